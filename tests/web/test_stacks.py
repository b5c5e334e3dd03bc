"""Frames of libraries are folded, the user's line stands out, and no line is lost."""

from __future__ import annotations

from paceline.web.stacks import blocks, library

TRACEBACK = """\
it wrote last:
  [rank0]: Traceback (most recent call last):
  [rank0]:   File "/home/me/train.py", line 15, in <module>
  [rank0]:     main()
  [rank0]:   File "/home/me/net.py", line 8, in forward
  [rank0]:     return self.fc(x)
  [rank0]:            ^^^^^^^^^^
  [rank0]:   File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1778, in _call
  [rank0]:     return self._call_impl(*args, **kwargs)
  [rank0]:   File "/usr/lib/python3.11/threading.py", line 3, in run
  [rank0]:   [Previous line repeated 9 more times]
  [rank0]: RuntimeError: mat1 and mat2 shapes
  after it rank 1: the same""".splitlines()
STACK = """\
rank 0 on vm (pid 7180): hangs.py:13 in main: it waits
    torch/distributed/distributed_c10d.py:3252 in all_reduce
    libtorch_cpu.so in wait
    /work/hangs.py:13 in main
    /work/hangs.py:14 in <module>
    … and 3 more

rank 1 on vm: it sleeps
    /work/other.py:1 in <module>""".splitlines()


def shown(lines: list[str]) -> list[tuple[str, str]]:
    """Of each block the kind, and what it is about."""
    found = blocks(lines)
    assert "\n".join(it["text"] for it in found) == "\n".join(lines), "no line is lost"
    return [(it["kind"], " ".join(it.get("of", ())) or it["text"].strip().split("\n")[0]) for it in found]


def test_a_traceback() -> None:
    assert shown(TRACEBACK) == [
        ("text", "it wrote last:"), ("frame", '[rank0]:   File "/home/me/train.py", line 15, in <module>'),
        ("at", '[rank0]:   File "/home/me/net.py", line 8, in forward'), ("folded", "torch Python"),
        ("text", "[rank0]: RuntimeError: mat1 and mat2 shapes"),
    ]  # fmt: skip
    assert next(it for it in blocks(TRACEBACK) if it["kind"] == "folded")["count"] == 2


def test_stacks_of_ranks() -> None:
    assert shown(STACK) == [
        ("text", "rank 0 on vm (pid 7180): hangs.py:13 in main: it waits"), ("folded", "torch C"),
        ("at", "/work/hangs.py:13 in main"), ("frame", "/work/hangs.py:14 in <module>"),
        ("text", "rank 1 on vm: it sleeps"), ("at", "/work/other.py:1 in <module>"),
    ]  # fmt: skip


def test_what_is_no_stack() -> None:
    """Nothing, a traceback of libraries alone, and frames that were cut off."""
    assert blocks([]) == []
    alone = ['  File "/usr/lib/python3.12/runpy.py", line 1, in run', "ImportError: no"]
    assert [it["kind"] for it in blocks(alone)] == ["folded", "text"]
    assert [it["kind"] for it in blocks(["    return f(x)", "time: data 20 %"])] == ["text"]


def test_whose_a_file_is() -> None:
    for file, of in (
        ("/home/me/src/vision/train.py", ""), ("train.py", ""), ("/home/me/python3.11/train.py", ""),
        ("/x/src/paceline/train/loop/run.py", "paceline"), ("/tmp/a.pyz/paceline/node/x.py", "paceline"),
        ("<frozen runpy>", "Python"), ("/opt/conda/lib/python3.10/json/__init__.py", "Python"),
        ("/v/lib/python3.10/dist-packages/yaml/__init__.py", "yaml"), ("/tmp/torchinductor_me/ab/c.py", "torch"),
    ):  # fmt: skip
        assert library(file) == of, file
