"""Who may use the page: the checks that every request passes before anything else looks at it.

The address that is opened has a random token behind `#`, which browsers do not send. The page exchanges it for a
cookie (HttpOnly, SameSite=Strict) and a key, which it keeps in the storage of its origin and sends as a header. Cookies
do not know ports: another server of this machine may be sent the cookie, but never the key; and a page of another
origin cannot send the header.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import socket
import time
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING

from paceline.job.errors import UserError
from paceline.job.paths import jobs_folder, make_private

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

KEY_HEADER = "x-paceline-key"
SESSION = "/api/session"  # where the token is exchanged
SIGNED_IN = "paceline.signed_in"  # in the scope of a request, if so
_LASTS = 14 * 86400  # seconds for which a session is valid
_MOST_BODY = 1 << 20
_MOST_TOKEN = 4096  # bytes of a body, from who has not signed in
_BODY_SECONDS = 10.0
_HOST = re.compile(r"(?:\[([^]]*)\]|([^:\[\]]*))(?::[0-9]*)?")

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Sessions:
    """Makes and checks sessions; they outlive the server, which signs them with a secret in the folder of jobs."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        # of this process, for the address that is opened, and for programs as `Authorization: Bearer TOKEN`
        self.token = secrets.token_urlsafe(32)
        self.cookie = f"paceline-{hashlib.sha256(b'name' + secret).hexdigest()[:12]}"  # the name of the cookie

    def new(self) -> tuple[str, str]:
        """The cookie of a new session, and its key."""
        text = f"{int(time.time()) + _LASTS}.{secrets.token_urlsafe(16)}"
        value = f"{text}.{self._signed('cookie', text)}"
        return value, self._signed("key", value)

    def accepts(self, cookie: str, key: str) -> bool:
        """Whether these are a session's, and it still lasts."""
        text, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._signed("cookie", text).encode()):
            return False
        is_valid = hmac.compare_digest(key.encode(), self._signed("key", cookie).encode())
        return is_valid and int(text.partition(".")[0]) > time.time()

    def is_token(self, text: str) -> bool:
        """Whether this is the token."""
        return hmac.compare_digest(text.encode(), self.token.encode())

    def _signed(self, use: str, text: str) -> str:
        digest = hmac.digest(self._secret, f"{use} {text}".encode(), "sha256")
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def secret() -> bytes:
    """The secret of this user; whoever deletes its file ends all sessions."""
    path: Path = jobs_folder().parent / "paceline-web.key"
    make_private(path.parent)
    try:
        new = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(32))
            os.link(new, path)  # of two servers that start at once, one makes it
        except FileExistsError:
            pass
        finally:
            new.unlink(missing_ok=True)
        found = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot use {path}: {error.strerror}; check its permissions") from None
    if len(found) < 32:
        raise UserError(f"{path} is damaged; delete it, and start paceline web again")
    return found


def names_of_this_machine() -> set[str]:
    """The names by which a browser may call it."""
    return {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}


class Guard:
    """Refuses requests that the page did not make, and adds the headers that restrict the page itself."""

    def __init__(self, app: ASGIApp, sessions: Sessions, names: Collection[str], *, read_only: bool) -> None:
        self._app, self._sessions, self._names, self._read_only = app, sessions, names, read_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand on, one request."""
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name.lower() for name, _ in message["headers"]}
                more = {**_HEADERS, **({"Cache-Control": "no-store"} if b"cache-control" not in own else {})}
                message["headers"] = [
                    *message["headers"],
                    *((name.lower().encode(), value.encode()) for name, value in more.items()),
                ]
            await send(message)

        most = _MOST_TOKEN if scope["path"] == SESSION else _MOST_BODY
        status, why = self._refusal(scope, headers)
        length = headers.get("content-length", "0")
        if not status and length.isdecimal() and int(length[:20]) > most:
            status, why = 413, f"the request is larger than {most} bytes"
        body = b""
        if not status and scope["method"] not in ("GET", "HEAD"):
            try:
                body = await asyncio.wait_for(_body(receive, most), _BODY_SECONDS)
            except (asyncio.TimeoutError, ValueError) as error:
                status, why = (408, "the request took too long") if not str(error) else (413, str(error))
        if status:
            await _answer(guarded, status, {"error": why})
            return
        is_read = False

        async def replayed() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replayed, guarded)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str]:
        """The status and the reason with which a request is refused; 0 if it is not."""
        host, method, path = headers.get("host", ""), scope["method"], scope["path"]
        if not self._is_known(host):
            return 421, f"{host[:80]} is not a name of this server; add --host NAME to paceline web"
        if "origin" in headers and headers["origin"].partition("://")[2] != host:
            return 403, "the request comes from a page of another site"
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") and path.startswith("/api/"):
            return 403, "the request comes from a page of another site"
        if not path.startswith("/api/"):
            return (0, "") if method in ("GET", "HEAD") else (405, "only GET")
        if path == SESSION:
            return 0, ""
        if not self._is_signed_in(headers):
            return 401, "open the address that paceline web has printed"
        scope[SIGNED_IN] = True
        if self._read_only and method not in ("GET", "HEAD"):
            return 403, "this server was started with --read-only"
        return 0, ""

    def _is_known(self, host: str) -> bool:
        """Whether a page of this server is asked for. An address is: only names can be bound to another address."""
        found = _HOST.fullmatch(host.lower())
        if found is None:
            return False
        name = found[1] or found[2]
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_signed_in(self, headers: dict[str, str]) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._sessions.is_token(token):
            return True
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self._sessions.cookie)
        except CookieError:
            return False
        return found is not None and self._sessions.accepts(found.value, headers.get(KEY_HEADER, ""))


async def _body(receive: Receive, most: int) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ValueError("the connection has ended")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise ValueError(f"the request is larger than {most} bytes")
        if not message.get("more_body"):
            return b"".join(parts)


async def _answer(send: Send, status: int, data: Mapping[str, object]) -> None:
    body = json.dumps(data).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
