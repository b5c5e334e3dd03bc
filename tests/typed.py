"""A command line within this process, for what starts no job: refusals, dry runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING
from unittest import mock

from paceline.backends import everywhere
from paceline.cli.flags import where
from paceline.cli.main import run

if TYPE_CHECKING:
    from tests.conftest import Paceline


def typed(paceline: Paceline, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a command line of paceline in its folder, with its variables, to its end."""
    for cache in (everywhere._loaded, everywhere._on_hosts, where._first_found):
        cache.cache_clear()
    before = os.getcwd()
    os.chdir(paceline.folder)
    try:
        with (
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
            mock.patch.dict(os.environ, paceline.env, clear=True),
            mock.patch.object(sys, "argv", ["paceline", *args]),
        ):
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    code: object = run()
                except SystemExit as ended:
                    code = ended.code
            texts = []
            for stream in (out, err):
                stream.seek(0)
                texts.append(stream.read())
    finally:
        os.chdir(before)
    assert isinstance(code, int)
    return subprocess.CompletedProcess(["paceline", *args], code, *texts)


def refusal(paceline: Paceline, *args: str) -> str:
    """The line with which a command line is refused, without `paceline: `."""
    done = typed(paceline, *args)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("paceline: ")
    return done.stderr.removeprefix("paceline: ").removesuffix("\n")
