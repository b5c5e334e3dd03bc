"""What code of a node refuses, as an error of the command line."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from paceline.job.errors import UserError
from paceline.node.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Whatever a node's code refuses is the user's to mend.

    Raises:
        UserError: it was refused.
    """
    try:
        yield
    except Refused as refused:
        raise UserError(str(refused)) from None
