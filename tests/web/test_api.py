"""What the page is answered: jobs of several targets, some of which do not answer, and actions."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import eventually

from paceline.backends import everywhere
from paceline.backends.base import Backend, Listing, Prepared
from paceline.contract.machine import machine_id
from paceline.job.errors import UserError
from paceline.job.job import SILENT, Contents, Instance, Job, Node
from paceline.job.quantities import show_time
from paceline.job.spec import JobSpec
from paceline.web.api import OPERATIONS
from paceline.web.machines import POINTS, Use, of_histories

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.web.conftest import Page

JOB = Job("it", "RUNNING", "lab", "torch", 1, 2, 0, None, 100.0, 101.0, None, (), None)
NAMES = ("plain", "<script>alert(1)<img src=x>", "__proto__", "a b&c=d", "名字", "..", "q?x#y")


class Fake(Backend):
    """A target in memory; what it is asked to do is in `done`."""

    def __init__(self, name: str, *jobs: Job) -> None:
        super().__init__(name, None, f" --on {name}")
        self.jobs = {job.name: replace(job, backend=name) for job in jobs}
        self.done: list[Any] = []
        self.error: str | None = None

    def describe(self, names: Any = None, since: float | None = None) -> Listing:
        if self.error:
            raise UserError(self.error)
        return Listing([self.jobs[name] for name in (self.jobs if names is None else names) if name in self.jobs])

    def prepare(self, spec: JobSpec, *, detached: bool = True) -> Prepared:
        if spec.script == "nowhere.py":
            raise UserError("no script nowhere.py")
        return Prepared(spec, notes=("it is a fake",))

    def start(self, prepared: Prepared, progress: Any) -> Job:
        job = replace(JOB, name=prepared.spec.name or "new", backend=self.name)
        self.done.append(("start", prepared.spec))
        self.jobs[job.name] = job
        return job

    def spec(self, name: str) -> JobSpec:
        return JobSpec(script="train.py", args=("--lr", "0.1"), ranks=2)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [{"time": 101.0, "event": "started"}]

    def contents(self, names: Any) -> dict[str, Contents]:
        return {name: Contents(3, 4096) for name in names}

    def stop(self, names: Any, now: bool = False) -> dict[str, str]:
        self.done.append(("stop", *names, now))
        return {}

    def delete(self, names: Any) -> list[str]:
        self.done.append(("delete", *names))
        return []

    def scaleout(self, name: str, more: Any) -> list[str]:
        self.done.append(("scaleout", name, more))
        return ["node2"]

    def scalein(self, name: str, fewer: Any) -> list[str]:
        self.done.append(("scalein", name, fewer))
        return ["node1"]

    def nodes(self, warn: Any) -> list[Node]:
        return [Node("node1", (), {}, 8.0, 1.0, 100, 50, 0, 0, device_count=8, allocated_count=2, jobs={"it": 2})]

    def usage(self, names: Any, warn: Any) -> dict[str, Any]:
        return {}

    def wait(self, names: Any, seconds: Any = None, tick: Any = None) -> bool:
        return True

    def logs(self, name: str, query: Any) -> Iterator[Any]:
        return iter(())

    def shell(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """The only target."""
    return targets(monkeypatch, Fake("lab", JOB))[0]


def targets(monkeypatch: pytest.MonkeyPatch, *backends: Fake) -> tuple[Fake, ...]:
    places = [everywhere.Place(it.name, lambda it=it: it) for it in backends]
    monkeypatch.setattr(everywhere, "places", lambda: places)
    monkeypatch.setattr("paceline.backends.registry.load", lambda name=None, *_, **__: dict(
        (it.name, it) for it in backends).get(name, backends[0]))  # fmt: skip
    return backends


def names(page: Page, query: str = "") -> list[str]:
    return [job["name"] for job in page.get(f"/api/jobs?fields=name&{query}").json()["jobs"]]


def test_jobs_have_the_keys_of_list(lab: Fake, page: Page) -> None:
    answer = page.get("/api/jobs").json()
    assert answer["jobs"] == [json.loads(json.dumps(lab.jobs["it"].to_dict()))]
    assert answer["counts"] == {"RUNNING": 1} and answer["total"] == 1
    assert [(it["name"], it["error"]) for it in answer["targets"]] == [("lab", None)]


def test_jobs_are_filtered_sorted_and_cut_by_the_server(monkeypatch: pytest.MonkeyPatch, page: Page) -> None:
    def made(number: int) -> Job:
        progress: Any = {"epoch": 0, "step": 1, "metrics": {"train_loss": 9.0 - number}} if number % 2 else None
        state = "RUNNING" if number % 2 else "FAILED"
        return replace(
            JOB, name=f"n{number}", created=100.0 + number, state=state, progress=progress, error=f"why{number}"
        )

    targets(monkeypatch, Fake("lab", *map(made, range(5))), Fake("farm", replace(JOB, name="other", created=1.0)))
    eventually(lambda: len(names(page)) == 6, "both targets have answered")
    assert names(page) == ["n4", "n3", "n2", "n1", "n0", "other"]
    assert names(page, "offset=1&limit=2") == ["n3", "n2"]
    assert names(page, "sort=name&state=FAILED,LOST") == ["n0", "n2", "n4"]
    assert names(page, "sort=loss")[:2] == ["n3", "n1"]  # those without one come last
    assert names(page, "q=WHY3+lab") == ["n3"] and names(page, "target=farm") == ["other"]
    assert page.get("/api/jobs?sort=__class__").status_code == 400
    assert page.get("/api/jobs?limit=-1").status_code == 400


def test_what_stands_above_jobs_and_groups_of_them(monkeypatch: pytest.MonkeyPatch, page: Page) -> None:
    now = time.time()

    def made(number: int, **more: Any) -> Job:
        return replace(JOB, name=f"sweep-{number}", created=now - number, **more)

    loss: Any = {"epoch": 0, "step": 1, "metrics": {"loss": 0.5}, "samples_per_second": 3.0}
    jobs = (
        made(1, state="RUNNING", devices=("0", "1"), waiting="it hangs: rank 1 is in a lock"),
        made(2, state="PENDING", waiting="waits for 2 devices"),
        made(3, state="PENDING", waiting="waits for 1 device; 1 job ahead; held by: sweep-1"),
        made(4, state="FAILED", finished=now - 60, cause="exception", error="no"),
        made(5, state="FAILED", finished=now - 2 * 86400, cause="exception"),
        made(6, state="SUCCEEDED", finished=now - 60, progress=loss, labels={"team": "a"}),
        replace(JOB, name="other-x7k2p", created=now - 9, state="SUCCEEDED", finished=now, command="eval.py"),
    )  # fmt: skip
    targets(monkeypatch, Fake("lab", *jobs))
    answer = page.get("/api/jobs").json()
    assert answer["summary"] == {
        "running": 1, "hung": 1, "devices": 2, "devices_all": None, "devices_kind": None, "waiting": 2,
        "reasons": [["waits for devices", 2]], "failed": 1, "causes": [["exception", 1]],
    }  # fmt: skip

    def there_are() -> Any:
        summary = page.get("/api/jobs?limit=0").json()["summary"]
        return summary["devices_all"], summary["devices_kind"]

    eventually(lambda: there_are() == (8, "devices"), "the target was asked, and nobody waited for it")
    # What runs no more has no speed, and what has succeeded is done.
    assert sorted(answer["has"]) == ["devices", "loss", "why"]
    assert page.get("/api/jobs?state=SUCCEEDED").json()["has"] == ["loss"]
    assert answer["labels"] == ["team"]

    def groups(query: str) -> list[tuple[str, int, float | None]]:
        return [(it["group"], it["jobs"], it["loss"]) for it in page.get(f"/api/jobs?{query}").json()["groups"]]

    assert groups("group=name") == [("sweep", 6, 0.5), ("other", 1, None)]
    assert groups("group=name&state=PENDING") == [("sweep", 2, None)]
    assert groups("group=command&q=eval.py") == [("eval.py", 1, None)]
    assert groups("group=label:team") == [("team=a", 1, 0.5)]
    assert page.get("/api/jobs?group=x").status_code == 400
    # Each group is a filter, and the states are counted of what is searched for.
    assert names(page, "in=name:other") == ["other-x7k2p"]
    assert names(page, "in=label:team=a") == ["sweep-6"]
    assert names(page, "in=command:eval.py&state=RUNNING") == []
    assert page.get("/api/jobs?in=command:eval.py&state=RUNNING").json()["counts"] == {"SUCCEEDED": 1}


def test_only_random_endings_are_taken_from_names(monkeypatch: pytest.MonkeyPatch, page: Page) -> None:
    named = ("bert-large", "bert-small", "train-x7k2p", "train-bcdef", "trial-12")
    jobs = (replace(JOB, name=name, command="train.py --model bert") for name in named)
    waits = {"state": "SUSPENDED", "waiting": "paceline resume it lets it go on"}
    suspended = (replace(JOB, name=f"s{number}", **waits) for number in (1, 2))
    targets(monkeypatch, Fake("lab", *jobs, *suspended))
    groups = page.get("/api/jobs?group=name&state=RUNNING").json()["groups"]
    assert {it["group"]: it["jobs"] for it in groups} == {"bert-large": 1, "bert-small": 1, "train": 2, "trial": 1}
    assert page.get("/api/jobs").json()["summary"]["reasons"] == [["suspended", 2]]


def test_who_started_jobs_is_shown_where_they_are_of_several(monkeypatch: pytest.MonkeyPatch, page: Page) -> None:
    jobs = (replace(JOB, name="a", user="zoe"), replace(JOB, name="b", user="ann"), replace(JOB, name="c"))
    targets(monkeypatch, Fake("lab", *jobs))
    assert "user" in page.get("/api/jobs").json()["has"]
    assert "user" not in page.get("/api/jobs?q=zoe").json()["has"]
    assert names(page, "sort=user") == ["b", "a", "c"] and names(page, "q=zoe") == ["a"]


def test_losses_are_read_once_of_jobs_that_have_ended(monkeypatch: pytest.MonkeyPatch, page: Page) -> None:
    lab, _ = targets(monkeypatch, Fake("lab", JOB, replace(JOB, name="done", state="SUCCEEDED")), Fake("farm", JOB))
    asked: list[list[str]] = []
    monkeypatch.setattr(lab, "losses", lambda those: asked.append(those) or {"done": [2.0, 1.0]}, raising=False)
    eventually(lambda: len(names(page)) == 3, "both targets have answered")
    for _ in range(2):
        assert page.get("/api/losses?target=lab&names=done,it,other").json() == {"losses": {"done": [2.0, 1.0]}}
    assert asked == [["done", "it"]]
    assert page.get("/api/losses?target=farm&names=it").json() == {"losses": {}}  # it keeps none
    failed = replace(lab.jobs["done"], state="FAILED")  # it was run again under its name

    def fails(_: Any) -> Any:
        raise UserError("lab does not answer")

    lab.jobs["done"] = failed
    page.post("/api/jobs/lab/it/stop", json={})
    eventually(lambda: names(page, "state=FAILED") == ["done"], "its state has changed")
    monkeypatch.setattr(lab, "losses", fails)
    assert page.get("/api/losses?target=lab&names=done").json() == {"losses": {}}


def test_a_silent_target_delays_no_other_and_is_named(monkeypatch: pytest.MonkeyPatch, page: Page) -> None:
    here, silent = targets(monkeypatch, Fake("lab", JOB), Fake("farm"))
    answers = threading.Event()
    silent.describe = lambda *_: (answers.wait(60), Listing([]))[1]  # type: ignore[method-assign]
    eventually(lambda: names(page) == ["it"], "the one that answers is shown")
    here.error = "node1 does not answer"
    page.post("/api/jobs/lab/it/stop", json={})
    eventually(lambda: page.get("/api/jobs").json()["targets"][0]["error"], "its error is shown")
    assert names(page) == ["it"]  # as it was known last
    answers.set()


def test_a_backend_is_used_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch, page: Page) -> None:
    both, overlaps = threading.Barrier(2), list[str]()

    class Unsafe(Fake):
        def __init__(self) -> None:
            super().__init__("lab", JOB)
            self.lock = threading.Lock()

        def spec(self, name: str) -> JobSpec:
            if not self.lock.acquire(blocking=False):
                overlaps.append(name)
            both.wait(60)
            self.lock.release()
            return super().spec(name)

    kept = Unsafe()
    monkeypatch.setattr(everywhere, "places", lambda: [everywhere.Place("lab", lambda: kept, None, Unsafe)])
    assert names(page) == ["it"]
    with ThreadPoolExecutor(2) as pool:
        for answer in pool.map(page.get, 2 * ["/api/jobs/lab/it/file"]):
            assert answer.status_code == 200
    assert not overlaps


def test_what_changes_is_told(lab: Fake, page: Page) -> None:
    version = page.get("/api/jobs").json()["version"]
    lab.jobs["it"] = replace(lab.jobs["it"], state="SUCCEEDED")
    page.post("/api/jobs/lab/it/stop", json={})  # looks again at once
    # What is learnt of machines makes another version as well, which may come first.
    eventually(lambda: page.get("/api/jobs").json()["jobs"][0]["state"] == "SUCCEEDED", "its state")
    assert page.get("/api/jobs").json()["version"] > version


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_found_and_is_only_text(monkeypatch: pytest.MonkeyPatch, page: Page, name: str) -> None:
    from urllib.parse import quote

    targets(monkeypatch, Fake("lab", replace(JOB, name=name, labels={"a": name})))
    assert names(page) == [name]
    answer = page.get(f"/api/jobs/lab/{quote(name, safe='')}")
    if name == "..":  # every client takes it out of a path
        return
    assert answer.json()["job"]["name"] == name
    assert answer.headers["content-type"] == "application/json"


def test_a_job_has_what_can_be_done_and_the_lines_for_it(lab: Fake, page: Page) -> None:
    answer = page.get("/api/jobs/lab/it").json()
    assert answer["can"] == ["stop", "scale"]
    assert answer["commands"]["stop"] == "paceline stop --on lab it"
    assert page.get("/api/jobs/lab/other").status_code == page.get("/api/jobs/farm/it").status_code == 404
    assert page.get("/api/jobs/lab/it/events").json()["events"][0]["event"] == "submitted"
    assert page.get("/api/jobs/lab/it/contents").json() == {"checkpoints": 3, "size": 4096}
    assert page.get("/api/jobs/lab/it/file").text == "script: train.py\nargs:\n- --lr\n- '0.1'\nranks: 2\n"


def test_actions_do_what_the_verbs_do(lab: Fake, page: Page) -> None:
    def post(action: str, **body: Any) -> int:
        return page.post(f"/api/jobs/lab/it/{action}", json=body).status_code

    assert post("stop") == post("stop", now=True) == post("scale", nodes=2) == post("scale", nodes=-1) == 200
    assert post("scale", hosts=["node1"], remove=True) == 200
    assert lab.done == [("stop", "it", False), ("stop", "it", True), ("scaleout", "it", 2), ("scalein", "it", 1),
                        ("scalein", "it", ["node1"])]  # fmt: skip
    for wrong in ({}, {"nodes": 0}, {"nodes": True}, {"nodes": 1, "hosts": ["a"]}, {"hosts": "a"}, {"hosts": [1]}):
        assert post("scale", **wrong) == 400, wrong


def test_only_the_job_that_was_looked_at_is_deleted(lab: Fake, page: Page) -> None:
    seen = page.get("/api/jobs/lab/it").json()["job"]
    lab.jobs["it"] = replace(lab.jobs["it"], created=999.0)
    assert page.post("/api/jobs/lab/it/delete", json={"created": seen["created"]}).status_code == 409
    assert page.post("/api/jobs/lab/it/delete", json={}).status_code == 409
    seen = page.get("/api/jobs/lab/it").json()["job"]
    assert page.post("/api/jobs/lab/it/delete", json={"created": seen["created"]}).status_code == 200
    assert lab.done == [("delete", "it")]


def test_a_dry_run_starts_nothing_and_shows_the_line(lab: Fake, page: Page) -> None:
    file = "script: train.py\nname: new\n"
    answer = page.post("/api/submit", json={"file": file, "on": "lab", "dry_run": True}).json()
    assert '"train.py"' in answer["text"] and answer["command"] == "paceline submit --on lab job.yaml"
    assert "it is a fake" in answer["notes"] and not lab.done
    assert page.post("/api/submit", json={"file": file, "on": "lab"}).json()["name"] == "new"
    assert page.get("/api/jobs/lab/new").status_code == 200  # at once
    assert lab.done[0][1].script == "train.py"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"file": "script: nowhere.py"}, "no script nowhere.py"),
        ({"file": "scrpt: train.py"}, "job file:1: scrpt"),
        ({"file": "{"}, "not valid YAML"),
        ({"file": "!!python/object/apply:os.system [true]"}, "a job is a mapping"),
        ({"file": 1}, "file: should be a text"),
        ({}, "job file is empty"),
        ({"file": "script: train.py", "dry_run": 1}, "dry_run: should be true or false"),
        ({"file": "script: train.py", "dryrun": True}, "'dryrun': no such key; submit takes file, on, dry_run"),
    ],
)
def test_a_job_that_cannot_run_is_refused_in_one_line(lab: Fake, page: Page, body: Any, why: str) -> None:
    answer = page.post("/api/submit", json=body)
    assert answer.status_code == 400 and why in answer.json()["error"] and "\n" not in answer.json()["error"]
    assert not lab.done


def test_arguments_and_variables_are_sent_as_people_type_them(lab: Fake, page: Page) -> None:
    lab.jobs["it"] = replace(lab.jobs["it"], state="FAILED", finished=200.0)
    typed = {"args": '--name=\'a b\' "c d" \\" 中文', "env": "A=b=c\n\n B=\n"}
    answer = page.post("/api/jobs/lab/it/resubmit", json={**typed, "dry_run": True}).json()
    spec = json.loads(answer["text"])["job"]
    assert spec["args"] == ["--name=a b", "c d", '"', "中文"]
    assert (spec["env"]["A"], spec["env"]["B"]) == ("b=c", "")
    for wrong, why in (({"args": "'a"}, "no closing quotation"), ({"env": "A"}, "'A'"), ({"env": "A=1\n=2"}, "''")):
        answer = page.post("/api/jobs/lab/it/resubmit", json={**wrong, "dry_run": True})
        assert answer.status_code == 400 and why in answer.json()["error"]
    assert not lab.done


def test_json_that_is_nested_too_deeply(page: Page) -> None:
    assert page.post("/api/submit", content=b"[" * 100_000).status_code == 400


def test_resubmit_shows_its_flags(lab: Fake, page: Page) -> None:
    lab.jobs["it"] = replace(lab.jobs["it"], state="FAILED", finished=200.0)
    changes = {
        "ranks": 4,
        "env": {"A": "b c"},
        "args": ["-x", "$(y)"],
        "fresh": True,
        "dry_run": True,
        "time_limit": "2h",
    }
    answer = page.post("/api/jobs/lab/it/resubmit", json=changes).json()
    line = "paceline resubmit --on lab --env 'A=b c' -n 4 --time-limit 2h --fresh it -- -x '$(y)'"
    assert answer["command"] == line
    assert not lab.done
    assert page.post("/api/jobs/lab/it/resubmit", json={**changes, "dry_run": False}).status_code == 200
    spec = lab.done[0][1]
    assert (spec.ranks, spec.args, spec.env, spec.resume_from) == (4, ("-x", "$(y)"), {"A": "b c"}, "it")
    for wrong in ({"ranks": "many"}, {"env": [1]}, {"args": 1}, {"on": 3}, {"ranks": {"a": 1}}, {"time_limit": [2]}):
        assert page.post("/api/jobs/lab/it/resubmit", json=wrong).status_code == 400, wrong


@pytest.mark.parametrize("body", [b"[]", b"1", b"{", b"\xff", b'"x"', b"null"])
def test_a_body_that_is_no_object_is_refused(lab: Fake, page: Page, body: bytes) -> None:
    assert page.post("/api/jobs/lab/it/stop", content=body).status_code == 400
    assert not lab.done


def test_machines(lab: Fake, page: Page) -> None:
    page.get("/api/jobs")
    (node,) = page.get("/api/machines?target=lab").json()["nodes"]
    assert (node["name"], node["device_count"], node["jobs"]) == ("node1", 8, {"it": 2})
    assert page.get("/api/machines?target=../etc").status_code == 404


def test_who_has_the_devices_of_a_machine_and_until_when(monkeypatch: pytest.MonkeyPatch, page: Page) -> None:
    limited = replace(JOB, name="it", started=60.0, time_limit=3600.0, user="ann")
    rank = Instance("other-master-0", "node1.lab.example", 0, "RUNNING")
    by_rank = replace(JOB, name="other", instances=(rank,))
    suspended = replace(by_rank, name="third", state="SUSPENDED")
    targets(monkeypatch, Fake("lab", limited, by_rank, suspended))
    eventually(lambda: len(names(page)) == 3, "the jobs are known")
    (node,) = page.get("/api/machines?target=lab").json()["nodes"]
    assert [
        {key: it[key] for key in ("name", "user", "since", "until", "count", "ranks")} for it in node["holders"]
    ] == [
        {"name": "it", "user": "ann", "since": show_time(60.0), "until": show_time(3660.0), "count": 2, "ranks": 0},
        {"name": "other", "user": None, "since": show_time(101.0), "until": None, "count": 0, "ranks": 1},
    ]


def test_a_machine_that_answers_no_more_is_shown(lab: Fake, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> Any:
        return page.get("/api/machines?target=lab")

    known = Node("node1", (), {}, 8.0, 1.0, 100, 50, 0, 0, device_count=8)
    silent = replace(known, state=SILENT, cores=0.0, device_count=0)
    monkeypatch.setattr(lab, "nodes", lambda _: [known])
    page.get("/api/jobs")
    assert ask().json()["nodes"][0]["silent"] is None
    monkeypatch.setattr(lab, "nodes", lambda _: [silent, replace(silent, name="new")])
    one, new = ask().json()["nodes"]
    assert (one["state"], one["device_count"], one["measured"]) == (SILENT, 8, False)
    assert one["silent"]["since"] and new["silent"]["since"] is None and new["silent"]["asked"]

    def fails(_: Any) -> list[Node]:
        raise UserError("lab does not answer")

    monkeypatch.setattr(lab, "nodes", fails)
    answer = ask().json()
    assert answer["warnings"] == ["lab does not answer"] and len(answer["nodes"]) == 2


def test_a_machine_that_has_never_answered_has_a_row(lab: Fake, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> list[Node]:
        raise UserError("cannot reach node1")

    silent = Node("node1", (), {}, 0.0, 0.0, 0, 0, 0, 0, state=SILENT, measured=False)
    monkeypatch.setattr(lab, "nodes", fails)
    page.get("/api/jobs")
    assert page.get("/api/machines?target=lab").status_code == 400  # nothing is known of it
    monkeypatch.setattr(lab, "silent_nodes", lambda: [silent], raising=False)
    for _ in range(2):
        answer = page.get("/api/machines?target=lab").json()
        assert answer["warnings"] == ["cannot reach node1"]
        assert [(it["name"], it["state"], it["silent"]["since"]) for it in answer["nodes"]] == [("node1", SILENT, None)]


def test_one_machine_has_one_key_on_all_targets(lab: Fake, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node("node1", (), {}, 8.0, 1.0, 100, 50, 0, 0)
    found = (
        replace(node, machine=machine_id()), replace(node, name="127.0.0.1"),
        replace(node, name="localhost", partitions=("cpu",)),  # a node of a cluster elsewhere is called so, too
        replace(node, name="a", machine="m"), replace(node, name="b", machine="m"),
    )  # fmt: skip
    monkeypatch.setattr(lab, "nodes", lambda _: found)
    page.get("/api/jobs")
    keys = [it["key"] for it in page.get("/api/machines?target=lab").json()["nodes"]]
    assert keys == ["here", "here", "lab/localhost", "m", "m"]


def test_machines_have_curves_of_what_the_page_has_seen(lab: Fake, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = {"index": 0, "uuid": "", "name": "", "use": 50.0}
    node = Node("node1", (), {}, 8.0, 2.0, 100, 50, 0, 0, gpus=(gpu,))
    unmeasured = replace(node, name="node2", measured=False, gpus=())
    monkeypatch.setattr(lab, "nodes", lambda _: [node, unmeasured])
    page.get("/api/jobs")
    assert "curves" not in page.get("/api/machines?target=lab").json()
    curves = page.get("/api/machines?target=lab&curves=1").json()["curves"]
    assert [*curves] == ["node1"]
    assert {name: (len(it), set(it)) for name, it in curves["node1"].items()} == {
        "cpu": (POINTS, {None, 0.25}), "memory": (POINTS, {None, 0.5}), "gpu": (POINTS, {None, 0.5})
    }  # fmt: skip
    assert not page.get("/api/machines?target=lab&shown=node2&curves=1").json()["curves"]


def test_machines_have_curves_of_what_jobs_have_recorded() -> None:
    def line(end: float, load: float, cores: float = 8.0) -> Any:
        use = {"cores": cores, "load": load, "memory": 100, "memory_used": 50}
        return {"time": 6000.0 + end, "seconds": 10.0, "machine": use}

    nodes = [Node("node1", (), {}, 8.0, 1.0, 100, 50, 0, 0), Node("node2", (), {}, 8.0, 1.0, 100, 50, 0, 0)]
    recorded: list[Any] = [
        {"host": "node1", "telemetry": [line(-3590.0, 8.0), line(-595.0, 2.0), line(-30.0, 4.0), line(0.0, 8.0)]},
        {"host": "node2", "telemetry": [line(0.0, 2.0, cores=2.0)]},  # it saw a part of the machine
        {"host": "other", "telemetry": [line(0.0, 2.0)]},
    ]
    shown = of_histories(recorded, nodes)
    assert [*shown] == ["node1"]
    cpu = shown["node1"].curves(6059.0)["cpu"]
    # a minute that two lines share has their mean; what is older than an hour is gone
    assert (len(cpu), cpu[-12:]) == (POINTS, [0.25, 0.25, *(None,) * 8, 0.75, None])
    assert set(cpu[:-12]) == {None}
    own = Use()
    own.add(99, {"cpu": 0.1}, 1.0)
    own.fill(shown["node1"])
    assert own.curves(6059.0)["cpu"][-2] == 0.1


def test_the_description_is_of_all_operations(lab: Fake, page: Page, new_page: Callable[..., Page]) -> None:
    description = page.get("/api/openapi.json").json()
    assert description["openapi"].startswith("3.")
    described = {(path, method.upper()) for path, those in description["paths"].items() for method in those}
    assert described == {(it.path, it.method) for it in OPERATIONS}
    for it in OPERATIONS:  # nothing answers without a session
        if it.answers != "session":
            path = it.path.format(target="lab", name="it")
            assert new_page().request(it.method, path).status_code == 401, path
