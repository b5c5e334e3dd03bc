"""What `paceline run --rehearse` tells the ranks, and what they record: files in a folder of the rehearsal.

```
plan.json                 `Plan`
<attempt>-<rank>.jsonl    what a rank has done, one JSON object a line: `e` is its kind, `at` FILE:LINE of the script
saved                     some rank has saved a state
unprotected               why files of the working folder are really written
upper, work               what the ranks have written in the working folder, which keeps its files
```
"""

from __future__ import annotations

from typing import TypedDict

FOLDER = "PACELINE_REHEARSAL"  # the variable with the path of that folder
PLAN, SAVED, UNPROTECTED, UPPER, WORK = "plan.json", "saved", "unprotected", "upper", "work"


class Plan(TypedDict):
    """How a rehearsal goes."""

    steps: int  # batches of a pass over a data set, and a third of the steps of an optimizer, after which ranks end
    victim: int  # the rank that is killed once
    after: int  # how many steps after a state was saved first
    differ: bool  # whether each rank gets a hash seed of its own
