"""Progress bars of what may take long."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int | None], None]]:
    """Give a callback that is told what is done, how much of it is done, and how much there is."""
    yield lambda *_: None
