"""What a system has that runs jobs, such as a cluster: tables, and what would go wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .finding import Finding


@dataclass(frozen=True)
class Report:
    """What `paceline check` shows of such a system. The fields are the keys of its JSON.

    Attributes:
        sections: title → rows of two: what, and how it is.
        findings: what would go wrong; errors come first.
        remedy: a file that corrects some of it; "" if there is none.
        remedy_use: what the file is, and what takes it.
    """

    sections: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    remedy: str = ""
    remedy_use: str = ""
