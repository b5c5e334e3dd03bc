"""`python -m benchmarks`: measure and print the table. The exit code is 1 if a row fails, not if it misses its goal."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import NoReturn

from . import cases, report
from .case import Case
from .lab import Lab
from .row import Row, measure


def main() -> int:
    """Measure the rows that the command line names."""
    options = _parser().parse_args()
    chosen = _choose(options.only)
    signal.signal(signal.SIGTERM, _interrupt)
    facts = report.machine()
    print(report.headline(facts), flush=True)
    rows: list[Row] = []
    interrupted = False
    try:
        with Lab() as lab:
            for case in chosen:
                rows.append(measure(case, options.pairs, lab, _progress))
    except KeyboardInterrupt:
        interrupted = True
    _progress("")
    print(report.table(rows), flush=True)
    if options.json:
        options.json.write_text(json.dumps(report.as_json(facts, rows), indent=2) + "\n")
    if interrupted:
        print("interrupted; the rows that were not finished are left out", file=sys.stderr)
        return 130
    return 1 if any(row.error for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Compare paceline with other tools.")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="a row, or a group of rows; repeatable  [default: all]"
    )
    parser.add_argument("--pairs", type=_at_least_one, default=5, metavar="N", help="pairs per row  [default: 5]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every sample to this file")
    return parser


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} measures nothing; give 1 or more")
    return number


def _choose(only: list[str] | None) -> list[Case]:
    groups = cases.load()
    names = {*groups, *(case.name for group in groups.values() for case in group)}
    for name in only or ():
        if name not in names:
            sys.exit(f"benchmarks: there is no {name!r}; choose from {', '.join(sorted(names))}")
    return [case for group, rows in groups.items() for case in rows if not only or group in only or case.name in only]


def _progress(text: str) -> None:
    """Show a line that the next one overwrites; without a terminal, show nothing."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


sys.exit(main())
