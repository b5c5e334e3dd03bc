"""Jobs that are ended at once, and jobs whose node is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .user import User

STUBBORN = """
    import signal, threading
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("here", flush=True)
    threading.Event().wait()
"""


def test_a_job_that_does_not_end_by_itself_is_ended_at_once(user: User) -> None:
    user.submit(STUBBORN, name="it", nodes=2, devices=2, grace=300)
    job = user.until("it", lambda job: user.lines("it").count("here") == 2)
    assert job.devices == ("0:0", "0:1", "1:0", "1:1")
    assert sum(len(node.allocated) for node in user.backend().nodes(print)) == 4
    assert user.backend().stop(["it"], now=True) == {}
    assert user.ended("it").state == "STOPPED"
    assert user.backend().stop(["it"]) == {}
    assert user.backend().delete(["it"]) == []
    user.nothing_left("it")
    assert [node.state for node in user.backend().nodes(print)] == ["ready", "ready"]
    user.cluster.cordon("node-1")
    assert [node.state for node in user.backend().nodes(print)] == ["cordoned", "ready"]


def test_a_node_that_is_lost_ends_a_job_of_fixed_size(user: User) -> None:
    user.submit("import threading; print('here', flush=True); threading.Event().wait()", name="it", nodes=2,
                placement="spread", silence=3)  # fmt: skip
    user.until("it", lambda job: user.lines("it").count("here") == 2)
    lost = user.get("it").instances[1].node.partition("/")[0]
    user.cluster.power_off(lost)
    job = user.ended("it")
    assert job.state == "FAILED" and "it-1" in str(job.error), job
    assert "not ready" in {node.name: node.state for node in user.backend().nodes(print)}[lost]
