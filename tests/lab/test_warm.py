"""Processes that are kept warm on hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conftest import eventually

if TYPE_CHECKING:
    from .lab import Client


def test_jobs_start_warm_on_hosts(client: Client) -> None:
    """A job leaves a process on each of its hosts; the next one starts from these, whatever connection it came by."""
    client.script("import os; print(os.environ['PACELINE_RANK'], os.environ.get('SSH_CONNECTION', '')[:5])")
    run = ("run", "-v", "--on", "lab", "--nnodes", "2", "script.py")
    done = client.succeeds(run[0], "--keep-warm", "10m", *run[1:])
    assert "started cold: no process is kept warm" in done.stderr

    def kept() -> list[str]:
        return [it["machine"] for it in client.json("warm", "--on", "lab", "--list")]

    eventually(lambda: len(kept()) == 2, "both hosts keep one")
    done = client.succeeds(*run)
    assert "started on h1 from a process that was kept warm" in done.stderr
    assert "started on h2 from a process that was kept warm" in done.stderr
    done = client("warm", "--on", "lab", "--stop")
    assert (done.returncode, done.stdout.count(" has ended")) == (0, 2)
    assert kept() == []
