"""A command line within this process, for what starts no job: refusals, dry runs."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from typing import TYPE_CHECKING
from unittest import mock

from paceline.cli.flags import everywhere, where
from paceline.cli.main import main

if TYPE_CHECKING:
    from tests.conftest import Paceline


def typed(paceline: Paceline, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a command line of paceline in its folder, with its variables, to its end."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    for cache in (everywhere._loaded, where._first_found):
        cache.cache_clear()
    before = os.getcwd()
    os.chdir(paceline.folder)
    try:
        with (
            mock.patch.dict(os.environ, paceline.env, clear=True),
            mock.patch.object(sys, "argv", ["paceline", *args]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            main()
    except SystemExit as ended:
        code = ended.code
    finally:
        os.chdir(before)
    assert isinstance(code, int)
    texts = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(["paceline", *args], code, *texts)


def refusal(paceline: Paceline, *args: str) -> str:
    """The line with which a command line is refused, without `paceline: `."""
    done = typed(paceline, *args)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("paceline: ")
    return done.stderr.removeprefix("paceline: ").removesuffix("\n")
