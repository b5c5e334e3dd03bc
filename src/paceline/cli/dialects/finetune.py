"""Command lines for fine-tuning that start torchrun themselves: `swift` of ms-swift, `llamafactory-cli`.

Source: ms-swift 3.9, `swift/cli/main.py`; LLaMA-Factory 0.9, `src/llamafactory/cli.py` and `launcher.py`.
"""

from __future__ import annotations

from .cluster import has_devices
from .engine import Line, Tool

_VARIABLES = {
    "NPROC_PER_NODE": "-n",
    "NNODES": "--nnodes",
    "NODE_RANK": "--node-rank",
    "MASTER_ADDR": "--master-addr",
    "MASTER_PORT": "--master-port",
}


def _module(name: str, *, is_counted: bool = False) -> Tool:
    """A subcommand that runs a module on all ranks; with `is_counted` there is one for each GPU if no variable says so.

    Otherwise there is one.
    """

    def finish(line: Line) -> None:
        if is_counted and line.get("-n") is None and has_devices(line):
            line.add("-n", "gpu")
        line.add("-m")
        line.program.insert(0, name)

    return Tool(name, finish=finish, is_program=True)


# Other subcommands of theirs start one process.
SWIFT = Tool(
    "swift",
    tools={
        "pt": _module("swift.cli.pt"),
        "sft": _module("swift.cli.sft"),
        "rlhf": _module("swift.cli.rlhf"),
        "infer": _module("swift.cli.infer"),
    },
    variables=_VARIABLES,
)
LLAMAFACTORY = Tool(
    "llamafactory-cli",
    tools={"train": _module("llamafactory.launcher", is_counted=True)},
    variables={**_VARIABLES, "MAX_RESTARTS": "--max-restarts", "RDZV_ID": "--rdzv-id", "FORCE_TORCHRUN": ""},
)
