"""The constant commands that ssh runs on a host before paceline is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO

    Request = dict[str, Any]
    Answer = dict[str, Any]
    Body = Callable[[IO[bytes]], None]


# Nothing in the home folder, where it starts, may shadow what it imports. Every Python 3 understands it.
READ = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; import json; "
    "exec(json.loads(sys.stdin.buffer.readline().decode()))"
)


# The archive gets the bytecode of this Python beside its modules, or every request would compile them anew; another
# Python passes over it.
BEGIN = """
import os
def say(answer):
    sys.stdout.write(json.dumps(answer) + chr(10))
    sys.stdout.flush()
def add_bytecode(archive):
    import importlib.util, marshal, zipfile
    head = importlib.util.MAGIC_NUMBER + bytes([1]) + bytes(11)  # 1: not to be compared with the source
    with zipfile.ZipFile(archive, "a") as packed:
        for name in packed.namelist():
            if name.startswith(("paceline/contract/", "paceline/node/")):
                code = compile(packed.read(name), path + "/" + name, "exec", dont_inherit=True)
                packed.writestr(zipfile.ZipInfo(name + "c"), head + marshal.dumps(code))
order = json.loads(sys.stdin.buffer.readline().decode())
request = sys.stdin.buffer.readline()
if sys.version_info < (3, 9):
    found = sys.executable + " is Python " + ".".join(map(str, sys.version_info[:3]))
    say({"error": found + ", too old; name one from 3.9 on with --ssh-python, or python = in the settings"})
    sys.exit()
root = os.path.expanduser(order["root"])
path = os.path.join(root, order["name"])
try:
    os.makedirs(root, mode=0o700, exist_ok=True)
    is_missing = not os.path.exists(path)
    if is_missing:
        coming = path + "." + str(os.getpid())
        try:
            with open(coming, "wb") as file:
                say({"need": True})
                data = sys.stdin.buffer.read(order["bytes"])
                file.write(data)
            if len(data) < order["bytes"]:
                sys.exit()
            add_bytecode(coming)
            try:
                os.link(coming, path)  # another may have been as quick, and processes may use what it brought
            except FileExistsError:
                pass
            except OSError:  # no hard links here
                os.replace(coming, path)
        finally:
            if os.path.exists(coming):
                os.unlink(coming)
    else:
        say({"need": False})
except OSError as error:
    say({"error": "cannot write to " + root + ": " + str(error.strerror) + "; choose another root in the settings"})
    sys.exit()
sys.path.insert(0, path)  # there may be another paceline
from paceline.node.host.serve import main
sys.path.append(sys.path.pop(0))
main(root, request)
"""
