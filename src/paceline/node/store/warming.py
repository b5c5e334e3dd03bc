"""The warm servers of this machine, for clients here and elsewhere."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from paceline.contract import CONTRACTS, thread_count
from paceline.node.errors import Refused
from paceline.node.machine import devices
from paceline.node.planning import fitting
from paceline.node.planning.packages import PRELOAD, WITH_OPTIMIZERS
from paceline.node.warm import folder
from paceline.node.warm import start as servers
from paceline.node.warm.leave import start_server

from .plan import python_path

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Literal

    from paceline.contract.messages import WarmRecord, WarmWanted

    from .home import Home


def start(home: Home, here: fitting.Here, wanted: WarmWanted) -> WarmRecord:
    """Start a warm server, and return what it says of itself when it is ready."""
    framework = wanted["framework"]
    if framework not in CONTRACTS or framework not in PRELOAD:
        known = ", ".join(sorted(PRELOAD))
        raise Refused(f"--framework {framework} is nothing that can be kept warm; take one of {known}")
    if framework not in fitting.SAFE_WITH_DEVICES and devices.accelerators():
        raise Refused(f"importing {framework} may initialise this machine's GPUs, which a fork cannot use")
    more = WITH_OPTIMIZERS if framework == "torch" else ()
    preload = (*PRELOAD[framework], *more, *wanted["preload"])
    for module in preload:
        top = module.partition(".")[0]
        if not top.isidentifier():
            raise Refused(f"--preload {module}: this is no name of a module; write for example numpy.linalg")
        if importlib.util.find_spec(top) is None:
            flag = "--preload" if module in wanted["preload"] else "--framework"
            raise Refused(f"{flag}: {top} is not installed for {here.python[0]}; install it there, or check the name")
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", str(thread_count(devices.cores(), wanted["ranks"])))
    if home.is_remote:
        env["PYTHONPATH"] = python_path(env)
    modules, where = tuple(dict.fromkeys(preload)), _folder(home)
    said = start_server(here.python, modules, env, os.getcwd(), wanted["seconds"], wait=True, where=where)
    assert said is not None
    return said


def ask(home: Home, what: Literal["describe", "stop"]) -> list[WarmRecord]:
    """What each warm server of a folder of jobs here answers to "describe" or "stop"."""
    return servers.ask(what, _folder(home))


def _folder(home: Home) -> Path:
    return folder.folder(str(home.root) if home.is_remote else None)
