"""Several hosts that answer at once, and what is said to them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from paceline.backends.remote.engine import run
from paceline.backends.ssh.streams import Streams

if TYPE_CHECKING:
    import pytest

    from paceline.backends.remote.connection import Host


def test_a_word_to_a_host_without_a_connection_is_heard_by_nobody(caplog: pytest.LogCaptureFixture) -> None:
    streams = Streams([], lambda _: {"do": "wait", "names": []})
    streams.say(cast("Host", "h1"), "signal 2")
    run(asyncio.sleep(0))
    assert caplog.text == "", "asyncio tells of errors there"
    assert streams.take() is None
    streams.close()
