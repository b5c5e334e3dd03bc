"""What the nodes of a long job have written: for tests of views, and for measuring them."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from paceline.node.telemetry.history import metrics, reduced, thinned

START = 1_790_000_000.0
SHARES = ("data", "compute", "exchange", "checkpoint", "other")


def line(time: float, ranks: range, gpus: int) -> Any:
    """A line of telemetry of a node."""
    minute = (time - START) / 60
    wave = [0.5 + 0.4 * math.sin(minute / 20 + rank) for rank in ranks]
    return {
        "time": time,
        "seconds": 10.0,
        "job": {"cpu": 6.0 + wave[0], "memory": 40 << 30, "read": 1e7 * wave[0], "written": 1e5},
        "machine": {"cores": 64.0, "load": 20.0, "memory": 512 << 30, "memory_used": 200 << 30, "disk": 1 << 40,
                    "disk_used": 1 << 39, "received": 3e8 * wave[0], "sent": 3e8},
        "ranks": {
            "rank": list(ranks), "cpu": [1.2 * it for it in wave], "memory": [5 << 30 for _ in wave],
            "read": [1e6 for _ in wave], "written": [0.0 for _ in wave], "data": [round(0.2 * it, 3) for it in wave],
            "compute": [round(0.6 * it, 3) for it in wave], "exchange": [round(1 - 0.85 * it, 3) for it in wave],
            "checkpoint": [0.0 for _ in wave], "other": [round(0.05 * it, 3) for it in wave],
            "steps": [2.0 for _ in wave],
        },
        "gpus": {
            "index": list(range(gpus)), "use": [round(95 * it, 1) for it in (wave * gpus)[:gpus]],
            "memory": [80 << 30] * gpus, "memory_used": [60 << 30] * gpus, "temperature": [60.0] * gpus,
            "power": [500.0] * gpus,
        },
    }  # fmt: skip


def telemetry(ranks: range, hours: float, gpus: int = 8) -> list[Any]:
    """All lines of a node, merged as its agent does."""
    return thinned(
        (line(START + 10.0 * it, ranks, gpus) for it in range(1, int(hours * 360) + 1)), START + hours * 3600
    )


def write_metrics(path: Path, hours: float, names: int = 6) -> None:
    """A line of metrics.jsonl per second."""
    with path.open("w") as file:
        for number in range(1, int(hours * 3600) + 1):
            noise = [0.01 * ((number * 7919 + it) % 97) for it in range(names)]
            values = {f"metric_{it}": math.exp(-number / 9000) + more for it, more in enumerate(noise)}
            times = {f"{part}_seconds": 0.1 for part in ("data", "forward_backward", "sync", "optimizer", "total")}
            line = {"time": START + number, "epoch": 0, "step": 2 * number, "attempt": 0}
            file.write(json.dumps({**line, "loss": values["metric_0"], **values, **times}) + "\n")


def histories(nodes: int, ranks: int, hours: float, folder: Path, names: int = 6) -> list[Any]:
    """What the nodes of a job send."""
    write_metrics(folder / "metrics.jsonl", hours, names)
    return [
        {"host": f"node-{node}", "node_rank": node,
         "telemetry": reduced(telemetry(range(node * ranks, (node + 1) * ranks), hours), 240),
         "metrics": metrics(folder / "metrics.jsonl") if not node else None, "software": {}, "missing": []}
        for node in range(nodes)
    ]  # fmt: skip


def main(run: Path, ranks: int = 64, hours: float = 8.0) -> None:
    """Make a job that has ended one of 64 ranks and 8 hours, in its run directory."""
    with (run / "telemetry.jsonl").open("w") as file:
        file.writelines(json.dumps(it) + "\n" for it in telemetry(range(ranks), hours))
    write_metrics(run / "metrics.jsonl", hours)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
