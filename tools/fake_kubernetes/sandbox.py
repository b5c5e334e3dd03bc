"""Starts one container: a process with its own mounts, host name, pids and network; standard library alone, run as a script.

    python -IS sandbox.py SPECIFICATION STATUS

SPECIFICATION is a JSON file, STATUS a descriptor that gets a line per event: "pid N", "error WHAT", "started", "exit CODE". Its
root is the machine's own, below a layer that nobody else sees. It ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUTS, _NEWIPC, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
_PDEATHSIG = 1
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "fuse")


def mount(source: str, target: str | Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    arguments = [os.fsencode(str(part)) or None for part in (source, target, kind)]
    if _LIBC.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None):
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")


def unmount(target: str | Path) -> None:
    """Take a mount away as soon as nobody uses it; nothing happens if there is none."""
    _LIBC.umount2(os.fsencode(str(target)), 2)


def _call(name: str, *arguments: int | bytes) -> None:
    if getattr(_LIBC, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _place(upper: Path, path: str) -> Path:
    """Where a layer has a path; links among its folders, such as /bin, remain links."""
    parent, name = os.path.split(path)
    return upper / os.path.realpath(parent).lstrip("/") / name


def _layer(upper: Path, spec: dict[str, Any]) -> None:
    """What the image adds to the machine's files, and what it lacks."""
    hidden: set[Path] = set()
    for path in sorted(spec["hidden"]):
        place = _place(upper, path)
        if not hidden & {place, *place.parents}:
            hidden.add(place)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.mknod(place, 0o600, 0)  # so overlays say that a file is gone
    for path in spec["emptied"]:
        place = upper / path.lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o1777)
        os.setxattr(place, "trusted.overlay.opaque", b"y")
    for path, content in spec["files"].items():
        place = _place(upper, path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        if content.startswith("-> "):
            place.symlink_to(content[3:])
        else:
            place.write_text(content)
            place.chmod(0o755 if content.startswith("#!") else 0o644)


def _root(spec: dict[str, Any]) -> Path:
    """The container's files."""
    scratch = Path(spec["scratch"])
    mount("tmpfs", scratch, "tmpfs", 0, "mode=755")
    upper, work, root = scratch / "upper", scratch / "work", scratch / "root"
    for path in (upper, work, root):
        path.mkdir()
    _layer(upper, spec)
    mount("overlay", root, "overlay", 0, f"lowerdir=/,upperdir={upper},workdir={work}")
    for name in ("proc", "sys", "dev", "tmp"):
        (root / name).mkdir(exist_ok=True)
    mount("/sys", root / "sys", "", _BIND | _REC)
    device = root / "dev"
    mount("tmpfs", device, "tmpfs", 0, "mode=755,size=64k")
    nodes = [Path("/dev", name) for name in _DEVICES]
    for node in [*nodes, *Path("/dev").glob("nvidia*")]:
        if node.exists() and not node.is_dir():
            (device / node.name).touch()
            mount(str(node), device / node.name, "", _BIND)
    for name, target in (("fd", "self/fd"), ("stdin", "self/fd/0"), ("stdout", "self/fd/1"), ("stderr", "self/fd/2")):
        (device / name).symlink_to(f"/proc/{target}")
    (device / "pts").mkdir()
    mount("devpts", device / "pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=620")
    (device / "ptmx").symlink_to("pts/ptmx")
    (device / "shm").mkdir()
    if all(each["target"].rstrip("/") != "/dev/shm" for each in spec["mounts"]):
        mount("tmpfs", device / "shm", "tmpfs", 0, "mode=1777,size=64m")
    for each in spec["mounts"]:
        _volume(root, each)
    return root


def _resolve(root: Path, path: str) -> Path:
    """Where a path is below a root whose links, such as /var/run, are meant from there."""
    parts, found = path.split("/"), root
    for _ in range(100):
        if not parts:
            break
        part = parts.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            found = found.parent if found != root else root
        elif (found / part).is_symlink():
            target = os.readlink(found / part)
            found = root if target.startswith("/") else found
            parts = target.split("/") + parts
        else:
            found /= part
    return found


def _volume(root: Path, spec: dict[str, Any]) -> None:
    source, target = Path(spec["source"]), _resolve(root, spec["target"])
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount(str(source), target, "", _BIND | _REC)
    if spec.get("read_only"):
        mount("none", target, "", _REMOUNT | _BIND | _RDONLY)


def _find(program: str, path: str) -> str:
    if "/" in program:
        os.stat(program)
        return program
    for folder in path.split(":"):
        full = os.path.join(folder, program)
        if os.path.isfile(full) and os.access(full, os.X_OK):
            return full
    raise FileNotFoundError(f'exec: "{program}": executable file not found in $PATH')


def _become(spec: dict[str, Any], root: Path, status: int) -> None:
    """In the child: be the container's first process."""
    program = spec["argv"][0]
    try:
        _LIBC.prctl(_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        os.chroot(root)
        os.chdir("/")
        mount("proc", "/proc", "proc")
        os.makedirs(spec["cwd"], exist_ok=True)
        if spec.get("read_only"):
            mount("none", "/", "", _REMOUNT | _BIND | _RDONLY)
        os.chdir(spec["cwd"])
        os.umask(0o022)
        if spec.get("user") is not None or spec.get("group") is not None:
            os.setgroups([])
            os.setgid(spec.get("group") or 0)
        if spec.get("user") is not None:
            os.setuid(spec["user"])
        for number in range(1, signal.NSIG):
            if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
                signal.signal(number, signal.SIG_DFL)
        os.execve(_find(program, spec["env"].get("PATH", "/bin:/usr/bin")), spec["argv"], spec["env"])
    except OSError as error:
        words = (
            error.args[0]
            if len(error.args) == 1
            else f'exec: "{program}": stat {program}: {os.strerror(error.errno or 0)}'
        )
        os.write(status, f"error {words.lower() if len(error.args) > 1 else words}\n".encode())
    os._exit(128)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[1]).unlink()  # it has secrets
    status = int(sys.argv[2])
    os.set_inheritable(status, False)
    _LIBC.prctl(_PDEATHSIG, signal.SIGKILL)
    if spec["starter"] != os.getppid():
        os._exit(1)  # it was gone before
    network = os.open(spec["network"], os.O_RDONLY)
    _call("setns", network, _NEWNET)
    os.close(network)
    _call("unshare", _NEWNS | _NEWUTS | _NEWIPC | _NEWPID)
    mount("none", "/", "", _REC | _PRIVATE)
    root = _root(spec)
    name = spec["hostname"].encode()
    _call("sethostname", name, len(name))
    ready, unready = os.pipe()
    child = os.fork()
    if child == 0:
        _become(spec, root, status)
    os.close(unready)
    os.write(status, f"pid {child}\n".encode())
    os.read(ready, 1)  # the child closes its end when it becomes the program, or ends
    os.write(status, b"started\n")
    _, ended = os.waitpid(child, 0)
    os.write(status, f"exit {os.waitstatus_to_exitcode(ended)}\n".encode())


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        os.write(int(sys.argv[2]), f"error {error}\n".encode())
        sys.exit(128)
