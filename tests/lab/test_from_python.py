"""`paceline.jobs` with hosts that it names."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .lab import Client


def test_jobs_go_to_hosts_that_are_named_and_on_from_this_machine(client: Client) -> None:
    script = client.script("""
        from paceline import jobs

        def where():
            import os, socket
            return socket.gethostname(), int(os.environ["RANK"])

        job = jobs.submit(where, hosts="h1:1,h2:2")
        assert job.results(120) == [("h1", 0), ("h2", 1), ("h2", 2)], job.results()
        assert [it.name for it in jobs.list_jobs()] == [job.name]
        here = jobs.submit(where, nproc=2)
        here.result()
        there = jobs.resubmit(here.name, on="lab", nproc=1)
        assert there.results(120) == [("h1", 0)]
        assert {it.backend for it in jobs.list_jobs()} == {"local", "h1:1,h2:2", "lab"}, jobs.list_jobs()
        for it in jobs.list_jobs():
            jobs.delete(it.name)
        assert jobs.list_jobs() == []
        print("done")
    """)
    out, err = client.start(python=(sys.executable, script)).communicate()
    assert out == "done\n", err
