"""A folder with the code of jobs: its mark, which snapshots leave out, and names that clients and nodes know."""

from __future__ import annotations

import re

# The `.gitignore` of such a folder.
GITIGNORE = b"# The code of jobs; made by paceline.\n*\n"


def source_name(source: str) -> str:
    """What the copy of a folder or repository is called: the last part of its path or URL, without `.git`."""
    return re.split(r"[/:]", source.rstrip("/"))[-1].removesuffix(".git")
