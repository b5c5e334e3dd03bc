"""The report, opened from a file in a real browser: its policy refuses nothing of it, and nothing of a job is code."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from tests.web.long_job import START, histories
from tests.web.test_report import HOSTILE, JOB, view

from paceline.backends.base import History
from paceline.web.report import report
from paceline.web.views import job_view

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


def test_several_lines_of_one_step(chromium: Browser, tmp_path: Path) -> None:
    values = {"loss": [4.0, 2.0, None], "accuracy": [None, None, 0.5]}
    logged = {"time": [1.0, 2.0, 3.0], "step": [1, 2, 2], "values": values, "last": {"loss": 2.0, "accuracy": 0.5}}
    node: Any = {"host": "", "node_rank": 0, "telemetry": [], "metrics": logged, "software": {}, "missing": []}
    opened(chromium, tmp_path, view(node))
    chromium.until("!!document.querySelector('.uplot')")
    labels = chromium.run("[...document.querySelectorAll('.chart [role=img]')].map((it) => it.ariaLabel)")
    assert {"loss: 2 to 4, last 2", "accuracy: 0.5"} <= set(labels)


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


def test_the_bar_of_time_why_and_paper(chromium: Browser, tmp_path: Path) -> None:
    trace = """Traceback (most recent call last):
  File "/home/me/train.py", line 9, in main
    net(batch)
  File "/v/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1, in _call
    return forward_call()
  File "/v/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 2, in forward
    return F.linear()
ValueError: no"""
    failure = {"rank": 0, "node": 0, "message": "ValueError: no", "traceback": trace}
    happened: Any = [
        {"time": START, "event": "submitted"}, {"time": START + 20, "event": "started", "attempt": 0},
        {"time": START + 40, "event": "checkpoint", "step": 7},
        {"time": START + 50, "event": "restarting", "attempt": 1, "restarts": 1, "why": "a node was lost"},
        {"time": START + 60, "event": "started", "attempt": 1},
        {"time": START + 100, "event": "finished", "failure": failure, "others": []},
    ]  # fmt: skip
    found = job_view(JOB, happened, History(histories(2, 4, 0.2, tmp_path)), file="script: train.py\n")
    opened(chromium, tmp_path, found)
    told = chromium.run("document.querySelector('.timeline svg').getAttribute('aria-label')")
    for words in ("waiting 20s", "starting 10s", "running 1m10s", "1 checkpoint", "1 restart"):
        assert words in told
    bar = "document.querySelector('.timeline svg').getBoundingClientRect()"
    left, top, width = chromium.run(f"(({{x, y, width}}) => [x, y, width])({bar})")
    for part, words in (
        (0.1, "waiting: 20s"),
        (0.4, "saved step 7"),
        (0.5, "a node was lost"),
        (0.9, "attempt 1: 40s"),
    ):
        chromium.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + part * width, y=top + 25)
        chromium.until(f"document.querySelector('.tip')?.textContent.includes('{words}')")
    assert chromium.run("document.querySelector('.why mark').textContent.trim().split('\\n')[0]").endswith("in main")
    assert "linear.py" not in chromium.text()
    chromium.click(".why summary", "2 frames of torch")
    chromium.shows("linear.py")
    for scheme in ("light", "dark"):
        chromium.emulate(prefers_color_scheme=scheme)
        assert not chromium.barriers(), scheme
    chromium.run("dispatchEvent(new Event('beforeprint'))")
    chromium.call("Emulation.setEmulatedMedia", media="print", features=[])
    chromium.resize(718, 1000)
    assert chromium.run("document.documentElement.scrollWidth") <= 718
    assert chromium.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    controls = "[...document.querySelectorAll('form, select, nav button')]"
    assert not chromium.run(f"{controls}.some(it => it.offsetParent)")
    assert chromium.run("document.querySelectorAll('.section:not([open])').length") == 0
    chromium.call("Emulation.setEmulatedMedia", media="", features=[])
    chromium.run("dispatchEvent(new Event('afterprint'))")
    assert chromium.run("document.querySelectorAll('.section:not([open])').length") > 0
    assert chromium.console == []
