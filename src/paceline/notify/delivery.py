"""Sends notices to one receiver: by HTTP, or by the sendmail of this machine."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import shutil
import ssl
import subprocess
import threading
import time
import urllib.request
from collections import deque
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.error import URLError
from urllib.parse import urlsplit

from paceline._version import __version__
from paceline.job.errors import UserError
from paceline.job.text import a_few, counted, printable

from .formats import message, verdict
from .notice import merged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .notice import Notice

_SECONDS = 10.0  # that a receiver has to answer
_MAIL_SECONDS = 60.0
_MOST_ANSWER = 4096  # bytes of an answer that are read
_LONGEST = 160  # characters of it that are said
_SECRET = 8  # characters from which on a part of an address may be a secret
_PER_MINUTE = 20  # requests; DingTalk and WeCom take no more
_LONGEST_PAUSE, _LONGEST_ASKED = 300.0, 3600.0  # seconds between two tries; the same if the receiver asks for it
_MOST_WAITING = 1000  # notices of a receiver
KEPT = 86400.0  # seconds for which a notice is tried
_TEMPORARY = 75  # EX_TEMPFAIL of sendmail


class Outcome(NamedTuple):
    """What has become of a message.

    Attributes:
        problem: why it was not taken; "" if it was.
        is_later: whether to try again.
        after: in how many seconds, if the receiver says so.
    """

    problem: str = ""
    is_later: bool = False
    after: float | None = None


class Way(Protocol):
    """How a receiver is reached."""

    @property
    def where(self) -> str:
        """The host, or the addresses, for messages; no secret is in it."""

    def send(self, notices: Sequence[Notice]) -> Outcome:
        """Send these in one message, once."""


class Webhook:
    """Posts to an address. Redirects are not followed, and certificates are checked."""

    def __init__(self, url: str, kind: str, secret: str = "", seconds: float = _SECONDS) -> None:
        self._url, self._kind, self._secret, self._seconds = url, kind, secret, seconds
        parts = urlsplit(url)
        self.where = printable(parts.hostname or "")
        hidden = {url, secret, parts.query, *parts.path.split("/"), *parts.query.split("&"), *parts.query.split("=")}
        self._hidden = sorted((it for it in hidden if len(it) >= _SECRET), key=len, reverse=True)
        # Without its handlers of errors and redirects: each answer comes back as it is.
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(context=ssl.create_default_context()),
        ):
            self._opener.add_handler(handler)

    def send(self, notices: Sequence[Notice]) -> Outcome:
        """See `Way`."""
        url, body = message(self._kind, self._url, self._secret, notices)
        headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": f"paceline/{__version__}"}
        try:
            request = urllib.request.Request(url, body, headers, method="POST")
            with self._opener.open(request, timeout=self._seconds) as answer:
                status, retry_after = int(answer.status), answer.headers.get("Retry-After")
                content = b""
                with contextlib.suppress(OSError, http.client.HTTPException):  # it has the notices, and has said so
                    content = answer.read(_MOST_ANSWER)
        except (
            OSError,
            http.client.HTTPException,
            ValueError,
        ) as error:  # ValueError: names that cannot be one of a host
            return Outcome(f"{self.where}: {self._shown(self._reason(error))}", is_later=True)
        if 200 <= status < 300:
            problem, is_later = verdict(self._kind, content)
            return Outcome(f"{self.where} {self._shown(problem)}" if problem else "", is_later)
        said = self._shown(content.decode(errors="replace").strip())
        problem = f"{self.where} answers {status}{f': {said}' if said else ''}"
        if 300 <= status < 400:
            problem = f"{self.where} answers {status}, a redirect, which is not followed; give the address it leads to"
        after = float(retry_after) if retry_after and retry_after.isascii() and retry_after.isdecimal() else None
        return Outcome(problem, status == 429 or status >= 500, after)

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, URLError) and isinstance(error.reason, BaseException):
            error = error.reason
        if isinstance(error, TimeoutError):
            return f"no answer within {self._seconds:g} s"
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"its certificate is not to be trusted: {error.verify_message}"
        if isinstance(error, (http.client.RemoteDisconnected, ConnectionResetError)):
            return "it closed the connection without an answer"
        return str(getattr(error, "strerror", None) or getattr(error, "reason", None) or error or type(error).__name__)

    def _shown(self, text: str) -> str:
        """What a stranger has said, without the secrets that may be in it."""
        for secret in self._hidden:
            text = text.replace(secret, "…")
        shown = printable(" ".join(text.split()))
        return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"


class Mail:
    """Hands a mail to the sendmail of this machine, whose settings say who sends it and how."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self.where = a_few(addresses)
        found = shutil.which("sendmail", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/lib")
        if found is None:
            raise UserError("mail needs a program sendmail, as postfix, exim, msmtp and others bring it; install one")
        self._program = found

    def send(self, notices: Sequence[Notice]) -> Outcome:
        """See `Way`."""
        more = f", and {len(notices) - 1} more" if len(notices) > 1 else ""
        mail = EmailMessage()
        mail["To"] = ", ".join(self._addresses)
        mail["Subject"] = notices[0].title + more
        mail["Date"] = formatdate(localtime=True)
        mail["Message-ID"] = make_msgid(domain="paceline.invalid")
        mail["Auto-Submitted"] = "auto-generated"  # RFC 3834: nobody's absence answers it
        mail.set_content(merged(notices))
        try:
            done = subprocess.run(
                [self._program, "-t", "-i"], input=mail.as_bytes(), capture_output=True, timeout=_MAIL_SECONDS,
                check=False, start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Outcome(f"{self._program} has not ended within {_MAIL_SECONDS:g} s", is_later=True)
        except OSError as error:
            return Outcome(f"{self._program} cannot be run: {error.strerror}", is_later=True)
        if not done.returncode:
            return Outcome()
        said = printable((done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1])[:_LONGEST]
        problem = f"{self._program} ends with exit code {done.returncode}{f': {said}' if said else ''}"
        return Outcome(problem, is_later=done.returncode == _TEMPORARY)


class Pace:
    """When the next message may be sent, and how many notices it takes; times are those of a monotonic clock."""

    def __init__(self, first: float = 1.0, chance: Callable[[], float] = random.random) -> None:
        """After the first failure it waits for `first` seconds at most, and twice as long after each more."""
        self._first, self._chance = first, chance
        self._sent: deque[float] = deque(maxlen=_PER_MINUTE)
        self._failures = 0
        self._not_before = 0.0

    def wait(self, now: float) -> float:
        """Seconds until a message may be sent."""
        is_full = len(self._sent) == _PER_MINUTE
        return max(0.0, self._not_before - now, self._sent[0] + 60 - now if is_full else 0.0)

    def size(self, waiting: int, now: float) -> int:
        """How many notices go into the next message: all, if each alone would be too many messages in this minute."""
        recent = sum(now - it < 60 for it in self._sent)
        return 1 if waiting <= _PER_MINUTE - recent else waiting

    def tried(self, now: float, outcome: Outcome) -> None:
        """A message was sent, with this outcome."""
        self._sent.append(now)
        self._failures = self._failures + 1 if outcome.is_later else 0
        if outcome.is_later:
            pause = min(_LONGEST_PAUSE, self._first * 2.0 ** min(self._failures - 1, 20)) * (0.5 + self._chance() / 2)
            self._not_before = now + max(pause, min(outcome.after or 0.0, _LONGEST_ASKED))


class Sender:
    """Sends what waits for a receiver, in a thread of its own."""

    def __init__(
        self,
        name: str,
        way: Way,
        waiting: Sequence[Notice],
        *,
        tell: Callable[[str], object],
        warn: Callable[[str], object],
        changed: Callable[[], object],
        pace: Pace | None = None,
    ) -> None:
        """Keep what waits; `changed` is called when it has become less."""
        self._name, self._way, self._waiting = printable(name), way, list(waiting)
        self._tell, self._warn, self._changed = tell, warn, changed
        self._pace = pace or Pace()
        self._news = threading.Condition()
        self._is_closing = False
        self._said = ""
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"notices for {name}")

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    @property
    def waiting(self) -> list[Notice]:
        """What is not sent yet."""
        with self._news:
            return list(self._waiting)

    def put(self, notices: Sequence[Notice]) -> None:
        """Send these, too."""
        with self._news:
            self._waiting += notices
            lost = len(self._waiting) - _MOST_WAITING
            if lost > 0:
                del self._waiting[:lost]
            self._news.notify()
        if lost > 0:
            self._warn(f"{self._name}: more than {_MOST_WAITING} notices wait; the oldest {lost} are dropped")

    def close(self) -> None:
        """Send what can be sent at once, and nothing more."""
        with self._news:
            self._is_closing = True
            self._news.notify()

    def join(self, seconds: float) -> None:
        """Wait for that."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while notices := self._next():
            outcome = self._way.send(notices)
            self._pace.tried(time.monotonic(), outcome)
            is_old = time.time() - notices[0].time > KEPT
            if not outcome.is_later or is_old:
                with self._news:
                    sent = set(map(id, notices))
                    self._waiting = [it for it in self._waiting if id(it) not in sent]
                self._changed()
            self._report(notices, outcome, is_old=is_old)

    def _next(self) -> list[Notice]:
        """What the next message takes, when it may be sent; nothing if there is to be none."""
        with self._news:
            while True:
                pause = self._pace.wait(time.monotonic())
                if self._waiting and not pause:
                    return self._waiting[: self._pace.size(len(self._waiting), time.monotonic())]
                if self._is_closing:
                    return []
                self._news.wait(pause if self._waiting else None)

    def _report(self, notices: Sequence[Notice], outcome: Outcome, *, is_old: bool) -> None:
        """Say it, and nothing twice."""
        title = notices[0].title.removeprefix("paceline: ")
        more = f" and {len(notices) - 1} more" if len(notices) > 1 else ""
        if not outcome.problem:
            self._said = ""
            self._tell(f"{self._name}: {title}{more}")
            return
        then = "it is tried again"
        if not outcome.is_later or is_old:
            then = f"{counted(len(notices), 'notice')} could not be delivered"
        said = f"{self._name}: {outcome.problem}; {then}"
        if said != self._said:
            self._said = said
            self._warn(said)


def check_address(url: str) -> str:
    """What is wrong with an address, without naming it; "" if nothing is."""
    if not url.isascii() or any(it.isspace() or not it.isprintable() for it in url):
        return "has spaces or letters that an address cannot have; write them as %XX"
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            return "does not begin with https:// or http://"
        if "@" in parts.netloc:
            return "has a user before its host, which is not sent; leave it out"
        if parts.hostname and parts.port != 0:
            return ""
    return "has no host, or no valid port; copy the address again"
