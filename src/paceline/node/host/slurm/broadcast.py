"""Carries a job to nodes that share no disk: inside of its batch script to the first, from there to all by sbcast."""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import os
import re
import shlex
import tarfile
import zipfile
from typing import TYPE_CHECKING, Any

from paceline.contract import TOKEN
from paceline.node import ENTRY
from paceline.node.errors import Refused
from paceline.node.rundir.directory import RunDirectory
from paceline.node.store import code_folder

from .commands import call
from .folder import COMMENT, JobFolder
from .queue import REFUSED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_LEAST_LIMIT = 4 << 20  # bytes of a batch script, unless Slurm is told otherwise
_SLACK = 1 << 10  # bytes; what Slurm adds
_ARCHIVE = "paceline.pyz"
_MARK = "# What the nodes need:"
_LINE = 1 << 12

# Puts paceline in its place on a node. It is between double quotes in a string of a shell, so it has none.
_PLACE = (
    "import os, pathlib, sys, tarfile; sent, name, place = sys.argv[1:]; "
    "new = pathlib.Path(place + str(os.getpid())); "
    "new.write_bytes(tarfile.open(sent).extractfile(name).read()); new.replace(place)"
)
# Before the command come the Python and the place of paceline's archive on the node itself: in a container they differ.
SEES = f'[ -e "$2" ] || (umask 077; "$1" -c "{_PLACE}" "$0/carried" {_ARCHIVE} "$2") || exit 2; shift 2; exec "$@"'

# Makes the folder of a job, $0, on a node. $1 is the job's identifier; the others are those of jobs that had its name
# and were deleted. Nobody else may be able to change any part of the path: they could run code as this user.
_MAKE = """\
umask 077
no() { echo "$(uname -n): $1"; exit 1; }
another="set root in the settings to another folder of yours there"
rmdir "$0" 2> /dev/null
if [ -e "$0" ] || [ -L "$0" ]; then
  held=$(cat "$0/id" 2> /dev/null)
  case " $* " in
    " ${held:-none} "*) ;;
    *" ${held:-none} "*) gone=${0%/*}/.gone.$held; mv "$0" "$gone" 2> /dev/null; rm -rf "$gone" ;;
    *) no "$0 has the files of another job there; give this one another --name, or remove them by hand" ;;
  esac
fi
said=$(mkdir -p "$0" 2>&1) || no "cannot write to $0 on its disk: $said; $another"
root=${0%/slurm/*} me=$(id -u) theirs="-perm -020 -o -perm -002"
name=$(id -un 2> /dev/null) && [ "$(id -gn 2> /dev/null)" = "$name" ] &&
  theirs="-perm -020 ! -group $(id -g) -o -perm -002"
job=$(cd -P "$0" && pwd -P) top=$(cd -P "$root" && pwd -P)
for part in "$0" "$job"; do
  while :; do
    case "$part" in "$0"|"$job"|"$root"|"$top") parents= ;; *) parents="! -perm -1000" ;; esac
    found=$(find "$part" -prune \\( ! -user "$me" ! -user 0 -o ! -type l \\( $theirs \\) $parents \\)) || found=$part
    [ -z "$found" ] || no "others may change $part (see its owner and mode); use chown or chmod go-w there, or $another"
    [ "$part" != / ] || break
    part=$(dirname "$part")
  done
done
(echo "$1" > "$0/id") 2> /dev/null || no "cannot write to $0 on its disk; $another"
"""
_BEGIN = """\
trap 'heard=1; : > "$job/stop"' USR1
refuse() {{
  said=$(printf '%s\\n' "$2" | grep -v '^srun: ' | tail -n 1)
  said=$(printf %s "$1${{said:-$2}}" | tail -n 1 | tr '"{{\\n' "'( " | cut -c 1-300)
  scontrol update "jobid=$number" "comment={comment} {refused}$said"
  exit 1
}}
[ -n "${token}" ] || refuse "this Slurm job has the script of another one; to run that again: paceline resubmit {name}"
# The nodes share no disk. What they need follows this script; sbcast takes it to all of them.
make={make}
said=$(sh -c "$make" "$job" {ids} 2>&1) || refuse "" "$said"
said=$(sed '1,/^{mark}$/d' "$0" | base64 -d 2>&1 > "$job/carried.first") ||
  refuse "$(uname -n): cannot write to $job on its disk: " "$said"
exec >> "$job/slurm.out" 2>&1
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  said=$(srun {srun} sh -c "$make" "$job" {ids} 2>&1 && sbcast --force "$job/carried.first" "$job/carried" 2>&1) ||
    refuse "the code did not reach all nodes: " "$said"
fi
mv "$job/carried.first" "$job/carried"
"""
_UNPACK = """\
said=$(sh -c "$sees" "$job" {command} {command} slurm-unpack "$job" 2>&1) || refuse "$(uname -n): " "$said"
[ ! -e "$job/stop" ] || exec {command} slurm-finish "$job" 143
"""


def check(job: Mapping[str, Any], options: Mapping[str, Any], old: JobFolder | None) -> None:
    """Check that a job finds the checkpoints of the one from which it goes on, if nodes share no disk.

    Args:
        job: the new one.
        options: its options.
        old: from which it goes on.

    Raises:
        Refused: it does not.
    """
    if old is None or job["fresh"] or job["checkpoint_dir"] is not None:
        return
    if old.is_broadcast():
        raise Refused(
            f"the checkpoints of job {old.name} are on its nodes' own disks; start anew with --fresh, or name a folder"
            " that all nodes see with --checkpoint-dir"
        )
    if options.get("broadcast"):
        raise Refused(
            f"the checkpoints of job {old.name} are in {old.path}, and with broadcast the nodes do not see that; leave"
            " broadcast out, start anew with --fresh, or name a folder that all nodes see with --checkpoint-dir"
        )


def begin(job_id: str, name: str, srun: Sequence[str], deleted: Sequence[str]) -> str:
    """What a batch script does first.

    Args:
        job_id: paceline's identifier of the job.
        name: of the job.
        srun: flags for one task on each node.
        deleted: identifiers of jobs that had the name, and whose files may be replaced.
    """
    return _BEGIN.format(
        comment=COMMENT + job_id, make=shlex.quote(_MAKE), ids=" ".join((job_id, *deleted)), mark=_MARK,
        srun=" ".join(srun), token=TOKEN, name=name, refused=REFUSED,
    )  # fmt: skip


def unpacking(command: Sequence[str]) -> str:
    """What a batch script does before it starts the agents: its end must know the job, too."""
    return _UNPACK.format(command=shlex.join(command))


def add_to(script: Path, folder: JobFolder) -> None:
    """Add to a batch script what the nodes need of the job in this folder.

    Raises:
        Refused: it is more than Slurm takes.
    """
    carried = base64.b64encode(_packed(folder)).decode()
    lines = "\n".join(carried[start : start + _LINE] for start in range(0, len(carried), _LINE))
    text = f"{script.read_text()}exit\n{_MARK}\n{lines}\n"
    size, limit = len(text) + _SLACK, _LEAST_LIMIT
    if size > limit and size > (limit := _limit()):
        raise Refused(
            f"the code makes a batch script of {_mib(size)}, and Slurm takes {_mib(limit)} (max_script_size in"
            " SchedulerParameters); leave large files out with .pacelineignore, or name a folder that all nodes see"
            " with --working-dir"
        )
    script.write_text(text)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _limit() -> int:
    with contextlib.suppress(Refused):
        if found := re.search(r"\bmax_script_size=(\d+)", call("scontrol", "show", "config")):
            return int(found[1])
    return _LEAST_LIMIT


def _packed(folder: JobFolder) -> bytes:
    """The archive (tar.gz) with the job, its code, and paceline."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        _add(tar, _ARCHIVE, _paceline())
        _add(tar, folder.job.name, folder.job.read_bytes())
        if folder.code.is_dir():
            tar.add(folder.code, arcname="code")
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o600
    tar.addfile(info, io.BytesIO(data))


def _paceline() -> bytes:
    """The archive of paceline's node side, without bytecode, and not compressed: that is done once."""
    plain = io.BytesIO()
    with zipfile.ZipFile(ENTRY) as source, zipfile.ZipFile(plain, "w") as copy:
        for name in source.namelist():
            if not name.endswith(".pyc"):
                copy.writestr(zipfile.ZipInfo(name), source.read(name))
    return plain.getvalue()


# -- on a node ---------------------------------------------------------------------------------------------------------


def main(path: str) -> int:
    """Unpack the job with this folder; returns the exit code."""
    from pathlib import Path

    unpack(JobFolder(Path(path)))
    return 0


def unpack(folder: JobFolder) -> None:
    """Make the folder of a job on this node of what was carried here, unless it is there.

    Raises:
        OSError: it cannot be made.
    """
    if folder.job.exists():
        folder.carried.unlink(missing_ok=True)
        return
    RunDirectory(folder.path).mark()
    (folder.path / "lives").mkdir(exist_ok=True)
    with tarfile.open(folder.carried) as tar:
        tar.extraction_filter = lambda member, _: member  # the user's own code, with all its links
        names = {member.name: member for member in tar if not member.name.startswith("code/")}
        if "code" in names and not folder.code.exists():
            with code_folder.building(folder.code) as building:
                for member in tar.getmembers():
                    if member.name.startswith("code/"):
                        member.name = member.name.partition("/")[2]
                        tar.extract(member, building)
        source = tar.extractfile(names[folder.job.name])
        assert source is not None
        new = folder.job.with_name(f".job.{os.getpid()}")
        new.write_bytes(source.read())
        new.chmod(0o600)
        new.replace(folder.job)  # the last: with it the folder is complete
    folder.carried.unlink(missing_ok=True)
