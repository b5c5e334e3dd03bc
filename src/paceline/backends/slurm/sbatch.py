"""The options of sbatch that a user may give, and those that paceline sets itself.

Source: https://slurm.schedmd.com/sbatch.html, the versions 22.05 to 25.05.
"""

from __future__ import annotations

KNOWN = frozenset({
    "account", "acctg-freq", "batch", "bb", "bbf", "begin",
    "consolidate-segments", "constraint", "container", "container-id", "contiguous", "core-spec",
    "cores-per-socket", "cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency",
    "distribution", "exclude", "exclusive", "extra", "extra-node-info", "get-user-env", "gid",
    "gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "gres-flags",
    "hint", "hold", "ignore-pbs", "kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mcs-label", "mem",
    "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nice", "no-kill", "no-requeue", "nodefile",
    "nodelist", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket", "oom-kill-step", "overcommit",
    "oversubscribe", "partition", "power", "prefer", "priority", "profile", "propagate", "qos", "reboot",
    "requeue", "resv-ports", "reservation", "resources", "segment", "sockets-per-node", "spread-job", "stepmgr",
    "switches", "thread-spec", "threads-per-core", "time", "time-min", "tmp", "tres-bind", "tres-per-task", "uid",
    "use-min-nodes", "wait-all-nodes", "wckey",
})  # fmt: skip
ABBREVIATED = {
    "A": "account", "C": "constraint", "G": "gpus", "L": "licenses", "c": "cpus-per-task",
    "d": "dependency", "p": "partition", "q": "qos", "t": "time", "w": "nodelist", "x": "exclude",
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
