"""Connections to ports of a pod, as kubectl asks for them: SPDY/3.1 in the messages of a WebSocket.

Each connection is two streams with one number: what is sent, and why it failed. Source:
https://github.com/kubernetes/kubernetes/blob/v1.31.0/staging/src/k8s.io/client-go/tools/portforward/portforward.go and
https://www.chromium.org/spdy/spdy-protocol/spdy-protocol-draft3-1 (frames, and the dictionary of the headers).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import zlib
from socket import socket as make_socket
from typing import TYPE_CHECKING

from aiohttp import WSMsgType

from . import network

if TYPE_CHECKING:
    from aiohttp import web

PROTOCOL = "SPDY/3.1+portforward.k8s.io"
_CONTROL, _VERSION = 0x80000000, 3 << 16
_SYN_STREAM, _SYN_REPLY, _RST_STREAM, _PING = 1, 2, 3, 6
_FIN = 1
_WORDS = (
    *[
        "options",
        "head",
        "post",
        "put",
        "delete",
        "trace",
        "accept",
        "accept-charset",
        "accept-encoding",
        "accept-language",
        "accept-ranges",
        "age",
        "allow",
        "authorization",
        "cache-control",
        "connection",
        "content-base",
        "content-encoding",
        "content-language",
        "content-length",
        "content-location",
        "content-md5",
        "content-range",
        "content-type",
        "date",
        "etag",
        "expect",
        "expires",
        "from",
        "host",
        "if-match",
        "if-modified-since",
        "if-none-match",
        "if-range",
        "if-unmodified-since",
        "last-modified",
        "location",
        "max-forwards",
        "pragma",
        "proxy-authenticate",
        "proxy-authorization",
        "range",
        "referer",
        "retry-after",
        "server",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "user-agent",
        "vary",
        "via",
        "warning",
        "www-authenticate",
        "method",
        "get",
        "status",
    ],
    *("200 OK", "version", "HTTP/1.1", "url", "public", "set-cookie", "keep-alive", "origin"),
)
_TAIL = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 Non-Authoritative "
    "Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden404 Not Found500 Internal "
    "Server Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, "
    "Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,application/xml,"
    "application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8"
    "charset=iso-8859-1,utf-,*,enq=0."
)
_DICTIONARY = b"".join(struct.pack(">I", len(word)) + word.encode() for word in _WORDS) + _TAIL.encode()


class Session:
    """The streams of one WebSocket."""

    def __init__(self, socket: web.WebSocketResponse, namespace: str) -> None:
        self._socket, self._namespace = socket, namespace
        self._headers = zlib.decompressobj(zdict=_DICTIONARY)
        self._replies = zlib.compressobj(zdict=_DICTIONARY)
        self._errors: dict[str, int] = {}  # number of a connection → its stream for errors
        self._inputs: dict[int, asyncio.Queue[bytes]] = {}  # stream → what comes for the port; b"" at the end
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Until the client ends it."""
        data = b""
        try:
            async for message in self._socket:
                data += message.data if message.type is WSMsgType.BINARY else b""
                while len(data) >= 8 and len(data) >= (end := 8 + int.from_bytes(data[5:8], "big")):
                    await self._frame(int.from_bytes(data[:4], "big"), data[4], data[8:end])
                    data = data[end:]
        finally:
            for task in self._tasks:
                task.cancel()

    async def _frame(self, first: int, flags: int, data: bytes) -> None:
        if not first & _CONTROL:
            if first in self._inputs:
                for part in (data, *([b""] if flags & _FIN else ())):
                    self._inputs[first].put_nowait(part)
            return
        kind, stream = first & 0xFFFF, int.from_bytes(data[:4], "big")
        if kind == _PING:
            await self._send(first, 0, data)
        elif kind == _RST_STREAM and stream in self._inputs:
            self._inputs[stream].put_nowait(b"")
        elif kind == _SYN_STREAM:
            headers = self._read(self._headers.decompress(data[10:]))
            reply = self._replies.compress(bytes(4)) + self._replies.flush(zlib.Z_SYNC_FLUSH)
            await self._send(_CONTROL | _VERSION | _SYN_REPLY, 0, struct.pack(">I", stream) + reply)
            if headers["streamtype"] == "error":
                self._errors[headers["requestid"]] = stream
            else:
                self._inputs[stream] = asyncio.Queue()
                task = asyncio.ensure_future(
                    self._connect(stream, self._errors.pop(headers["requestid"]), int(headers["port"]))
                )
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _read(block: bytes) -> dict[str, str]:
        words, at = [], 4
        for _ in range(2 * int.from_bytes(block[:4], "big")):
            end = at + 4 + int.from_bytes(block[at : at + 4], "big")
            words.append(block[at + 4 : end].decode())
            at = end
        return dict(zip(words[::2], words[1::2], strict=True))

    async def _send(self, first: int, flags: int, data: bytes) -> None:
        with contextlib.suppress(ConnectionError, RuntimeError):
            await self._socket.send_bytes(struct.pack(">II", first, flags << 24 | len(data)) + data)

    async def _connect(self, stream: int, errors: int, port: int) -> None:
        try:
            with network.inside(self._namespace):
                one = make_socket()
            one.setblocking(False)
            await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", port))
            reader, writer = await asyncio.open_connection(sock=one)
        except OSError as error:
            words = os.strerror(error.errno or 0).lower()
            text = f'error forwarding port {port} to pod {self._namespace}, uid : failed to execute portforward in network namespace "/run/netns/{self._namespace}": failed to connect to localhost:{port} inside namespace: dial tcp4 127.0.0.1:{port}: connect: {words}'
            await self._send(errors, _FIN, text.encode())
            await self._send(stream, _FIN, b"")
            return

        async def feed() -> None:
            while data := await self._inputs[stream].get():
                writer.write(data)
                await writer.drain()
            writer.write_eof()

        feeding = asyncio.ensure_future(feed())
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    await self._send(stream, 0, data)
            await self._send(stream, _FIN, b"")
            await self._send(errors, _FIN, b"")
        finally:
            feeding.cancel()
            writer.close()
            del self._inputs[stream]
