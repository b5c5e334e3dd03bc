"""Commands in pods, as channels of a WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import struct
import termios
from typing import TYPE_CHECKING, Any

from aiohttp import WSMsgType

if TYPE_CHECKING:
    from aiohttp import web
    from multidict import MultiMapping

    from .containers import Container

_STDIN, _STDOUT, _STDERR, _ERROR, _RESIZE, _CLOSE = 0, 1, 2, 3, 4, 255


def _wants(query: MultiMapping[str], name: str) -> bool:
    return query.get(name) in ("true", "1")


async def execute(
    socket: web.WebSocketResponse, container: Container, namespace: str, query: MultiMapping[str]
) -> None:
    """Run a command in a container; its output, its input and its end go over the socket."""
    command = query.getall("command", [])
    tty = _wants(query, "tty")
    await socket.send_bytes(bytes([_STDOUT]))
    enter = [
        "nsenter",
        "-t",
        str(container.pid),
        "-m",
        "-u",
        "-i",
        "-n",
        "-p",
        "-r",
        f"--wd=/proc/{container.pid}/root{container.cwd}",
    ]
    status: Any
    code: int | OSError
    try:
        code = await _run(socket, [*enter, *command], container.env, tty, query)
    except OSError as error:
        code = error
    if isinstance(code, OSError) or (code in (126, 127) and not _exists(container, command[0])):
        words = f'exec: "{command[0]}": executable file not found in $PATH: unknown'
        text = f"Internal error occurred: error executing command in container: failed to exec in container: failed to start exec: OCI runtime exec failed: exec failed: unable to start container process: {words}"
        status = {"metadata": {}, "status": "Failure", "reason": "InternalError", "message": text, "code": 500}
    elif code:
        causes = [{"reason": "ExitCode", "message": str(code)}]
        message = f"command terminated with non-zero exit code: exit status {code}"
        status = {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode", "message": message,
                  "details": {"causes": causes}}  # fmt: skip
    else:
        status = {"metadata": {}, "status": "Success"}
    with contextlib.suppress(ConnectionError, RuntimeError):
        await socket.send_bytes(bytes([_ERROR]) + json.dumps(status).encode())
        await socket.close(code=1000)


def _exists(container: Container, program: str) -> bool:
    root = f"/proc/{container.pid}/root"
    if "/" in program:
        return os.path.lexists(root + program)
    return any(os.path.lexists(f"{root}{folder}/{program}") for folder in container.env.get("PATH", "").split(":"))


async def _run(
    socket: web.WebSocketResponse, command: list[str], env: dict[str, str], tty: bool, query: MultiMapping[str]
) -> int:
    if tty:
        return await _run_on_terminal(socket, command, env)
    given = asyncio.subprocess.PIPE if _wants(query, "stdin") else asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command, stdin=given, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=env, start_new_session=True,
    )  # fmt: skip

    async def copy(stream: Any, channel: int) -> None:
        while data := await stream.read(1 << 15):
            with contextlib.suppress(ConnectionError, RuntimeError):
                await socket.send_bytes(bytes([channel]) + data)

    async def feed() -> None:
        async for message in socket:
            if message.type is not WSMsgType.BINARY or not message.data or process.stdin is None:
                continue
            if message.data[0] == _STDIN:
                process.stdin.write(message.data[1:])
                with contextlib.suppress(ConnectionError):
                    await process.stdin.drain()
            elif message.data[0] == _CLOSE:
                process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # the client is gone

    feeding = asyncio.ensure_future(feed())
    try:
        await asyncio.gather(copy(process.stdout, _STDOUT), copy(process.stderr, _STDERR))
        code = await process.wait()
    finally:
        feeding.cancel()
        if process.returncode is None:
            process.kill()
    return 128 - code if code < 0 else code


async def _run_on_terminal(socket: web.WebSocketResponse, command: list[str], env: dict[str, str]) -> int:
    loop = asyncio.get_running_loop()
    ours, theirs = os.openpty()
    process = await asyncio.create_subprocess_exec(
        "setsid", "--ctty", "--wait", *command, stdin=theirs, stdout=theirs, stderr=theirs,
        env={"TERM": "xterm", **env},
    )  # fmt: skip
    os.close(theirs)
    output: asyncio.Queue[bytes] = asyncio.Queue()

    def receive() -> None:
        try:
            data = os.read(ours, 1 << 15)
        except OSError:
            data = b""
        if not data:
            loop.remove_reader(ours)
        output.put_nowait(data)

    loop.add_reader(ours, receive)

    async def feed() -> None:
        async for message in socket:
            if message.type is not WSMsgType.BINARY or not message.data:
                continue
            if message.data[0] == _STDIN:
                os.write(ours, message.data[1:])
            elif message.data[0] == _RESIZE:
                size = json.loads(message.data[1:])
                fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", size["Height"], size["Width"], 0, 0))
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    feeding = asyncio.ensure_future(feed())
    try:
        while data := await output.get():
            with contextlib.suppress(ConnectionError, RuntimeError):
                await socket.send_bytes(bytes([_STDOUT]) + data)
        code = await process.wait()
    finally:
        feeding.cancel()
        loop.remove_reader(ours)
        os.close(ours)
    return 128 - code if code < 0 else code
