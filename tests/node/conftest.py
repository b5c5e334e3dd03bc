"""What the tests of a node share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from paceline.node.eventloop.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator


def close(loop: Loop) -> None:
    """A loop is its process's, and has no end of its own: close what it has opened."""
    for key in list(loop._selector.get_map().values()):
        if not isinstance(key.fileobj, int):
            key.fileobj.close()  # type: ignore[attr-defined]  # a socket or a channel
    loop._selector.close()
    loop._timers.clear()
    os.close(loop._signals_read)
    os.close(loop._signals_write)


@pytest.fixture(autouse=True)
def _loops_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the loops of a test at its end."""
    made: list[Loop] = []
    begin = Loop.__init__

    def noted(self: Loop) -> None:
        begin(self)
        made.append(self)

    monkeypatch.setattr(Loop, "__init__", noted)
    yield
    for loop in made:
        if loop._selector.get_map() is not None:  # it is not closed yet
            close(loop)
