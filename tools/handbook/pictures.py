"""Pictures for the pages, as SVG that is the same on every machine: `python -m tools.handbook` draws them.

Colours follow the reader's: light or dark, as the system says. The figures of the last one are read from
docs/measured-training.md.
"""

from __future__ import annotations

import math
import re
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
IMAGES = DOCS / "images"
_STYLE = """\
text{font:14px system-ui,sans-serif;fill:#1f2328}.small{font-size:12px;fill:#59636e}.code{font-family:monospace}
.paper{fill:#fff;stroke:#d1d9e0}.box{fill:#eef4fb;stroke:#4a7fb5}.ours{fill:#4a7fb5}.other{fill:#b8c0c8}
.good{fill:#dff0e1;stroke:#3f8f4f}.bad{fill:#fbe3e0;stroke:#c0483c}.line{stroke:#59636e;fill:none}.head{fill:#59636e}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9aa4ae}.paper{fill:#0f141a;stroke:#30363d}
.box{fill:#18263a;stroke:#5b9bd5}.ours{fill:#5b9bd5}.other{fill:#5a636d}.good{fill:#15301c;stroke:#58b368}
.bad{fill:#3a1c19;stroke:#e0685c}.line{stroke:#9aa4ae}.head{fill:#9aa4ae}}"""


class Picture:
    """A picture that grows by what is drawn into it; all lengths are pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path class="head" d="M0 0L8 4L0 8z"/></marker>',
            f'<rect class="paper" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        ]

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        """Write words at a point."""
        self._parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>')

    def bar(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draw a rectangle."""
        self._parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:.4g}" height="{height:g}" rx="4"/>')

    def box(self, x: float, y: float, width: float, lines: tuple[str, ...], kind: str = "box") -> None:
        """Draw a box with words in it: the first line is its name."""
        height = 14 + 18 * len(lines)
        self.bar(x, y, width, height, kind)
        for number, words in enumerate(lines):
            self.text(x + width / 2, y + 20 + 18 * number, words, "small" if number else "")

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draw an arrow."""
        self._parts.append(f'<path class="line" d="M{x:g} {y:g}L{to_x:g} {to_y:g}" marker-end="url(#head)"/>')

    def done(self) -> str:
        """Return the SVG."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def pictures() -> dict[Path, str]:
    """Each picture's file, and its text."""
    drawn = {
        "job": job(), "node": node(), "checkpoint": checkpoint(), "exactly-once": exactly_once(),
        "slow-network": slow_network(),
    }  # fmt: skip
    return {IMAGES / f"{name}.svg": text for name, text in drawn.items()}


def job() -> str:
    """A job's way, from the command line to the ranks and back."""
    it = Picture(760, 300, "A job's way from the command line through a backend to the ranks on each machine, and back")
    it.box(20, 40, 150, ("paceline", "run, submit, a job file,", "a line of torchrun …"))
    it.arrow(172, 74, 208, 74)
    it.box(210, 40, 120, ("job", "what to run,", "code, data"))
    it.arrow(332, 74, 368, 74)
    it.box(370, 40, 130, ("backend", "here, ssh, Slurm,", "Kubernetes"))
    for number in range(2):
        y = 24 + 120 * number
        it.arrow(502, 74, 538, y + 34)
        it.box(540, y, 200, (f"node {number}", "agent → fork server", f"→ ranks {2 * number} and {2 * number + 1}"))
    it.arrow(640, 96, 640, 140)
    it.arrow(640, 140, 640, 96)
    it.text(650, 122, "agents agree", "small", "start")
    it.box(540, 240, 200, ("a folder on each node",), "good")
    it.arrow(640, 214, 640, 238)
    it.arrow(538, 256, 172, 256)
    it.text(355, 246, "logs, events, progress, checkpoints", "small")
    it.box(20, 230, 150, ("paceline", "list, logs, why, top"))
    return it.done()


def node() -> str:
    """Who starts whom on a node."""
    it = Picture(760, 240, "Who starts whom on a node: client, guard and agent, fork server, ranks")
    it.box(20, 90, 140, ("client", "shows the output,", "passes signals on"))
    it.arrow(162, 124, 198, 124)
    it.box(200, 90, 150, ("agent", "below a guard: ends", "all that is left"))
    it.arrow(352, 124, 388, 124)
    it.box(390, 90, 150, ("fork server", "imports the", "framework once"))
    for number, y in enumerate((24, 158)):
        it.arrow(542, 124, 578, y + 30)
        it.box(580, y, 160, (f"rank {number}", "forked, in a session", "of its own"))
    it.text(660, 118, "after a failure, all are", "small")
    it.text(660, 134, "forked again", "small")
    it.text(275, 176, "journal, logs and telemetry", "small")
    it.text(275, 192, "of the job's folder", "small")
    return it.done()


def checkpoint() -> str:
    """How a checkpoint is committed."""
    it = Picture(760, 210, "How a checkpoint is committed: a copy in memory, files in a hidden folder, one rename")
    steps = (
        ("copy", "to CPU memory;", "training goes on"), ("agree", "all ranks save", "the same step"),
        ("write", "files in a", "hidden folder"), ("manifest", "sizes, checksums,", "fsync"),
    )  # fmt: skip
    for number, lines in enumerate(steps):
        it.box(20 + 148 * number, 40, 124, lines)
        it.arrow(146 + 148 * number, 74, 166 + 148 * number, 74)
    it.box(612, 40, 128, ("rename", "step-000400 is", "there as a whole"), "good")
    it.box(20, 140, 568, ("killed, full disk, lost machine before the rename: step-000300 stays the newest",), "bad")
    it.box(612, 140, 128, ("keep=3",))
    it.arrow(676, 110, 676, 138)
    it.arrow(304, 110, 304, 138)
    return it.done()


def exactly_once() -> str:
    """Which samples are trained over a restart."""
    it = Picture(760, 250, "Every sample counts once: steps after the newest checkpoint are trained again from it")
    width = 66
    for row, (y, ranks, first, last) in enumerate(((50, 4, 1, 6), (150, 2, 5, 10))):
        it.text(16, y + 17, f"attempt {row}", "", "start")
        it.text(16, y + 35, f"{ranks} ranks", "small", "start")
        for step in range(first, last + 1):
            lost = row == 0 and step > 4
            x = 94 + width * (step - 1)
            it.bar(x, y, width - 4, 46, "bad" if lost else "good")
            it.text(x + (width - 4) / 2, y + 20, f"step {step}", "small")
            it.text(x + (width - 4) / 2, y + 36, f"{16 * (step - 1)}-{16 * step - 1}", "small")
    at = 90 + width * 4 - 2
    it.arrow(at, 130, at, 146)
    it.text(at, 124, "checkpoint after step 4: weights, optimizer, position in the epoch", "small")
    it.text(90 + width * 6 + 8, 77, "a machine dies: steps 5 and 6 are undone", "small", "start")
    it.text(
        90,
        226,
        "Below each step the samples of its batch: 16 with any number of ranks, each sample once.",
        "small",
        "start",
    )
    return it.done()


def slow_network() -> str:
    """The time of a step with 21 MB of gradients over slow networks."""
    page = (DOCS / "measured-training.md").read_text()
    rows = (
        ("1 Gbit/s", "sync-1g", "powersgd(2)"), ("1 Gbit/s", "sync-local", "local_sgd(8)"),
        ("100 Mbit/s", "sync-100m", "powersgd(2)"),
    )  # fmt: skip
    it = Picture(760, 320, "Time of a step with 21 MB of gradients on two hosts, with paceline's methods and with DDP")
    it.text(
        20, 28, "A step with 21 MB of gradients, two hosts with one rank each (docs/measured-training.md)", "", "start"
    )
    for number, (network, row, method) in enumerate(rows):
        found = re.search(rf"^\| {row} \| ([\d.]+) ms \| DDP by hand: ([\d.]+) s \|", page, re.MULTILINE)
        assert found is not None, row
        y = 58 + 84 * number
        it.text(20, y + 26, network, "", "start")
        for place, (label, seconds, kind) in enumerate(
            ((method, float(found[1]) / 1000, "ours"), ("DistributedDataParallel", float(found[2]), "other"))
        ):
            width = 165 * (math.log10(seconds) + 2)  # from 10 ms on
            it.bar(290, y + 30 * place, width, 22, kind)
            it.text(280, y + 16 + 30 * place, label, "small", "end")
            it.text(298 + width, y + 16 + 30 * place, f"{seconds * 1000:.0f} ms", "", "start")
    it.text(290, 306, "logarithmic: 10 ms at the left", "small", "start")
    return it.done()
