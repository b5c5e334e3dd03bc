"""The mark of a folder that only holds the code of jobs: clients and nodes write it, and snapshots leave it out."""

from __future__ import annotations

# The `.gitignore` of such a folder.
GITIGNORE = b"# The code of jobs; made by paceline.\n*\n"
