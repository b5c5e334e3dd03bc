"""Views of jobs, and the file that shows them: what it holds, how large it is, and that nothing in a job escapes."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from paceline.backends.base import History
from paceline.job.job import Instance, Job
from paceline.node.rundir.directory import RunDirectory
from paceline.node.telemetry.history import history
from paceline.web import views
from paceline.web.gather import flattened
from paceline.web.report import is_report, report, script_of

from .long_job import START, histories

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "</script><script>alert(1)</script><!-- \u2028 ' \" & \ud800 __proto__"
JOB = Job(
    name="digits", state="FAILED", backend="local", framework="torch", nodes=1, ranks=2, attempt=0, exit_code=1,
    created=START, started=START + 1, finished=START + 100,
    instances=(Instance("digits-master-0", "lab", 0, "FAILED", 7, 1), Instance("digits-worker-0", "lab", 1, "STOPPED")),
    error="rank 0: ValueError", command="train.py",
)  # fmt: skip
STORY: list[dict[str, Any]] = [
    {"time": START, "event": "submitted", "ranks": 2},
    {"time": START + 99, "event": "finished", "state": "FAILED", "exit_code": 1, "failure": {
        "rank": 0, "node": 0, "message": "ValueError: no", "traceback": "Traceback\n  line 1\nValueError: no"},
     "others": []},
]  # fmt: skip
NOTHING: Any = {
    "host": "", "node_rank": 0, "telemetry": [], "metrics": None, "software": {}, "missing": ["no telemetry"],
}  # fmt: skip


def view(*nodes: Any, job: Job = JOB, **more: Any) -> views.JobView:
    return views.job_view(job, STORY, History(list(nodes)), **more)


class Page(HTMLParser):
    """The elements of a report, and the text of its scripts and style sheets."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags:
            self.texts.append((self.tags[-1][0], data))

    def text_of(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag and text.strip()]

    @property
    def data(self) -> Any:
        return json.loads(self.text_of("script")[0])


def test_what_a_view_says() -> None:
    found = view(NOTHING, logs=views.last_lines([(1, b"a\nb\n"), (0, b"c\n"), (1, b"\xff\n")], 2), file="script: x\n")
    assert found["job"]["name"] == "digits"
    assert found["events"][1]["details"].startswith("failure: rank 0: ValueError: no;")
    assert "ValueError: no" in "\n".join(found["why"])
    assert found["logs"] == [{"rank": 0, "lines": ["c"]}, {"rank": 1, "lines": ["b", "\ufffd"]}]
    assert (found["use"], found["metrics"], found["missing"]) == (None, None, ["no telemetry"])
    json.dumps(found, allow_nan=False)


def test_what_the_fields_of_a_job_say_is_told_once() -> None:
    job = dataclasses.replace(JOB, error="rank 0: ValueError: no", advice="ask for more", slow=("it waits for data",))
    found = view(NOTHING, job=job)
    assert found["why"][:2] == ["job digits: FAILED (exit code 1) after 1m39s", "rank 0: ValueError: no"]
    told = "\n".join(it["text"] for it in found["told"])
    assert told.startswith("it wrote last:")
    assert "it waits for data" not in told
    job = dataclasses.replace(JOB, error="rank 0: exit code 3")
    failure = {"rank": 0, "node": 0, "host": "vm", "message": "exit code 3", "traceback": "", "collectives": ""}
    end = {"time": START + 99, "event": "finished", "failure": failure, "others": [{**failure, "rank": 1}]}
    assert [it["text"] for it in views.job_view(job, [end], History([]))["told"]] == ["  after it rank 1: exit code 3"]
    waits = dataclasses.replace(JOB, state="PENDING", error=None, waiting="it waits for 2 devices")
    assert views.job_view(waits, [], History([]))["told"] == []
    hangs = dataclasses.replace(JOB, state="RUNNING", error=None, finished=None, waiting="it hangs: rank 1 is late")
    hang = {"seconds": 9.0, "line": "rank 1 is late", "places": []}
    happened = [{"time": START + 20, "event": "hang", "why": "for 9 s rank 1 is late", "hang": hang}]
    assert views.job_view(hangs, happened, History([]))["told"] == []


def test_settings_that_are_compared() -> None:
    spec = {
        "script": "a.py", "nodes": 2, "devices": ["0", "1"], "env": {"A": "x y", "URL": "https://me:hush@host"},
        "args": ["train", "--lr", "-0.1", "--fp16", "--size=3", "--file", "a b", "--file", "c", "model.depth=5"],
    }  # fmt: skip
    assert flattened(spec) == {
        "script": "a.py", "nodes": "2", "devices": "0 1", "env.A": "x y", "env.URL": "https://me:…@host",
        "args.1": "train", "args.--lr": "-0.1", "args.--fp16": "yes", "args.--size": "3", "args.--file": "a b, c",
        "args.model.depth": "5",
    }  # fmt: skip


def test_very_many_events() -> None:
    many = [{"time": START + it, "event": "checkpoint", "step": it} for it in range(5000)]
    found = views.events(many)
    assert len(found) < 500
    assert (found[0]["details"], found[-1]["details"]) == ("step=0", "step=4999")
    assert any("left_out=" in it["details"] for it in found)


def used(rank: int, begin: float, end: float, cpu: float) -> Any:
    """The history of a node with a line every 10 s."""
    lines = [
        {"time": START + at + 10, "seconds": 10.0, "job": {"cpu": cpu, "memory": 1, "read": 0, "written": 0},
         "machine": dict.fromkeys(("load", "memory_used", "received", "sent"), 2.0),
         "ranks": {"rank": [rank], "data": [0.25], "compute": [0.75], "exchange": [0.0], "checkpoint": [0.0],
                   "other": [0.0]}}
        for at in range(int(begin), int(end), 10)
    ]  # fmt: skip
    return {**NOTHING, "host": f"n{rank}", "telemetry": lines, "missing": []}


def test_use_of_nodes_whose_lines_are_some_seconds_apart() -> None:
    """The total has the part of each node at its ends too, but of one that has left."""
    found = views.use([used(0, 0, 100, 1.0), used(1, 8, 98, 4.0), used(2, 8, 78, 8.0)], points=10)
    assert found is not None
    assert found["total"]["values"]["cpu"] == [13.0] * 8 + [5.0] * 2


def test_use_of_nodes_that_saw_other_times() -> None:
    """A node that came late counts from then on; where nobody measured, there is a gap."""
    found = views.use([used(0, 0, 100, 1.0), used(1, 50, 80, 4.0)], points=10)
    assert found is not None
    assert found["time"] == [START + 10 * it for it in range(1, 11)]
    assert found["total"]["values"]["cpu"] == [1.0] * 5 + [5.0] * 3 + [1.0] * 2
    assert found["nodes"][1]["values"]["cpu"] == [None] * 5 + [4.0] * 3 + [None] * 2
    assert found["ranks"] is not None
    cells = base64.b64decode(found["ranks"]["shares"]["compute"])
    assert list(cells[10:]) == [255] * 5 + [round(0.75 * 254)] * 3 + [255] * 2
    assert set(found["ranks"]["shares"]) == {"data", "compute"}


def test_a_hostile_job_stays_text() -> None:
    job = dataclasses.replace(JOB, name=HOSTILE, command=HOSTILE, error=HOSTILE, labels={"__proto__": HOSTILE})
    logged = {"time": [1.0], "step": [1], "values": {"__proto__": [1.0], HOSTILE: [None]}, "last": {"__proto__": 1.0}}
    node = {**NOTHING, "metrics": logged, "host": HOSTILE, "missing": [HOSTILE]}
    found = view(node, job=job, logs=[{"rank": 0, "lines": [HOSTILE, "\x1b]0;x\x07"]}], file=HOSTILE)
    page = Page(report([found]))
    assert [tag for tag, _ in page.tags].count("script") == 2
    shown = page.data["jobs"][0]
    assert shown["job"]["labels"]["__proto__"].startswith("</script>")
    assert shown["metrics"]["values"]["__proto__"] == [1.0]


def test_it_loads_nothing_and_its_policy_allows_its_own_code_alone() -> None:
    page = Page(report([view(NOTHING)]))
    assert not [attrs for _, attrs in page.tags if {"src", "href", "onclick", "style"} & attrs.keys()]
    (policy,) = [it["content"] for _, it in page.tags if it.get("http-equiv") == "Content-Security-Policy"]
    hashes = re.findall(r"(script|style)-src 'sha256-([^']+)'", policy or "")
    for (kind, digest), text in zip(hashes, [page.text_of("script")[1], page.text_of("style")[0]], strict=True):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() == digest, kind
    assert "default-src 'none'" in (policy or "")
    assert "ValueError: no" in "".join(page.text_of("pre")), "what a reader without JavaScript sees"


def test_the_script_has_each_module_once() -> None:
    script = script_of("report.js")
    assert len(re.findall(r'^modules\["vendor/preact.js"\] = ', script, re.MULTILINE)) == 1
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)
    assert "</script" not in script


def test_the_size_for_64_ranks_and_8_hours(tmp_path: Path) -> None:
    found = view(*histories(8, 8, 8.0, tmp_path))
    assert found["use"] is not None and len(found["use"]["nodes"]) == 8
    assert len(report([found]).encode()) < 300_000


def test_the_size_for_very_many(tmp_path: Path) -> None:
    """512 ranks on 16 nodes, 50 metrics, thousands of events."""
    nodes = histories(1, 512, 0.4, tmp_path, names=50)
    nodes += [{**nodes[0], "node_rank": rank, "metrics": None} for rank in range(1, 16)]
    states = ["FAILED" if rank == 500 else "STOPPED" for rank in range(512)]
    instances = tuple(Instance(f"digits-worker-{rank}", "lab", rank, state) for rank, state in enumerate(states))
    found = views.job_view(
        dataclasses.replace(JOB, instances=instances), [*STORY, *STORY[:1] * 5000], History(nodes), logs=()
    )
    assert "FAILED" in [it["state"] for it in found["job"]["instances"]]
    assert "128 of 512 ranks are listed" in found["missing"]
    assert len(report([found]).encode()) < 350_000


def test_ten_thousand_metrics() -> None:
    names = [f"metric_{it}" for it in range(10_000)]
    logged = {"time": [1.0], "step": [1], "values": {it: [1.0] for it in names}, "last": dict.fromkeys(names, 1.0)}
    found = view({**NOTHING, "metrics": logged})
    assert found["metrics"] is not None
    assert list(found["metrics"]["values"]) == list(found["metrics"]["last"]) == names[:200]
    assert "200 of 10000 metrics are shown, those that were logged first" in found["missing"]


def test_pieces_that_are_missing(tmp_path: Path) -> None:
    found = view(history(RunDirectory(tmp_path)))
    assert "no telemetry was recorded" in found["missing"][0]
    assert report([found, found]).count("the job has run for less than 3 s") == 2


def test_only_a_report_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.html"
    assert not is_report(path)
    path.write_text("<html>mine</html>")
    assert not is_report(path)
    path.write_text(report([view(NOTHING)]))
    assert is_report(path)


@pytest.mark.parametrize("count", [1, 300, 5000])
def test_many_ranks_share_rows(count: int) -> None:
    lines = [{"time": START + 10, "seconds": 10.0, "ranks": {"rank": list(range(count)), "data": [1.0] * count,
              **{share: [0.0] * count for share in views.SHARES[1:]}}}]  # fmt: skip
    found = views.ranks([{**NOTHING, "telemetry": lines}])
    assert found is not None
    assert len(found["rank"]) <= 128
    assert base64.b64decode(found["shares"]["data"]) == bytes([254]) * len(found["rank"])
