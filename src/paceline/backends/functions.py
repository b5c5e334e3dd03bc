"""Jobs that are a function: the folder that is their code, and what comes of them; see `node/ranks/function.py`."""

from __future__ import annotations

import base64
import os
import pickle
import pickletools
import re
import secrets
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.contract.functions import CALL, PACKAGES, Outcome, Pickled, RankFailed
from paceline.job.errors import UserError
from paceline.node.planning.script import IMPORTS, MPI, NEED_TORCH, imports_of_file

from .base import LogQuery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.job.job import Job
    from paceline.job.spec import JobSpec

    from .base import Backend, LogLines

_KEY = re.compile(r"result-[0-9a-f]{32}")
_SCRIPT = """\
import sys

from paceline.node.ranks.function import main
{imports}
main(__file__, sys.argv[1])
"""


def write(work: Callable[[], Any], name: str, folder: Path) -> dict[str, object]:
    """Fill a folder with the code of a job that calls a function; returns the fields of the job."""
    packages = find_spec("cloudpickle")
    if packages is None and getattr(work, "func", work).__module__ == "__main__":
        raise UserError(f"{name} is a function of this program itself; install cloudpickle, or put it into a module")
    try:
        pickled = Pickled(work, name)
    except pickle.PicklingError as error:
        raise UserError(str(error)) from None
    if packages is not None and packages.origin is not None:  # a node need not have it
        shutil.copytree(Path(packages.origin).parent, folder / PACKAGES / "cloudpickle")
    stdlib = sysconfig.get_path("stdlib")
    own = [path for path in sys.path if not path.startswith(stdlib) and "-packages" not in path]
    call = (sys.version_info[:2], os.getcwd(), list(map(os.path.abspath, own)), pickle.dumps(pickled))
    (folder / CALL).write_bytes(pickle.dumps(call))
    script = f"{re.sub(r'[^A-Za-z0-9_]+', '', name) or 'function'}.py"
    (folder / script).write_text(_SCRIPT.format(imports=_imports(pickled.data, [Path(path or ".") for path in own])))
    return {
        "script": script,
        "args": (f"result-{secrets.token_hex(16)}",),
        "code": {"mode": "snapshot", "source": str(folder)},
    }


def _imports(pickled: bytes, own: Sequence[Path]) -> str:
    """Import statements of what a function may import: of its names, and of what modules in these folders import."""
    names = {str(word) for _, word, _ in pickletools.genops(pickled)}
    words = {name.partition(".")[0] for name in names}
    for file in (getattr(sys.modules.get(name), "__file__", None) for name in names):
        root = None if file is None else next((path for path in own if path.resolve() in Path(file).parents), None)
        if file is not None and root is not None:
            words |= imports_of_file(Path(file), root).every
    first = [name for name in (MPI, *IMPORTS) if name in words and name in sys.modules]
    later = sorted(words & {MPI, *IMPORTS, *NEED_TORCH} - {*first})  # the function itself imports them
    lines = [*(f"import {name}" for name in first), *(f"def later():\n    import {name}" for name in later)]
    return "".join(f"{line}\n" for line in lines)


def is_function(spec: JobSpec) -> bool:
    """Whether a job is a function: what it runs on its ranks is in its code."""
    return len(spec.args) == 1 and _KEY.fullmatch(spec.args[0]) is not None


def results(there: Backend, job: Job, *, every: bool) -> list[Any]:
    """What a function has returned on rank 0, or on all ranks, of a job that has ended."""
    is_good = job.state == "SUCCEEDED"
    found = _outcomes(there, job, None if every or not is_good else (0,))
    bad = [rank for rank, outcome in sorted(found.items()) if not outcome.is_good]
    if job.traceback is not None and job.traceback["rank"] in bad:  # the others have failed because of it
        bad = [job.traceback["rank"]]
    if bad:
        error = found[bad[0]].error_of(bad[0])
        if isinstance(error, RankFailed):  # what the function has returned or raised cannot come back
            raise UserError(f"rank {bad[0]} of job {job.name}: {error}") from error.__cause__
        raise error
    if not is_good:
        raise UserError(f"job {job.name} {job.state.lower()}{f': {job.error}' if job.error else ''}")
    missing = [rank for rank in range(job.ranks if every else 1) if rank not in found]
    if missing:
        raise UserError(f"rank {missing[0]} of job {job.name} has left no result; see paceline logs {job.name}")
    return [outcome.value for _, outcome in sorted(found.items())]


def without_results(lines: Iterator[LogLines], job: Job) -> Iterator[LogLines]:
    """What a job has written; of a function without its results, which nobody reads."""
    key = _KEY.search(job.command)
    if key is None:
        yield from lines
        return
    result = re.compile(rb"^%b .*\n?" % key[0].encode(), re.MULTILINE)
    for it in lines:
        if text := result.sub(b"", it.text):
            yield it._replace(text=text)


def _outcomes(there: Backend, job: Job, ranks: tuple[int, ...] | None) -> dict[int, Outcome]:
    """The outcomes that these ranks have written; None for all."""
    spec = there.spec(job.name)
    args = spec.args
    if not is_function(spec):
        raise UserError(f"job {job.name} is no function, so it has no result; see paceline logs {job.name}")
    texts: dict[int, bytes] = {}
    for it in there.logs(job.name, LogQuery(ranks)):
        for line in it.text.splitlines():
            texts[it.rank] = texts.get(it.rank, b"") + line.partition(f"{args[0]} ".encode())[2]
    whole = {rank: text[:-1] for rank, text in texts.items() if text.endswith(b".")}
    return {rank: Outcome.from_bytes(base64.b64decode(text)) for rank, text in whole.items()}
