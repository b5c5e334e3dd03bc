"""Signs that each rank of a node does all of the work, while the ranks run: none of them has asked which rank it is."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Callable

from paceline.node.machine import processes

from .hang import listed
from .outside import text_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from paceline.contract.stands import Answer

    from .asking import Asked

_IN_TURN = 3  # looks at which all ranks are alone in a package's world: they may still meet by other means


class Unjoined:
    """Takes in what is seen of the ranks at each look, and says the first sign."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Nothing is seen yet; `say` is called with the sign, in words."""
        self._say: Callable[[str], None] | None = say
        self._alone: dict[Asked, list[str]] = {}  # what ranks have answered to the last look that have not asked
        self._in_turn = 0
        self._files: dict[str, list[int]] = {}  # that ranks wrote to at the last look

    def look(self, live: Collection[Asked]) -> None:
        """Look at the files of the ranks, if none had asked at the last look; what they answer next must agree."""
        is_alone = bool(live) and self._say is not None and self._alone.keys() == {*live}
        self._in_turn = self._in_turn + 1 if is_alone and all(self._alone.values()) else 0
        self._alone, self._files = {}, {}
        for rank in live if is_alone else ():
            for path in _written_to(rank.pid):
                self._files.setdefault(path, []).append(rank.rank)

    def hear(self, rank: Asked, answer: Answer, live: Collection[Asked]) -> None:
        """Take in what a rank has answered, and judge if that was the last one."""
        if self._say is None or "alone" not in answer:
            return
        self._alone[rank] = answer["alone"]
        sign = self._sign() if self._alone.keys() == {*live} else ""
        if sign:
            self._say(f"{sign}, and the script has not asked which rank it is, as if each rank did all of the work")
            self._say = None

    def _sign(self) -> str:
        packages = {name for names in self._alone.values() for name in names}
        if packages and self._in_turn >= _IN_TURN:
            here = listed([rank.rank for rank in self._alone])
            return f"{here} use {', '.join(packages)}, each in a world of its own (--framework mpi makes it one)"
        path, ranks = next((it for it in self._files.items() if len(it[1]) > 1), ("", []))
        if not path or any(_runs_programs(rank.pid) for rank in self._alone):  # they may have opened it for these
            return ""
        return f"{listed(ranks)} write over each other in {path}"


def _written_to(pid: int) -> list[str]:
    """Files that a process writes to, and shares with no other one on purpose.

    That is, it has opened them itself, for writing only and not to append, has no lock, and has written something. No
    file is touched, since that could wait for a server that does not answer.
    """
    found = _open_files(pid)
    given = _open_files(next(iter(processes.parents(pid)), 0)) if found else []
    return [path for path in found if path not in given]


def _open_files(pid: int) -> list[str]:
    found = []
    for name, path in processes.open_files(pid).items():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            info = dict(line.split(":", 1) for line in text_of(f"/proc/{pid}/fdinfo/{name}").splitlines())
            flags = int(info["flags"], 8)
            is_file = path.startswith("/") and not path.startswith("/dev/") and not path.endswith(" (deleted)")
            overwrites = flags & os.O_ACCMODE == os.O_WRONLY and not flags & os.O_APPEND and int(info["pos"]) > 0
            if is_file and overwrites and "lock" not in info:
                found.append(path)
    return found


def _runs_programs(pid: int) -> bool:
    """Whether a descendant of a process is another program; what it has only forked is not."""
    with contextlib.suppress(OSError):
        command = text_of(f"/proc/{pid}/cmdline")
        return any(text_of(f"/proc/{child}/cmdline") != command for child in processes.descendants(pid))
    return True
