"""`paceline web`: the page with all jobs, live."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import shutil
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import click

from paceline.cli.flags.option import Option, SectionedCommand, Whole
from paceline.cli.terminal.write import say
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

_PORT = 7345
_OPENERS = ("xdg-open", "open", "wslview", "sensible-browser")


def _web(*, port: int, host: str, tls_cert: str | None, tls_key: str | None, read_only: bool, no_browser: bool) -> None:
    """Show all jobs of all targets on a page, live, until Ctrl-C.

    The page opens in your browser; its address has a token, with which whoever has it may do what you may. It needs no
    internet. `paceline report` makes a file of a job instead.
    """
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise UserError(f"{missing[0]} is not installed; in the clone of paceline, pip install -e '.[web]' installs it")
    if (tls_cert is None) is not (tls_key is None):
        raise UserError("--tls-cert and --tls-key belong together; give both")
    from paceline.web.server import Page, Tls

    tls = Tls(tls_cert, tls_key) if tls_cert is not None and tls_key is not None else None
    page = Page(host, port, tls=tls, read_only=read_only)
    if not _is_loopback(host) and tls is None:
        say(
            f"--host {host} without --tls-cert and --tls-key: whoever can read the network between the browser and "
            "this machine gets the token, and may run programs as you"
        )
    click.echo(page.url)
    say("open this address in a browser; Ctrl-C ends the server")
    sys.stdout.flush()
    with contextlib.nullcontext() if no_browser else _opened(page.url), contextlib.suppress(KeyboardInterrupt):
        page.serve()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def _opened(url: str) -> Iterator[None]:
    """Open an address in the user's browser, if there is one here.

    Other users see the arguments of processes, so these have a file with the address, and not the address.
    """
    has_screen = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    opener = os.environ.get("BROWSER") or next(filter(None, map(shutil.which, _OPENERS)), None)
    if opener is None or not (has_screen or os.environ.get("BROWSER")):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="paceline-web-") as folder:  # mode 0700
        path = os.path.join(folder, "open.html")
        with open(path, "w", encoding="utf-8") as file:
            file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}"><a href="{url}">paceline</a>')
        with contextlib.suppress(OSError):
            none = subprocess.DEVNULL
            subprocess.Popen([opener, path], stdin=none, stdout=none, stderr=none, start_new_session=True)
        yield


web = SectionedCommand(
    "web",
    callback=_web,
    params=[
        Option(
            ["--port"],
            type=Whole(0, 65535),
            metavar="N",
            default=_PORT,
            help=f"Port of the page; 0: any free one.  [default: {_PORT}]",
        ),
        Option(
            ["--host"],
            metavar="ADDRESS",
            default="127.0.0.1",
            help="Where to listen; beyond this machine with --tls-cert.  [default: 127.0.0.1]",
        ),
        Option(["--tls-cert"], metavar="FILE", help="Certificate of that address, in PEM format."),
        Option(["--tls-key"], metavar="FILE", help="The key of the certificate."),
        Option(["--read-only"], is_flag=True, help="Show jobs, and let nobody change them from the page."),
        Option(["--no-browser"], is_flag=True, help="Only print the address."),
    ],
)
