"""What a rank does before it ends."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")

from paceline.train.group.join import settle


def test_python_does_not_finalize_while_a_thread_of_gloo_is_at_work() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)  # without the GIL
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    settle(60.0)
    assert ended.is_set()
    thread.join()
