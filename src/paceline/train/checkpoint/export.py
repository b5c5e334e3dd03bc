"""A part of a checkpoint as one file: safetensors, written tensor by tensor, or the file of one `torch.save`.

`paceline checkpoint export` runs this in a process of its own, with a checkpoint that it has verified.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.contract.checkpoint import CHUNK, listing, piece_files

from .errors import CheckpointError, DamagedCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from .pieces import Shards


class Refused(Exception):
    """What was asked for cannot be done; the message is one line."""


def main() -> None:
    """Write the file that the command line names: CHECKPOINT PART FILE, and "force" or ""."""
    checkpoint, part, file, force = sys.argv[1:]
    target = Path(file)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")

    def undo() -> None:
        temporary.unlink(missing_ok=True)

    complete(
        lambda: _export(Path(checkpoint), part, temporary, target, force=bool(force)),
        undo,
        f"cannot export {part} of {checkpoint}",
        target,
    )


def complete(work: Callable[[], None], undo: Callable[[], None], failed: str, target: Path) -> NoReturn:
    """Do some work, and end the process. It is undone if it fails, or is ended by a signal.

    Args:
        work: what writes the target.
        undo: removes what has no name yet; is called in any case.
        failed: begins the line that says why a checkpoint is the reason of a failure.
        target: is named if the disk is the reason.
    """

    def end(number: int, _: object) -> None:  # no exception: it could come within torch's writer, which takes none
        undo()
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup does
            signal.signal(number, end)
    code = 1
    try:
        work()
        code = 0
    except Refused as error:
        say(str(error))
        code = 2
    except (CheckpointError, DamagedCheckpoint) as error:
        say(f"{failed}: {error}")
    except OSError as error:
        say(f"-o {target}: {error.strerror}")
    finally:
        undo()
    sys.exit(code)


def _export(checkpoint: Path, part: str, temporary: Path, target: Path, *, force: bool) -> None:
    from . import disk_format  # takes seconds, for torch
    from .pieces import Shards
    from .store import _map

    shards = Shards([checkpoint / name for name in piece_files((listing(checkpoint) or {"files": ()})["files"])], _map)
    state = _map(checkpoint / f"{part}.pt")
    if target.suffix == ".pt":
        record = disk_format.write_file(temporary, shards.fill(part, state, lambda *_: None))
    else:
        record = disk_format.write_stream(temporary, _safetensors(part, _tensors(part, state), shards))
    if not force and os.path.lexists(target):
        raise Refused(f"-o {target} exists since a moment ago; choose another file, or replace it with --force")
    temporary.replace(target)
    disk_format.sync_folder(target.absolute().parent)
    say(f"{part} of {checkpoint}, {record.size} bytes")
    print(target)


def _tensors(part: str, state: Any) -> dict[str, torch.Tensor]:
    """The tensors of a state by their names, as far as safetensors can have them; says what it cannot."""
    import torch

    from paceline.train.parallel.weights import TYPES

    is_flat = isinstance(state, dict) and all(isinstance(name, str) for name in state)
    tensors = {n: it for n, it in state.items() if isinstance(it, torch.Tensor)} if is_flat else {}
    if not tensors:
        raise Refused(f"--part {part} is no flat dict of tensors, as safetensors needs; choose a file FILE.pt")
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.dtype not in TYPES.values():
            kind = f"{tensor.layout}, {tensor.dtype}".removeprefix("torch.strided, ")
            raise Refused(f"--part {part}: {name!r} is of type {kind}, not known to safetensors; choose a file FILE.pt")
    if left := [name for name in state if name not in tensors]:
        say(f"left out, because they are no tensors: {', '.join(map(repr, left))}")
    return tensors


def _safetensors(part: str, tensors: dict[str, torch.Tensor], shards: Shards) -> Iterator[bytes]:
    """The content of the file; each tensor is made whole when it is its turn."""
    from paceline.train.parallel.weights import TYPES

    kinds = {dtype: kind for kind, dtype in TYPES.items()}
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # so that each is aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": kinds[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield from _bytes(shards.fill(part, {name: tensors[name]}, lambda *_: None)[name])


def _bytes(tensor: torch.Tensor) -> Iterator[bytes]:
    plain = tensor.contiguous()
    for at in range(0, size := plain.numel() * plain.dtype.itemsize, CHUNK):
        yield ctypes.string_at(plain.data_ptr() + at, min(CHUNK, size - at))


def say(line: str) -> None:
    """Print a line of paceline's."""
    print(f"paceline: {line}", file=sys.stderr)
