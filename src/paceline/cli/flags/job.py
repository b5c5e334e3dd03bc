"""The flags that say what a job is, for every verb that starts one."""

from __future__ import annotations

import click

from . import completion
from .given import Where
from .option import Count, Number, Section, Whole

# What `run --help` has, in the order in which people need it; `--help-all` has the rest.
USUAL = (
    "--nproc-per-node", "--gpus", "--hosts", "--on", "--nnodes", "--module", "--env", "--secret", "--name",
    "--max-restarts", "--time-limit", "--image", "--data", "--sync-mode", "--sync-source", "--checkpoint-dir",
    "--tensorboard", "--keep-warm", "--tee", "--dry-run", "--rehearse",
)  # fmt: skip
REHEARSED_STEPS = 12  # unless a flag says otherwise

RANKS = Section("Ranks")
PROGRAM = Section("Program")
JOB = Section("Job")
FILES = Section("Files")
OUTPUT = Section("Output")
NODES = Section("Several machines")
TORCHRUN = Section("torchrun")
HOROVODRUN = Section("horovodrun")
TENSORFLOW = Section("TensorFlow")
REHEARSAL = Section("Rehearsal")


class Given(Where):
    """What a command line that starts a job has given: each flag with its declaration, and SCRIPT with its ARGS."""

    script: str = ""
    args: tuple[str, ...] = ()

    ranks = RANKS.text(
        "-n --nproc-per-node ranks",
        envvar="PET_NPROC_PER_NODE",
        metavar="N|auto|gpu|cpu",
        help="Ranks on each machine. auto: one per GPU, or per core without GPUs.  [default: 1; with -H, its slots]",
    )
    total = RANKS.whole(
        "-np total", type=Whole(1), metavar="N", help="Ranks on all machines together, as horovodrun counts."
    )
    gpus = RANKS.whole(
        "--gpus",
        type=Count(0),
        metavar="N",
        help="GPUs of each machine for this job alone; it waits until they are free.  [default: see docs/jobs.md]",
    )
    devices = RANKS.text("--devices", metavar="0,1", help="GPUs of each machine by name, in the place of --gpus.")
    share_devices = RANKS.switch("--share-devices", help="Share the GPUs with other jobs that have this flag.")
    cpus = RANKS.whole("--cpus", type=Whole(1), metavar="N", help="Cores for all ranks of a machine.")
    memory = RANKS.text("--memory", metavar="16Gi", help="Memory that a machine must have.")
    framework = RANKS.text(
        "--framework",
        metavar="NAME",
        shell_complete=completion.frameworks,
        help="Framework whose variables the ranks get.  [default: what the script imports]",
    )
    horovod = RANKS.text(
        "--horovod",
        type=click.Choice(["real", "paceline"]),
        help="Whose horovod the script imports.  [default: the installed one, else paceline's]",
    )
    env = RANKS.texts("--env", metavar="NAME=VALUE", help="Set a variable for the ranks; repeatable.")
    secret = RANKS.texts(
        "--secret",
        metavar="NAME",
        help="Pass a variable of yours to the ranks; its value is never stored or shown; repeatable.",
    )
    setup = RANKS.texts(
        "--setup",
        metavar="COMMAND",
        help="Run a shell command once on each node before its ranks, which get its variables; repeatable.",
    )
    environment = RANKS.text(
        "--environment",
        metavar="SOURCE",
        help="Install the packages of SOURCE on each machine into a folder of paceline's own, and run the ranks with "
        "them: uv.lock, pylock.toml, requirements.txt, pyproject.toml, environment.yml, a folder of wheels, a virtual "
        "environment, here (the packages of this Python), auto (what the project has) or none.",
    )
    pass_index = RANKS.switch(
        "--pass-index", help="Append --process_index I --process_num N (with --framework indexed)."
    )

    module = PROGRAM.switch("-m --module", envvar="PET_MODULE", help="SCRIPT is a module, as in python -m.")
    no_python = PROGRAM.switch("--no-python", envvar="PET_NO_PYTHON", help="SCRIPT is any program on PATH.")
    run_path = PROGRAM.switch(
        "--run-path", envvar="PET_RUN_PATH", help="Accepted; every script runs inside its rank anyway."
    )
    start_method = PROGRAM.text(
        "--start-method",
        type=click.Choice(["fork", "exec", "spawn", "forkserver"]),
        envvar="PET_START_METHOD",
        help="fork, forkserver: from a process that has imported the framework; exec, spawn: each on its own.  "
        "[default: fork]",
    )
    preload = PROGRAM.text("--preload", metavar="MODULE,…", help="More modules to import once, before the fork.")
    keep_warm = PROGRAM.text(
        "--keep-warm",
        metavar="10m|off",
        help="Keep the framework imported after the job; within this time the next job starts at once.",
    )
    verbose = PROGRAM.switch("-v --verbose", help="Say whether a warm process started the job.")

    name = JOB.text(
        "--name",
        metavar="NAME",
        help="The job's name; NAME- takes the next free number.  [default: the script's and five random characters]",
    )
    label = JOB.texts("--label", metavar="NAME=VALUE", help="A label for list --label; repeatable.")
    priority = JOB.whole("--priority", type=int, metavar="N", help="Waiting jobs of a higher priority start first.")
    queue = JOB.text("--queue", metavar="NAME", help="Queue or partition, where the backend has several.")
    time_limit = JOB.text("--time-limit", metavar="2h", help="Stop the job after this time.")
    ttl = JOB.text("--ttl", metavar="7d", help="Delete the job this long after its end.")
    image = JOB.text("--image", metavar="IMAGE", help="Container image in which the ranks run.")
    option = JOB.texts("--option", metavar="NAME=VALUE", help="An option of the backend; repeatable.")
    max_restarts = JOB.whole(
        "--max-restarts",
        type=Whole(0),
        envvar="PET_MAX_RESTARTS",
        metavar="N",
        help="How often all ranks start again on failure.  [default: 0]",
    )
    grace = JOB.text(
        "--grace", metavar="30s", help="Time between SIGTERM and SIGKILL when the job is stopped.  [default: 30s]"
    )
    hang = JOB.text(
        "--hang",
        type=click.Choice(["warn", "restart", "off"]),
        help="When ranks hang: name the culprit, start all ranks again as well, or do not watch.  [default: warn]",
    )
    hang_after = JOB.text(
        "--hang-after", metavar="60s", help="How long ranks stand still before that is a hang.  [default: 60s]"
    )
    dry_run = JOB.switch("--dry-run", help="Print job and variables, and start nothing.")

    working_dir = FILES.text(
        "--working-dir",
        metavar="DIR",
        help="Where the ranks start.  [default: this folder, or with --sync-mode the code in the job's own]",
    )
    sync_mode = FILES.text(
        "--sync-mode",
        metavar="git|rsync|snapshot",
        help="Copy the code, and start there; it is in code/NAME of the working dir.  [default: run what is there]",
    )
    sync_source = FILES.text("--sync-source", metavar="URL[@REF]|PATH", help="Where to copy the code from.")
    data = FILES.texts("--data", metavar="VOLUME:/PATH", help="A named volume; repeatable.")
    tensorboard = FILES.switch("--tensorboard", help="Start a TensorBoard with the job.")
    logdir = FILES.text("--logdir", metavar="DIR", help="Folder that the TensorBoard shows.  [default: the job's]")
    checkpoint_dir = FILES.text(
        "--checkpoint-dir", metavar="DIR", help="Where paceline.init keeps checkpoints.  [default: the job's folder]"
    )
    log_dir = FILES.text(
        "--log-dir",
        envvar="PET_LOG_DIR",
        metavar="DIR",
        help="Where the job's folder with its logs goes.  [default: ~/.local/state/paceline/jobs]",
    )

    stdin = OUTPUT.whole(
        "--stdin",
        type=Whole(0),
        metavar="RANK",
        help="The local rank that reads this command's standard input, for breakpoint() and input().  [default: none]",
    )
    detach = OUTPUT.switch("--detach", help="The same as paceline submit.")
    tee = OUTPUT.text(
        "-t --tee",
        envvar="PET_TEE",
        metavar="all|0:3,1:2",
        help="Ranks to show besides local rank 0; 1 is stdout, 2 stderr, 3 both. Lines begin with [rank N].",
    )
    redirects = OUTPUT.text(
        "-r --redirects", envvar="PET_REDIRECTS", metavar="3|0:1,…", help="Streams to keep off the screen."
    )
    local_ranks_filter = OUTPUT.text(
        "--local-ranks-filter", envvar="PET_LOCAL_RANKS_FILTER", metavar="0,1", help="Show only these local ranks."
    )

    nnodes = NODES.text(
        "--nnodes --workers nnodes",
        envvar="PET_NNODES",
        metavar="N|MIN:MAX",
        help="How many machines take part; MIN:MAX lets them come and go. Without -H or --on start this on each.  "
        "[default: 1, or those that -H names]",
    )
    node_rank = NODES.whole(
        "--node-rank",
        type=Whole(0),
        envvar="PET_NODE_RANK",
        metavar="I",
        help="This machine's number, 0 at the main address.  [default: as they come]",
    )
    master_addr = NODES.text("--master-addr", envvar="PET_MASTER_ADDR", metavar="HOST", help="Address of node 0.")
    master_port = NODES.whole(
        "--master-port",
        type=Whole(1, 65535),
        envvar="PET_MASTER_PORT",
        metavar="PORT",
        help="Where the machines meet; on one machine, MASTER_PORT.  [default: 29500; a free one]",
    )
    local_addr = NODES.text(
        "--local-addr",
        envvar="PET_LOCAL_ADDR",
        metavar="HOST",
        help="Name of this machine among the others.  [default: found out]",
    )
    rdzv_endpoint = NODES.text(
        "--rdzv-endpoint",
        envvar="PET_RDZV_ENDPOINT",
        metavar="HOST[:PORT]",
        help="The same as --master-addr and --master-port.",
    )
    rdzv_id = NODES.text(
        "--rdzv-id",
        envvar="PET_RDZV_ID",
        metavar="ID",
        help="Identifier that all machines of the job share.  [default: none]",
    )
    rdzv_backend = NODES.text(
        "--rdzv-backend",
        envvar="PET_RDZV_BACKEND",
        metavar="c10d|static",
        help="Accepted; either means paceline's own coordinator.",
    )
    rdzv_conf = NODES.text(
        "--rdzv-conf",
        envvar="PET_RDZV_CONF",
        metavar="K=V,…",
        help="join_timeout=SECONDS: how long to wait for the others (600); last_call_timeout: for more than MIN (3); "
        "keep_alive_interval times keep_alive_max_attempt: seconds without a packet until a machine is lost (10).",
    )
    standalone = NODES.switch("--standalone", envvar="PET_STANDALONE", help="One machine; the default.")

    role = TORCHRUN.text("--role", envvar="PET_ROLE", metavar="NAME", help="Value of ROLE_NAME for the ranks.")
    use_env = TORCHRUN.switch("--use-env", help="Give no --local_rank to scripts that declare it.")
    numa_binding = TORCHRUN.text(
        "--numa-binding",
        type=click.Choice(["node", "socket", "exclusive", "core-complex"]),
        envvar="PET_NUMA_BINDING",
        help="Let each rank use only the cores near its GPU.",
    )
    virtual_local_rank = TORCHRUN.switch(
        "--virtual-local-rank",
        envvar="PET_VIRTUAL_LOCAL_RANK",
        help="Each rank sees its GPU alone, and LOCAL_RANK is 0.",
    )
    shutdown_timeout = TORCHRUN.number(
        "--shutdown-timeout",
        type=Number(0, 10**9),
        envvar="PET_SHUTDOWN_TIMEOUT",
        metavar="SECONDS",
        help="The same as --grace, in seconds.",
    )
    signals_to_handle = TORCHRUN.text(
        "--signals-to-handle",
        envvar="PET_SIGNALS_TO_HANDLE",
        metavar="SIGTERM,…",
        help="Accepted; SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are always handled.",
    )
    duplicate_stdout_filters = TORCHRUN.text(
        "--duplicate-stdout-filters",
        envvar="PET_DUPLICATE_STDOUT_FILTERS",
        metavar="TEXT,…",
        help="Accepted; paceline logs --all --grep shows such lines.",
    )
    duplicate_stderr_filters = TORCHRUN.text(
        "--duplicate-stderr-filters",
        envvar="PET_DUPLICATE_STDERR_FILTERS",
        metavar="TEXT,…",
        help="Accepted; paceline logs --all --grep shows such lines.",
    )
    event_log_handler = TORCHRUN.text(
        "--event-log-handler",
        envvar="PET_EVENT_LOG_HANDLER",
        metavar="NAME",
        help="Accepted; paceline events shows what happened to a job.",
    )
    logs_specs = TORCHRUN.text(
        "--logs-specs",
        envvar="PET_LOGS_SPECS",
        metavar="NAME",
        help="Accepted; where logs go is --log-dir, what is shown --tee and --redirects.",
    )
    monitor_interval = TORCHRUN.number(
        "--monitor-interval",
        type=Number(0),
        envvar="PET_MONITOR_INTERVAL",
        metavar="SECONDS",
        help="Accepted; paceline waits for events.",
    )

    start_timeout = HOROVODRUN.text(
        "--start-timeout", metavar="10m", help="How long to wait for the other machines.  [default: 10m]"
    )
    min_np = HOROVODRUN.whole(
        "--min-np --min-num-proc",
        type=Whole(1),
        metavar="N",
        help="Least number of ranks that the job goes on with: the MIN of --nnodes.",
    )
    max_np = HOROVODRUN.whole(
        "--max-np --max-num-proc", type=Whole(1), metavar="N", help="Greatest number of ranks: the MAX of --nnodes."
    )
    host_discovery_script = HOROVODRUN.text(
        "--host-discovery-script",
        metavar="PROGRAM",
        help="Program that prints the present hosts as HOST:SLOTS; called every second.",
    )
    cooldown = HOROVODRUN.pair(
        "--blacklist-cooldown-range cooldown",
        metavar="MIN MAX",
        help="When a host that has failed comes back: after MIN, such as 10s, then twice that each time, up to MAX.",
    )
    output_filename = HOROVODRUN.text(
        "--output-filename", metavar="DIR", help="The same as --log-dir, on this machine."
    )

    chief = TENSORFLOW.whole(
        "--chief",
        is_flag=False,
        flag_value=1,
        type=Whole(0, 1),
        metavar="1",
        help="A chief besides the --workers, as rank 0; TF_CONFIG says so.",
    )
    ps = TENSORFLOW.whole("--ps", type=Whole(0), metavar="N", help="Parameter servers besides the --workers.")
    evaluator = TENSORFLOW.whole(
        "--evaluator",
        is_flag=False,
        flag_value=1,
        type=Whole(0, 1),
        metavar="1",
        help="An evaluator besides the --workers, as the last rank.",
    )

    rehearse = REHEARSAL.text(
        "--rehearse",
        metavar="N",
        help="Compare some steps of N ranks here; they run on cores, and it ends with what is wrong between them.",
    )
    rehearse_steps = REHEARSAL.whole(
        "--rehearse-steps",
        type=Whole(2),
        metavar="S",
        help="Batches of each pass over the data; the rehearsal ends after three times as many steps.  "
        f"[default: {REHEARSED_STEPS}]",
    )
    rehearse_seed = REHEARSAL.whole(
        "--rehearse-seed", type=Whole(0), metavar="SEED", help="Which rank is killed, and when.  [default: at random]"
    )


SPEC = [*RANKS, *PROGRAM, *JOB, *FILES]

PROGRAM_ARGUMENTS = [
    click.Argument(["script"]),
    click.Argument(["args"], nargs=-1, type=click.UNPROCESSED),
]
REST = [*NODES, *TORCHRUN, *HOROVODRUN, *TENSORFLOW, *PROGRAM_ARGUMENTS]
