"""Each usual message, as torch, NCCL, CUDA or Python writes it, is found by its own pattern; ordinary lines are not."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paceline.node.failure import rank_failure
from paceline.node.usual_messages import USUAL, advice

if TYPE_CHECKING:
    from paceline.contract.records import Failure

DOCS = Path(__file__).parents[2] / "docs" / "messages.md"
# Of torch 2.13 on a CPU, recorded, where it can be provoked there; the others are of the sources in the table.
MESSAGES = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total capacity of 31.47 GiB "
    "of which "
    "12.73 GiB is free. Including non-PyTorch memory, this process has 18.73 GiB memory in use. Of the allocated "
    "memory "
    "9.08 GiB is allocated by PyTorch, and 9.35 GiB is reserved by PyTorch but unallocated.",
    "RuntimeError: CUDA error: out of memory",
    "RuntimeError: CUDA error: device-side assert triggered\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1.",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version",
    "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
    "RuntimeError: CUDA error: invalid device ordinal",
    "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
    "RuntimeError: CUDA error: peer access is not supported between these two devices",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "AssertionError: Torch not compiled with CUDA enabled",
    "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
    "'spawn' start method",
    "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False. If "
    "you are "
    "running on a CPU-only machine, please use torch.load with map_location=torch.device('cpu')",
    "DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, invalid usage (run with "
    "NCCL_DEBUG=WARN for details), NCCL version 2.20.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL "
    "library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 10",
    "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
    "DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, unhandled system error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.18.6\nncclSystemError: System call (e.g. socket, "
    "malloc) or "
    "external library call failed or device error. \nLast error:\nsocketStartConnect: Connect to 192.168.19.14<52822> "
    "failed : No route to host",
    "DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nCuda failure 1 'invalid argument'",
    "DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or "
    "there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network "
    "error or a "
    "remote process exiting prematurely.",
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, "
    "NumelOut=466119168, Timeout(ms)=600000) ran for 600004 milliseconds before timing out.",
    "RuntimeError: [2] is setting up NCCL communicator and retreiving ncclUniqueId from [0] via c10d key-value "
    "store by "
    "key '0', but store->get('0') got error: Socket Timeout",
    "RuntimeError: [enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != "
    "nullptr. Unable to find address for: eth9",
    "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
    "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms",
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting "
    "4000ms for recv operation to complete",
    "  what():  [enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] "
    "op.preamble.length "
    "<= op.nbytes. 2000 vs 1000. Received data size doesn't match expected size. Is there a distributed collective "
    "mismatch in your code?",
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error "
    "[127.0.0.1]:49841: "
    "Connection reset by peer. This is typically caused by a remote worker hanging or bugs in the application.",
    "DistNetworkError: The server socket has failed to listen on any local network address. port: 29811, useIpv6: "
    "false, "
    "code: -98, name: EADDRINUSE, message: address already in use",
    "DistStoreError: Timed out after 3 seconds waiting for clients. 1/2 clients joined.",
    "DistNetworkError: The client socket has timed out after 2000ms while trying to connect to (127.0.0.1, 29813).",
    "DistStoreError: wait timeout after 5000ms, keys: /default_pg/1//cpu//0/1",
    "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but "
    "not set",
    "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
    "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error "
    "indicates that your module has parameters that were not used in producing loss.",
    "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following "
    "reasons: 1) "
    "Use of a module parameter outside the `forward` function.\nParameter at index 1 with name a.bias has been "
    "marked as "
    "ready twice.",
    "RuntimeError: DDP expects same model across all ranks, but Rank 1 has 4 params, while rank 0 has inconsistent 2 "
    "params.",
    "RuntimeError: DistributedDataParallel is not needed when a module doesn't have any parameter that requires a "
    "gradient.",
    "RuntimeError: a leaf Variable that requires grad is being used in an in-place operation.",
    "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
    "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation: "
    "[torch.FloatTensor [3]], which is output 0 of Exp, is at version 1; expected version 0 instead.",
    "RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors after "
    "they have "
    "already been freed).",
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "RuntimeError: mat1 and mat2 must have the same dtype, but got Double and Float",
    "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    "RuntimeError: unable to allocate shared memory(shm) for file </torch_29092_2577537015_0>: No space left on device "
    "(28)",
    "RuntimeError: unable to open shared memory object </torch_23886_685472482_48> in read-write mode: Too many open "
    "files (24)",
    "RuntimeError: DataLoader worker (pid(s) 23489) exited unexpectedly",
    "RuntimeError: DataLoader timed out after 1 seconds",
    "RuntimeError: stack expects each tensor to be equal size, but got [1] at entry 0 and [2] at entry 1",
    "RuntimeError: \n        An attempt has been made to start a new process before the\n        current process has "
    "finished its bootstrapping phase.",
    "AttributeError: Can't pickle local object 'D.__init__.<locals>.<lambda>'",
    "UnpicklingError: Weights only load failed. This file can still be loaded, to do so you have two options",
    "RuntimeError: Error(s) in loading state_dict for Linear:\n\tsize mismatch for weight: copying a param with shape "
    "torch.Size([4, 3]) from checkpoint, the shape in current model is torch.Size([3, 3]).",
    'RuntimeError: Error(s) in loading state_dict for Linear:\n\tMissing key(s) in state_dict: "weight", "bias". \n\t'
    'Unexpected key(s) in state_dict: "module.weight", "module.bias". ',
    "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory.",
    "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534",
    "OSError: [Errno 24] Too many open files: '/dev/null'",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to "
    "allocate 1125899906842624 bytes. Error code 12 (Cannot allocate memory)",
    "ImportError: /lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.30' not found (required by "
    "/env/lib/libtorch_python.so)",
    "OSError: libcudart.so.11.0: cannot open shared object file: No such file or directory",
    "ModuleNotFoundError: No module named 'horovod.nosuchmod'",
    "ModuleNotFoundError: No module named 'nosuchmod'",
    "FileNotFoundError: [Errno 2] No such file or directory: '/data/images.csv'",
    "./job.sh: 2: nvcc: not found",
    "job.sh: line 4: ./train.sh: Permission denied",
    "image registry/none:1 cannot be pulled: not found; check its name, and --pull-secret if it is private",
    "killed: out of memory",
    "killed by SIGKILL",
    "exit code 137",
    "killed by SIGSEGV",
    "killed by SIGILL",
)
MORE_GENERAL = {45: {56}, 46: {57}}  # places in the table: of a message → of those that are found in it too, but later
ORDINARY = """\
epoch 3: loss 0.25, 812 samples/s, 1.2 GiB of CUDA memory allocated
UserWarning: find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters
[W1125 07:05:59 ProcessGroupNCCL.cpp:1250] Warning: WARNING: destroy_process_group() was not called before program exit
huggingface/tokenizers: The current process just got forked, after parallelism has already been used.
UserWarning: This DataLoader will create 8 worker processes in total. Our suggested max number of worker is 2
node0:531:1762 [0] NCCL INFO Connected all rings
FutureWarning: You are using `torch.load` with `weights_only=False`
listening on port 29500; timeout 1800 s; DataLoader has 4 workers; CUDA_VISIBLE_DEVICES=0,1
ValueError: expected sequence of length 3 at dim 1 (got 2)
exit code 1
killed by SIGABRT"""


@pytest.mark.parametrize("place", range(len(USUAL)))
def test_each_usual_message_is_found_by_its_own_pattern_and_no_other(place: int) -> None:
    found = {number for number, usual in enumerate(USUAL) if re.search(usual.pattern, MESSAGES[place])}
    assert found == {place} | {number for number in found if number > place and number in MORE_GENERAL.get(place, ())}
    assert advice(MESSAGES[place]).text
    assert "{" not in advice(MESSAGES[place]).text
    assert len(MESSAGES) == len(USUAL)
    assert USUAL[place].source.startswith("https://")


@pytest.mark.parametrize(
    ("line", "kind", "about"),
    [
        ("./job.sh: 2: exec: /env/bin/python: not found", "missing program", "/env/bin/python"),
        ("job.sh: line 2: /env/bin/python: No such file or directory", "missing program", "/env/bin/python"),
        ("job.sh: line 2: nvcc: command not found", "missing program", "nvcc"),
        ("job.sh: line 2: data/images.csv: No such file or directory", "", ""),
        ("CheckpointError: cannot save step 100 in /x: no space left: the checkpoint needs 4.1 MB", "disk full", ""),
        ("ImportError: libcudart.so.11: cannot open shared object file", "missing library", "libcudart.so.11"),
        ("MemoryError: ", "out of memory", ""),
    ],
)
def test_a_message_has_a_kind_and_what_it_is_about(line: str, kind: str, about: str) -> None:
    assert advice(line)[1:] == (kind, about)


def test_what_paceline_has_not_of_horovod_is_not_to_be_installed() -> None:
    for line in (
        "AttributeError: module 'paceline.horovod.torch' has no attribute 'nosuch'",
        "ImportError: cannot import name 'nosuch' from 'paceline.horovod.torch' (/x/__init__.py)",
        "ModuleNotFoundError: No module named 'horovod.nosuch'",
    ):
        assert "is not in paceline's Horovod" in advice(line).text


def test_ordinary_lines_are_no_usual_messages() -> None:
    assert [line for line in ORDINARY.splitlines() if advice(line).text] == []


def test_what_was_allocated_on_the_gpu_is_said() -> None:
    assert advice(MESSAGES[0]).text.startswith(
        "GPU 0 is full: 22.78 GiB more was asked for, 12.73 GiB of 31.47 GiB is free, PyTorch has 9.08 GiB "
        "allocated and "
        "9.35 GiB reserved"
    )


def test_of_a_long_text_the_beginning_and_the_end_are_searched() -> None:
    assert advice("x" * 1_000_000 + "\n" + MESSAGES[2]) == advice(MESSAGES[2])
    assert advice(MESSAGES[2] + "\n" + "x" * 1_000_000) == advice(MESSAGES[2])
    assert advice("x" * 500_000 + MESSAGES[2] + "x" * 500_000).text == ""


def _failure(folder: Path, log: str, status: int, *, oom: bool = False) -> Failure:
    (folder / "log").write_text(log)
    return rank_failure(rank=0, node=0, host="h", pid=1, status=status, ended=0.0, log=folder / "log",
                        error=folder / "error", oom=oom)  # fmt: skip


def test_the_end_of_the_log_tells_why_unless_the_signal_came_from_outside(tmp_path: Path) -> None:
    frames = "".join(f"frame #{number}: <unknown function> + 0x163b752 (in libtorch_cpu.so)\n" for number in range(28))
    text = f"{MESSAGES[27]}\n{frames}"
    assert _failure(tmp_path, text, 1 << 8)["advice"] == advice(MESSAGES[27]).text
    assert _failure(tmp_path, text, 6)["advice"] == advice(MESSAGES[27]).text
    assert _failure(tmp_path, text, 9)["advice"] == advice("killed by SIGKILL").text
    assert _failure(tmp_path, text, 9, oom=True)["advice"] == advice("killed: out of memory").text
    assert _failure(tmp_path, "", 11)["advice"] == advice("killed by SIGSEGV").text
    assert _failure(tmp_path, "", 3 << 8)["advice"] == ""
    assert _failure(tmp_path, "", 137 << 8)["advice"] == advice("exit code 137").text


def test_the_docs_have_the_list() -> None:
    written = DOCS.read_text()
    assert written == _begin(written) + "".join(map(item, range(len(USUAL)))), (
        "write it anew: python -m tests.node.test_usual_messages"
    )


def _begin(written: str) -> str:
    return written[: written.index("\n- ") + 1]


def item(place: int) -> str:
    """The item of docs/messages.md."""
    text = re.search(USUAL[place].pattern, MESSAGES[place])
    assert text is not None
    line = f"`{' '.join(text[0].split()).strip('`')}`: {USUAL[place].advice} ([source]({USUAL[place].source}))"
    return (
        textwrap.fill(
            line, 120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
        )
        + "\n"
    )


if __name__ == "__main__":
    DOCS.write_text(_begin(DOCS.read_text()) + "".join(map(item, range(len(USUAL)))))
