"""What web.md has its readers type: the page is started, and asked as programs ask it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

from tests.conftest import GENEROUS, free_port
from tests.docs.pages import DOCS, blocks
from tests.docs.test_blocks import commands
from tests.needs import need

if TYPE_CHECKING:
    from tests.conftest import Paceline

INSTALL, START, ASK = (line for block in blocks(DOCS / "web.md")[:2] for line in commands(block))


def test_the_page_is_started_and_asked(paceline: Paceline) -> None:
    need("" if shutil.which("curl") else "needs curl (Debian package curl)")
    assert INSTALL == "pip install -e '.[web]'"
    port = str(free_port())
    server = paceline.start(*shlex.split(START)[1:], "--no-browser", "--port", port)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    ask = ASK.replace("7345", port)
    environment = {**os.environ, "TOKEN": url.rpartition("#")[2].rpartition("=")[2]}
    done = subprocess.run(
        ["bash", "-c", ask], env=environment, capture_output=True, text=True, timeout=GENEROUS, check=False
    )
    server.send_signal(signal.SIGINT)
    server.communicate(timeout=GENEROUS)
    assert "jobs" in json.loads(done.stdout), f"{url}: {done.stdout}{done.stderr}"
