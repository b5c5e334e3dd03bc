"""Submits and followers whose server, connection or client goes away; refusals leave nothing."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from fake_kubernetes import errors, images
from tests.conftest import GENEROUS, eventually

from paceline.backends.base import Incomplete, LogQuery
from paceline.backends.kubernetes.api import client
from paceline.backends.kubernetes.api.client import Cluster as Client
from paceline.backends.kubernetes.api.errors import Expired
from paceline.backends.kubernetes.start import holding
from paceline.job.errors import UserError
from paceline.job.spec import JobSpec

from .user import Silence, User

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fake_kubernetes.cluster import Cluster
    from tests.conftest import Paceline

COUNT = """
    import os, time
    for number in range(40):
        print("line", number, flush=True)
        time.sleep(0.05)
"""
PARTS = [("POST", "/jobs"), ("POST", "/services"), ("POST", "/configmaps"), ("POST", "/secrets"), ("PATCH", "/jobs/")]


@pytest.fixture
def user(user: User) -> User:
    """A user whose cluster has the image `quick`, in which a pod has all that it needs and ends at once."""
    user.cluster.images["quick"] = replace(images.usual(), path=(), files={"/usr/local/sbin/python3": "#!/bin/sh\n"})
    return user


class Killed(BaseException):
    """The client is killed: it does nothing more."""


@pytest.mark.parametrize(("kind", "queue"), [("job", None), ("job", "fast"), ("pytorchjob", None)])
def test_a_client_that_is_killed_leaves_nothing(
    user: User, monkeypatch: pytest.MonkeyPatch, kind: str, queue: str | None
) -> None:
    user.cluster.install("training-operator")
    monkeypatch.setattr(holding, "LEFTOVER", 1)
    send = Client.send
    for number in itertools.count():
        sent = 0

        def count(self: Client, *args: Any, number: int = number) -> Any:
            nonlocal sent
            if sent >= number:
                raise Killed
            sent += 1
            return send(self, *args)

        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(Client, "send", count)
            user.submit("pass", name=f"killed{number:02}", nodes=2, kind=kind, queue=queue, image="quick")
            break
        assert kind != "job" or user.cluster.all("Pod") == []
    assert number > 5, "a Job, a Service, ConfigMaps, a Secret, and what confirms them"
    there = [f"killed{number:02}"]
    if kind != "job" or queue:  # the last request removes the Job that has owned it, which also ends by itself
        number -= 1
        there.append(f"killed{number:02}")
    for name in there:
        if queue:
            assert user.cluster.get("Job", name)["status"].get("startTime") is None  # type: ignore[index]
            user.cluster.patch("Job", name, {"spec": {"suspend": False}})  # as Kueue does
        user.ended(name)
    user.deadlines_pass()
    eventually(lambda: len(user.cluster.all("Job")) == len(there) * (kind == "job"), "what has owned it has ended")
    for before in range(number):
        user.nothing_left(f"killed{before:02}")


def test_a_list_that_changes_between_its_pages_has_each_object_once(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        user.cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"s{number}"}})

    def expire(request: Any) -> None:
        if "continue=" in request.path_qs:
            user.cluster.server.hook = None
            user.cluster.server.expire_watches()

    user.cluster.server.hook = expire
    monkeypatch.setattr(client, "PAGE", 2)
    connection = user.backend()._cluster
    pages = list(connection.pages(connection.path("v1", "secrets")))
    assert user.cluster.server.hook is None
    assert [it["metadata"]["name"] for page in pages for it in page["items"]] == [f"s{number}" for number in range(5)]
    (version,) = {page["metadata"]["resourceVersion"] for page in pages}
    with pytest.raises(Expired):
        list(connection.watch(connection.path("v1", "secrets"), version, 1))


@pytest.mark.parametrize("after", [False, True])
def test_the_server_restarts_during_submit(user: User, after: bool) -> None:
    for number, (method, part) in enumerate(PARTS):
        user.cluster.restart_at(method, part, after)
        user.submit("pass", name=f"it{number}", nodes=2, image="quick")
        user.cluster.wait_for_server()
    user.cluster.throttle(3)
    user.cluster.conflict()
    user.submit("pass", name="busy", image="quick")
    for name in [*(f"it{number}" for number in range(len(PARTS))), "busy"]:
        assert user.ended(name).state == "SUCCEEDED"
        assert name == "busy" or user.cluster.get("Service", name)
    user.cluster.restart_at("DELETE", "/jobs/", after)
    assert user.backend().delete(["it0"]) == []
    user.cluster.wait_for_server()
    user.nothing_left("it0")


def test_who_follows_a_job_goes_on_asking_while_the_server_is_away(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_LOOK_TIMEOUT", "0.2s")
    user.submit("import threading; print('here', flush=True); threading.Event().wait()", name="it", grace="1s")
    user.wrote("it", "here")
    said, ends = Silence(), []
    waiting, following, looking = user.backend(), user.backend(), user.backend()
    for there in (waiting, following):
        there.ask_on(said.say)
    lines: list[bytes] = []

    def follow() -> None:
        lines.extend(it.text for it in following.logs("it", LogQuery((0,), follow=True)))

    threads = [threading.Thread(target=lambda: ends.append(waiting.wait(["it"]))), threading.Thread(target=follow)]
    for thread in threads:
        thread.start()
    eventually(lambda: lines, "it is followed")
    user.cluster.stop_server()
    eventually(lambda: len(said.said) == 2, "both say that it does not answer")
    assert all("does not answer" in line and line.endswith("; paceline goes on asking") for line in said.said)
    with pytest.raises(UserError, match="does not answer"):
        looking.describe(["it"])
    user.cluster.start_server()
    user.backend().stop(["it"])
    for thread in threads:
        thread.join(120)
    assert ends == [True] and lines == [b"here\n"] and len(said.said) == 2


def test_a_follower_misses_no_line(user: User) -> None:
    user.submit(COUNT, name="it")
    lines: list[str] = []
    thread = threading.Thread(target=lambda: lines.extend(user.lines("it", (0,), follow=True)))
    thread.start()
    user.wrote("it", "line 0")
    (pod,) = user.cluster.all("Pod")
    name, nodes = pod["metadata"]["name"], user.cluster.nodes.values()
    for _ in range(2):
        user.cluster.restart_server()
        user.cluster.expire_watches()
        # What is written between a break and the next connection would be gone with the old file.
        # The container may end first.
        eventually(lambda: not thread.is_alive() or any(node.streams for node in nodes), "it is followed")
        user.cluster.rotate_log(name)
    thread.join(120)
    assert lines == [f"line {number}" for number in range(40)]


SAYS = """
    import os, time
    rank = os.environ["RANK"]
    print("first", rank, flush=True)
    while not os.path.exists("GO"):
        time.sleep(0.05)
    print("second", rank, flush=True)
"""


@pytest.mark.parametrize("late", [3600.0, -3600.0])
def test_a_follower_compares_no_clocks(user: User, late: float) -> None:
    """Neither when it begins after the last line of each node, nor for what comes then."""
    list(user.cluster.nodes.values())[1].late = late
    shared = user.cluster.claim("shared")
    user.submit(SAYS.replace("GO", "/shared/go"), name="it", nodes=2, placement="spread", data=["shared:/shared"])
    for rank in (0, 1):
        user.wrote("it", f"first {rank}")
    lines: list[str] = []

    def follow() -> None:
        for line in user.backend().logs("it", LogQuery(None, follow=True, tail=9)):
            lines.append(line.text.decode().rstrip("\n"))

    thread = threading.Thread(target=follow)
    thread.start()
    eventually(lambda: len(lines) == 2, "what each node has written")
    (shared / "go").touch()
    thread.join(120)
    assert sorted(lines) == ["first 0", "first 1", "second 0", "second 1"]
    assert sorted(user.lines("it", None, tail=1)) == ["second 0", "second 1"]


def test_the_logs_of_a_node_that_answers_are_shown_when_another_is_silent(user: User) -> None:
    script = "import threading; print('here', flush=True); threading.Event().wait()"
    user.submit(script, name="it", nodes=2, silence="300s", placement="spread")
    user.wrote("it", "here", 2)
    node = user.get("it").instances[1].node.partition("/")[0]
    user.cluster.cut(node)
    assert user.lines("it", (0,)) == ["here"]
    found = user.backend().logs("it", LogQuery(None))
    assert next(found).text == b"here\n"
    with pytest.raises(
        Incomplete, match=f"^the logs of node {node} cannot be read: .*; lines of its ranks may be missing"
    ):
        next(found)
    assert any(it["event"] == "silent" and it["host"] == node for it in user.backend().events("it"))

    def refuse(request: Any) -> None:
        if request.path.endswith("/log"):
            user.cluster.server.hook = None
            raise errors.too_many()

    user.cluster.server.hook = refuse
    assert user.lines("it", (0,)) == ["here"]
    assert user.cluster.server.hook is None


def test_what_is_refused_leaves_nothing(user: User) -> None:
    user.submit("pass", name="there")
    with pytest.raises(UserError, match=r"a job named there is in this namespace; choose another --name"):
        user.submit("pass", name="there")
    with pytest.raises(UserError, match=r'unknown field "spec.template.spec.colour".*; correct --pod-template'):
        user.submit("pass", name="field", pod_template={"spec": {"colour": "red"}})
    with pytest.raises(UserError, match=r"the API server refuses it: .*spec.template.spec"):
        user.submit("pass", name="value", pod_template={"spec": {"restartPolicy": "Always"}})
    user.cluster.deny("create", "configmaps")
    with pytest.raises(
        UserError, match=r"cannot create resource \"configmaps\".*; paceline check --on kubernetes shows"
    ):
        user.submit("pass", name="denied")
    there = user.backend()
    prepared = there.prepare(JobSpec.validated({"script": "denied.py", "name": "denied"}))
    with pytest.raises(
        UserError, match=r"^you may not create configmaps in namespace default, .*; paceline check --on"
    ):
        prepared.text()
    user.cluster.allow()
    with pytest.raises(UserError, match=r"namespaces \"nowhere\" not found; create it"):
        user.submit("pass", name="nowhere", namespace="nowhere")
    with pytest.raises(UserError, match=r"a job on Kubernetes needs an image"):
        user.backend(image=None).prepare(JobSpec.validated({"command": "true"}))
    for name in ("field", "value", "denied"):
        user.nothing_left(name)


def test_an_empty_list_is_no_answer_of_a_namespace_that_is_missing(user: User) -> None:
    assert user.backend().describe().jobs == []
    for names in (None, ["it"]):
        with pytest.raises(UserError, match=r"namespaces \"nowhere\" not found; create it"):
            user.backend(namespace="nowhere").describe(names)
    user.cluster.deny("get", "namespaces")  # as most users
    assert user.backend(namespace="nowhere").describe().jobs == []


def test_who_waits_for_a_job_that_is_not_there_is_told(user: User) -> None:
    user.submit("pass", name="there", image="quick")
    with pytest.raises(UserError, match=r"^no job other in namespace default$"):
        user.backend().wait(["there", "other"], 1)
    assert user.backend().wait(["there"], 120)


@pytest.mark.parametrize(
    ("verb", "part", "count"),
    [
        ("logs --all it", "/log", 2),
        ("events it", "/pods", 1),
        ("list", "/pods", 1),
        ("check --on lab", "/selfsubjectaccessreviews", 2),
    ],
)
def test_ctrl_c_ends_what_waits_for_a_server_that_is_silent(
    paceline: Paceline, make_cluster: Callable[..., Cluster], verb: str, part: str, count: int
) -> None:
    cluster = make_cluster(operators=["training-operator"])
    paceline.env.update(
        KUBECONFIG=str(cluster.kubeconfig), PACELINE_LOOK_TIMEOUT="1h", PACELINE_ACT_TIMEOUT="1h", TERM="dumb"
    )
    (paceline.folder / "paceline.toml").write_text('[targets.lab]\nbackend = "kubernetes"\nimage = "usual"\n')
    paceline.succeeds("submit", "--on", "lab", "--nnodes", "2", "--name", "it", paceline.script("print('here')"))
    paceline.succeeds("wait", "it")
    cluster.silence(part)
    before = len(cluster.server.requests)
    waiting = paceline.start(*verb.split())
    try:
        eventually(
            lambda: sum(part in it for it in cluster.server.requests[before:]) >= count,
            lambda: f"it asks: {cluster.server.requests[before:]}",
        )
        waiting.send_signal(signal.SIGINT)
        out, err = waiting.communicate(timeout=GENEROUS)
        assert (waiting.returncode, "Traceback" in err) == (130, False), (out, err)
    finally:
        waiting.kill()
        waiting.communicate()


def test_what_the_server_warns_of_is_said(user: User) -> None:
    user.cluster.server.warning = 'would violate PodSecurity "restricted:latest": runAsNonRoot != true'
    there, said = user.backend(), Silence()
    prepared = there.prepare(JobSpec.validated({"command": "true", "name": "it"}))
    advice = "add --run-as UID:GID, or --run-as image for an image with a user"
    line = f"the cluster warns: {user.cluster.server.warning}; {advice}"
    assert prepared.text().startswith(f"# {line}\n")
    there.start(prepared, said)
    assert said.said == [line]


def test_the_role_of_check_names_the_user(
    new_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list"]}]
    new_cluster.user("carl", rules=rules, cluster_rules=rules)
    report = User(new_cluster, tmp_path, monkeypatch, "carl").backend().check(None)  # type: ignore[arg-type]
    assert "  name: carl\n" in report.remedy and "kind: ClusterRole" not in report.remedy


def test_what_a_user_without_permissions_sees(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    user.cluster.user("nobody")
    user.context = "nobody"
    with pytest.raises(UserError, match=r'User "nobody" cannot list resource "jobs" in API group "batch"'):
        user.backend().describe()
    report = user.backend().check(None)  # type: ignore[arg-type]  # it reports no progress
    assert [finding.level for finding in report.findings][:1] == ["error"]
    assert "kind: Role\n" in report.remedy and "kind: ClusterRole\n" in report.remedy
    assert "- jobs\n" in report.remedy and "namespace: default" in report.remedy
    assert "  name: nobody\n" in report.remedy
    nodes = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}]
    pods = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    user.cluster.user("half", rules=pods, cluster_rules=nodes)
    user.context = "half"
    said: list[str] = []
    assert len(user.backend().nodes(said.append)) == 2
    assert said == [
        "you may not list pods outside namespace default; what they have is not counted",
        "the cluster has no metrics-server that answers; CPU and MEMORY are what pods have requested",
    ]
    report = user.backend().check(None)  # type: ignore[arg-type]
    assert any(it.what.startswith("does not let you list pods of all namespaces: ") for it in report.findings)
    user.context = "wrong-token"
    with pytest.raises(UserError, match="does not accept your credentials"):
        user.backend().describe()
    user.context = "admin"
    report = user.backend().check(None)  # type: ignore[arg-type]
    assert (list(report.findings), report.remedy) == ([], "")
    assert dict(report.sections["Nodes"])["node-1"] == "ready; 8 GPUs (NVIDIA-H100-80GB-HBM3), 0 allocated"
    user.cluster.stop_server()
    monkeypatch.setenv("PACELINE_LOOK_TIMEOUT", "1s")
    with pytest.raises(UserError, match=r"the API server of admin at https://.* does not answer"):
        user.backend().describe()
    user.cluster.start_server()
