"""What each rank of a job runs that is a function: the function, and the line of its log that has the outcome.

The job's code is a folder with a script that calls `main`, the function, and cloudpickle if it was pickled by that.
"""

from __future__ import annotations

import base64
import os
import pickle
import sys

from paceline.contract.functions import CALL, PACKAGES, Outcome, RankFailed, raised

_MOST = 4 << 20  # bytes of an outcome, which is in a log
_LINE = 1 << 16  # of them in a line


def main(script: str, key: str) -> None:
    """Call the function, and write what comes of it.

    It runs in the folder in which the job was submitted, and imports modules from there, where there is such a folder.
    """
    code = os.path.dirname(os.path.abspath(script))
    with open(os.path.join(code, CALL), "rb") as file:
        version, folder, paths, data = pickle.load(file)
    if version != sys.version_info[:2]:
        theirs, ours = (".".join(map(str, it)) for it in (version, sys.version_info[:2]))
        sys.exit(
            f"paceline: the function was pickled by Python {theirs}, and {sys.executable} is Python {ours}; submit it "
            "with the same version"
        )
    # The script is not to be found as a module: it may have the name of one of the user's.
    sys.path[:1] = [*filter(os.path.isdir, paths), os.path.join(code, PACKAGES)]
    if os.path.isdir(folder):
        os.chdir(folder)
    try:
        value = pickle.loads(data)()
    except Exception as error:
        _write(key, raised(error))
        raise
    _write(key, Outcome(True, value))


def _write(key: str, outcome: Outcome) -> None:
    data = outcome.to_bytes()
    if len(data) > _MOST:
        size = f"{len(data) / (1 << 20):.1f} MiB, and up to {_MOST >> 20} come back"
        data = Outcome(False, RankFailed(f"its result has {size}; write it to a file and return its path")).to_bytes()
    text = base64.b64encode(data) + b"."
    sys.stdout.flush()
    with open(1, "wb", closefd=False) as out:
        for at in range(0, len(text), _LINE):
            out.write(b"%s %s\n" % (key.encode(), text[at : at + _LINE]))
