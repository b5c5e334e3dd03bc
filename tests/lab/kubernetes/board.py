"""A TensorBoard that starts faster than the real one."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

from fake_kubernetes import images

BOARD = """
import http.server, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        prefix = flags["--path_prefix"] + "/"
        body = b"TensorBoard" + bytes(3 << 20 if self.path == prefix + "index.js" else 0)
        self.send_response(200 if self.path.startswith(prefix) else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = http.server.ThreadingHTTPServer((flags["--host"], int(flags["--port"])), Handler)
address = f"http://{flags['--host']}:{flags['--port']}{flags['--path_prefix']}/"
print(f"TensorBoard 0 at {address} (Press CTRL+C to quit)", file=sys.stderr)
server.serve_forever()
"""


def with_board() -> images.Image:
    """An image that has it in place of the real one."""
    found = importlib.util.find_spec("tensorboard")
    assert found is not None and found.submodule_search_locations is not None
    return replace(images.usual(), files={str(Path(found.submodule_search_locations[0], "main.py")): BOARD})
