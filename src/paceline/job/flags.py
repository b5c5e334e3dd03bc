"""Which flag of the command line sets a field of a job, so that messages can name it."""

from __future__ import annotations

# The flags that are not called as the field that they set.
_NAMES = {
    "nodes": "--nnodes",
    "ranks": "-n",
    "secrets": "--secret",
    "labels": "--label",
    "options": "--option",
    "backend": "--on",
    "tensorboard_dir": "--logdir",
    "run_id": "--rdzv-id",
    "main_address": "--master-addr",
    "main_port": "--master-port",
    "local_address": "--local-addr",
    "join_timeout": "--start-timeout",
    "last_call": "--rdzv-conf last_call_timeout",
    "silence": "--rdzv-conf keep_alive_interval times keep_alive_max_attempt",
}


# More flags that set a field, for job files that are written with the names of flags.
_MORE = {
    "--gpus": "devices",
    "--nproc-per-node": "ranks",
    "--shutdown-timeout": "grace",
}
# What other tools call a field of a job, with _.
ELSEWHERE = {
    **dict.fromkeys(("gpu", "num_gpus", "n_gpus", "gpu_count", "gpus_per_node", "num_devices"), "gpus"),
    **dict.fromkeys(("nproc", "nprocs", "procs", "processes", "num_processes", "num_procs", "num_ranks"), "ranks"),
    **dict.fromkeys(("n", "nproc_per_node", "ntasks_per_node", "ntasks", "slots", "world_size"), "ranks"),
    **dict.fromkeys(("nnodes", "num_nodes", "node_count", "num_machines", "replicas", "workers"), "nodes"),
    **dict.fromkeys(("cpu", "cores", "num_cpus", "cpus_per_task"), "cpus"),
    **dict.fromkeys(("mem", "ram"), "memory"),
    **dict.fromkeys(("time", "timeout", "walltime", "wall_time", "timeout_min"), "time_limit"),
    **dict.fromkeys(("retry", "retries", "restarts", "max_retries", "backoff_limit"), "max_restarts"),
    **dict.fromkeys(("environment", "envs", "env_vars", "environ"), "env"),
    **dict.fromkeys(("entrypoint", "entry_point", "program", "file"), "script"),
    **dict.fromkeys(("cwd", "workdir", "chdir"), "working_dir"),
    **dict.fromkeys(("volumes", "mounts"), "data"),
    **dict.fromkeys(("target", "on", "cluster"), "backend"),
    "partition": "queue",
}
_FIELDS = {flag: field for field, flag in _NAMES.items()} | _MORE


def field_of(key: str) -> str:
    """The field that a key of a job file means: its own name, or that of the flag which sets it, with - or _."""
    flag = f"--{key.replace('_', '-')}"
    return _FIELDS.get(flag, key.replace("-", "_"))


def flag_of(key_path: tuple[str | int, ...]) -> str:
    """The flag that sets a field of a job; of a field that has fields, the path to one of these."""
    if not key_path:
        return "the job"
    name = str(key_path[0])
    if name == "code":
        return "--sync-source" if key_path[1:] == ("source",) else "--sync-mode"
    if name == "rendezvous" and len(key_path) > 1:
        name = str(key_path[1])
    return _NAMES.get(name, f"--{name.replace('_', '-')}")
