"""The most usual messages with which ranks end: what each means, and what to do.

A pattern is searched for in what a rank ended with: the exception, or the end of its log. The first one that is found
counts, so special ones come before general ones. docs/messages.md has the same list.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_ABOUT = ("module", "path", "program", "lib", "image")  # groups of patterns that name what is missing
_MOST_LETTERS = 16384  # of a text that is searched, from its beginning and from its end
_TORCH, _NCCL = "https://github.com/pytorch/pytorch/issues/", "https://github.com/NVIDIA/nccl/issues/"
_DOCS, _PYTHON = "https://pytorch.org/docs/stable/", "https://docs.python.org/3/library/"
_CUDA = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
_NCCL_DOCS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
_GLOO = "https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/"


class Usual(NamedTuple):
    """A usual message."""

    pattern: str  # a regular expression without nested repetition
    advice: str  # what it means and what to do, in one line; `{name}` is a group of the pattern
    source: str  # where the message or the remedy is documented
    kind: str = ""  # of fault, for programs; "" if what raised it says more than that


class Advice(NamedTuple):
    """What is known of a text: see `Usual`; "" is what is not known."""

    text: str = ""
    kind: str = ""
    about: str = ""  # the module, path, program or library that the message names


USUAL = (
    # -- memory of the device, CUDA --
    Usual(
        r"CUDA out of memory\. Tried to allocate (?P<tried>[\d.]+ \w+)\. GPU (?P<gpu>\d+) has a total capac\w+ of "
        r"(?P<total>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free\.(?:[^\n]*?Of the allocated memory "
        r"(?P<allocated>[\d.]+ \w+) is allocated by PyTorch, and (?P<reserved>[\d.]+ \w+) is reserved)?",
        "GPU {gpu} is full: {tried} more was asked for, {free} of {total} is free, PyTorch has {allocated} "
        "allocated and "
        "{reserved} reserved but unallocated; use a smaller batch, activation checkpointing or sharding, and if "
        "more is "
        "reserved than was asked for, PYTORCH_ALLOC_CONF=expandable_segments:True",
        _DOCS + "notes/cuda.html#memory-management",
        "GPU out of memory",
    ),
    Usual(
        r"CUDA (error: )?out of memory(?!\. Tried to allocate [\d.]+ \w+\. GPU)",
        "the GPU's memory is full: use a smaller batch, activation checkpointing or sharding; nvidia-smi shows whether "
        "another process has it",
        _DOCS + "notes/faq.html",
        "GPU out of memory",
    ),
    Usual(
        r"device-side assert triggered",
        "mostly an index out of range, such as a label >= the number of classes or a token >= the vocabulary; "
        "CUDA_LAUNCH_BLOCKING=1, or a run on the CPU, shows the line",
        _TORCH + "74079",
    ),
    Usual(
        r"an illegal memory access was encountered",
        "a kernel accessed memory that is not its own; CUDA_LAUNCH_BLOCKING=1 shows the line, compute-sanitizer "
        "the kernel",
        _CUDA,
    ),
    Usual(
        r"no kernel image is available for execution on the device",
        "this torch, or extension, is not built for this GPU: install a build for its compute capability "
        "(torch.cuda.get_arch_list() lists those it has)",
        "https://github.com/facebookresearch/detectron2/issues/235",
    ),
    Usual(
        r"CUDA driver version is insufficient|NVIDIA driver on your system is too old",
        "the NVIDIA driver is older than this CUDA build needs: update the driver, or install torch for an older CUDA",
        _CUDA,
    ),
    Usual(
        r"Found no NVIDIA driver on your system",
        "this machine, or this container, has no NVIDIA driver: ask for a GPU, or start the container with --gpus all",
        "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/docker-specialized.html",
    ),
    Usual(
        r"CUDA error: invalid device ordinal",
        "a rank uses a GPU that it does not have: use cuda:LOCAL_RANK, with no more ranks than GPUs "
        "(CUDA_VISIBLE_DEVICES limits them)",
        "https://github.com/wdrink/PyDeepFakeDet/issues/1",
    ),
    Usual(
        r"uncorrectable ECC error encountered",
        "the GPU's memory is damaged: nvidia-smi -q -d ECC and the kernel's Xid lines say which; leave this host out",
        "https://github.com/vllm-project/vllm/issues/5222",
    ),
    Usual(
        r"(all CUDA-capable devices are|CUDA-capable device\(s\) is/are) busy or unavailable",
        "another process has the GPU in exclusive mode, or it is in a bad state: see nvidia-smi for processes and the "
        "compute mode",
        _TORCH + "2704",
    ),
    Usual(
        r"peer access is not supported between these two devices|peer mapping resources exhausted",
        "these GPUs cannot access each other's memory directly: set NCCL_P2P_DISABLE=1",
        _NCCL_DOCS,
    ),
    Usual(
        r"CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)",
        "cuBLAS got no memory on the GPU: use a smaller batch; on the first step also look for other processes there",
        "https://github.com/QwenLM/Qwen3/issues/873",
        "GPU out of memory",
    ),
    Usual(
        r"CUDNN_STATUS_\w+|Unable to find a valid cuDNN algorithm|cuDNN error:",
        "cuDNN mostly fails for lack of GPU memory, or as another cuDNN is found before torch's: use a smaller "
        "batch, and "
        "take CUDA out of LD_LIBRARY_PATH",
        _DOCS + "notes/cuda.html",
    ),
    Usual(
        r"Torch not compiled with CUDA enabled",
        "this torch is a build for the CPU: install one with CUDA, or use device cpu",
        "https://pytorch.org/get-started/locally/",
    ),
    Usual(
        r"Cannot re-initialize CUDA in forked subprocess",
        "a DataLoader worker or another child uses CUDA: keep data on the CPU there, or use "
        "multiprocessing_context='spawn'",
        _DOCS + "notes/multiprocessing.html#cuda-in-multiprocessing",
    ),
    Usual(
        r"Attempting to deserialize object on a? ?CUDA device",
        "a checkpoint holds tensors of a GPU that is not here: torch.load(…, map_location='cpu')",
        _DOCS + "generated/torch.load.html",
    ),
    # -- NCCL --
    Usual(
        r"Duplicate GPU detected",
        "two ranks use the same GPU: call torch.cuda.set_device(LOCAL_RANK) before the first collective",
        _NCCL + "1241",
    ),
    Usual(
        r"no GPUs found|Distributed package doesn't have NCCL built in",
        "NCCL needs GPUs and a torch with CUDA: use init_process_group('gloo') here, or run where GPUs are",
        _NCCL + "861",
    ),
    Usual(
        r"NCCL error.*unhandled system error|ncclSystemError",
        "NCCL could not connect or allocate: NCCL_DEBUG=INFO says why; often NCCL_SOCKET_IFNAME must name the "
        "interface, "
        "or /dev/shm is too small",
        _NCCL_DOCS,
    ),
    Usual(
        r"NCCL error.*unhandled cuda error|ncclUnhandledCudaError",
        "a CUDA call in NCCL failed: NCCL_DEBUG=INFO says which; often the GPU is full, or driver and NCCL do not fit",
        _NCCL + "1410",
    ),
    Usual(
        r"remote process exited or there was a network error|ncclRemoteError",
        "another rank ended, or the network between them broke: look at the rank that failed first, then at the links",
        _NCCL + "2076",
    ),
    Usual(
        r"Watchdog caught collective operation timeout",
        "a rank did not enter this collective in time: ranks took different branches or numbers of batches, or one was "
        "slow; TORCH_NCCL_TRACE_BUFFER_SIZE=2000 records which",
        _TORCH + "118369",
    ),
    Usual(
        r"is setting up NCCL communicator and retr\w+ ncclUniqueId",
        "rank 0 did not come, or ended, before the first collective: look at its log",
        _TORCH + "82091",
    ),
    # -- gloo, TCPStore --
    Usual(
        r"Unable to find address for: ",
        "GLOO_SOCKET_IFNAME names an interface that this host does not have: `ip addr` lists them",
        _DOCS + "distributed.html#choosing-the-network-interface-to-use",
    ),
    Usual(
        r"connectFullMesh failed",
        "ranks cannot reach each other: open the ports between the hosts, and set GLOO_SOCKET_IFNAME to an "
        "interface that "
        "they share",
        "https://github.com/sgl-project/sglang/issues/3226",
    ),
    Usual(
        r"Rank \d+ failed to pass monitoredBarrier|Ranks [\d, ]+ failed to pass monitoredBarrier",
        "the named rank did not come to the barrier: look at where it stands",
        _DOCS + "distributed.html#torch.distributed.monitored_barrier",
    ),
    Usual(
        r"Timed out waiting \d+ms for (recv|send) operation",
        "another rank did not enter the same collective within the timeout: ranks took different branches or "
        "numbers of "
        "batches, or one was slow (init_process_group(timeout=…))",
        _GLOO + "unbound_buffer.cc",
    ),
    Usual(
        r"Received data size doesn't match expected size|op\.preamble\.length <= op\.nbytes",
        "ranks gave tensors of different sizes to one collective: compare shapes and dtypes, or use DistributedSampler "
        "with drop_last",
        _GLOO + "pair.cc",
    ),
    Usual(
        r"gloo/transport/tcp/\S+\] (Read error|Write error|Connection closed by peer|writev)",
        "another rank ended while this one exchanged data with it: its own error is in its log",
        _GLOO + "pair.cc",
    ),
    Usual(
        r"EADDRINUSE|[Aa]ddress already in use",
        "another process listens on this port: leave MASTER_PORT to paceline, or choose a free one",
        _DOCS + "elastic/run.html",
    ),
    Usual(
        r"Timed out after \d+ seconds waiting for clients",
        "not all ranks have come to init_process_group: compare WORLD_SIZE with the number of ranks, and look "
        "at the logs "
        "of the others",
        _DOCS + "distributed.html#torch.distributed.TCPStore",
    ),
    Usual(
        r"client socket has timed out after \d+ms while trying to connect",
        "nothing listens at MASTER_ADDR and MASTER_PORT, or a firewall is between: check that rank 0 runs there",
        _DOCS + "distributed.html#tcp-initialization",
    ),
    Usual(
        r"DistStoreError: wait timeout after \d+ms",
        "another rank did not come to the same init_process_group or new_group: all ranks must call it, in one order",
        _DOCS + "distributed.html#torch.distributed.new_group",
    ),
    Usual(
        r"environment variable (RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set",
        "the script was started without a launcher, or has cleared its environment: start it with paceline run",
        _DOCS + "distributed.html#environment-variable-initialization",
    ),
    Usual(
        r"Default process group has not been initialized",
        "a collective comes before init_process_group, or after destroy_process_group",
        _DOCS + "distributed.html#initialization",
    ),
    # -- DDP, autograd --
    Usual(
        r"Expected to have finished reduction in the prior iteration",
        "parameters got no gradient: use all of them in the loss, or DistributedDataParallel(…, "
        "find_unused_parameters=True)",
        _DOCS + "generated/torch.nn.parallel.DistributedDataParallel.html",
    ),
    Usual(
        r"has been marked as ready twice|Expected to mark a variable ready only once",
        "parameters are used twice in a step: checkpoint(…, use_reentrant=False), or static_graph=True",
        _DOCS + "generated/torch.nn.parallel.DistributedDataParallel.html",
    ),
    Usual(
        r"DDP expects same model across all ranks|appears not to match sizes of the same param in process",
        "ranks have built different models: build them from the same settings and seed on each rank",
        "https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/reducer.cpp",
    ),
    Usual(
        r"doesn't have any parameter that requires a gradient",
        "all parameters are frozen: wrap only modules that train in DistributedDataParallel",
        _DOCS + "generated/torch.nn.parallel.DistributedDataParallel.html",
    ),
    Usual(
        r"a leaf Variable that requires grad is being used in an in-place operation",
        "a parameter is changed in place: do it below torch.no_grad()",
        _DOCS + "notes/autograd.html#in-place-operations-with-autograd",
    ),
    Usual(
        r"element 0 of tensors does not require grad",
        "the loss depends on no parameter that trains: look for detach(), no_grad(), item() or frozen parameters",
        _DOCS + "notes/autograd.html#setting-requires-grad",
    ),
    Usual(
        r"has been modified by an inplace operation",
        "a tensor that backward needs was changed: replace x += … by x = x + …; "
        "torch.autograd.set_detect_anomaly(True) "
        "shows the line",
        _DOCS + "notes/autograd.html#in-place-correctness-checks",
    ),
    Usual(
        r"Trying to backward through the graph a second time",
        "a part of the graph of an earlier step is used again: detach() what is kept between steps, such as "
        "hidden states",
        _DOCS + "generated/torch.Tensor.backward.html",
    ),
    Usual(
        r"Expected all tensors to be on the same device|is not on the expected device",
        "model and data are on different devices: move both with .to(device), and buffers with register_buffer",
        _DOCS + "notes/cuda.html",
    ),
    Usual(
        r"must have the same dtype, but got|Input type \([^)\n]+\) and (bias|weight) type",
        "data and model have different dtypes: convert the data with .to(dtype), or use torch.autocast",
        _DOCS + "amp.html",
    ),
    # -- DataLoader, multiprocessing --
    Usual(
        r"is killed by signal: Bus error|Unexpected bus error encountered in worker|"
        r"unable to (allocate shared memory\(shm\)|write to file </torch_)",
        "/dev/shm is full: make it larger (docker --shm-size=8g; in a pod an emptyDir of medium Memory), or use fewer "
        "num_workers",
        _TORCH + "5040",
    ),
    Usual(
        r"received 0 items of ancdata|unable to open shared memory object .*Too many open files",
        "too many files are open: torch.multiprocessing.set_sharing_strategy('file_system'), or a higher ulimit -n",
        _TORCH + "973",
    ),
    Usual(
        r"DataLoader worker \(pid(\(s\))? [\d, ]+\) (is killed by signal|exited unexpectedly)",
        "a DataLoader worker died, often for lack of memory: num_workers=0 shows its error; fewer workers need "
        "less memory",
        _DOCS + "data.html#multi-process-data-loading",
    ),
    Usual(
        r"DataLoader timed out after",
        "a worker gave no batch within DataLoader(timeout=…): the storage is slow, or a worker is blocked",
        _DOCS + "data.html",
    ),
    Usual(
        r"stack expects each tensor to be equal size",
        "samples of a batch differ in shape: resize or pad them, or give the DataLoader a collate_fn",
        _DOCS + "data.html#working-with-collate-fn",
    ),
    Usual(
        r"An attempt has been made to start a new process before the",
        "children that are spawned import the script again: put what starts it below if __name__ == '__main__':",
        _PYTHON + "multiprocessing.html#the-spawn-and-forkserver-start-methods",
    ),
    Usual(
        r"Can't (get|pickle) local object|[Cc]an't pickle <function <lambda>|cannot pickle '",
        "what goes to a spawned child must be picklable: replace lambdas and inner functions by functions of a module, "
        "open files and locks in the child",
        _PYTHON + "pickle.html#what-can-be-pickled-and-unpickled",
    ),
    # -- checkpoints --
    Usual(
        r"Weights only load failed",
        "the file holds more than tensors: torch.serialization.add_safe_globals, or weights_only=False for a "
        "file that you "
        "trust",
        _DOCS + "generated/torch.load.html",
    ),
    Usual(
        r"size mismatch for \S+: copying a param",
        "the checkpoint is of another model: build the model with the settings that it was saved with",
        _DOCS + "generated/torch.nn.Module.html#torch.nn.Module.load_state_dict",
    ),
    Usual(
        r"(Missing|Unexpected) key\(s\) in state_dict",
        "the names in the checkpoint differ; names with `module.` are of a model in DistributedDataParallel: save "
        "model.module.state_dict()",
        _DOCS + "generated/torch.nn.Module.html#torch.nn.Module.load_state_dict",
    ),
    Usual(
        r"PytorchStreamReader failed",
        "the checkpoint file is damaged or incomplete: take the one before, and save under another name, then rename",
        _DOCS + "generated/torch.load.html",
    ),
    Usual(
        r"[Nn]o space (is )?left( on|:)|inline_container\.cc:\d+\] \. (unexpected pos|PytorchStreamWriter failed)",
        "the disk is full, or the quota used: `df -h` and `df -i` of that folder show it; remove old "
        "checkpoints or logs",
        _PYTHON + "errno.html#errno.ENOSPC",
        "disk full",
    ),
    # -- the machine, the environment --
    Usual(
        r"Too many open files",
        "the process has too many files open: close them, or raise ulimit -n",
        _PYTHON + "resource.html#resource.RLIMIT_NOFILE",
    ),
    Usual(
        r"DefaultCPUAllocator: can't allocate memory|Cannot allocate memory|"
        r"Unable to allocate [\d.]+ [KMGTP]iB for an array|\bMemoryError\b",
        "the machine's memory, or its limit for this job, is used: load less at once, use fewer num_workers or ranks",
        _PYTHON + "errno.html#errno.ENOMEM",
        "out of memory",
    ),
    Usual(
        r"version `(GLIBC|GLIBCXX|CXXABI)_[\d.]+' not found",
        "a library is built for a newer system: put the environment's lib folder first in LD_LIBRARY_PATH, or "
        "install a "
        "build for this system",
        _TORCH + "87279",
    ),
    Usual(
        r"(?P<lib>lib[\w.+-]+\.so[\w.]*): cannot open shared object file",
        "{lib} is not found on this host: install it there, or add its folder to LD_LIBRARY_PATH",
        "https://man7.org/linux/man-pages/man8/ld.so.8.html",
        "missing library",
    ),
    Usual(
        r"No module named 'horovod\.[\w.]+'|cannot import name '\w+' from '(?:paceline\.)?horovod[\w.]*'|"
        r"module 'paceline\.horovod[\w.]*' has no attribute",
        "what the script asks for is not in paceline's Horovod, whose names docs/horovod.md has: leave it out",
        _PYTHON + "exceptions.html#ImportError",
    ),
    Usual(
        r"No module named '(?!horovod\.)(?P<module>[\w.]+)'",
        "{module} is not installed in the Python of this job, or its folder was not copied with the code: install it "
        "there, or set PYTHONPATH",
        _PYTHON + "exceptions.html#ModuleNotFoundError",
        "missing module",
    ),
    Usual(
        r"No such file or directory: '(?P<path>[^'\n]+)'",
        "{path} is not there on this host, or is relative to another folder: correct the path, copy it there, or mount "
        "a volume that has it with --data",
        _PYTHON + "exceptions.html#FileNotFoundError",
        "missing file",
    ),
    # -- shells --
    Usual(
        r"(?m)^\S+: (line )?\d+: (exec: )?(?P<program>[\w./+-]+(?=: (command )?not found$)|"
        r"[\w./+-]*/bin/[\w./+-]+(?=: No such file or directory$))",
        "{program} is not on PATH on this host: install it there, or name it by its full path (exit code 127)",
        "https://www.gnu.org/software/bash/manual/html_node/Exit-Status.html",
        "missing program",
    ),
    Usual(
        r"(?m)^\S+: (line )?\d+: (?P<program>[\w./+-]+): Permission denied$",
        "{program} may not be executed: chmod +x {program}, unless its folder is mounted with noexec (exit code 126)",
        "https://www.gnu.org/software/bash/manual/html_node/Exit-Status.html",
    ),
    # -- what Kubernetes says of an image --
    Usual(
        r"image (?P<image>\S+) (cannot be pulled|is not a valid name): ",
        "{image} cannot be pulled: correct --image; --pull-secret if it is private",
        "https://kubernetes.io/docs/concepts/containers/images/#imagepullbackoff",
        "wrong image",
    ),
    # -- what paceline itself says of an end --
    Usual(
        r"^killed: out of memory$",
        "the kernel ended it as memory ran out: use fewer num_workers or ranks a host, load less at once, or "
        "ask for more",
        "https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files",
        "out of memory",
    ),
    Usual(
        r"^killed by (SIGKILL|SIGTERM|SIGHUP|SIGINT|SIGQUIT)$",
        "not by paceline, and no lack of memory is recorded here: a person, a scheduler or another program sent "
        "the signal",
        "https://man7.org/linux/man-pages/man7/signal.7.html",
        "killed",
    ),
    Usual(
        r"^exit code 137$",
        "137 means that SIGKILL ended it or a program that it ran, mostly as memory ran out, by the kernel or by a "
        "container's limit: use fewer num_workers or ranks a host, load less at once, or ask for more",
        "https://man7.org/linux/man-pages/man7/signal.7.html",
        "killed",
    ),
    Usual(
        r"^killed by (SIGSEGV|SIGBUS|SIGFPE)$",
        "native code crashed: PYTHONFAULTHANDLER=1 prints the Python line; with SIGBUS, look whether /dev/shm is full",
        _PYTHON + "faulthandler.html",
    ),
    Usual(
        r"^killed by SIGILL$",
        "a library uses instructions that this CPU lacks: install a build for it",
        "https://man7.org/linux/man-pages/man7/signal.7.html",
    ),
)


def advice(text: str) -> Advice:
    """What to do about a text, from the first pattern that is found in it."""
    if len(text) > 2 * _MOST_LETTERS:
        text = f"{text[:_MOST_LETTERS]}\n{text[-_MOST_LETTERS:]}"
    for usual in USUAL:
        if match := re.search(usual.pattern, text):
            named = {name: value or "?" for name, value in match.groupdict().items()}
            return Advice(
                usual.advice.format_map(named), usual.kind, next((named[it] for it in _ABOUT if it in named), "")
            )
    return Advice()
