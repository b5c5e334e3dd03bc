"""Files of other tools, and the job files that they become."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.typed import refusal, typed

from paceline.job.reading import read

if TYPE_CHECKING:
    from tests.conftest import Paceline

SBATCH = """\
#!/bin/bash
#SBATCH --job-name=ddp  # its name
#SBATCH -N 2
#SBATCH --gres=gpu:4
#SBATCH --time=12:00:00
set -euo pipefail
module load cuda/12.4
if [ -f env.sh ]; then
  source env.sh
fi
export NCCL_DEBUG=INFO
nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
head_ip=$(srun --nodes=1 -w "${nodes[0]}" hostname --ip-address)
GPUS=4
cd $SLURM_SUBMIT_DIR
srun torchrun --nnodes 2 --nproc_per_node $GPUS --rdzv_id $RANDOM --rdzv_endpoint $head_ip:29500 t.py --lr 1 > log
echo done
"""
SKY = """\
name: mnist
num_nodes: 2
workdir: .
resources: {accelerators: "A100:8", cpus: 16+, memory: 64+, use_spot: true}
envs: {LR: 0.1, WANDB_API_KEY: }
secrets: {HF_TOKEN: }
setup: |
  conda activate x
  pip install -r requirements.txt
run: |
  MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
  torchrun --nnodes=$SKYPILOT_NUM_NODES --nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE \\
    --node_rank=$SKYPILOT_NODE_RANK --master_addr=$MASTER_ADDR t.py --lr $LR
"""
DSTACK = """\
type: task
name: train
nodes: 2
python: 3.12
env: [HF_TOKEN, A=1]
commands:
  - pip install -r requirements.txt
  - torchrun --nproc-per-node=$DSTACK_GPUS_PER_NODE --node-rank=$DSTACK_NODE_RANK --nnodes=$DSTACK_NODES_NUM t.py
resources: {gpu: "24GB:4", shm_size: 16GB}
"""
POD = """
        spec:
          containers:
            - name: pytorch
              image: i:1
              command: [torchrun, t.py, --lr, "0.1"]
              env: [{name: A, value: "1"}, {name: B, valueFrom: {secretKeyRef: {name: s, key: k}}}]
              resources: {limits: {nvidia.com/gpu: 2, cpu: 500m, memory: 8Gi}}
              volumeMounts: [{name: d, mountPath: /data}, {name: shm, mountPath: /dev/shm}]
          volumes:
            - {name: d, persistentVolumeClaim: {claimName: pvc}}
            - {name: shm, emptyDir: {medium: Memory, sizeLimit: 1Gi}}
"""
PYTORCHJOB = f"""\
apiVersion: v1
kind: Service
---
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {{name: pt, namespace: team}}
spec:
  nprocPerNode: "2"
  runPolicy: {{ttlSecondsAfterFinished: 3600, backoffLimit: 2}}
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      template: {POD}
    Worker:
      replicas: 3
      template: {POD}
"""
MPIJOB = """\
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata: {name: pi}
spec:
  slotsPerWorker: 1
  mpiReplicaSpecs:
    Launcher: {template: {spec: {containers: [{image: i, command: [mpirun], args: [-n, "2", -x, A=1, python, t.py]}]}}}
    Worker: {replicas: 2, template: {spec: {containers: [{image: i, resources: {limits: {cpu: 1}}}]}}}
"""
TRAINJOB = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: tj, labels: {kueue.x-k8s.io/queue-name: q}}
spec:
  runtimeRef: {name: torch-distributed}
  trainer: {image: i, numNodes: 2, numProcPerNode: 4, command: [bash, -c, "pip install x\\ntorchrun /w/t.py"]}
"""
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: bf16
num_machines: 1
num_processes: 4
"""
ARENA = """\
version: 0.1.0
name: llm
framework: {name: pytorch, options: {nproc_per_node: 8}}
image: i
run: torchrun t.py --epochs 10
worker: {replicas: 3, resources: {nvidia.com/gpu: 8, memory: 128Gi}}
envs: {NCCL_DEBUG: INFO}
storages: [{name: d, mount_path: /data, pvc: p}, {name: shm, shm: 64Gi}]
lifecycle: {active_deadline: 2h}
"""
# file → what it is, the job, and what is said of the rest
FILES: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "job.sbatch": (
        SBATCH,
        "a batch script of Slurm",
        {
            "name": "ddp", "script": "t.py", "args": ["--lr", "1"], "nodes": 2, "ranks": 4, "devices": 4,
            "env": {"NCCL_DEBUG": "INFO"}, "time_limit": "12h", "backend": "slurm",
            "setup": ["module load cuda/12.4", "if [ -f env.sh ]; then\nsource env.sh\nfi"],
        },
        [
            "left out: > log; each rank has a log file, see paceline logs JOB",
            "left out: echo done; a job runs one program",
        ],
    ),
    "sky.yaml": (
        SKY,
        "a task of SkyPilot",
        {
            "name": "mnist", "script": "t.py", "args": ["--lr", "0.1"], "nodes": 2, "ranks": "gpu", "devices": 8,
            "cpus": 16, "memory": "64Gi", "env": {"LR": "0.1"}, "secrets": ["WANDB_API_KEY", "HF_TOKEN"],
            "setup": "conda activate x\npip install -r requirements.txt", "code": {"mode": "snapshot"},
        },
        ["left out: A100 of its accelerators; --on says which machines", "left out: resources.use_spot"],
    ),
    "dstack.yml": (
        DSTACK,
        "a configuration of dstack",
        {
            "name": "train", "script": "t.py", "nodes": 2, "ranks": "gpu", "devices": 4, "env": {"A": "1"},
            "secrets": ["HF_TOKEN"], "setup": "pip install -r requirements.txt",
        },
        ["left out: python, resources.shm_size"],
    ),
    "pytorchjob.yaml": (
        PYTORCHJOB,
        "a PyTorchJob of Kubeflow",
        {
            "name": "pt", "script": "t.py", "args": ["--lr", "0.1"], "nodes": 4, "ranks": 2, "devices": 2, "cpus": 1,
            "memory": "8Gi", "image": "i:1", "env": {"A": "1"}, "secrets": ["B"], "data": ["pvc:/data"],
            "max_restarts": 2, "ttl": "1h", "backend": "kubernetes", "options": {"shm": "1Gi"},
        },
        [
            "left out: the Secret of B (paceline submit takes your own variable of that name)",
            "left out: Service, of the same file",
            "start it with: paceline submit --namespace team job.yaml, where job.yaml is this file",
        ],
    ),
    "mpijob.yaml": (
        MPIJOB,
        "an MPIJob of Kubeflow",
        {
            "name": "pi", "script": "t.py", "framework": "mpi", "nodes": 2, "cpus": 1, "image": "i",
            "env": {"A": "1"}, "backend": "kubernetes",
        },
        [],
    ),
    "trainjob.yaml": (
        TRAINJOB,
        "a TrainJob of Kubeflow",
        {
            "name": "tj", "script": "/w/t.py", "nodes": 2, "ranks": 4, "image": "i", "setup": "pip install x",
            "queue": "q", "backend": "kubernetes",
        },
        ["left out: spec.runtimeRef"],
    ),
    "accelerate.yaml": (
        ACCELERATE,
        "a configuration of accelerate",
        {"script": "train.py", "ranks": 4, "env": {"ACCELERATE_MIXED_PRECISION": "bf16"}},
        ["the file names no script; write yours in the place of train.py"],
    ),
    "arena.yaml": (  # the master, which it does not name, is one more
        ARENA,
        "a job of Arena v2",
        {
            "name": "llm", "script": "t.py", "args": ["--epochs", "10"], "nodes": 4, "ranks": 8, "devices": 8,
            "memory": "128Gi", "image": "i", "env": {"NCCL_DEBUG": "INFO"}, "data": ["p:/data"], "time_limit": "2h",
            "backend": "kubernetes", "options": {"shm": "64Gi"},
        },
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_a_job_file(paceline: Paceline, name: str) -> None:
    text, what, job, notes = FILES[name]
    (paceline.folder / name).write_text(text)
    done = typed(paceline, "explain", name)
    assert (done.returncode, yaml.safe_load(done.stdout)) == (0, job), done.stderr
    said = [line.removeprefix("paceline: ") for line in done.stderr.splitlines()]
    assert said[0] == f"{name} is {what}"
    assert [line for line in said[1:] if "has no effect" not in line] == notes
    written = typed(paceline, "explain", name, "-o", "j.yaml")
    assert written.stderr.splitlines()[-1].startswith("paceline: j.yaml is written; start it with: paceline submit ")
    assert (paceline.folder / "j.yaml").read_text() == done.stdout
    assert read(paceline.folder / "j.yaml").script == job["script"]
    assert refusal(paceline, "explain", name, "-o", "j.yaml") == "-o j.yaml: it exists; name another file"

    submitted = typed(paceline, "submit", "--max-restarts", "3", name)
    assert (submitted.returncode, submitted.stdout) == (2, done.stdout)
    last = submitted.stderr.splitlines()[-1]
    assert f"{name} is {what}; the job file that does the same is printed above: paceline explain {name} -o" in last
    assert "--max-restarts 3 job.yaml starts it" in last
    shown = typed(paceline, "run", "--tee", "all", name).stderr.splitlines()[-1]
    assert ", and paceline run " in shown and "-t all job.yaml starts it" in shown
    assert typed(paceline, "list", "-A", "-o", "json").stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("line", "job", "rest"),
    [
        ("torchrun --nproc_per_node 2 -t 3 t.py --lr 1", {"script": "t.py", "args": ["--lr", "1"], "ranks": 2},
         "run -t 3"),
        ("module load x && torchrun t.py", {"script": "t.py", "setup": "module load x"}, "submit"),
        ("horovodrun -np 4 -H a:2,b:2 t.py", {"script": "t.py", "framework": "horovod"}, "submit -np 4 -H a:2,b:2"),
        ("torchrun t.py --out $SCRATCH/x", {"command": "sh", "args": ["-c", "exec python t.py --out $SCRATCH/x"]},
         "submit"),
        ("A=1 torchrun t.py", {"script": "t.py", "env": {"A": "1"}}, "submit"),
    ],
)  # fmt: skip
def test_a_line_becomes_a_job_file(paceline: Paceline, line: str, job: dict[str, Any], rest: str) -> None:
    done = typed(paceline, "explain", "-o", "job.yaml", line)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load((paceline.folder / "job.yaml").read_text()) == job
    assert done.stderr == f"paceline: job.yaml is written; start it with: paceline {rest} job.yaml\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("echo it", "echo is no launcher that paceline knows"),
        ("arena list", "arena list: it starts no job"),
        ("if true; then torchrun t.py; fi", "the launcher stands in a loop or a condition; "),
        ("torchrun --nproc_per_node $N t.py", "-n $N: its value is not known here; write it"),
    ],
)
def test_a_line_that_has_no_job_file(paceline: Paceline, line: str, said: str) -> None:
    assert refusal(paceline, "explain", "-o", "job.yaml", line).startswith(said)
    assert refusal(paceline, "explain", line, "-o", "job.txt").startswith("-o job.txt: a job file ends in .yaml; ")
    assert not (paceline.folder / "job.yaml").exists()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.yaml", "type: service\ncommands: [x]\n", "t.yaml is a configuration of dstack: type service: "),
        ("t.yaml", "run: torchrun a.py; torchrun b.py\nnum_nodes: 1\n", "t.yaml is a task of SkyPilot: it starts 2 "),
        ("t.yaml", "run: for s in 1 2; do torchrun a.py; done\nnum_nodes: 1\n", "t.yaml is a task of SkyPilot: the "),
        ("t.yaml", "run: torchrun $X a.py\nnum_nodes: 1\n", "t.yaml is a task of SkyPilot: torchrun $X a.py: a "),
        ("t.yaml", "apiVersion: v1\nkind: MPIJob\nspec: 3\n", "t.yaml is an MPIJob of Kubeflow, and cannot be read "),
        (
            "t.sh",
            "#SBATCH -N 1\nN=1\nN=$(x)\nsrun torchrun --nproc_per_node $N t.py",
            "t.sh is a batch script of Slurm: -n $N: ",
        ),
        ("t.sh", "#SBATCH --nope\nsrun python t.py\n", "t.sh is a batch script of Slurm: sbatch has no flag --nope"),
        ("t.yaml", "type: task\ncommands: torchrun t.py\n", "t.yaml is a configuration of dstack: commands is one "),
        ("t.yaml", "run: a\nenvs: {}\n---\nrun: b\nenvs: {}\n", "t.yaml holds 2 jobs; write each into a file of its"),
        (
            "t.yaml",
            PYTORCHJOB.replace("t.py", "m.py", 1),
            "t.yaml is a PyTorchJob of Kubeflow: Master and Worker have ",
        ),
        ("t.yaml", "script: t.py\n", "t.yaml is no file of a tool that paceline knows; paceline submit t.yaml starts"),
    ],
)
def test_a_file_that_cannot_be_read(paceline: Paceline, name: str, text: str, said: str) -> None:
    (paceline.folder / name).write_text(text)
    assert refusal(paceline, "explain", name).startswith(said)


def job_of(paceline: Paceline, name: str, text: str) -> tuple[dict[str, Any], list[str]]:
    """The job file that a file becomes, and what is said of the rest."""
    (paceline.folder / name).write_text(text, encoding="utf-8")
    done = typed(paceline, "explain", name)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout), [line.removeprefix("paceline: ") for line in done.stderr.splitlines()][1:]


@pytest.mark.parametrize(
    ("lines", "folder", "setup"),
    [
        ("cd a; make; cd b && pip install .", "{start}/a/b", ["cd {start}", "cd a", "make", "cd b", "pip install ."]),
        ("make; cd a", "{start}/a", ["cd {start}", "make"]),
        ("cd /x; cd y || exit 1; make", "/x/y", "make"),
        ("cd a; make; cd $SLURM_SUBMIT_DIR; make", None, ["cd a", "make", "cd {start}", "make"]),
        ('cd "$SLURM_SUBMIT_DIR/sub"', "{start}/sub", None),
        ("cd $SCRATCH; tar x; cd /code", "/code", ["cd {start}", "cd $SCRATCH", "tar x"]),
    ],
)
def test_the_last_cd_is_where_ranks_start(paceline: Paceline, lines: str, folder: str | None, setup: Any) -> None:
    job, notes = job_of(paceline, "job.sbatch", f"#SBATCH -N 1\n{lines}\nsrun torchrun t.py\n")
    start = str(paceline.folder)
    setup = [it.format(start=start) for it in setup] if isinstance(setup, list) else setup
    folder = folder and folder.format(start=start)
    assert (job.get("working_dir"), job.get("setup"), notes) == (folder, setup, [])


def test_pushd_is_followed_and_a_cd_in_a_condition_is_named(paceline: Paceline) -> None:
    def of(lines: str) -> tuple[Any, Any, list[str]]:
        job, notes = job_of(paceline, "job.sbatch", f"#SBATCH -N 1\n{lines}\nsrun torchrun t.py\n")
        return job.get("working_dir"), job.get("setup"), notes

    start = str(paceline.folder)
    assert of("pushd src > /dev/null") == (f"{start}/src", None, [])
    assert of("pushd src\nmake\npopd") == (None, ["pushd src", "make"], [])
    assert of("popd")[2] == ["left out: popd; name the folder with --working-dir"]
    *_, notes = of("if [ -d src ]; then\n  cd src\nfi")
    assert notes == ["whether the script enters a folder with cd src is not known here; see --working-dir"]
    assert of("(cd src; make)")[2] == []


@pytest.mark.parametrize(
    ("lines", "args", "setup"),
    [
        ('V=""; V="$V --lr 0.1"; V+=" -x"', ["--lr", "0.1", "-x"], None),
        ("export V=1; export V=$V:2", ["1:2"], None),
        ("V=64; V=$((V*2))", None, ["export V=64", "export V=$((V*2))"]),
        ("export V=1; export V=$((1 + RANDOM))", None, ["export V=1", "export V=$((1 + RANDOM))"]),
        ("V=a; if x; then V=b; fi", None, ["export V=a", "if x; then V=b; fi\nexport V"]),
        ("V=2; ((V*=2))", None, ["export V=2", "((V*=2))\nexport V"]),
        ("V=a; case $X in b) V=c;; esac", None, ["export V=a", "case $X in b)V=c ;; esac\nexport V"]),
        ("read V < f", None, "read V < f\nexport V"),
        ("W=1; export W; V=$(x)", None, ["export W=1", "export W", "export V=$(x)"]),
        ('W="1 2"; V=$W', None, ['export W="1 2"', "export V=$W"]),
        ("cd /x && V=2", ["2"], None),
    ],
)
def test_a_variable_has_the_value_that_it_is_given_last(
    paceline: Paceline, lines: str, args: list[str] | None, setup: Any
) -> None:
    job, _ = job_of(paceline, "job.sbatch", f"#SBATCH -N 1\n{lines} && srun torchrun t.py $V\n")
    assert (job["args"], job.get("setup")) == (args or ["-c", "exec python t.py $V"], setup)


@pytest.mark.parametrize(
    ("lines", "setup"),
    [
        ("[ -f e ] && source e; make", ["if [ -f e ]; then\nsource e\nfi", "make"]),
        ("[ -f e ] && export V=1", "if [ -f e ]; then\nexport V=1\nfi\nexport V"),
        ("a && b && c | d", "if a && b; then\nc | d\nfi"),
        ("a && b || c", "a && b || c"),
        ("for i in 1; do a && b; done", "for i in 1; do a && b; done"),
        ("a && b &&", ["a", "b"]),
    ],
)
def test_a_command_that_depends_on_another_is_no_failure_without_it(paceline: Paceline, lines: str, setup: Any) -> None:
    job, _ = job_of(paceline, "job.sbatch", f"#SBATCH -N 1\n{lines}\nsrun torchrun t.py $V\n")
    assert job["setup"] == setup


def test_flags_of_words_that_a_script_puts_together(paceline: Paceline) -> None:
    lines = "L='torchrun --nproc_per_node 4'\nC='t.py -x'\nsrun bash -c \"$L $C\"\n"
    job, _ = job_of(paceline, "job.sbatch", f"#SBATCH -N 1\n{lines}")
    assert job == {"script": "t.py", "args": ["-x"], "ranks": 4, "backend": "slurm"}


MASTER = """\
        spec:
          containers:
            - {name: log, image: tail}
            - name: pytorch
              image: i:2
              command: [torchrun, t.py, --lr, "0.1"]
              env: [{name: A, value: "2"}, {name: IP, valueFrom: {fieldRef: {fieldPath: p}}}]
              resources: {limits: {cpu: 500m, memory: 8Gi}}
              volumeMounts: [{name: d, mountPath: /ckpt, subPath: s, readOnly: true}]
          volumes: [{name: d, persistentVolumeClaim: {claimName: ckpt}}]
"""


def test_what_only_one_role_has_is_named(paceline: Paceline) -> None:
    job, notes = job_of(paceline, "j.yaml", PYTORCHJOB.replace(POD, f"\n{MASTER}", 1))
    assert (job["image"], job["env"], job["data"]) == ("i:1", {"A": "1"}, ["pvc:/data"])
    for name in ("container log", "IP (its value is from fieldRef)", "subPath of volume d", "readOnly of volume d",
                 "image i:2", "env A", "data ckpt:/ckpt"):  # fmt: skip
        assert f"{name} of the Master" in notes[0]
    assert "that the Master has no GPU" in notes[0]

    text = MPIJOB.replace("-x, A=1", "-x, LR").replace("[mpirun]", "[mpirun], env: [{name: LR, value: '1'}]")
    job, notes = job_of(paceline, "j.yaml", text.replace("{image: i, command", "{image: j, command"))
    assert (job["env"], notes) == ({"LR": "1"}, ["left out: image j of the Launcher"])


def test_what_an_elastic_job_says_counts(paceline: Paceline) -> None:
    policy = (
        "{rdzvBackend: c10d, minReplicas: 1, maxReplicas: 4, maxRestarts: 9, nProcPerNode: 8, metrics: [{type: R}]}"
    )
    text = PYTORCHJOB.replace('nprocPerNode: "2"', f"elasticPolicy: {policy}")
    job, notes = job_of(paceline, "j.yaml", text)
    assert (job["nodes"], job["ranks"], job["max_restarts"]) == ("1:4", 8, 9)
    assert "elasticPolicy.metrics" in notes[0]


def test_references_of_kubernetes_are_replaced(paceline: Paceline) -> None:
    env = "env: [{name: A, value: x}, {name: D, value: /$(A)}]"
    text = TRAINJOB.partition("command:")[0] + f"{env}, command: [torchrun, t.py, $(D)/y, $$(A), $(NO)]}}\n"
    job, _ = job_of(paceline, "j.yaml", text)
    assert (job["env"], job["args"]) == ({"A": "x", "D": "/x"}, ["/x/y", "$(A)", "$(NO)"])


def test_what_a_batch_script_may_begin_with(paceline: Paceline) -> None:
    text = "\ufeff#!/bin/bash\n#SBATCH --array=0-3\nsrun torchrun t.py\nif x; then\necho\nfi\n"
    job, notes = job_of(paceline, "my job.sbatch", text)
    assert job["options"] == {"array": "0-3"}
    assert notes == ["left out: if x; then echo; fi; a job runs one program"]
    assert "paceline explain 'my job.sbatch' -o job.yaml" in typed(paceline, "submit", "my job.sbatch").stderr


def test_a_copy_of_the_code_is_where_cd_begins(paceline: Paceline) -> None:
    run = "  cd examples\n  pip install .\n  torchrun t.py\n"
    job, notes = job_of(paceline, "sky.yaml", f"num_nodes: 2\nworkdir: .\nrun: |\n{run}")
    assert job == {
        "command": "sh", "args": ["-c", "cd examples && exec python t.py"], "nodes": 2,
        "setup": ["cd examples", "pip install ."], "code": {"mode": "snapshot"},
    }  # fmt: skip
    assert notes == []


def test_variables_of_other_tools(paceline: Paceline) -> None:
    run = """  G=$SKYPILOT_NUM_GPUS_PER_NODE
  echo $SKYPILOT_NODE_IPS
  N=$SKYPILOT_NUM_GPUS_PER_NODE torchrun --nproc_per_node $G t.py --gpus $G --rank $SKYPILOT_NODE_RANK
"""
    job, notes = job_of(paceline, "sky.yaml", f"num_nodes: 2\nrun: |\n{run}")
    program = 'exec python t.py --gpus "$SKYPILOT_NUM_GPUS_PER_NODE" --rank $SKYPILOT_NODE_RANK'
    assert job == {
        "command": "sh", "args": ["-c", program], "nodes": 2, "ranks": "gpu", "setup": "echo $SKYPILOT_NODE_IPS",
    }  # fmt: skip
    assert notes == [
        "left out: N=$SKYPILOT_NUM_GPUS_PER_NODE; its value is not known here",
        "no job of paceline sets $SKYPILOT_NODE_IPS, $SKYPILOT_NODE_RANK, $SKYPILOT_NUM_GPUS_PER_NODE; "
        "write their values",
    ]


def test_the_setup_of_a_task_runs_where_the_task_starts(paceline: Paceline) -> None:
    task = "setup: pip install -r r.txt\nrun: |\n  cd sub\n  torchrun --nproc_per_node=2 train.py\n"
    (paceline.folder / "sky.yaml").write_text(task)
    job = yaml.safe_load(typed(paceline, "explain", "sky.yaml").stdout)
    assert job["setup"] == [f"cd {paceline.folder}", "pip install -r r.txt"]
    assert job["working_dir"] == str(paceline.folder / "sub")


def test_a_batch_script_keeps_what_slurm_is_told_of_its_job(paceline: Paceline) -> None:
    text = "#!/bin/bash\n#SBATCH --no-requeue\n\n# of all\n#SBATCH --mem=0\nsrun torchrun t.py\n#SBATCH -N 4\n"
    job, _ = job_of(paceline, "job.sbatch", text)
    assert job["options"]["slurm"] == {"no-requeue": True, "mem": "0"}
    assert job.get("nodes", 1) == 1, "Slurm reads no option behind the first command"
