"""The report, opened from a file in a real browser: its policy refuses nothing of it, and nothing of a job is code."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from tests.web.long_job import histories
from tests.web.test_report import HOSTILE, JOB, view

from paceline.web.report import report

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lab.web.browser import Browser

pytestmark = pytest.mark.needs("chromium")


def opened(chromium: Browser, folder: Path, *views: Any) -> None:
    path = folder / "report.html"
    path.write_text(report(views))
    chromium.open(path.as_uri())
    chromium.until("!!document.querySelector('main')")


def test_all_of_a_long_job(chromium: Browser, tmp_path: Path) -> None:
    logs = [{"rank": 0, "lines": ["\x1b[31mred\x1b[0m"]}]
    opened(chromium, tmp_path, view(*histories(2, 4, 1.0, tmp_path), logs=logs))
    for text in ("digits", "ValueError: no", "loss", "Seconds of a step", "CPU cores", "digits-worker-0"):
        chromium.shows(text)
    assert chromium.run("document.querySelectorAll('.uplot').length") > 10
    assert chromium.run("document.querySelector('.ansi-color-1').textContent") == "red"
    chromium.click("button", "exchange")
    chromium.click("label", "Logarithmic")
    chromium.fill("select", "node-1", "change")
    chromium.until("document.querySelectorAll('.uplot').length > 10")
    assert chromium.console == []


def test_hostile_names(chromium: Browser, tmp_path: Path) -> None:
    job = dataclasses.replace(JOB, name=HOSTILE.replace("\ud800", ""), error=HOSTILE, command=HOSTILE)
    values = {"__proto__": [1.0, 2.0], "constructor": [1.0, 1.0], "</script>": [1.0, None]}
    logged = {"time": [1.0, 2.0], "step": [1, 2], "values": values, "last": {name: 1.0 for name in values}}
    node: Any = {"host": "", "node_rank": 0, "telemetry": [], "metrics": logged, "software": {}, "missing": [HOSTILE]}
    hostile = view(node, job=job, logs=[{"rank": 0, "lines": [HOSTILE, "\x1b]0;title\x07x"]}], file=HOSTILE)
    chromium.run("window.alert = () => { window.wasCalled = true }")
    opened(chromium, tmp_path, hostile)
    chromium.shows("alert(1)")
    assert chromium.run("document.querySelectorAll('.uplot').length") == 4
    opened(chromium, tmp_path, hostile, view(node))
    chromium.shows("Compare")
    chromium.click("button", "digits")
    chromium.shows("digits-master-0")
    assert chromium.run("document.querySelectorAll('script').length") == 2
    assert chromium.run("window.wasCalled") is None
    assert chromium.console == []
