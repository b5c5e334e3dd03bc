"""The flags that say what a job is, for every verb that starts one."""

from __future__ import annotations

import click

from . import completion
from .options import Count, Option

# What `run --help` has, in the order in which people need it; `--help-all` has the rest.
USUAL = (
    "--nproc-per-node", "--gpus", "--hosts", "--on", "--nnodes", "--module", "--env", "--secret", "--name",
    "--max-restarts", "--time-limit", "--image", "--data", "--sync-mode", "--sync-source", "--checkpoint-dir",
    "--tensorboard", "--keep-warm", "--tee", "--detach", "--dry-run",
)  # fmt: skip

RANKS = [
    Option(
        ["-n", "--nproc-per-node", "ranks"],
        section="Ranks",
        envvar="PET_NPROC_PER_NODE",
        metavar="N|auto|gpu|cpu",
        help="Ranks on each machine. auto: one per GPU, or per core without GPUs.  [default: 1; with -H, its slots]",
    ),
    Option(
        ["-np", "total"],
        section="Ranks",
        type=int,
        metavar="N",
        help="Ranks on all machines together, as horovodrun counts.",
    ),
    Option(
        ["--gpus"],
        section="Ranks",
        type=Count(0),
        metavar="N",
        help="GPUs of each machine for this job alone; it waits until they are free.  [default: see docs/jobs.md]",
    ),
    Option(["--devices"], section="Ranks", metavar="0,1", help="The same, by name."),
    Option(
        ["--share-devices"], section="Ranks", is_flag=True, help="Share the GPUs with other jobs that have this flag."
    ),
    Option(["--cpus"], section="Ranks", type=click.IntRange(1), metavar="N", help="Cores for all ranks of a machine."),
    Option(["--memory"], section="Ranks", metavar="16Gi", help="Memory that a machine must have."),
    Option(
        ["--framework"],
        section="Ranks",
        metavar="NAME",
        shell_complete=completion.frameworks,
        help="Framework whose variables the ranks get.  [default: what the script imports]",
    ),
    Option(
        ["--horovod"],
        section="Ranks",
        type=click.Choice(["real", "paceline"]),
        help="Whose horovod the script imports.  [default: the installed one, else paceline's]",
    ),
    Option(
        ["--env"],
        section="Ranks",
        multiple=True,
        metavar="NAME=VALUE",
        help="Set a variable for the ranks; repeatable.",
    ),
    Option(
        ["--secret"],
        section="Ranks",
        multiple=True,
        metavar="NAME",
        help="Pass a variable of your environment to the ranks; its value is never stored or shown; repeatable.",
    ),
    Option(
        ["--pass-index"],
        section="Ranks",
        is_flag=True,
        help="Append --process_index I --process_num N (with --framework indexed).",
    ),
]

PROGRAM = [
    Option(
        ["-m", "--module"],
        section="Program",
        is_flag=True,
        envvar="PET_MODULE",
        help="SCRIPT is a module, as in python -m.",
    ),
    Option(
        ["--no-python"],
        section="Program",
        is_flag=True,
        envvar="PET_NO_PYTHON",
        help="SCRIPT is any program on PATH.",
    ),
    Option(
        ["--run-path"],
        section="Program",
        is_flag=True,
        envvar="PET_RUN_PATH",
        help="As in torchrun; every script runs inside its rank anyway.",
    ),
    Option(
        ["--start-method"],
        section="Program",
        type=click.Choice(["fork", "exec", "spawn", "forkserver"]),
        envvar="PET_START_METHOD",
        help="fork: from a process that has imported the framework; exec: each on its own.  [default: fork]",
    ),
    Option(["--preload"], section="Program", metavar="MODULE,…", help="More modules to import once, before the fork."),
    Option(
        ["--keep-warm"],
        section="Program",
        metavar="10m",
        help="When the job has ended, keep its framework imported for this time: the next job starts at once.",
    ),
    Option(["-v", "--verbose"], section="Program", is_flag=True, help="Say whether such a process started the job."),
]

JOB = [
    Option(
        ["--name"],
        section="Job",
        metavar="NAME",
        help="The job's name; NAME- takes the next free number.  [default: the script's and five random characters]",
    ),
    Option(
        ["--label"], section="Job", multiple=True, metavar="NAME=VALUE", help="A label for list --label; repeatable."
    ),
    Option(["--priority"], section="Job", type=int, metavar="N", help="Waiting jobs of a higher priority start first."),
    Option(["--queue"], section="Job", metavar="NAME", help="Queue, where the backend has several."),
    Option(["--time-limit"], section="Job", metavar="2h", help="Stop the job after this time."),
    Option(["--ttl"], section="Job", metavar="7d", help="Delete the job this long after its end."),
    Option(["--image"], section="Job", metavar="IMAGE", help="Container image, where the backend runs containers."),
    Option(
        ["--option"],
        section="Job",
        multiple=True,
        metavar="NAME=VALUE",
        help="An option of the backend; repeatable.",
    ),
    Option(
        ["--max-restarts"],
        section="Job",
        type=click.IntRange(0),
        envvar="PET_MAX_RESTARTS",
        metavar="N",
        help="How many times all ranks start again after a failure.  [default: 0]",
    ),
    Option(
        ["--grace"],
        section="Job",
        metavar="30s",
        help="Time between SIGTERM and SIGKILL when the job is stopped.  [default: 30s]",
    ),
    Option(
        ["--hang"],
        section="Job",
        type=click.Choice(["warn", "restart", "off"]),
        help="When ranks hang: name the culprit, start all ranks again as well, or do not watch.  [default: warn]",
    ),
    Option(
        ["--hang-after"],
        section="Job",
        metavar="60s",
        help="How long ranks stand still until they hang.  [default: 60s]",
    ),
    Option(["--dry-run"], section="Job", is_flag=True, help="Print the job and the ranks' variables; start nothing."),
]

FILES = [
    Option(
        ["--working-dir"],
        section="Files",
        metavar="DIR",
        help="Where the ranks start.  [default: this folder, or with --sync-mode the code in the job's own]",
    ),
    Option(
        ["--sync-mode"],
        section="Files",
        metavar="git|rsync|snapshot",
        help="Copy the code to code/NAME of the working dir and start there.  [default: run what is there]",
    ),
    Option(["--sync-source"], section="Files", metavar="URL[@REF]|PATH", help="Where to copy it from."),
    Option(["--data"], section="Files", multiple=True, metavar="VOLUME:/PATH", help="A named volume; repeatable."),
    Option(["--tensorboard"], section="Files", is_flag=True, help="Start a TensorBoard with the job."),
    Option(
        ["--logdir"], section="Files", metavar="DIR", help="What the TensorBoard shows.  [default: the job's folder]"
    ),
    Option(
        ["--checkpoint-dir"],
        section="Files",
        metavar="DIR",
        help="Where paceline.init keeps checkpoints.  [default: the job's folder]",
    ),
    Option(
        ["--log-dir"],
        section="Files",
        envvar="PET_LOG_DIR",
        metavar="DIR",
        help="Where the job's folder with its logs goes.  [default: ~/.local/state/paceline/jobs]",
    ),
]

OUTPUT = [
    Option(
        ["--stdin"],
        section="Output",
        type=click.IntRange(0),
        metavar="RANK",
        help="The local rank that reads this command's standard input, for breakpoint() and input().  [default: none]",
    ),
    Option(["--detach"], section="Output", is_flag=True, help="The same as paceline submit."),
    Option(
        ["-t", "--tee"],
        section="Output",
        envvar="PET_TEE",
        metavar="all|0:3,1:2",
        help="Ranks to show besides local rank 0 (1 stdout, 2 stderr, 3 both), with the prefix [rank N].",
    ),
    Option(
        ["-r", "--redirects"],
        section="Output",
        envvar="PET_REDIRECTS",
        metavar="3|0:1,…",
        help="Streams to keep off the screen.",
    ),
    Option(
        ["--local-ranks-filter"],
        section="Output",
        envvar="PET_LOCAL_RANKS_FILTER",
        metavar="0,1",
        help="Show only these local ranks.",
    ),
]

NODES = [
    Option(
        ["--nnodes", "--workers", "nnodes"],
        section="Several machines",
        envvar="PET_NNODES",
        metavar="N|MIN:MAX",
        help="How many machines take part; MIN:MAX lets them come and go. Without -H or --on start this on each.  "
        "[default: 1, or those that -H names]",
    ),
    Option(
        ["--node-rank"],
        section="Several machines",
        type=click.IntRange(0),
        envvar="PET_NODE_RANK",
        metavar="I",
        help="This machine's number, 0 at the main address.  [default: as they come]",
    ),
    Option(
        ["--master-addr"],
        section="Several machines",
        envvar="PET_MASTER_ADDR",
        metavar="HOST",
        help="Address of node 0.",
    ),
    Option(
        ["--master-port"],
        section="Several machines",
        type=click.IntRange(1, 65535),
        envvar="PET_MASTER_PORT",
        metavar="PORT",
        help="Where the machines meet; on one machine, MASTER_PORT.  [default: 29500; a free one]",
    ),
    Option(
        ["--local-addr"],
        section="Several machines",
        envvar="PET_LOCAL_ADDR",
        metavar="HOST",
        help="Name of this machine among the others.  [default: found out]",
    ),
    Option(
        ["--rdzv-endpoint"],
        section="Several machines",
        envvar="PET_RDZV_ENDPOINT",
        metavar="HOST[:PORT]",
        help="The same as --master-addr and --master-port.",
    ),
    Option(
        ["--rdzv-id"],
        section="Several machines",
        envvar="PET_RDZV_ID",
        metavar="ID",
        help="Identifier that all machines of the job share.  [default: none]",
    ),
    Option(
        ["--rdzv-backend"],
        section="Several machines",
        envvar="PET_RDZV_BACKEND",
        metavar="c10d|static",
        help="Either means paceline's own coordinator.",
    ),
    Option(
        ["--rdzv-conf"],
        section="Several machines",
        envvar="PET_RDZV_CONF",
        metavar="K=V,…",
        help="join_timeout=SECONDS: how long to wait for the others (600); last_call_timeout: for more than MIN (3); "
        "keep_alive_interval times keep_alive_max_attempt: seconds without a packet until a machine is lost (10).",
    ),
    Option(
        ["--standalone"],
        section="Several machines",
        is_flag=True,
        envvar="PET_STANDALONE",
        help="One machine; the default.",
    ),
]

TORCHRUN = [
    Option(
        ["--role"],
        section="torchrun",
        envvar="PET_ROLE",
        metavar="NAME",
        help="ROLE_NAME of the ranks.",
    ),
    Option(
        ["--use-env"],
        section="torchrun",
        is_flag=True,
        help="Give no --local_rank to scripts that declare it.",
    ),
    Option(
        ["--numa-binding"],
        section="torchrun",
        type=click.Choice(["node", "socket", "exclusive", "core-complex"]),
        envvar="PET_NUMA_BINDING",
        help="Let each rank use only the cores near its GPU.",
    ),
    Option(
        ["--virtual-local-rank"],
        section="torchrun",
        is_flag=True,
        envvar="PET_VIRTUAL_LOCAL_RANK",
        help="Each rank sees its GPU alone, and LOCAL_RANK is 0.",
    ),
    Option(
        ["--shutdown-timeout"],
        section="torchrun",
        type=click.FloatRange(0),
        envvar="PET_SHUTDOWN_TIMEOUT",
        metavar="SECONDS",
        help="The same as --grace, in seconds.",
    ),
    Option(
        ["--signals-to-handle"],
        section="torchrun",
        envvar="PET_SIGNALS_TO_HANDLE",
        metavar="SIGTERM,…",
        help="Accepted; SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are always handled.",
    ),
    Option(
        ["--duplicate-stdout-filters"],
        section="torchrun",
        envvar="PET_DUPLICATE_STDOUT_FILTERS",
        metavar="TEXT,…",
        help="Accepted; paceline logs --all --grep shows such lines.",
    ),
    Option(
        ["--duplicate-stderr-filters"],
        section="torchrun",
        envvar="PET_DUPLICATE_STDERR_FILTERS",
        metavar="TEXT,…",
        help="Accepted likewise.",
    ),
    Option(
        ["--event-log-handler"],
        section="torchrun",
        envvar="PET_EVENT_LOG_HANDLER",
        metavar="NAME",
        help="Accepted; paceline events shows what happened to a job.",
    ),
    Option(
        ["--logs-specs"],
        section="torchrun",
        envvar="PET_LOGS_SPECS",
        metavar="NAME",
        help="Accepted; where logs go is --log-dir, what is shown --tee and --redirects.",
    ),
    Option(
        ["--monitor-interval"],
        section="torchrun",
        type=float,
        envvar="PET_MONITOR_INTERVAL",
        metavar="SECONDS",
        help="Accepted; paceline waits for events.",
    ),
]

HOROVODRUN = [
    Option(
        ["--start-timeout"],
        section="horovodrun",
        metavar="10m",
        help="How long to wait for the other machines.  [default: 10m]",
    ),
    Option(
        ["--min-np", "--min-num-proc"],
        section="horovodrun",
        type=click.IntRange(1),
        metavar="N",
        help="Least number of ranks that the job goes on with: the MIN of --nnodes.",
    ),
    Option(
        ["--max-np", "--max-num-proc"],
        section="horovodrun",
        type=click.IntRange(1),
        metavar="N",
        help="Greatest number of ranks: the MAX of --nnodes.",
    ),
    Option(
        ["--host-discovery-script"],
        section="horovodrun",
        metavar="PROGRAM",
        help="Program that prints the present hosts as HOST:SLOTS; called every second.",
    ),
    Option(
        ["--blacklist-cooldown-range", "cooldown"],
        section="horovodrun",
        nargs=2,
        metavar="MIN MAX",
        help="When a host that has failed comes back: after MIN, such as 10s, then twice that each time, up to MAX.",
    ),
    Option(["--output-filename"], section="horovodrun", metavar="DIR", help="The same as --log-dir, on this machine."),
]

SPEC = [*RANKS, *PROGRAM, *JOB, *FILES]

PROGRAM_ARGUMENTS = [
    click.Argument(["script"]),
    click.Argument(["args"], nargs=-1, type=click.UNPROCESSED),
]
