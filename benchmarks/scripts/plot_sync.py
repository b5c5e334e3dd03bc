"""`python -m benchmarks.scripts.plot_sync FILE`: draw the validation loss over time for several methods.

Two lab hosts train the transformer of examples/chargpt.py with links of 100 Mbit/s; the methods take turns. DDP trains
without a limit before. It takes root, Linux and some minutes. FILE ends in .svg or .png; the values are written beside
it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

from .. import lab as labs
from ..cases.sync import LOSS, ONE_THREAD
from ..lab import Lab, installed

MBIT = 100
METHODS = ["ddp", "fp16", "powersgd(4)", "local_sgd(8)", "diloco(64)"]
LABELS = {"ddp": "DDP"}

Curve = list[tuple[float, float]]


def measure(seconds: float) -> dict[str, Curve]:
    """The curve of each method."""
    labs.TIMEOUT = 3600.0
    with Lab() as lab:
        hosts = lab.hosts().hosts[:2]
        start = [*lab.hosts().enter(), installed("paceline"), "run", "--on", "lab2", "--nnodes", "2", "-n", "1"]

        def train(*methods: str) -> dict[str, Curve]:
            answer: dict[str, Curve] = lab.answer([*start, *ONE_THREAD, LOSS, ",".join(methods), str(seconds), "0"])
            return answer

        found = {"DDP, no limit": train("ddp")["ddp"]}
        for host in hosts:
            host.limit(MBIT)
        found.update({LABELS.get(method, method): curve for method, curve in train(*METHODS).items()})
        return found


def draw(curves: dict[str, Curve], file: Path) -> None:
    """Draw them, from where they are all on the scale."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "paceline"})
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for name, curve in curves.items():
        is_reference = name == "DDP, no limit"
        axes.plot(
            [seconds for seconds, _ in curve], [loss for _, loss in curve], label=name,
            color="black" if is_reference else None, linestyle="--" if is_reference else "-", marker=".",
        )  # fmt: skip
    axes.set(xlabel="seconds of training", ylabel="validation loss", title=f"Two hosts, {MBIT} Mbit/s")
    axes.set_ylim(top=3.0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the validation loss over time for several methods.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=60, help="of training per method  [default: 60]")
    parser.add_argument("--values", type=Path, help="draw these values instead of measuring")
    options = parser.parse_args()
    if options.values:
        curves = json.loads(options.values.read_text())
    else:
        curves = measure(options.seconds)
        options.file.with_suffix(".json").write_text(json.dumps(curves) + "\n")
    draw(curves, options.file)


if __name__ == "__main__":
    main()
