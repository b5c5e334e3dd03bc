"""Stands in for docker and apptainer, which Debian has not, or not without a daemon of the whole machine.

It runs containers in mount namespaces of their own, and takes the flags that paceline gives and no others. As with the
real ones, a container of `docker` is no child of the command that starts it, gets none of its descriptors or variables
but those that are named, goes on when that command is killed, and is a line of `docker ps` as long as it runs; one of
`apptainer` is a child, and gets all variables. LAB_IMAGES is the folder of images: a root folder each, and in `refused`
what a registry says of others. Run as root.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(os.environ["LAB_IMAGES"])
NEW_MOUNTS = 0x20000
BECOME_SUBREAPER = 36


def docker(words: list[str]) -> int:
    if words[0] == "ps":
        print("".join(f"{path.name}\n" for path in IMAGES.glob("running/*")), end="")
        return 0
    if (IMAGES / "closed").exists():
        print(
            "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock: "
            'Get "http://%2Fvar%2Frun%2Fdocker.sock/v1.24/info": dial unix /var/run/docker.sock: connect: permission '
            "denied",
            file=sys.stderr,
        )
        return 1
    if words[0] == "info":
        print("[name=seccomp,profile=builtin name=cgroupns]" if "Security" in words[-1] else "map[runc:{runc []}]")
        return 0
    if words[:2] == ["image", "inspect"]:
        if _root(words[-1]).exists():
            print(f"sha256:{words[-1]}")
            return 0
        print(f"Error response from daemon: No such image: {words[-1]}", file=sys.stderr)
        return 1
    if words[0] == "pull":
        print(f"Using default tag: latest\nlatest: Pulling from {words[1]}", flush=True)
        source = IMAGES / "registry" / words[1].replace("/", "_")
        if not source.exists():
            print(f"Error response from daemon: manifest for {words[1]} not found: manifest unknown", file=sys.stderr)
            return 1
        os.symlink(source.resolve(), _root(words[1]))
        print("Status: Downloaded newer image")
        return 0
    assert words[0] == "run", words
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--rm", "--interactive", "--tty"):
        parser.add_argument(name, action="store_true")
    choices = {
        "--sig-proxy": "false", "--log-driver": "none", "--network": "host", "--pid": "host", "--uts": "host",
        "--ipc": "host", "--userns": "host", "--entrypoint": "",
    }  # fmt: skip
    for name, value in choices.items():
        parser.add_argument(name, choices=[value])
    for name in ("--workdir", "--user"):
        parser.add_argument(name)
    for name in ("--security-opt", "--ulimit", "--group-add", "--volume", "--env", "--device"):
        parser.add_argument(name, action="append", default=[])
    own = next(at for at, word in enumerate(words[1:], 1) if not word.startswith("-"))
    asked = parser.parse_args(words[1:own])
    assert asked.rm and asked.interactive and asked.network and asked.pid and asked.uts and asked.userns, words
    image, *command = words[own:]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    env.update((name, os.environ[name]) for name in asked.env if name in os.environ)
    user, group = map(int, asked.user.split(":"))
    binds = [tuple(it.removesuffix(":ro").split(":")) for it in asked.volume]
    return _as_a_daemon(lambda: _run(_root(image), binds, env, asked.workdir, (user, group), command))


def _as_a_daemon(run) -> int:  # type: ignore[no-untyped-def]  # a program of its own
    """Have a process that is no child run it, and pass input, output and exit code on."""
    ends = [os.pipe() for _ in range(4)]  # of input, output, errors, and the exit code
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        ctypes.CDLL(None).prctl(BECOME_SUBREAPER, 1)
        for number, (reads, writes) in enumerate(ends[:3]):
            os.dup2(writes if number else reads, number)
        code_end = ends[3][1]
        os.set_inheritable(code_end, False)
        for pair in ends[:3]:
            for end in pair:
                os.close(end)
        pid = os.fork()
        if pid == 0:
            run()
        (IMAGES / "running").mkdir(exist_ok=True)
        mark = IMAGES / "running" / str(pid)
        mark.touch()
        for number in range(3):
            os.close(number)
        status = os.waitpid(pid, 0)[1]
        # What is left ends with the first process, as in any container whose processes are the machine's.
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        while left := children.read_text().split():
            for each in left:
                os.kill(int(each), signal.SIGKILL)
            os.wait()
        mark.unlink()
        os.write(code_end, bytes([os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)]))
        os._exit(0)
    os.wait()
    (reads, stdin), (stdout, writes), (stderr, other), (code, code_end) = ends
    for end in (reads, writes, other, code_end):
        os.close(end)
    pumps = []
    for source, target in ((0, stdin), (stdout, 1), (stderr, 2)):
        if (pid := os.fork()) == 0:
            for end in (stdin, stdout, stderr, code):
                if end not in (source, target):
                    os.close(end)
            try:
                while data := os.read(source, 65536):
                    while data:
                        data = data[os.write(target, data) :]
            except OSError:
                pass
            os._exit(0)
        pumps.append(pid)
    for end in (stdin, stdout, stderr):
        os.close(end)
    for pid in pumps[1:]:
        os.waitpid(pid, 0)
    found = os.read(code, 1)
    os.kill(pumps[0], signal.SIGKILL)
    return found[0] if found else 137


def apptainer(words: list[str]) -> int:
    if words[0] == "pull":
        assert words[1] == "--force", words
        source = IMAGES / "registry" / words[3].removeprefix("docker://").replace("/", "_")
        if not source.exists():
            print(
                "FATAL:   While making image from oci registry: error fetching image to cache: failed to get checksum "
                f"for {words[3]}: reading manifest latest in {words[3]}: manifest unknown",
                file=sys.stderr,
            )
            return 255
        os.symlink(source.resolve(), words[2])
        return 0
    assert words[0] == "exec", words
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--bind", action="append", default=[])
    parser.add_argument("--pwd")
    parser.add_argument("--nv", action="store_true")
    own = next(at for at, word in enumerate(words[1:], 1) if not word.startswith("-"))
    asked = parser.parse_args(words[1:own])
    image, *command = words[own:]
    child = os.fork()
    if child == 0:
        env = {**os.environ, "PATH": "/usr/local/bin:/usr/bin:/bin", "APPTAINER_CONTAINER": image}
        _run(Path(image).resolve(), [(it, it) for it in asked.bind], env, asked.pwd, None, command)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(child, number))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256


def _root(image: str) -> Path:
    return IMAGES / image.replace("/", "_")


def _run(root, binds, env, folder, user, command) -> None:  # type: ignore[no-untyped-def]  # a program of its own
    """Become a command in a container."""
    try:
        if not root.exists():
            raise OSError(f"Unable to find image '{root.name}' locally")
        if ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS):
            raise OSError(ctypes.get_errno(), "unshare")
        here = tempfile.mkdtemp(dir="/tmp", prefix="lab-container-")
        _mount("--make-rprivate", "/")
        _mount("-t", "tmpfs", "container", here)
        shutil.copytree(root, f"{here}/root", symlinks=True)
        for source, target in [("/proc", "/proc"), ("/dev", "/dev"), ("/sys", "/sys"), *binds]:
            place = Path(f"{here}/root{target}")
            (place if os.path.isdir(source) else place.parent).mkdir(parents=True, exist_ok=True)
            if not os.path.isdir(source):
                place.touch()
            _mount("--rbind", source, str(place))
        os.chroot(f"{here}/root")
        os.chdir(folder)
        if user:
            os.setgroups([])
            os.setgid(user[1])
            os.setuid(user[0])
        if not shutil.which(command[0], path=env["PATH"]):
            print(f'exec: "{command[0]}": executable file not found in $PATH: unknown.', file=sys.stderr)
            os._exit(127)
        os.execvpe(command[0], command, env)
    except BaseException as error:
        print(error, file=sys.stderr)
    finally:
        os._exit(125)


def _mount(*words: str) -> None:
    subprocess.run(["/bin/mount", *words], check=True)


if __name__ == "__main__":
    sys.exit((apptainer if sys.argv[1] == "apptainer" else docker)(sys.argv[2:]))
