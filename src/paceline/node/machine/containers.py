"""Containers of this machine in which jobs run: what has an image, and the command that runs Python in one.

What runs in such a container has this machine's processes, network, shared memory and users, and the same folders at
the same paths: so whatever has a number, an address or a path here has the same one there. The folders are the user's
home and those that the job names.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.node.errors import Refused

from .building import said_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paceline.contract.facts import ImageFacts
    from paceline.contract.messages import Pulled, Says, WantedImage
    from paceline.contract.nodejob import NodeJob
    from paceline.contract.records import ContainerRecord, DataRecord

CONTAINER = "PACELINE_CONTAINER"  # in a container: what `command` needs for another one like it
CLIENT = (
    "PACELINE_CLIENT"  # in a container: the process of docker or podman which has started it, and passes its output
)
PROGRAMS = ("podman", "docker", "apptainer", "singularity")  # the first one that works runs an image
_FILES = ("apptainer", "singularity")  # these run files
_ANSWER_SECONDS = 20.0  # for a program to say what it has
# The same of the first container of an image: podman without root copies all of it then, apptainer may unpack it.
_FIRST_SECONDS = 1800.0
_NAMED = ("docker-archive:", "oci-archive:", "oci:", "dir:")  # files of images that podman reads
_REGISTRY = re.compile(r"[^/]*[.:][^/]*/|localhost/")  # what an image begins with that says where it is
_PASSED = ("PACELINE_", "NCCL_", "GLOO_", "UCX_")  # variables of this machine that containers get, too
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
_CDI = ("/etc/cdi", "/var/run/cdi")  # where podman looks for devices
_AMD = ("/dev/kfd", "/dev/dri")
_INFINIBAND = "/dev/infiniband"
_NO_PYTHON = re.compile(r"python3\W.*(not found|no such file)|no such file.*python3", re.IGNORECASE)
# What is wrong, and what to do, by what docker, podman and apptainer print.
_WHY = (
    (r"permission denied.*(docker\.sock|daemon socket)|docker\.sock.*permission denied",
     "docker's socket is closed to {user}; add {user} to its group (sudo usermod -aG docker {user}) and log in again,"
     " or install podman"),
    (r"cannot connect to the docker daemon|is the docker daemon running",
     "docker's daemon does not run; start it (sudo systemctl start docker), or install podman"),
    (r"newuidmap|newgidmap|subuid|subgid|insufficient UIDs",
     "podman has no user ids for {user}: {last}; install uidmap, and give some (sudo usermod --add-subuids"
     " 100000-165535 --add-subgids 100000-165535 {user})"),
    (r"no space left|disk quota exceeded", "there is no room for it ({last}); make room, for example with {program} "
     "system prune"),
    (r"unauthorized|authentication required|access denied|denied:|docker login",
     "the registry refuses it ({last}); correct --image, or log in there: {program} login {registry}"),
    (r"manifest unknown|not found|does not exist|no such image|name unknown",
     "there is no such image ({last}); correct --image"),
    (r"dial tcp|lookup |timeout|timed out|unreachable|connection refused|no route|could not resolve",
     "its registry is not reached ({last}); load the image there from a file: {load}"),
)  # fmt: skip
# The first process of a container: runs the others, and ends when all have ended, also those that were left behind.
# When its first child has ended and others have not, nobody needs the client any more once that has closed its input.
_FIRST = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
first = os.fork()
if not first:
    os.execvp(sys.argv[1], sys.argv[1:])
def forward(number, frame):
    with open("/proc/self/task/%d/children" % os.getpid()) as file:
        for pid in file.read().split():
            os.kill(int(pid), number)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, forward)
status = -1
while status < 0:
    pid, found = os.wait()
    status = found if pid == first else -1
code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
try:
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    while os.read(0, 65536):
        pass
    client = os.environ.get("{CLIENT}", "0")
    with open("/proc/%s/cmdline" % client, "rb") as file:
        if b"{CLIENT}" in file.read():
            os.kill(int(client), signal.SIGKILL)
except OSError:
    pass
null = os.open(os.devnull, os.O_RDWR)
for number in range(3):
    os.dup2(null, number)
try:
    while True:
        os.wait()
except OSError:
    os._exit(code)
"""
_OLD = "import sys; sys.version_info < (3, 9) and sys.exit('Python %d.%d is too old' % sys.version_info[:2])"
_INSIDE = f"{_OLD}; import runpy; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def is_inside() -> bool:
    """Whether this process is in a container of this kind."""
    return CONTAINER in os.environ


def described() -> ContainerRecord | None:
    """The container that this process is in; None if it is in none of this kind."""
    found = os.environ.get(CONTAINER)
    container: ContainerRecord | None = None if found is None else json.loads(found)
    return container


# -- which program -----------------------------------------------------------------------------------------------------


def look(root: Path, image: str, program: str | None, *, needs_devices: bool) -> ImageFacts:
    """What would run an image here: `program`, `reference` (as it calls the image), `is_there`; or the `problem`."""
    there = [it for it in ([program] if program else PROGRAMS) if shutil.which(it)]
    if not there:
        names = program or "podman, docker or apptainer"
        return {"problem": f"there is no {names} on PATH; install {program or 'one, for example podman,'} there"}
    tried = [_tried(root, image, it, needs_devices=needs_devices) for it in there]
    able = [it for it in tried if "problem" not in it]
    return next((it for it in able if it["is_there"]), (able or tried)[0])


def _tried(root: Path, image: str, program: str, *, needs_devices: bool) -> ImageFacts:
    """See `look`, for a program that is installed."""
    try:
        problem = _no_devices(program) if needs_devices else None
        if problem is not None:
            return {"program": program, "problem": problem}
        return {"program": program, **(_in_file if program in _FILES else _in_store)(root, image, program)}
    except Refused as error:
        return {"program": program, "problem": str(error)}


def _no_devices(program: str) -> str | None:
    """Why a program cannot give this machine's GPUs to containers."""
    if not _has_nvidia() or program in _FILES:
        return None
    no = f"this machine has GPUs, and {program} cannot give them to containers"
    if program == "podman":
        specs = (path for folder in _CDI for path in Path(folder).glob("*"))
        if any(b"nvidia.com/gpu" in path.read_bytes() for path in specs):
            return None
        make = "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
        return f"{no}: none are described in {' or '.join(_CDI)}; run {make}, or ask for no devices with --devices 0"
    if shutil.which("nvidia-container-runtime-hook") or "nvidia" in _asked(
        "docker", "info", "--format", "{{.Runtimes}}"
    ):
        return None
    return f"{no}; install nvidia-container-toolkit, or ask for no devices with --devices 0"


def _has_nvidia() -> bool:
    return os.path.exists("/dev/nvidiactl")


def _in_store(_: Path, image: str, program: str) -> ImageFacts:
    """How docker or podman call an image, and whether they have it."""
    if image.endswith(".sif"):
        raise Refused(f"{program} cannot run files such as {image}; install apptainer there")
    reference = image[len("docker://") :] if image.startswith("docker://") else image
    if reference.startswith(_NAMED):
        if program == "docker":
            file = reference.partition(":")[2]
            raise Refused(f"docker cannot run {image}; load it there (docker load -i {file}), and give its name")
        return {"reference": reference, "is_there": False}
    if program == "docker":
        if "rootless" in _asked("docker", "info", "--format", "{{.SecurityOptions}}"):
            raise Refused("docker is rootless there, and its containers do not have the machine's network; use podman")
        return {
            "reference": reference,
            "is_there": _has("docker", "image", "inspect", "--format", "{{.Id}}", reference),
        }
    is_there = _has("podman", "image", "exists", reference)
    if not is_there and not _REGISTRY.match(reference):  # podman asks in which registry, docker has one
        reference = f"docker.io/{'' if '/' in reference else 'library/'}{reference}"
        is_there = _has("podman", "image", "exists", reference)
    return {"reference": reference, "is_there": is_there}


def _in_file(root: Path, image: str, program: str) -> ImageFacts:
    """The file, or folder, with an image for apptainer, and whether it is there."""
    if image.startswith(("/", "./", "../", "~")) or image.endswith(".sif"):
        path = Path(os.path.expanduser(image))
        if not path.is_absolute():
            raise Refused(f"give the whole path of {image} there")
        if not path.exists():
            raise Refused(f"there is no {path}; copy the image there, or name one in a registry: docker://NAME")
        return {"reference": str(path), "is_there": True}
    source = image if "://" in image or image.startswith(_NAMED) else f"docker://{image}"
    import hashlib  # takes long, and each job imports this module

    path = root / "images" / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.sif"
    return {"reference": str(path), "is_there": path.exists(), "source": source}


def _asked(*command: str) -> str:
    """What a program says."""
    done = _done(command)
    if done.returncode:
        raise Refused(_why(command[0], "", done.stderr))
    return done.stdout


def _has(*command: str) -> bool:
    """Whether a program has an image."""
    done = _done(command)
    said = "\n".join(_lines(done.stderr))
    if done.returncode and said and not re.search("no such (image|object)", said, re.IGNORECASE):
        raise Refused(_why(command[0], command[-1], done.stderr))
    return not done.returncode


def _done(command: Sequence[str], seconds: float = _ANSWER_SECONDS) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL,
            timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Refused(f"{shlex.join(command)} does not answer within {seconds:g} s; see what it does") from None


def _lines(said: str) -> list[str]:
    """The lines that a program has printed, without the warnings with which podman may begin each answer."""
    return [line.strip() for line in said.splitlines() if line.strip() and "level=warning" not in line]


def _why(program: str, image: str, said: str) -> str:
    """What is wrong, and what to do, by what a program has printed."""
    lines = _lines(said)
    last = (
        re.sub(r"^(Error: |Error response from daemon: |FATAL: +|ERROR: +)+", "", lines[-1]) if lines else "no reason"
    )
    found = {
        "user": os.environ.get("USER") or f"user {os.getuid()}", "program": program, "last": last,
        "registry": image.partition("/")[0] if _REGISTRY.match(image) else "docker.io",
        "load": f"{program} load -i FILE" if program not in _FILES else "give the whole path of a .sif file as --image",
    }  # fmt: skip
    for pattern, text in _WHY:
        if re.search(pattern, said, re.IGNORECASE):
            return text.format(**found)
    return f"{program} failed: {last}"


# -- its image ---------------------------------------------------------------------------------------------------------


def prepare(root: Path, request: WantedImage, binds: Sequence[str], facts: Sequence[str]) -> Iterator[Says | Pulled]:
    """Get an image, unless it is there, and look into it; yields what happens, and at last `inside` and `facts`.

    Args:
        root: the folder of jobs.
        request: the image.
        binds: the folders that the container is to show.
        facts: the archive of the node side with the arguments that make it print what is in the container, in JSON.
    """
    found = look(root, request["image"], request["program"], needs_devices=request["needs_devices"])
    if "problem" in found:
        raise Refused(found["problem"])
    if not found["is_there"]:
        yield {"says": "begins"}
        yield from _pulled(found, request["image"])
    container: ContainerRecord = {
        "program": found["program"], "image": found["reference"], "binds": list(binds),
        "devices": request["needs_devices"],
    }  # fmt: skip
    yield {"says": "looks into it"}
    done = _done([*command(container, stays=False), "python3", "-c", _INSIDE, *facts], _FIRST_SECONDS)
    if done.returncode or not done.stdout.startswith("{"):
        said = done.stderr.strip() or done.stdout.strip()
        last = said.splitlines()[-1] if said else f"exit code {done.returncode}"
        if "is too old" in last or _NO_PYTHON.search(said):
            why = f"its {last}" if "is too old" in last else "it has no python3"
            raise Refused(f"image {request['image']}: {why}; choose an image with Python 3.9 or newer")
        raise Refused(f"image {request['image']}: {_why(found['program'], found['reference'], said)}")
    yield {"inside": command(container), "facts": json.loads(done.stdout)}


def _pulled(found: ImageFacts, image: str) -> Iterator[Says]:
    """Get an image from its registry, or from a file that podman reads."""
    program, path = found["program"], found["reference"]
    pull = [program, "pull", found["reference"]]
    if program in _FILES:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = f"{path}.{os.getpid()}"
        pull = [program, "pull", "--force", new, found["source"]]
    code, said = yield from said_by(pull, os.environ)
    if program in _FILES:
        if not code:
            os.replace(new, path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
    if code:
        raise Refused(f"image {image}: {_why(program, found['reference'], said)}")
    if found["reference"].startswith(_NAMED):  # podman says under which name it has it now
        found["reference"] = said.split()[-1]


# -- its container -----------------------------------------------------------------------------------------------------


def command(container: ContainerRecord, *, stays: bool = True, has_terminal: bool = False) -> list[str]:
    """What goes before a command so that it runs in a container; that has `program`, `image`, `binds` and `devices`.

    The container ends when all that was started in it has ended. One that does not `stay` ends with the command.
    """
    image, binds = container["image"], container["binds"]
    passed = [name for name in os.environ if name.startswith(_PASSED) or name.lower() in _PROXIES]
    passed = sorted({*passed, "HOME", "USER", "LOGNAME", "PYTHONNOUSERSITE", CONTAINER, CLIENT} - {"PACELINE_WARM_DIR"})
    own = (_file_command if container["program"] in _FILES else _store_command)(container, passed)
    if has_terminal and container["program"] not in _FILES:
        own.insert(2, "--tty")
    begin = f'{CLIENT}=$$ exec "$@"' if container["program"] not in _FILES else 'exec "$@"'
    unset = [word for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV") for word in ("-u", name)]
    variables = [f"{CONTAINER}={json.dumps({**container, 'binds': list(binds)})}", "PYTHONNOUSERSITE=1"]
    outside = ["env", *unset, *variables, "sh", "-c", begin, "sh", *own, image]
    return [*outside, "python3", "-c", _FIRST] if stays else outside


def _store_command(container: ContainerRecord, passed: Iterable[str]) -> list[str]:
    """The command of docker or podman, without the image."""
    is_podman, user = container["program"] == "podman", f"{os.getuid()}:{os.getgid()}"
    words = ["run", "--rm", "--interactive", "--sig-proxy=false", "--log-driver=none"]
    words += ["--network=host", "--pid=host", "--uts=host"]
    # podman cannot share it where the machine has no message queues.
    words += ["--ipc=host"] if os.path.isdir("/dev/mqueue") else ["--volume=/dev/shm:/dev/shm"]
    words += [f"--security-opt={it}" for it in ("label=disable", "seccomp=unconfined", "apparmor=unconfined")]
    words += ["--entrypoint=", f"--workdir={os.path.expanduser('~')}"]
    if is_podman:
        words += ["--pull=never", "--group-add=keep-groups"]
        words += ["--userns=keep-id"] if os.getuid() else [f"--user={user}"]
    else:
        words += [f"--user={user}", "--userns=host", "--ulimit=memlock=-1", "--ulimit=stack=67108864"]
        words += [f"--group-add={group}" for group in os.getgroups() if group != os.getgid()]
    words += [f"--volume={it}:{it}:ro" for it in ("/etc/passwd", "/etc/group") if os.path.exists(it)]
    words += [f"--volume={bind}:{bind}" for bind in container["binds"]]
    devices = [_INFINIBAND] if os.path.isdir(_INFINIBAND) else []
    if container["devices"]:
        devices += [path for path in _AMD if os.path.exists(path)] if os.path.exists(_AMD[0]) else []
        if _has_nvidia():
            words += ["--device=nvidia.com/gpu=all"] if is_podman else ["--gpus=all"]
    words += [f"--device={path}" for path in devices]
    return [container["program"], *words, *(f"--env={name}" for name in passed)]


def _file_command(container: ContainerRecord, _: Iterable[str]) -> list[str]:
    """The command of apptainer, without the image; it passes all variables."""
    devices = ["--nv"] if _has_nvidia() and container["devices"] else []
    devices += ["--rocm"] if os.path.exists(_AMD[0]) and container["devices"] else []
    binds = [f"--bind={bind}" for bind in container["binds"]]
    return [container["program"], "exec", *devices, *binds, f"--pwd={os.path.expanduser('~')}"]


def binds_of(program: str, own: Iterable[Path], job: NodeJob, data: Iterable[DataRecord]) -> list[str]:
    """The folders that a container shows: these, and those that its job names."""
    folders = [*own, *(whole(source["path"]) for source in data)]
    if job.code is None or job.working_dir != ".":
        folders.append(whole(job.working_dir))
    if job.checkpoint_dir is not None and os.path.isabs(os.path.expanduser(job.checkpoint_dir)):
        folders.append(whole(job.checkpoint_dir))
    there = [next(path for path in (it, *it.parents) if path.exists()) for it in folders]  # the job makes the rest
    binds = [str(folder) for folder in _outermost(there)]
    for bind in binds:
        if any(letter in bind for letter in ",:"):
            raise Refused(f"{bind}: {program} cannot show a folder with ',' or ':' in its name; rename it")
    return binds


def whole(path: str) -> Path:
    """The absolute path of a folder of the user."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def _outermost(folders: Iterable[Path]) -> list[Path]:
    """The same without those that are in others, and without /, which no container can show."""
    found = sorted({folder for folder in folders if folder != Path("/")})
    return [folder for folder in found if not any(other in folder.parents for other in found)]
