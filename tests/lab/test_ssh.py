"""Jobs on other machines: `--on` a target whose hosts ssh reaches, which have Python and nothing of ours."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.conftest import eventually

if TYPE_CHECKING:
    from .lab import Client

FOREVER = """
    import os, threading
    print("here", os.environ["RANK"], flush=True)
    threading.Event().wait()
"""


def get(client: Client, name: str) -> dict[str, Any]:
    done = client("get", "--on", "lab", name, "-o", "json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def submit(client: Client, *args: str) -> str:
    done = client("submit", "--on", "lab", *args)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_job_outlives_its_client_and_is_looked_at_over_ssh(client: Client) -> None:
    script = client.script("""
        import os, socket, sys
        import paceline
        print("hello from", socket.gethostname(), os.environ["RANK"], paceline.__file__)
    """)
    name = submit(client, "-n", "2", "--name", "first", script)
    assert client("wait", "--on", "lab", name).returncode == 0
    job = get(client, name)
    assert (job["state"], job["backend"], job["exit_code"]) == ("SUCCEEDED", "lab", 0)
    assert [rank["node"] for rank in job["instances"]] == ["h1", "h1"]
    logs = client("logs", "--on", "lab", name, "--all").stdout
    assert "[rank 0] hello from h1 0" in logs
    assert "[rank 1] hello from h1 1" in logs
    assert ".pyz/paceline/__init__.py" in logs
