"""The server of the page, until Ctrl-C."""

from __future__ import annotations

import gzip
import hashlib
import importlib.resources
import resource
import socket
import ssl
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.backends.watch import Watch
from paceline.job.errors import UserError

from .api import Api, refused
from .safety import SIGNED_IN, Guard, Sessions, names_of_this_machine, secret

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from importlib.abc import Traversable

    from starlette.requests import Request
    from starlette.types import ASGIApp

_TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml",
          "json": "application/json"}  # fmt: skip
_MOST_WAITING = 128  # connections, for their clients to send a request
_MOST_CONNECTIONS = 8 * _MOST_WAITING  # one that is closed for a newer one counts some turns of the loop longer
_MOST_OPEN = 256  # connections
_PATIENCE = 10.0  # seconds in which a client has sent a request, or has taken an answer
_BACKLOG = 128


class Tls(NamedTuple):
    """Files in PEM format."""

    certificate: str
    key: str


def application(
    watch: Watch, sessions: Sessions, names: Collection[str], *, read_only: bool = False, secure: bool = False
) -> ASGIApp:
    """The page and its API."""
    api = Api(watch, sessions, read_only=read_only, secure=secure)
    static = [Route(path, _static(file, path.rpartition(".")[2])) for path, file in _files()]
    app = Starlette(routes=[*api.routes(), *static], exception_handlers={HTTPException: refused})
    return Guard(app, sessions, names, read_only=read_only)


def _files() -> list[tuple[str, Traversable]]:
    """The paths of the page, and their files; there are no others."""
    folder = importlib.resources.files("paceline.web") / "static"
    found = [(f"/{file.name}", file) for file in folder.iterdir() if file.is_file()]
    found += [(f"/vendor/{file.name}", file) for file in (folder / "vendor").iterdir()]
    known = [(path, file) for path, file in found if path.rpartition(".")[2] in _TYPES]
    return [*known, *(("/", file) for path, file in known if path == "/index.html")]


def _static(file: Traversable, kind: str) -> Callable[[Request], Response]:
    """Answers with a file, which is read once."""
    content = file.read_bytes()
    small = gzip.compress(content, mtime=0)
    kind = _TYPES.get(kind, _TYPES["html"])
    headers = {
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:24]}"',
        "Cache-Control": "no-cache",
        "Vary": "Accept-Encoding",
    }

    def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(small, media_type=kind, headers={**headers, "Content-Encoding": "gzip"})
        return Response(content, media_type=kind, headers=headers)

    return answer


class _Impatient(H11Protocol):
    """Closes connections whose client does not send a request, or take an answer, in time; if there are very many, the
    oldest ones too.
    """

    _open: ClassVar[dict[_Impatient, None]] = {}
    _waiting: ClassVar[dict[_Impatient, None]] = {}  # for their clients to send a request, or the rest of one
    _waits: Any = None
    _untaken: Any = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `resume_writing` says that all has been taken
        self._open[self] = None
        if len(self._open) > _most_open():
            strangers = (it for it in self._open if not (it.scope or {}).get(SIGNED_IN))
            next(strangers)._abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering() and self.conn.trailing_data[0]:  # no browser asks for more before it has an answer
            self._abort()
        else:
            self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._untaken = self.loop.call_later(_PATIENCE, self._abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None

    def on_response_complete(self) -> None:
        """See `H11Protocol`: the connection may be used again, which has a limit of its own."""
        super().on_response_complete()
        self._watch(is_begun=False)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)  # it resumes writing
        self._open.pop(self, None)
        self._end_wait()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def _watch(self, *, is_begun: bool = True) -> None:
        if self.transport.is_closing():  # it may wait no more
            return
        if self._is_answering():
            self._end_wait()
            return
        self._waiting.setdefault(self)
        if is_begun and self._waits is None:
            self._waits = self.loop.call_later(_PATIENCE, self.transport.close)
        if len(self._waiting) > _MOST_WAITING:
            next(iter(self._waiting))._abort()

    def _abort(self) -> None:
        self._open.pop(self, None)
        self._end_wait()
        self.transport.abort()

    def _end_wait(self) -> None:
        self._waiting.pop(self, None)
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None


def _most_open() -> int:
    """How many connections may be open: jobs and streams of logs need files, too."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_OPEN if files == resource.RLIM_INFINITY else min(_MOST_OPEN, files // 4)


def listen(host: str, port: int) -> socket.socket:
    """A socket at this address; port 0 is any free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(_BACKLOG)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port, or --host") from None
    return found


class Page:
    """The server, which has its address before it runs.

    Attributes:
        url: to open, with the token.
    """

    def __init__(self, host: str, port: int, *, tls: Tls | None, read_only: bool) -> None:
        """Listen."""
        if tls is not None:
            try:
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(*tls)
            except OSError as error:
                raise UserError(
                    f"--tls-cert {tls.certificate}, --tls-key {tls.key}: {error.strerror or error}; give a certificate "
                    "and its key, in PEM format"
                ) from None
        sessions, self._watch = Sessions(secret()), Watch()
        self._socket = listen(host, port)
        port = self._socket.getsockname()[1]
        shown = socket.gethostname() if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        self.url = f"http{'s' if tls else ''}://{shown}:{port}/#token={sessions.token}"
        app = application(
            self._watch, sessions, {*names_of_this_machine(), host.lower()}, read_only=read_only, secure=tls is not None
        )
        config = uvicorn.Config(
            app,
            http=_Impatient,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
            ssl_certfile=tls.certificate if tls else None,
            ssl_keyfile=tls.key if tls else None,
        )
        self._server = uvicorn.Server(config)
        self._watch.begin()  # the browser takes a moment to start, too

    def serve(self) -> None:
        """Answer until a signal ends the server, or `end`."""
        self._server.run([self._socket])
        self._watch.close()

    def end(self) -> None:
        """End the server; may be called in another thread."""
        self._server.should_exit = True
