"""`paceline checkpoint`: what is shown of checkpoints, whether damage is found, parts as files, and files as one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402 - after torch is known to be there
from tests import recorded  # noqa: E402
from tests.train.checkpoint.checkpoint_ranks import same, save, shared_state, single  # noqa: E402
from tests.train.launching import launch  # noqa: E402
from tests.typed import refusal, typed  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import paceline as library  # noqa: E402
from paceline.contract.folder_lock import FolderLock  # noqa: E402
from paceline.train.checkpoint import export, import_weights  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Paceline

pytestmark = pytest.mark.torch
FILES = ["model.pt", "optimizer.pt", "rank-00000.pt", "scheduler.pt"]
TENSORS = 16  # of the sharded model, 4 MB each


@pytest.fixture
def saved(paceline: Paceline) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    folder = paceline.folder / "saved"
    with contextlib.closing(single(folder)) as store:
        save(store, 1)
        save(store, 2)
    return folder


@pytest.fixture(autouse=True)
def _this_process_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What should be refused in this process must not replace it by the export."""
    monkeypatch.delattr(os, "execv")


@pytest.fixture
def no_torch(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)


def damage(file: Path) -> None:
    """Change one byte in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# -- show and verify ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_torch")
def test_what_is_shown(paceline: Paceline, saved: Path) -> None:
    (saved / "step-000001" / "model.pt").write_bytes(b"short")
    (saved / "step-000003").mkdir()
    done = typed(paceline, "checkpoint", "show", "saved")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [re.split("  +", line) for line in done.stdout.splitlines()]
    assert lines[0] == ["NAME", "STEP", "SAVED AT", "RANKS", "SIZE", "FILES", "SIZES"]
    assert [line[0] for line in lines[1:]] == ["step-000002", "step-000001", "step-000003"]
    assert lines[1][-1] == "right"
    assert re.fullmatch(r"wrong: model.pt: 5 bytes instead of \d+", lines[2][-1])
    assert lines[3][-1] == "wrong: manifest.json: no such file"
    found = json.loads(typed(paceline, "checkpoint", "show", "saved/step-000002", "-o", "json").stdout)
    assert [(it["path"], it["step"], it["world_size"], it["problem"]) for it in found] == [
        ("saved/step-000002", 2, 1, None)
    ]
    assert {it["name"]: it["size"] for it in found[0]["files"]} == {
        name: (saved / "step-000002" / name).stat().st_size for name in FILES
    }
    table = typed(paceline, "checkpoint", "show", "saved/step-000002").stdout.splitlines()
    assert table[0].startswith("step 2 of 1 rank, saved at 20")
    assert [line.split()[0] for line in table[2:]] == ["FILE", *FILES]


@pytest.mark.usefixtures("no_torch")
def test_one_damaged_byte_is_found(paceline: Paceline, saved: Path) -> None:
    done = typed(paceline, "checkpoint", "verify", "saved")
    expected = [f"saved/step-00000{step}/{name}: intact" for step in (2, 1) for name in FILES]
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, expected, "")
    damage(saved / "step-000001" / "optimizer.pt")
    done = typed(paceline, "checkpoint", "verify", "saved")
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert lines[:5] + lines[6:] == expected[:5] + expected[6:]
    why = r"saved/step-000001/optimizer.pt: damaged: its checksum is [0-9a-f]{8} instead of [0-9a-f]{8}"
    assert re.fullmatch(why, lines[5])
    (saved / "step-000002" / "manifest.json").write_text("{}")
    lines = typed(paceline, "checkpoint", "verify", "saved").stdout.splitlines()
    assert lines[-1] == "saved/step-000002: damaged: manifest.json: damaged, or of another version"


def test_the_name_of_a_job(paceline: Paceline) -> None:
    recorded.ended(paceline, "it")
    assert refusal(paceline, "checkpoint", "show", "it") == "job it has saved no checkpoint; see paceline get it"
    with contextlib.closing(single(paceline.home / "jobs" / "it" / "checkpoints")) as jobs:
        save(jobs, 7)
    assert [it["step"] for it in json.loads(typed(paceline, "checkpoint", "show", "it", "-o", "json").stdout)] == [7]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("show", "no"), "there is no folder no, and no job 'no'; there is none yet; start one with paceline submit"),
        (("verify", "./no"), "./no is no folder; name a folder with checkpoints, one checkpoint, or a job"),
        (("show", "empty"), "empty has no checkpoints; name a folder with step-…, one of these, or a job"),
        (
            ("export", "saved", "-o", "model.bin"),
            "-o model.bin: of which kind is it? let its name end in .safetensors or .pt",
        ),
        (("export", "saved", "-o", "there.pt"), "-o there.pt exists; choose another file, or replace it with --force"),
        (("export", "saved", "-o", "no/m.pt"), "-o no/m.pt: there is no folder {}/no; name another file"),
        (
            ("export", "saved", "-o", "m.pt", "--part", "rank-00000"),
            "--part rank-00000: saved/step-000002 has no such part; choose one of model, optimizer, scheduler",
        ),
        (
            ("import", "no.pt", "-o", "new"),
            "no.pt is no file; name files of safetensors, or of torch.save with a state_dict",
        ),
        (
            ("import", "there.pt", "-o", "saved"),
            "-o saved has checkpoints; choose another folder, or add a newer one to them with --force",
        ),
        (
            ("import", "there.pt", "-o", "saved/step-000001", "--force"),
            "-o saved/step-000001 is a checkpoint; name the folder that it is in, or another one",
        ),
        (("import", "there.pt", "-o", "there.pt"), "-o there.pt: is no folder; choose another folder"),
        (("import", "there.pt", "-o", "no/new"), "-o no/new: there is no folder {}/no; choose another folder"),
    ],
)
def test_bad_input(paceline: Paceline, saved: Path, words: tuple[str, ...], line: str) -> None:
    (paceline.folder / "empty").mkdir()
    (paceline.folder / "there.pt").write_text("mine")
    before = names(paceline.folder)
    assert refusal(paceline, "checkpoint", *words) == line.format(paceline.folder)
    assert names(paceline.folder) == before
    assert (paceline.folder / "there.pt").read_text() == "mine"


@pytest.mark.usefixtures("no_torch")
def test_export_and_import_need_torch(paceline: Paceline, saved: Path) -> None:
    why = f"torch is not installed for {sys.executable}; use the paceline that is installed beside it"
    assert refusal(paceline, "checkpoint", "export", "saved", "-o", "m.pt") == why
    file = str(saved / "step-000001" / "model.pt")
    assert refusal(paceline, "checkpoint", "import", file, "-o", "new") == why


# -- export ------------------------------------------------------------------------------------------------------------


def test_all_kinds_of_tensors_and_what_is_none(paceline: Paceline) -> None:
    numbers = torch.arange(24.0).reshape(4, 6)
    model: dict[str, Any] = {
        "flag": torch.tensor([True, False, True]),
        "half": numbers.bfloat16(),
        "number": torch.tensor(3),
        "none": torch.zeros(0, 3),
        "turned": numbers.t(),
        "tied": numbers,
        "also tied ü": numbers,
        "complex": torch.complex(numbers, -numbers).conj(),
    }
    with contextlib.closing(single(paceline.folder / "saved")) as written:
        written.save(1, {"model": {**model, "note": "text"}}, {}, block=True)
    target = paceline.folder / "model.safetensors"
    target.write_text("older")
    done = paceline.succeeds("checkpoint", "export", "saved", "-o", "model.safetensors", "--force")
    assert done.stdout == "model.safetensors\n"
    about = f"model of saved/step-000001, {target.stat().st_size} bytes"
    assert done.stderr == f"paceline: left out, because they are no tensors: 'note'\npaceline: {about}\n"
    found = load_file(target)
    assert found.keys() == model.keys()
    for name, tensor in model.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    content = target.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    assert all(it["data_offsets"][0] % model[name].itemsize == 0 for name, it in header.items())
    places = [it["data_offsets"] for it in header.values()]
    assert [0, *(end for _, end in places)] == [*(begin for begin, _ in places), len(content) - 8 - length]


def test_the_newest_intact_one_and_other_parts(paceline: Paceline, saved: Path) -> None:
    damage(saved / "step-000002" / "optimizer.pt")
    done = paceline("checkpoint", "export", "saved", "--part", "optimizer", "-o", "o.safetensors")
    assert (done.returncode, done.stdout) == (2, "")
    skipped, refused = done.stderr.splitlines()
    assert skipped.startswith("paceline: saved/step-000002 is damaged and not used: optimizer.pt: its checksum is ")
    assert (
        refused == "paceline: --part optimizer is no flat dict of tensors, as safetensors needs; choose a file FILE.pt"
    )
    paceline.succeeds("checkpoint", "export", "saved", "--part", "optimizer", "-o", "o.pt")
    assert same(torch.load(paceline.folder / "o.pt", weights_only=True), shared_state(1)["optimizer"])
    damage(saved / "step-000001" / "optimizer.pt")
    assert typed(paceline, "checkpoint", "export", "saved", "--part", "optimizer", "-o", "p.pt").returncode == 1
    assert {*names(paceline.folder)} & {"o.safetensors", "p.pt"} == set()


@pytest.mark.parametrize(
    ("happens", "file", "ended"),
    [
        ("os.fsync = lambda _: os.kill(os.getpid(), signal.SIGINT)", "m.safetensors", (130, "")),
        ("os.fsync = lambda _: os.kill(os.getpid(), signal.SIGTERM)", "m.pt", (143, "")),
        (
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))",
            "m.safetensors",
            (1, "paceline: -o m.safetensors: File too large\n"),
        ),
    ],
)
def test_nothing_is_left_of_what_does_not_come_to_its_end(
    tmp_path: Path, happens: str, file: str, ended: tuple[int, str]
) -> None:
    with contextlib.closing(single(tmp_path)) as store:
        save(store, 1)
    before = names(tmp_path)
    code = f"import os, resource, signal; {happens}; from paceline.train.checkpoint.export import main; main()"
    # -B: the limit would cut what Python compiles, too.
    command = [sys.executable, "-B", "-c", code, str(tmp_path / "step-000001"), "model", file, ""]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == ended
    assert names(tmp_path) == before


def train(folder: str) -> None:
    """Save a sharded model of 64 MB, and whole, by plain torch, what it is."""
    with library.init(seed=1, checkpoint_dir=folder, checkpoint_every=1, progress=False) as run:
        model = torch.nn.Sequential(*(torch.nn.Linear(1001, 1001) for _ in range(TENSORS)))
        strategy = library.Strategy(shard=True, units=tuple(str(number) for number in range(TENSORS)))
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.1), strategy=strategy)
        data = run.dataloader(TensorDataset(torch.ones(3, 1001)), global_batch_size=3)
        for _ in run.epochs(1):
            for (x,) in data:
                run.backward(model(x).square().mean())
                optimizer.step()
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        if run.is_main:
            torch.save(whole, f"{folder}/whole.pt")


def anonymous_memory() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@contextlib.contextmanager
def watched_memory() -> Iterator[list[int]]:
    """A list of by how many bytes the memory of this process has grown until each call of os.write."""
    before, write = anonymous_memory(), os.write
    growths = []

    def watched(descriptor: int, data: Any) -> int:
        growths.append(anonymous_memory() - before)
        return write(descriptor, data)

    with mock.patch.object(os, "write", watched):
        yield growths


def exported(checkpoint: Path, target: Path) -> int:
    """Export a model; returns by how many bytes the memory of this process has grown at most while it was written."""
    with (
        mock.patch.object(sys, "argv", ["", str(checkpoint), "model", str(target), ""]),
        watched_memory() as growths,
        pytest.raises(SystemExit) as ended,
    ):
        export.main()
    assert ended.value.code == 0
    return max(growths)


def test_a_sharded_model_is_exported_whole_and_in_little_memory(paceline: Paceline) -> None:
    launch(train, (str(paceline.folder / "saved"),), 3)
    (checkpoint,) = (paceline.folder / "saved").glob("step-*")
    assert len([name for name in names(checkpoint) if name.startswith("shard-")]) == 3
    whole = torch.load(paceline.folder / "saved" / "whole.pt", weights_only=True)
    (growth,) = launch(exported, (checkpoint, paceline.folder / "model.safetensors"))
    assert same(load_file(paceline.folder / "model.safetensors"), whole)
    assert growth < 48e6, "of 64 MB, with 4 MB in a tensor; what is freed may stay with the process for a while"
    paceline.succeeds("checkpoint", "export", "saved", "-o", "model.pt")
    model = torch.nn.Sequential(*(torch.nn.Linear(1001, 1001) for _ in range(TENSORS)))
    model.load_state_dict(torch.load(paceline.folder / "model.pt", weights_only=True))
    assert same(dict(model.state_dict()), whole)


# -- import ------------------------------------------------------------------------------------------------------------


def written(module: Any, *args: object) -> tuple[object, str]:
    """Run the part of a verb that needs torch; returns its exit code, and what it says."""
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["", *map(str, args)]),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        pytest.raises(SystemExit) as ended,
    ):
        module.main()
    return ended.value.code, said.getvalue()


def test_what_is_exported_can_be_imported(paceline: Paceline, saved: Path) -> None:
    model = shared_state(2)["model"]
    paceline.succeeds("checkpoint", "export", "saved", "-o", "model.safetensors")
    done = paceline.succeeds("checkpoint", "import", "model.safetensors", "-o", "new")
    assert done.stdout == "new/step-000000\n"
    checkpoint = paceline.folder / "new" / "step-000000"
    size = (checkpoint / "model.pt").stat().st_size
    assert done.stderr == f"paceline: model of model.safetensors, {size} bytes\n"
    assert names(checkpoint.parent) == {"step-000000"}
    assert same(dict(torch.load(checkpoint / "model.pt", weights_only=True)), model)
    assert typed(paceline, "checkpoint", "verify", "new").stdout == "new/step-000000/model.pt: intact\n"
    (shown,) = json.loads(typed(paceline, "checkpoint", "show", "new", "-o", "json").stdout)
    assert (shown["step"], shown["weights_only"], shown["problem"]) == (0, True, None)
    line = typed(paceline, "checkpoint", "show", "new/step-000000").stdout.splitlines()[0]
    assert line.startswith("weights to begin with, imported at 20")
    done = paceline.succeeds("checkpoint", "import", "model.safetensors", "-o", "saved", "--force")
    with contextlib.closing(single(saved)) as store:
        found = store.load()
    assert found is not None
    assert (found.path.name, found.weights_only) == ("step-000000", True)
    assert same(dict(found.shared_state["model"]), model)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "model.safetensors is not a file of safetensors: cannot mmap an empty file"),
        (b"\xff" * 40, "model.safetensors is not a file of safetensors: "),
        (b"\2" + bytes(7) + b"[]", "model.safetensors is not a file of safetensors: "),
        (
            {"model": {"w": torch.zeros(2)}},
            "model.pt is no flat dict of tensors, as model.state_dict() is: it has 'model'",
        ),
        ([torch.zeros(2)], "model.pt is no state_dict of torch.save: it has a list"),
        ({"w": torch.zeros(2).to_sparse()}, "w in model.pt is torch.sparse_coo; weights are whole, dense tensors"),
        ({"w": torch.zeros(2, device="meta")}, "w in model.pt has no numbers; weights are whole, dense tensors"),
        ({"w": torch.zeros(2), "n": Path()}, "model.pt is neither of safetensors nor a state_dict of torch.save: "),
        ({"twice": torch.zeros(2)}, "twice is in both model.pt and other.pt; leave out one of them"),
    ],
)
def test_files_without_weights_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    files = ["model.safetensors" if isinstance(content, bytes) else "model.pt", "other.pt"]
    if isinstance(content, bytes):
        Path(files[0]).write_bytes(content)
    else:
        torch.save(content, files[0])
    torch.save({"twice": torch.zeros(2)}, files[1])
    ((code, said),) = launch(written, (import_weights, "new", "", *files))
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith(f"paceline: {why}")
    assert names(tmp_path) == {*files}


KINDS = st.sampled_from([
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.uint16,
    torch.complex64, torch.float8_e4m3fn,
])  # fmt: skip
SHAPES = st.lists(st.integers(0, 3), max_size=3)
STATES = st.dictionaries(
    st.text(min_size=1, max_size=5), st.tuples(KINDS, SHAPES, st.booleans()), min_size=1, max_size=6
)


def imports_any_state(folder: Path) -> None:
    """Weights of any types and shapes, in one file or two, come through import and export as they are."""

    @settings(max_examples=30, deadline=None)
    @given(STATES, st.booleans())
    def check(drawn: dict[str, Any], plain: bool) -> None:
        model, files = {}, [folder / f"{n}.{'pt' if plain else 'safetensors'}" for n in range(2)]
        parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for number, (name, (kind, shape, first)) in enumerate(drawn.items()):
            numbers = torch.arange(number, number + torch.Size(shape).numel()) % 2
            model[name] = parts[first][name] = numbers.reshape(shape).to(kind)
        used = [file for file, part in zip(files, parts, strict=True) if part]
        for file, part in zip(files, parts, strict=True):
            (torch.save if plain else save_file)(part, file)
        assert written(import_weights, folder / "new", "force", *used)[0] == 0
        checkpoint = sorted((folder / "new").glob("step-*"), key=os.path.getmtime)[-1]
        assert written(export, checkpoint, "model", folder / "again.safetensors", "force")[0] == 0
        assert same(load_file(folder / "again.safetensors"), model)

    check()


def test_weights_of_any_kind(tmp_path: Path) -> None:
    launch(imports_any_state, (tmp_path,))


def imports_broken_files(folder: Path) -> None:
    """A file that was changed somewhere is imported, or refused in one line; nothing is left of it."""
    good = folder / "good.safetensors"
    save_file({"a": torch.zeros(3), "b": torch.zeros(2, 2, dtype=torch.int64)}, good)
    content = good.read_bytes()

    @settings(max_examples=80, deadline=None)
    @given(st.integers(0, len(content) - 1), st.binary(max_size=4), st.booleans())
    def check(at: int, change: bytes, cuts: bool) -> None:
        file = folder / "bad.safetensors"
        file.write_bytes(content[:at] + change + (b"" if cuts else content[at + len(change) :]))
        code, said = written(import_weights, folder / "new", "force", file)
        assert code in (0, 2), said
        if code:
            assert said.count("\n") == 1
            assert said.startswith(f"paceline: {file} is no")
        assert not list(folder.glob("new/.*"))

    check()


def test_broken_files_are_refused(tmp_path: Path) -> None:
    launch(imports_broken_files, (tmp_path,))


def imported_in_little_memory(folder: Path) -> int:
    """Import 64 MB; returns by how many bytes the memory of this process has grown at most."""
    with watched_memory() as growths:
        assert written(import_weights, folder / "new", "", folder / "model.safetensors")[0] == 0
    return max(growths)


def test_import_takes_little_memory(tmp_path: Path) -> None:
    save_file({f"{n}": torch.ones(1000, 1000) for n in range(TENSORS)}, tmp_path / "model.safetensors")
    (growth,) = launch(imported_in_little_memory, (tmp_path,))
    assert growth < 16e6, "of 64 MB, with 4 MB in a tensor"


@pytest.mark.parametrize(
    ("happens", "ended"),
    [
        ("os.fsync = lambda _: os.kill(os.getpid(), signal.SIGTERM)", (143, "")),
        (
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))",
            (1, "paceline: cannot import into new: a file grew past the limit on the size of files (ulimit -f)\n"),
        ),
        (
            "import shutil; shutil.disk_usage = lambda _: shutil._ntuple_diskusage(100, 99, 1)",
            (1, "paceline: cannot import into new: no space left: the checkpoint needs 0.4 MB and 0.0 MB are free\n"),
        ),
    ],
)
def test_nothing_is_left_of_an_import_that_fails(tmp_path: Path, happens: str, ended: tuple[int, str]) -> None:
    torch.save(shared_state(1)["model"], tmp_path / "model.pt")
    code = f"import os, resource, signal; {happens}; from paceline.train.checkpoint.import_weights import main; main()"
    command = [sys.executable, "-B", "-c", code, "new", "", "model.pt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == ended
    assert names(tmp_path) == {"model.pt"}


def test_a_folder_that_a_job_holds(tmp_path: Path) -> None:
    torch.save(shared_state(1)["model"], tmp_path / "model.pt")
    (tmp_path / "new").mkdir()
    lock = FolderLock(tmp_path / "new", 0)
    ((code, said),) = launch(written, (import_weights, tmp_path / "new", "", tmp_path / "model.pt"))
    lock.release()
    assert code == 2
    assert said.startswith(f"paceline: -o {tmp_path}/new: held by another run (rank 0, pid {os.getpid()} on ")
    assert said.endswith("); stop that first, or choose another folder\n")
    assert names(tmp_path / "new") == set()
