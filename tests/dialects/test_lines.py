"""Lines of the documents of other tools, and the lines of paceline that they become."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.dialects.tools import explained
from paceline.cli.main import cli
from paceline.job.errors import UserError

PAGES = Path(__file__).resolve().parents[2] / "docs"
LINES = {
    # torchrun, of its reference and tutorials
    "torchrun --standalone --nproc-per-node=4 train.py --lr 0.1": "run --standalone -n 4 train.py --lr 0.1",
    "torchrun --nnodes=2 --nproc_per_node=8 --rdzv_id=100 --rdzv_backend=c10d --rdzv_endpoint=h:29400 train.py": (
        "run --nnodes 2 -n 8 --rdzv-id 100 --rdzv-endpoint h:29400 train.py"
    ),
    "torchrun --nnodes=1:4 --nproc-per-node=gpu --max-restarts=3 -t3 -r 0:1 -m pkg.train a": (
        "run --nnodes 1:4 -n gpu --max-restarts 3 -t 3 -r 0:1 -m pkg.train a"
    ),
    "CUDA_VISIBLE_DEVICES=0,1 OMP_NUM_THREADS=4 torchrun --nproc-per 2 train.py": (
        "CUDA_VISIBLE_DEVICES=0,1 OMP_NUM_THREADS=4 paceline run -n 2 train.py"
    ),
    "python -m torch.distributed.run --monitor-interval 1 --shutdown-timeout 20 --no_python ./train.sh": (
        "run --grace 20s --no-python ./train.sh"
    ),
    "torchrun --rdzv-backend etcd train.py": "! --rdzv-backend etcd: paceline's agents find each other",
    "torchrun --nproc 2 -- train.py -x": "run -n 2 train.py -x",
    "torchrun --nnodse 2 train.py": "! torchrun has no flag --nnodse; did you mean --nnodes?",
    "torchrun --nnodes": "! torchrun: --nnodes needs a value",
    "torchrun --on lab --nproc_per_node 2 train.py": "run --on lab -n 2 train.py",
    "srun -N 0 -n 4 -G 4 train.py": "run --on slurm --nnodes 0 -np 4 --gpus 4 train.py",
    # python -m torch.distributed.launch
    "python -m torch.distributed.launch --nproc_per_node=2 --use_env train.py": "run -n 2 --use-env train.py",
    "python3 -u -m torch.distributed.launch --nproc_per_node=2 --nnodes=2 --node_rank=1 --master_addr=10.0.0.1 "
    "--master_port=1234 train.py": (
        "run -n 2 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 1234 train.py"
    ),
    # Horovod
    "horovodrun -np 4 -H localhost:4 python train.py": ("run -np 4 -H localhost:4 --framework horovod python train.py"),
    "horovodrun -np 16 --hostfile hosts --ssh-port 12345 --start-timeout 60 python train.py": (
        "run -np 16 --hostfile hosts -p 12345 --start-timeout 60s --framework horovod python train.py"
    ),
    "horovodrun -np 4 --fusion-threshold-mb 32 --cycle-time-ms 3.5 --timeline-filename t.json python train.py": (
        "run -np 4 --env HOROVOD_FUSION_THRESHOLD=33554432 --env HOROVOD_CYCLE_TIME=3.5 --env HOROVOD_TIMELINE=t.json "
        "--framework horovod python train.py"
    ),
    "horovodrun -np 8 --min-np 4 --max-np 12 --host-discovery-script ./d.sh python train.py": (
        "run -np 8 --min-np 4 --max-np 12 --host-discovery-script ./d.sh --max-restarts 100 --framework horovod "
        "python train.py"
    ),
    "horovodrun --gloo --no-stall-check -np 1 env X=1 python train.py": (
        "run --env HOROVOD_STALL_CHECK_DISABLE=1 -np 1 --framework horovod --no-python env X=1 python train.py"
    ),
    "horovodrun --mpi -np 4 python train.py": "! --mpi: the collectives of paceline's Horovod API use gloo",
    "horovodrun --torus-allreduce -np 1 python t.py": "run -np 1 --framework horovod python t.py",
    "horovodrun --check-build": "! --check-build: write paceline check",
    # mpirun, of Horovod's page
    "mpirun -np 4 -H a:2,b:2 -bind-to none -map-by slot -x NCCL_DEBUG=INFO -x NOT_SET -mca pml ob1 -mca btl ^openib "
    "python train.py": (
        "run -np 4 -H a:2,b:2 --env NCCL_DEBUG=INFO --env OMPI_MCA_pml=ob1 --env 'OMPI_MCA_btl=^openib' python train.py"
    ),
    "mpiexec --allow-run-as-root -n 2 --mca plm_rsh_args '-p 2222' python t.py": "run -np 2 -p 2222 python t.py",
    "mpirun -np 2 sh -c 'echo $OMPI_COMM_WORLD_RANK'": (
        "run -np 2 --no-python --framework mpi sh -c 'echo $OMPI_COMM_WORLD_RANK'"
    ),
    "mpirun -np 2 python ranks/main.py": "run -np 2 --framework mpi python ranks/main.py",
    "mpirun -np 1 python a.py : -np 2 python b.py": "! mpirun A : B starts two programs; a job runs one program",
    "mpirun --stdin all -np 2 python t.py": "! --stdin all: one rank reads standard input",
    "mpirun --stdin none -np 2 python t.py": "run -np 2 python t.py",
    "mpirun -app file": "! -app: a job runs one program",
    "mpirun -np 2 -pernode -H a:8,b:8 python t.py": "run -n 1 -H a:8,b:8 --nnodes 2 python t.py",
    "mpirun -np 8 --map-by ppr:4:node:PE=2 -H a:8,b:8 python t.py": "run -n 4 -H a:8,b:8 --nnodes 2 python t.py",
    "mpiexec -n 4 -ppn 2 -hosts a,b python t.py": "run -n 2 -H a,b --nnodes 2 python t.py",
    "mpirun -np 7 -N 4 --hostfile hosts python t.py": "! -np 7 with 4 on each host: it does not divide them",
    "mpirun -np $N -N 4 -H a,b python t.py": "mpirun -np $N -N 4 -H a,b python t.py",
    "mpirun -np 2 --map-by ppr:1:socket python t.py": "! --map-by ppr:1:socket: -n N says how many ranks each host",
    "mpirun -np 4 --map-by node -H a:2,b:2 python t.py": "! --map-by node: ranks are numbered host by host",
    "mpirun -np 4 --bynode python t.py": "run -np 4 python t.py",
    "mpiexec -ppn 2 -f hosts -genv A 5 python t.py": "run -n 2 --hostfile hosts --env A=5 python t.py",
    # srun
    "srun -N2 --ntasks-per-node=4 --gres=gpu:4 -c 8 -t 1-12:00:00 -p gpu -A me python train.py": (
        "run --on slurm --nnodes 2 -n 4 --gpus 4 --time-limit 1d12h --queue gpu --slurm account=me --cpus 32 "
        "python train.py"
    ),
    "srun --nodes=2 --ntasks=8 --gpus-per-task=1 --mem=32G --export=ALL,LR=0.1 --label python train.py": (
        "run --on slurm --nnodes 2 -np 8 --memory 32Gi --env LR=0.1 --tee all --gpus 4 python train.py"
    ),
    "srun -N 2 --gres=gpu:a100:4 -t 30 torchrun --nnodes 2 --nproc_per_node 4 --rdzv_endpoint=$H:1 train.py": (
        "run --on slurm --nnodes 2 --slurm gres=gpu:a100:4 --time-limit 30m -n 4 train.py"
    ),
    "srun --mem 4x python t.py": "! --mem 4x is no size of Slurm's",
    "srun --jobid $SLURM_JOBID --tmp 5G python t.py": "run --on slurm --slurm tmp=5G python t.py",
    "srun --jobid 5 python t.py": "! --jobid 5: run the line in the shell of that allocation",
    "srun apptainer exec i.sif torchrun t.py": "run --on slurm apptainer exec i.sif torchrun t.py",
    "torchrun --help": "torchrun --help",
    "~/env/bin/mpirun -np 2 python t.py": "run -np 2 python t.py",
    "srun --pty bash": "! --pty: start the job, then paceline attach JOB",
    # Paddle, of 2020
    "python -m paddle.distributed.launch --selected_gpus='0,1' --log_dir=/tmp/mylog train.py": (
        "run --devices 0,1 --env PADDLE_LOG_DIR=/tmp/mylog -n gpu --framework paddle train.py"
    ),
    "python -m paddle.distributed.launch --cluster_node_ips=10.0.0.1,10.0.0.2 --node_ip=10.0.0.2 --started_port=6170 "
    "--selected_gpus=0,1 train.py": (
        "run --env PADDLE_START_PORT=6170 --devices 0,1 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 -n gpu "
        "--framework paddle train.py"
    ),
    "PADDLE_TRAINERS=10.0.0.1,127.0.0.1 python -m paddle.distributed.launch --use_paddlecloud train.py": (
        "PADDLE_TRAINERS=10.0.0.1,127.0.0.1 paceline run --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 "
        "--framework paddle train.py"
    ),
    # and of today
    "python -m paddle.distributed.launch --devices=0,1,2,3 train.py": (
        "run --devices 0,1,2,3 -n gpu --framework paddle train.py"
    ),
    "fleetrun --ips=127.0.0.1,10.0.0.2 --gpus=0 train.py": (
        "run --devices 0 --nnodes 2 --node-rank 0 --master-addr 127.0.0.1 -n gpu --framework paddle train.py"
    ),
    "python -m paddle.distributed.launch --master 10.0.0.1:49178 --nnodes 2 --rank 1 --nproc_per_node 2 "
    "--max_restart 5 train.py": (
        "run --rdzv-endpoint 10.0.0.1:49178 --nnodes 2 --node-rank 1 -n 2 --max-restarts 5 --framework paddle train.py"
    ),
    "PADDLE_MASTER=h:80 PADDLE_NNODES=2 PADDLE_RANK=1 PADDLE_NPROC_PER_NODE=4 A=1 fleetrun --nnodes 1 train.py": (
        "A=1 paceline run --rdzv-endpoint h:80 --nnodes 2 -n 4 --node-rank 1 --framework paddle train.py"
    ),
    "PADDLE_MASTER=etcd://h:2379 fleetrun train.py": "! --master etcd://h:2379: ",
    "PADDLE_NNODES=2 fleetrun $F train.py": "PADDLE_NNODES=2 paceline paddle-launch $F train.py",
    "python -m paddle.distributed.launch --backend gloo train.py": (
        "run --env PADDLE_DISTRI_BACKEND=gloo --framework paddle train.py"
    ),
    "python -m paddle.distributed.launch --backend auto train.py": "run --framework paddle train.py",
    "python -m paddle.distributed.launch --backend bkcl train.py": "! --backend bkcl: paceline knows GPUs and CPUs",
    "python -m paddle.distributed.launch train.py": "run --framework paddle train.py",
    "python -m paddle.distributed.launch --master etcd://h:2379 --nnodes 1:4 train.py": "! --master etcd://h:2379: ",
    "python -m paddle.distributed.launch --server_num 2 --worker_num 2 train.py": (
        "! --server-num: paceline trains without parameter servers"
    ),
    "fleetrun --ips=10.9.9.1,10.9.9.2 --master 10.9.9.1:80 --rank 0 train.py": (
        "run --rdzv-endpoint 10.9.9.1:80 --node-rank 0 --framework paddle train.py"
    ),
    "fleetrun --ips=10.9.9.1,10.9.9.2 train.py": "! this machine is none of the nodes 10.9.9.1, 10.9.9.2",
    # The shell
    "CUDA_VISIBLE_DEVICES=0 nohup torchrun --nproc-per-node 2 train.py --name 'a > b' > out.log 2>&1 &": (
        "CUDA_VISIBLE_DEVICES=0 paceline run -n 2 train.py --name 'a > b' > out.log 2>&1 &"
    ),
    "time torchrun train.py 2> err | tee out": "time paceline run train.py 2> err | tee out",
    "torchrun train.py --steps 2 > out": "run train.py --steps 2 > out",
    "torchrun --nproc_per_node=$(nvidia-smi -L | wc -l) --nnodes $N train.py ~/*.bin \"$HOME/a b\" '$x'": (
        "run -n $(nvidia-smi -L | wc -l) --nnodes $N train.py ~/*.bin \"$HOME\"'/a b' '$x'"
    ),
    'torchrun t.py runs/"$NAME"_2 "$D"/*.txt ~/x/"$NAME".{a,b} $X"_2" "cost: \\$5"': (
        """run t.py runs/"$NAME"_2 "$D"/*.txt ~/x/"$NAME".{a,b} $X'_2' 'cost: $5'"""
    ),
    "cat > c <<EOF\nlr: 1  # it's\n  - a\nEOF\ntorchrun t.py": (
        "cat > c <<EOF\nlr: 1  # it's\n  - a\nEOF\npaceline run t.py"
    ),
    "cat <<< it && torchrun t.py": "cat <<< it && paceline run t.py",
    "torchrun \\\n  t.py $@ \\": "run t.py $@",
    "case $X in a) N=1;; esac; torchrun t.py": "case $X in a)N=1 ;; esac; paceline run t.py",
    'torchrun "$X': "! 'torchrun \"$X': no closing quotation",
    "(cd sub && torchrun t.py)": "(cd sub && paceline run t.py)",
    "for s in 1 2; do torchrun t.py $s; done": "for s in 1 2; do paceline run t.py $s; done",
    'srun -N 2 bash -c "torchrun --nnodes 2 --nproc_per_node 4 --node_rank \\$SLURM_PROCID t.py"': (
        "run --on slurm --nnodes 2 -n 4 t.py"
    ),
    "srun bash -c 'torchrun t.py $X'": "run --on slurm --no-python bash -c 'torchrun t.py $X'",
    "srun --gpus-per-node 4 python t.py": "run --on slurm --gpus 4 python t.py",
    "mpirun -np 8 -N 4 python t.py": "run -np 8 python t.py",
    "set -e; A='x y' torchrun train.py && python b.py || exit 1": (
        "set -e; A='x y' paceline run train.py && python b.py || exit 1"
    ),
    "#!/bin/sh\n#SBATCH -N 2\nexport A=1  # for all\nsrun -N 2 \\\n  python train.py &> log\n": (
        "#!/bin/sh\n#SBATCH -N 2\nexport A=1\npaceline run --nnodes 2 python train.py &> log"
    ),
    "env A=1 sudo -u me uv run torchrun train.py": "env A=1 sudo -u me uv run paceline run train.py",
    "$(which python) -m torch.distributed.run $FLAGS train.py": "torchrun $FLAGS train.py",
    "A=(\n  --lr 1 # it's\n)\nA+=('b c'); torchrun ${A[@]} t.py; srun -N 2 torchrun \"${A[@]}\" t.py": (
        "A=(\n  --lr 1 # it's\n)\nA+=('b c'); paceline torchrun ${A[@]} t.py; "
        'paceline srun -N 2 torchrun "${A[@]}" t.py'
    ),
    "python -u -m torch.distributed.launch --nproc_per_node 2 $FLAGS t.py": (
        "torch-launch --nproc_per_node 2 $FLAGS t.py"
    ),
    'srun -l bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID $CMD"': (
        """srun -l bash -c "$LAUNCHER"' --node_rank $SLURM_PROCID '"$CMD\""""
    ),
    'srun bash -c "torchrun --node_rank \\$SLURM_PROCID --nproc_per_node $N t.py $X"': "run --on slurm -n $N t.py $X",
    'A="x y" nohup bash -lc "torchrun t.py $X" > log &': "A='x y' paceline run t.py $X > log &",
    "sh -c 'cd x && torchrun t.py || exit' > log": "(cd x && paceline run t.py || exit)> log",
    "docker run img bash -c 'a; torchrun t.py'": "! docker … bash -c: explain what stands in its quotes",
    "bash -c 'echo it'": "! bash -c: no launcher that paceline knows stands in its quotes",
    "$LAUNCHER t.py": "! $LAUNCHER may hold a launcher; then write paceline before it: paceline $LAUNCHER t.py",
    "sbatch -N 2 -o log --wrap='srun torchrun --nproc_per_node 4 t.py'": "submit --on slurm --nnodes 2 -n 4 t.py",
    "sbatch -N 2 job.sh --lr 1": '! sbatch: the lines in the file matter; write paceline explain "$(cat job.sh)"',
    "sbatch job.sh; torchrun t.py": "sbatch job.sh; paceline run t.py",
    "salloc -N 2 mpirun -np 8 python t.py": "run --on slurm --nnodes 2 -np 8 python t.py",
    "ssh -p 22 -tl me node1 'cd /x && torchrun --nnodes 2 --node_rank 1 --nproc_per_node 4 t.py --name \"a b\"'": (
        "run -H me@node1 -p 22 --working-dir /x -n 4 t.py --name 'a b'"
    ),
    "ssh $H torchrun --nproc_per_node $N t.py; ssh node1 ls": "paceline run -H $H -n $N t.py; ssh node1 ls",
    "ssh node1 'source env; torchrun t.py'": "run -H node1 --no-python sh -c 'source env ; torchrun t.py'",
    """srun bash -c 'torchrun t.py "$X"'""": """run --on slurm --no-python bash -c 'torchrun t.py "$X"'""",
    "python train.py --lr 1": "run python train.py --lr 1",
    "srun -c $N --mem $MEM python train.py": "srun -c $N --mem $MEM python train.py",
    "srun -c x python train.py": "! --cpus x: write the number for a node",
    "bash job.sh": '! bash: the lines in the file matter; write paceline explain "$(cat job.sh)"',
    "squeue --me": "! squeue is no launcher; write paceline list",
    "": "! there is no line to explain",
    "torchrun --nproc-per-node 1 --nproc-per-node 2 train.py": "run -n 2 train.py",
    "torchrun train.py 'it": '! "torchrun train.py \'it": no closing quotation',
    # accelerate
    "accelerate launch --multi_gpu --num_processes 8 --num_machines 2 --machine_rank 1 --main_process_ip h "
    "--main_process_port 29500 --mixed_precision=bf16 --dynamo_backend no train.py --lr 1": (
        "run -np 8 --nnodes 2 --node-rank 1 --master-addr h --master-port 29500 --env ACCELERATE_MIXED_PRECISION=bf16 "
        "--env ACCELERATE_DYNAMO_BACKEND=NO train.py --lr 1"
    ),
    "accelerate launch --main_process_port 0 --num_processes 2 t.py": "run -np 2 t.py",
    "accelerate launch --gpu_ids 0,1 -m pkg.train": "run --devices 0,1 -m -n gpu pkg.train",
    "accelerate launch --use_fsdp --fsdp_version 2 --fsdp_use_orig_params false --fsdp_transformer_layer_cls_to_wrap=L "
    "train.py": (
        "run --env ACCELERATE_USE_FSDP=true --env FSDP_VERSION=2 --env FSDP_USE_ORIG_PARAMS=false "
        "--env FSDP_TRANSFORMER_CLS_TO_WRAP=L --env FSDP_MIN_NUM_PARAMS=100000000 "
        "--env FSDP_CPU_RAM_EFFICIENT_LOADING=true --env FSDP_SYNC_MODULE_STATES=true train.py"
    ),
    "accelerate launch --use_deepspeed --zero_stage 3 --zero3_init_flag true --offload_optimizer_device cpu "
    "--deepspeed_config_file d.json train.py": (
        "run --env ACCELERATE_USE_DEEPSPEED=true --env ACCELERATE_DEEPSPEED_ZERO_STAGE=3 "
        "--env ACCELERATE_DEEPSPEED_ZERO3_INIT=true --env ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE=cpu "
        "--env ACCELERATE_DEEPSPEED_CONFIG_FILE=d.json train.py"
    ),
    "accelerate launch --fp8_backend te train.py": "! --fp8-backend: give its settings to Accelerator()",
    "python -m accelerate.commands.launch train.py": "run train.py",
    "accelerate launch --config_file settings.yaml --num_processes 2 train.py": (
        "run --env ACCELERATE_MIXED_PRECISION=bf16 --env FSDP_USE_ORIG_PARAMS=false --env ACCELERATE_USE_FSDP=true -np "
        "2 --env FSDP_MIN_NUM_PARAMS=100000000 --env FSDP_CPU_RAM_EFFICIENT_LOADING=true "
        "--env FSDP_SYNC_MODULE_STATES=true train.py"
    ),
    "accelerate launch --config_file fp8.yaml t.py": "! --fp8-backend: give its settings to Accelerator()",
    "accelerate launch --config_file parallel.yaml t.py": "! --parallelism-config-tp-size: give its settings",
    "accelerate launch --config_file none.yaml t.py": "! --config-file none.yaml: No such file or directory; write the",
    "accelerate launch --config_file $F t.py": "accelerate launch --config_file $F t.py",
    "accelerate launch --num_processes 7 --num_machines 2 train.py": "run --nnodes 2 -n 3 train.py",
    "accelerate launch --num_processes 1 --num_machines 2 train.py": "! --num_processes 1 on 2 machines: write",
    # Command lines for fine-tuning
    "NPROC_PER_NODE=4 A=1 swift sft --model M -n 2": "A=1 paceline run -n 4 -m swift.cli.sft --model M -n 2",
    "swift infer --model M": "run -m swift.cli.infer --model M",
    "swift export --model M": "! swift is no launcher that paceline knows",
    "FORCE_TORCHRUN=1 NNODES=2 NODE_RANK=0 MASTER_ADDR=h llamafactory-cli train a.yaml": (
        "run --nnodes 2 --node-rank 0 --master-addr h -m llamafactory.launcher a.yaml"
    ),
    # DeepSpeed
    "deepspeed --no_ssh --hostfile hosts --node_rank 1 --master_addr a t.py": (
        "run --node-rank 1 --master-addr a --nnodes 2 -n 4 t.py"
    ),
    "deepspeed --no_ssh --hostfile none --node_rank 1 t.py": "! --hostfile none: No such file or directory",
    "deepspeed --no_ssh --num_nodes 2 --num_gpus 4 --node_rank 1 t.py": "run --nnodes 2 -n 4 --node-rank 1 t.py",
    "deepspeed --num_gpus=4 --no_local_rank train.py --deepspeed_config d.json": (
        "run -n 4 --use-env train.py --deepspeed_config d.json"
    ),
    "deepspeed --help": "! deepspeed is no launcher; write paceline run -n gpu SCRIPT",
    "deepspeed --include localhost:0,1 --module pkg.train": "run --devices 0,1 -m -n gpu pkg.train",
    "deepspeed --include a@b --num_gpus $N t.py": "run -H a,b -n $N t.py",
    "deepspeed --hostfile hosts --include b t.py": "run -H b:4 t.py",
    "deepspeed --include b@c --hostfile hosts t.py": "! --include c: not in hosts; name hosts that are there",
    "deepspeed --no_ssh --hostfile hosts --include b --master_addr b t.py": (
        "run --master-addr b --nnodes 1 -n 4 t.py"
    ),
    "deepspeed $X t.py": "! deepspeed: a variable may hold its flags; write them out",
    "deepspeed --include a:0,1@b:1 t.py": "! --include a:0,1@b:1: write -H HOST:N,…",
    # Arena
    "arena submit etjob --name=e --workers=3 --max-workers=9 --image=I 'python e.py'": (
        "submit --on kubernetes --name e --image I --nnodes 3:9 python e.py"
    ),
    """arena submit pytorch --name=e --image=I "'python e.py --lr 1'\"""": (
        "submit --on kubernetes --name e --image I python e.py --lr 1"
    ),
    "arena --loglevel info submit pytorch --name=pytorch-git --gpus=1 --workers=3 --working-dir=/root --image=IMG "
    "--sync-mode=git --sync-source=https://h/mnist-pytorch.git --data=training-data:/mnist_data --tensorboard "
    "--logdir=/mnist_data/logs 'python /root/code/mnist-pytorch/mnist.py --epochs 10 --backend nccl'": (
        "submit --on kubernetes --name pytorch-git --gpus 1 --nnodes 3 --working-dir /root --image IMG --sync-mode git "
        "--sync-source https://h/mnist-pytorch.git --data training-data:/mnist_data --tensorboard "
        "--logdir /mnist_data/logs python /root/code/mnist-pytorch/mnist.py --epochs 10 --backend nccl"
    ),
    "arena submit pytorchjob --name=x --image=IMG --selector a=b --selector c=d --toleration all --cpu 500m --gang "
    "--clean-task-policy=None --running-timeout 2h --env=GIT_SYNC_BRANCH=dev --sync-mode git --sync-source URL "
    "'torchrun --nproc_per_node 2 train.py'": (
        "submit --on kubernetes --name x --image IMG --toleration all --cpus 1 --gang coscheduling --clean-pods none "
        "--time-limit 2h --sync-mode git --selector a=b,c=d --sync-source URL@dev -n 2 train.py"
    ),
    "arena submit tf --name=t --workers=2 --workerImage=IMG --chief --evaluator --gpus=0 'python t.py'": (
        "submit --on kubernetes --name t --nnodes 2 --image IMG --chief 1 --evaluator 1 --framework tensorflow "
        "python t.py"
    ),
    "arena submit tf --name=t --workers=2 --chief --ps=2 --image=IMG 'python t.py'": (
        "submit --on kubernetes --name t --nnodes 2 --chief 1 --ps 2 --image IMG --framework tensorflow python t.py"
    ),
    "arena submit tf --name=t --ps=1 --ps-cpu=2 --image=IMG 'python t.py'": "! --ps-cpu: all nodes of a job run with",
    "arena submit tf --name=t --ps=one --image=IMG 'python t.py'": "! --ps one is no number",
    "arena submit mpi --name=m --workers=2 --image=IMG 'mpirun python m.py'": (
        "submit --on kubernetes --name m --nnodes 2 --image IMG --framework mpi python m.py"
    ),
    "arena submit horovod --name=h --workers=2 --image=IMG 'cd /code && python h.py'": (
        "submit --on kubernetes --name h --nnodes 2 --image IMG --framework horovod --no-python "
        "sh -c 'cd /code && python h.py'"
    ),
    "arena submit pytorch --name=x --image=I --shell /bin/bash 'source e && python x.py'": (
        "submit --on kubernetes --name x --image I --no-python /bin/bash -c 'source e && python x.py'"
    ),
    "arena submit pytorch --name x --data-dir /data 'python x.py'": "! --data-dir: name it as a volume",
    "arena list": "list --on kubernetes",
    "arena --config c --pprof list": "KUBECONFIG=c paceline list --on kubernetes",
    "arena list --type tfjob": "! --type: paceline list shows all kinds",
    "arena list -n team -A": "list --on kubernetes --namespace team -A",
    "arena get x --type pytorchjob -e": "get --on kubernetes x && paceline events --on kubernetes x",
    "arena get x -e -g -o yaml": "get --on kubernetes -o yaml x",
    "arena logs x -f -i x-worker-0 -t 5 --since 1h": "logs --on kubernetes -f -i x-worker-0 -t 5 --since 1h x",
    "arena top node": "top node --on kubernetes",
    "arena top job x -n team": "top job --on kubernetes --namespace team x",
    "arena delete x y --type tf": "delete --force --on kubernetes x y",
    "arena prune -s 7d": "prune --on kubernetes -s 7d",
    "arena data list": "data list --on kubernetes",
    "arena scaleout etjob --name=x --count=1": "scaleout --on kubernetes --nnodes 1 x",
    "arena job run -f arena.yaml": "submit --on kubernetes --name llm --image i --nnodes 4 t.py --lr 1",
    "arena job run -f none.yaml": "! --file none.yaml: no file of Arena v2 is there",
    "arena job run -f arena.yaml --set worker.replicas=2": "! --set: change the file, or write a flag",
    "arena job list -o json": "list --on kubernetes -o json",
    "arena job logs x -f --tail 5": "logs --on kubernetes -f -t 5 x",
    "arena job suspend x": "suspend --on kubernetes x",
    "arena job resume x": "resume --on kubernetes x",
    "arena check": "check --on kubernetes",
    "arena serve tensorflow --name x": "! arena serve: paceline trains, and serves no models",
    "arena submit pytorsh x": "! arena submit has no 'pytorsh' here; did you mean pytorch?",
    # paddlecloud
    "paddlecloud job --server s --port 80 --user-ak a --user-sk b train --job-name j --job-conf c.py "
    "--k8s-trainers 2 --k8s-gpu-cards 8 --k8s-priority high --k8s-memory 190Gi --k8s-wall-time 96:00:00 "
    "--k8s-not-local --distribute-job-type NCCL2 --file-dir . --image-addr IMG --start-cmd "
    "'python -m paddle.distributed.launch --use_paddlecloud --selected_gpus=0,1 train.py'": (
        "submit --on kubernetes --name j --nnodes 2 --gpus 8 --priority 1 --memory 190Gi --time-limit 96h "
        "--sync-mode snapshot --sync-source . --image IMG -n gpu --framework paddle train.py"
    ),
    "paddlecloud job --start-cmd 'python t.py' --is-standalone 0 --distribute-job-type NCCL2 --k8s-trainers 2": (
        "submit --on kubernetes --nnodes 2 python t.py"
    ),
    "paddlecloud job --nope x": "! paddlecloud job has no flag --nope",
    "paddlecloud job kill j": "stop j",
    "paddlecloud job logs --job-id j": "logs j",
    # none of these
    "accelerated train.py": "! accelerated is no launcher that paceline knows; they are torchrun, torch-launch",
    "torchrun 'train.py": '! "torchrun \'train.py": no closing quotation',
}


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs that knows a cluster of Kubernetes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks/main.py").write_text("from comm import rank")
    (tmp_path / "ranks/comm.py").write_text("import os; rank = os.environ['OMPI_COMM_WORLD_RANK']")
    (tmp_path / "arena.yaml").write_text(
        "name: llm\nframework: {name: pytorch}\nimage: i\nrun: torchrun t.py --lr 1\nworker: {replicas: 3}\n"
    )
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n")
    (tmp_path / "settings.yaml").write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 1\nmachine_rank: 0\nnum_processes: 8\n"
        "tpu_env: []\nfsdp_config:\n  fsdp_use_orig_params: false\nuse_cpu: false\nrdzv_backend: static\n"
    )
    (tmp_path / "fp8.yaml").write_text("fp8_config: {backend: TE}\n")
    (tmp_path / "parallel.yaml").write_text("parallelism_config: {parallelism_config_tp_size: 2}\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("KUBECONFIG", "config")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PADDLE_TRAINERS", "10.0.0.1,127.0.0.1")
    monkeypatch.delenv("NOT_SET", raising=False)


@pytest.mark.parametrize("line", LINES)
def test_line(line: str) -> None:
    expected = LINES[line]
    with click.Context(cli):
        check(line, expected)


def test_the_settings_of_accelerate_that_no_flag_names(tmp_path: Path) -> None:
    path = tmp_path / "hf/accelerate/default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("num_processes: 4\nfsdp_config: {version: 2}\nmpirun_config: {mpirun_hostfile: hosts}\n")
    with click.Context(cli):
        line, notes = explained("accelerate launch t.py")
        assert line == "paceline run -np 4 --env FSDP_VERSION=2 --hostfile hosts t.py"
        assert notes == [f"the settings of {path} count where no flag says otherwise; --config_file names another file"]
        assert explained("accelerate launch --cpu t.py") == ("paceline run --env ACCELERATE_USE_CPU=true t.py", [])


@given(st.lists(st.text(st.characters(exclude_categories=["C"]), max_size=8), max_size=4))
def test_quoted_words_stay_as_they_are(words: list[str]) -> None:
    with click.Context(cli):
        text, notes = explained(f"A=1 torchrun train.py {shlex.join(words)} > log")
    assert (shlex.split(text), notes) == (["A=1", "paceline", "run", "train.py", *words, ">", "log"], [])


def test_the_lines_of_the_documentation() -> None:
    tools = "torchrun|python -m|horovodrun -np|mpirun|srun|paddlecloud|arena"
    text = "\n".join(page.read_text() for page in PAGES.glob("from-*.md"))
    items = re.sub(r"\n +", " ", text)
    rows = re.findall(rf"^- `((?:{tools}) [^`]+)`.*? → `(paceline [^`]+)`", items, re.MULTILINE)
    assert len(rows) > 30
    with click.Context(cli):
        for old, new in rows:
            assert explained(old)[0] == new


def check(line: str, expected: str) -> None:
    if expected.startswith("! "):
        with pytest.raises(UserError) as refused:
            explained(line)
        assert str(refused.value).startswith(expected[2:])
        assert "\n" not in str(refused.value)
    else:
        assert explained(line)[0] in (expected, f"paceline {expected}")


def test_lines_as_windows_and_web_pages_write_them() -> None:
    assert explained("torchrun --nproc-per-node 2 \\\r\n  train.py\r\n")[0] == "paceline run -n 2 train.py"
    with pytest.raises(UserError, match="begins with the dash \u2013 of a printed text"):
        explained("torchrun \u2013nproc-per-node 2 train.py")
    assert explained("torchrun train.py \u2013lr")[0] == "paceline run train.py '\u2013lr'", (
        "words of the script are its own"
    )
