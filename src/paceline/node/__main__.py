"""Entry of every process on a node: `python <this file or its archive> agent|forkserver|rank|batch|pod|slurm|… …`."""

import os
import sys

# Python put this file's folder first on sys.path; its modules must not shadow the user's or the standard library's.
_here = os.path.dirname(os.path.abspath(__file__))
if sys.path and os.path.abspath(sys.path[0]) == _here:
    del sys.path[0]
_root = os.path.dirname(os.path.dirname(_here))
if sys.path and sys.path[0] == _root and os.path.isfile(_root):  # nor must those in an archive
    del sys.path[0]
if _root not in sys.path:
    sys.path.append(_root)

_OTHERS = {
    "shell": "host.serve:shell", "stands": "watching.live:main", "profile": "watching.profile:main",  # beside a rank
    "inside": "host.containers:inside",
    "slurm": "host.slurm.place.task:main", "slurm-step": "host.slurm.place.step:main",
    "slurm-finish": "host.slurm.end.finish:main", "slurm-check": "host.check:main",
}  # fmt: skip


def main() -> None:
    """Run the role that the first argument names."""
    role = sys.argv[1]
    if role == "agent":
        from paceline.node.agent import guard

        def at_end(status: int) -> None:
            from paceline.node.warm.leave import leave_behind

            leave_behind(sys.argv[2])

        guard.begin(sys.argv[2], at_end)  # now, while this process is small and has no threads
        from paceline.node.agent.agent import main as agent

        sys.exit(agent(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
    elif role == "forkserver":
        from paceline.node.ranks.forkserver import main as forkserver

        forkserver(int(sys.argv[2]), sys.argv[3])
    elif role == "warm":
        import importlib

        importlib.import_module("paceline.node.ranks.forkserver")
        cold = frozenset(sys.modules)  # what every fork server has imported
        from paceline.node.warm.server import main as warm

        warm(sys.argv[2:], cold)
    elif role == "rank":
        from pathlib import Path

        from paceline.node.machine.processes import rank_title, set_title
        from paceline.node.ranks.program import run_program, script_folder
        from paceline.node.spec import Program

        error, kind, target, *args = sys.argv[2:]
        set_title(rank_title(target, os.environ))
        if not getattr(sys.flags, "safe_path", False):
            sys.path.insert(0, script_folder(target) if kind == "script" else os.getcwd())
        run_program(Program(kind, target, tuple(args)), Path(error))
    elif role == "mpidaemon":
        from paceline.node.ranks.mpi_proxy import start_daemon

        start_daemon(sys.argv[2], sys.argv[3], sys.argv[4:])
    elif role == "mpirank":
        from paceline.node.ranks.mpi_proxy import represent_rank

        sys.exit(represent_rank(sys.argv[2]))
    elif role == "batch":
        from paceline.node.host.batch import main as batch

        batch(sys.argv[2])
    elif role == "pod":
        from paceline.node.host.pod import main as pod

        sys.exit(pod(sys.argv[2], sys.argv[3]))
    elif role in _OTHERS:
        import importlib

        module, _, function = _OTHERS[role].partition(":")
        sys.exit(getattr(importlib.import_module(f"paceline.node.{module}"), function)(*sys.argv[2:]))


if __name__ == "__main__":
    main()
