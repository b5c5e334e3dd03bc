"""The flags that say what a job is, for every verb that starts one."""

from __future__ import annotations

import click

from . import completion
from .option import Count, Number, Option, Whole, in_section

# What `run --help` has, in the order in which people need it; `--help-all` has the rest.
USUAL = (
    "--nproc-per-node", "--gpus", "--hosts", "--on", "--nnodes", "--module", "--env", "--secret", "--name",
    "--max-restarts", "--time-limit", "--image", "--data", "--sync-mode", "--sync-source", "--checkpoint-dir",
    "--tensorboard", "--keep-warm", "--tee", "--dry-run", "--rehearse",
)  # fmt: skip

RANKS = in_section(
    "Ranks",
    Option(
        ["-n", "--nproc-per-node", "ranks"],
        envvar="PET_NPROC_PER_NODE",
        metavar="N|auto|gpu|cpu",
        help="Ranks on each machine. auto: one per GPU, or per core without GPUs.  [default: 1; with -H, its slots]",
    ),
    Option(["-np", "total"], type=Whole(1), metavar="N", help="Ranks on all machines together, as horovodrun counts."),
    Option(
        ["--gpus"],
        type=Count(0),
        metavar="N",
        help="GPUs of each machine for this job alone; it waits until they are free.  [default: see docs/jobs.md]",
    ),
    Option(["--devices"], metavar="0,1", help="GPUs of each machine by name, in the place of --gpus."),
    Option(["--share-devices"], is_flag=True, help="Share the GPUs with other jobs that have this flag."),
    Option(["--cpus"], type=Whole(1), metavar="N", help="Cores for all ranks of a machine."),
    Option(["--memory"], metavar="16Gi", help="Memory that a machine must have."),
    Option(
        ["--framework"],
        metavar="NAME",
        shell_complete=completion.frameworks,
        help="Framework whose variables the ranks get.  [default: what the script imports]",
    ),
    Option(
        ["--horovod"],
        type=click.Choice(["real", "paceline"]),
        help="Whose horovod the script imports.  [default: the installed one, else paceline's]",
    ),
    Option(["--env"], multiple=True, metavar="NAME=VALUE", help="Set a variable for the ranks; repeatable."),
    Option(
        ["--secret"],
        multiple=True,
        metavar="NAME",
        help="Pass a variable of yours to the ranks; its value is never stored or shown; repeatable.",
    ),
    Option(
        ["--setup"],
        multiple=True,
        metavar="COMMAND",
        help="Run a shell command once on each node before its ranks, which get its variables; repeatable.",
    ),
    Option(
        ["--environment"],
        metavar="SOURCE",
        help="Install the packages of SOURCE on each machine into a folder of paceline's own, and run the ranks with "
        "them: uv.lock, pylock.toml, requirements.txt, pyproject.toml, environment.yml, a folder of wheels, a virtual "
        "environment, here (the packages of this Python), auto (what the project has) or none.",
    ),
    Option(["--pass-index"], is_flag=True, help="Append --process_index I --process_num N (with --framework indexed)."),
)

PROGRAM = in_section(
    "Program",
    Option(["-m", "--module"], is_flag=True, envvar="PET_MODULE", help="SCRIPT is a module, as in python -m."),
    Option(["--no-python"], is_flag=True, envvar="PET_NO_PYTHON", help="SCRIPT is any program on PATH."),
    Option(
        ["--run-path"],
        is_flag=True,
        envvar="PET_RUN_PATH",
        help="Accepted; every script runs inside its rank anyway.",
    ),
    Option(
        ["--start-method"],
        type=click.Choice(["fork", "exec", "spawn", "forkserver"]),
        envvar="PET_START_METHOD",
        help="fork, forkserver: from a process that has imported the framework; exec, spawn: each on its own.  "
        "[default: fork]",
    ),
    Option(["--preload"], metavar="MODULE,…", help="More modules to import once, before the fork."),
    Option(
        ["--keep-warm"],
        metavar="10m|off",
        help="Keep the framework imported after the job; within this time the next job starts at once.",
    ),
    Option(["-v", "--verbose"], is_flag=True, help="Say whether a warm process started the job."),
)

JOB = in_section(
    "Job",
    Option(
        ["--name"],
        metavar="NAME",
        help="The job's name; NAME- takes the next free number.  [default: the script's and five random characters]",
    ),
    Option(["--label"], multiple=True, metavar="NAME=VALUE", help="A label for list --label; repeatable."),
    Option(["--priority"], type=int, metavar="N", help="Waiting jobs of a higher priority start first."),
    Option(["--queue"], metavar="NAME", help="Queue or partition, where the backend has several."),
    Option(["--time-limit"], metavar="2h", help="Stop the job after this time."),
    Option(["--ttl"], metavar="7d", help="Delete the job this long after its end."),
    Option(["--image"], metavar="IMAGE", help="Container image in which the ranks run."),
    Option(["--option"], multiple=True, metavar="NAME=VALUE", help="An option of the backend; repeatable."),
    Option(
        ["--max-restarts"],
        type=Whole(0),
        envvar="PET_MAX_RESTARTS",
        metavar="N",
        help="How often all ranks start again on failure.  [default: 0]",
    ),
    Option(
        ["--grace"], metavar="30s", help="Time between SIGTERM and SIGKILL when the job is stopped.  [default: 30s]"
    ),
    Option(
        ["--hang"],
        type=click.Choice(["warn", "restart", "off"]),
        help="When ranks hang: name the culprit, start all ranks again as well, or do not watch.  [default: warn]",
    ),
    Option(["--hang-after"], metavar="60s", help="How long ranks stand still before that is a hang.  [default: 60s]"),
    Option(["--dry-run"], is_flag=True, help="Print job and variables, and start nothing."),
)

FILES = in_section(
    "Files",
    Option(
        ["--working-dir"],
        metavar="DIR",
        help="Where the ranks start.  [default: this folder, or with --sync-mode the code in the job's own]",
    ),
    Option(
        ["--sync-mode"],
        metavar="git|rsync|snapshot",
        help="Copy the code, and start there; it is in code/NAME of the working dir.  [default: run what is there]",
    ),
    Option(["--sync-source"], metavar="URL[@REF]|PATH", help="Where to copy the code from."),
    Option(["--data"], multiple=True, metavar="VOLUME:/PATH", help="A named volume; repeatable."),
    Option(["--tensorboard"], is_flag=True, help="Start a TensorBoard with the job."),
    Option(["--logdir"], metavar="DIR", help="Folder that the TensorBoard shows.  [default: the job's]"),
    Option(
        ["--checkpoint-dir"],
        metavar="DIR",
        help="Where paceline.init keeps checkpoints.  [default: the job's folder]",
    ),
    Option(
        ["--log-dir"],
        envvar="PET_LOG_DIR",
        metavar="DIR",
        help="Where the job's folder with its logs goes.  [default: ~/.local/state/paceline/jobs]",
    ),
)

OUTPUT = in_section(
    "Output",
    Option(
        ["--stdin"],
        type=Whole(0),
        metavar="RANK",
        help="The local rank that reads this command's standard input, for breakpoint() and input().  [default: none]",
    ),
    Option(["--detach"], is_flag=True, help="The same as paceline submit."),
    Option(
        ["-t", "--tee"],
        envvar="PET_TEE",
        metavar="all|0:3,1:2",
        help="Ranks to show besides local rank 0; 1 is stdout, 2 stderr, 3 both. Lines begin with [rank N].",
    ),
    Option(["-r", "--redirects"], envvar="PET_REDIRECTS", metavar="3|0:1,…", help="Streams to keep off the screen."),
    Option(
        ["--local-ranks-filter"],
        envvar="PET_LOCAL_RANKS_FILTER",
        metavar="0,1",
        help="Show only these local ranks.",
    ),
)

NODES = in_section(
    "Several machines",
    Option(
        ["--nnodes", "--workers", "nnodes"],
        envvar="PET_NNODES",
        metavar="N|MIN:MAX",
        help="How many machines take part; MIN:MAX lets them come and go. Without -H or --on start this on each.  "
        "[default: 1, or those that -H names]",
    ),
    Option(
        ["--node-rank"],
        type=Whole(0),
        envvar="PET_NODE_RANK",
        metavar="I",
        help="This machine's number, 0 at the main address.  [default: as they come]",
    ),
    Option(["--master-addr"], envvar="PET_MASTER_ADDR", metavar="HOST", help="Address of node 0."),
    Option(
        ["--master-port"],
        type=Whole(1, 65535),
        envvar="PET_MASTER_PORT",
        metavar="PORT",
        help="Where the machines meet; on one machine, MASTER_PORT.  [default: 29500; a free one]",
    ),
    Option(
        ["--local-addr"],
        envvar="PET_LOCAL_ADDR",
        metavar="HOST",
        help="Name of this machine among the others.  [default: found out]",
    ),
    Option(
        ["--rdzv-endpoint"],
        envvar="PET_RDZV_ENDPOINT",
        metavar="HOST[:PORT]",
        help="The same as --master-addr and --master-port.",
    ),
    Option(
        ["--rdzv-id"],
        envvar="PET_RDZV_ID",
        metavar="ID",
        help="Identifier that all machines of the job share.  [default: none]",
    ),
    Option(
        ["--rdzv-backend"],
        envvar="PET_RDZV_BACKEND",
        metavar="c10d|static",
        help="Accepted; either means paceline's own coordinator.",
    ),
    Option(
        ["--rdzv-conf"],
        envvar="PET_RDZV_CONF",
        metavar="K=V,…",
        help="join_timeout=SECONDS: how long to wait for the others (600); last_call_timeout: for more than MIN (3); "
        "keep_alive_interval times keep_alive_max_attempt: seconds without a packet until a machine is lost (10).",
    ),
    Option(["--standalone"], is_flag=True, envvar="PET_STANDALONE", help="One machine; the default."),
)

TORCHRUN = in_section(
    "torchrun",
    Option(["--role"], envvar="PET_ROLE", metavar="NAME", help="Value of ROLE_NAME for the ranks."),
    Option(["--use-env"], is_flag=True, help="Give no --local_rank to scripts that declare it."),
    Option(
        ["--numa-binding"],
        type=click.Choice(["node", "socket", "exclusive", "core-complex"]),
        envvar="PET_NUMA_BINDING",
        help="Let each rank use only the cores near its GPU.",
    ),
    Option(
        ["--virtual-local-rank"],
        is_flag=True,
        envvar="PET_VIRTUAL_LOCAL_RANK",
        help="Each rank sees its GPU alone, and LOCAL_RANK is 0.",
    ),
    Option(
        ["--shutdown-timeout"],
        type=Number(0, 10**9),
        envvar="PET_SHUTDOWN_TIMEOUT",
        metavar="SECONDS",
        help="The same as --grace, in seconds.",
    ),
    Option(
        ["--signals-to-handle"],
        envvar="PET_SIGNALS_TO_HANDLE",
        metavar="SIGTERM,…",
        help="Accepted; SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are always handled.",
    ),
    Option(
        ["--duplicate-stdout-filters"],
        envvar="PET_DUPLICATE_STDOUT_FILTERS",
        metavar="TEXT,…",
        help="Accepted; paceline logs --all --grep shows such lines.",
    ),
    Option(
        ["--duplicate-stderr-filters"],
        envvar="PET_DUPLICATE_STDERR_FILTERS",
        metavar="TEXT,…",
        help="Accepted; paceline logs --all --grep shows such lines.",
    ),
    Option(
        ["--event-log-handler"],
        envvar="PET_EVENT_LOG_HANDLER",
        metavar="NAME",
        help="Accepted; paceline events shows what happened to a job.",
    ),
    Option(
        ["--logs-specs"],
        envvar="PET_LOGS_SPECS",
        metavar="NAME",
        help="Accepted; where logs go is --log-dir, what is shown --tee and --redirects.",
    ),
    Option(
        ["--monitor-interval"],
        type=Number(0),
        envvar="PET_MONITOR_INTERVAL",
        metavar="SECONDS",
        help="Accepted; paceline waits for events.",
    ),
)

HOROVODRUN = in_section(
    "horovodrun",
    Option(["--start-timeout"], metavar="10m", help="How long to wait for the other machines.  [default: 10m]"),
    Option(
        ["--min-np", "--min-num-proc"],
        type=Whole(1),
        metavar="N",
        help="Least number of ranks that the job goes on with: the MIN of --nnodes.",
    ),
    Option(
        ["--max-np", "--max-num-proc"],
        type=Whole(1),
        metavar="N",
        help="Greatest number of ranks: the MAX of --nnodes.",
    ),
    Option(
        ["--host-discovery-script"],
        metavar="PROGRAM",
        help="Program that prints the present hosts as HOST:SLOTS; called every second.",
    ),
    Option(
        ["--blacklist-cooldown-range", "cooldown"],
        nargs=2,
        metavar="MIN MAX",
        help="When a host that has failed comes back: after MIN, such as 10s, then twice that each time, up to MAX.",
    ),
    Option(["--output-filename"], metavar="DIR", help="The same as --log-dir, on this machine."),
)

TENSORFLOW = in_section(
    "TensorFlow",
    Option(
        ["--chief"],
        is_flag=False,
        flag_value=1,
        type=Whole(0, 1),
        metavar="1",
        help="A chief besides the --workers, as rank 0; TF_CONFIG says so.",
    ),
    Option(["--ps"], type=Whole(0), metavar="N", help="Parameter servers besides the --workers."),
    Option(
        ["--evaluator"],
        is_flag=False,
        flag_value=1,
        type=Whole(0, 1),
        metavar="1",
        help="An evaluator besides the --workers, as the last rank.",
    ),
)

SPEC = [*RANKS, *PROGRAM, *JOB, *FILES]

PROGRAM_ARGUMENTS = [
    click.Argument(["script"]),
    click.Argument(["args"], nargs=-1, type=click.UNPROCESSED),
]
