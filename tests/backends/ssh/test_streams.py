"""Several hosts that answer at once, and what is said to them."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, cast

from paceline.backends.remote.bootstrap import BEGINS
from paceline.backends.remote.connection import Host
from paceline.backends.remote.engine import run
from paceline.backends.ssh.streams import Streams

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

# It notes what it is to run and what it is asked. A part that is held breaks; it ends when the client is back.
BREAKS = f"""#!/bin/sh
for last; do :; done
read -r program; read -r order; read -r request
printf '%s\\n' "$last" "$request" >> "$ASKED"
printf '%s\\n' {BEGINS} '{{"need": false}}'
case $request in
*rejoin*) printf '%s\\n' '{{"rejoined": 0}}' '{{"end": true}}'; cat > /dev/null;;
*) printf '%s\\n' '{{"names": []}}'; read -r hold; exit 255;;
esac
"""


def test_a_word_to_a_host_without_a_connection_is_heard_by_nobody(caplog: pytest.LogCaptureFixture) -> None:
    streams = Streams([], lambda _: {"do": "wait", "names": []})
    streams.say(cast("Host", "h1"), "signal 2")
    run(asyncio.sleep(0))
    assert caplog.text == "", "asyncio tells of errors there"
    assert streams.take() is None
    streams.close()


def test_a_part_in_a_container_is_found_again_outside_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that holds it is in the container; another one knows nothing of it, and would see it break again."""
    (tmp_path / "ssh").write_text(BREAKS)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    host = Host("h1", 1, None, None, "python3", "/root", is_kept=False, inside=("enter", "image"))
    streams = Streams([host], lambda _: {"do": "wait", "names": []})
    assert streams.take() == (host, {"names": []})
    streams.hold(host, "it", "one")
    said = [answer for _, answer in iter(streams.take, None)]
    streams.close()
    assert [list(answer) for answer in said] == [["event", "details"]] * 2, "it broke, and is connected again"
    first, asked, second, rejoin = (tmp_path / "asked").read_text().splitlines()
    assert ("wait" in asked, "rejoin" in rejoin) == (True, True)
    assert ("enter image" in first, "enter image" in second) == (True, False)
