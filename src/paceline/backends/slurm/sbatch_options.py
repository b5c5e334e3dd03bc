"""The options of sbatch that a user may give, and those that paceline sets itself.

Source: https://slurm.schedmd.com/sbatch.html, the versions 22.05 to 26.05.
"""

from __future__ import annotations

KNOWN = frozenset({
    "account", "acctg-freq", "batch", "bb", "bbf", "begin",
    "consolidate-segments", "constraint", "container", "container-id", "container-type", "contiguous", "core-spec",
    "cores-per-socket", "cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency",
    "distribution", "exclude", "exclusive", "extra", "extra-node-info", "get-user-env", "gid",
    "gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "gres-flags",
    "hint", "hold", "ignore-pbs", "kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mcs-label", "mem",
    "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nice", "no-kill", "no-requeue", "nodefile",
    "nodelist", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket", "oom-kill-step", "overcommit",
    "oversubscribe", "partition", "power", "prefer", "priority", "profile", "propagate", "qos", "reboot",
    "requeue", "resv-ports", "reservation", "resources", "segment", "sockets-per-node", "spread-job",
    "spread-segments", "stepmgr", "switches", "thread-spec", "threads-per-core", "time", "time-min", "tmp", "tres-bind",
    "tres-per-task", "uid", "use-min-nodes", "wait-all-nodes", "wckey",
})  # fmt: skip
# Those without a value, and those whose value may be left out.
SWITCHES = frozenset({
    "consolidate-segments", "contiguous", "hold", "ignore-pbs", "no-requeue", "overcommit", "oversubscribe", "reboot",
    "requeue", "spread-job", "spread-segments", "stepmgr", "use-min-nodes",
})  # fmt: skip
MAY_LACK_VALUE = frozenset({
    "exclusive", "get-user-env", "nice", "no-kill", "oom-kill-step", "propagate", "resv-ports",
})  # fmt: skip
YES_OR_NO = frozenset({"kill-on-invalid-dep"})
OPPOSITE = {"requeue": "no-requeue", "no-requeue": "requeue"}
ABBREVIATED = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus", "H": "hold",
    "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes", "O": "overcommit", "Q": "quiet", "S": "core-spec",
    "V": "version", "W": "wait", "a": "array", "b": "begin", "c": "cpus-per-task", "d": "dependency", "e": "error",
    "h": "help", "i": "input", "k": "no-kill", "m": "distribution", "n": "ntasks", "o": "output", "p": "partition",
    "q": "qos", "s": "oversubscribe", "t": "time", "v": "verbose", "w": "nodelist", "x": "exclude",
}  # fmt: skip
OURS = {
    "job-name": "give --name",
    "nodes": "give --nnodes",
    "ntasks": "paceline starts one agent on each node; give --nnodes and -n",
    "ntasks-per-node": "paceline starts one agent on each node; give the ranks on it with -n",
    "comment": "paceline finds its jobs by it; give --label",
    "output": "see the logs with paceline logs",
    "error": "see the logs with paceline logs",
    "input": "ranks have no input in a batch job",
    "open-mode": "the logs of a job that is requeued are kept",
    "chdir": "give --working-dir",
    "export": "give --env, or --secret",
    "signal": "give --grace: the ranks have that time, from the warning of Slurm on",
    "array": "give --array",
    "clusters": "give that cluster a target of its own, with its login node",
    "cluster-constraint": "give each cluster a target of its own, with its login node",
    "export-file": "give --env, or --secret",
    "wrap": "give the script and its arguments",
    "parsable": "paceline reads the answer of sbatch",
    "test-only": "give --dry-run",
    "wait": "see paceline wait",
    "quiet": "paceline reads the answer of sbatch",
    "verbose": "see paceline get and paceline logs",
    "help": "see man sbatch",
    "usage": "see man sbatch",
    "version": "see paceline check",
}


def name_of(given: str) -> str:
    """The whole name of an option of sbatch, which may be given as `-p`, `--partition` or `mail_user`."""
    name = given.lstrip("-")
    return ABBREVIATED.get(name, name.replace("_", "-"))
