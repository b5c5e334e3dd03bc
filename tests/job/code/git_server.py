"""A server of git repositories over http, with a password."""

from __future__ import annotations

import base64
import os
import subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PASSWORD = "s3cr3t'\"$(id) p%40ss"


class GitServer(ThreadingHTTPServer):
    """Serves the repositories in a folder to one user; `public/…` to everyone."""

    daemon_threads = True

    def __init__(self, root: Path, address: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((address, port), _GitHandler)
        self.root = root
        self.seen_in_processes: list[bytes] = []
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def look_at_processes(self) -> None:
        """Note command lines that show the password."""
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    line = (path / "cmdline").read_bytes()
                except OSError:
                    continue
                if PASSWORD.encode() in line:
                    self.seen_in_processes.append(line)


class _GitHandler(BaseHTTPRequestHandler):
    server: GitServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.server.look_at_processes()
        header = self.headers.get("Authorization", "")
        if header:
            self.server.asked.append(base64.b64decode(header.removeprefix("Basic ")).decode())
        allowed = header == "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()
        if not allowed and not path.startswith("/public/"):
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="test"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        env = {
            **os.environ,
            "GIT_PROJECT_ROOT": str(self.server.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
        }
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = subprocess.run(["git", "http-backend"], input=body, env=env, capture_output=True, check=False).stdout
        head, _, content = answer.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if ": " in line)
        self.send_response(int(fields.pop("Status", "200 OK").split()[0]))
        for name, value in fields.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET
