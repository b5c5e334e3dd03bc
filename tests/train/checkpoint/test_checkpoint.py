"""Saving and loading checkpoints in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zlib
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from tests.train.checkpoint.checkpoint_ranks import processes, rank_state, same, save, shared_state, single  # noqa: E402

from paceline.contract.folder_lock import LOCK  # noqa: E402
from paceline.train.checkpoint import disk_format  # noqa: E402
from paceline.train.checkpoint.disk_format import FileRecord, Manifest, make_temporary  # noqa: E402
from paceline.train.checkpoint.errors import DamagedCheckpoint  # noqa: E402
from paceline.train.checkpoint.snapshots import Staging  # noqa: E402
from paceline.train.checkpoint.store import CheckpointError, CheckpointStore, SingleExchange  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.torch


class Counter:
    """Something a user registers whose state needs pickle."""

    def __init__(self, count: int) -> None:
        self.count = count


class Gate(SingleExchange):
    """Keeps saves from going on until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def decide(self, data: bytes, rule: Callable[[list[bytes]], bytes]) -> bytes:
        if threading.current_thread() is not threading.main_thread():
            self.open.wait()
        return super().decide(data, rule)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    missing: list[str] = []
    fsync, commit = os.fsync, disk_format.commit

    def noted(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checked(temporary: Path, folder: Path, step: int) -> Path:
        missing.extend(path.name for path in (temporary, *temporary.iterdir()) if path.stat().st_ino not in synced)
        return commit(temporary, folder, step)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(disk_format, "commit", checked)
    save(single(tmp_path), 7)
    assert names(tmp_path) == ["step-000007"]
    assert not missing
    assert tmp_path.stat().st_ino in synced


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    store = single(tmp_path / "new" / "folder")
    assert store.latest() is None
    assert store.load() is None
    save(store, 7)
    found = store.load()
    assert found is not None
    assert (found.step, found.world_size, found.path) == (7, 1, store.folder / "step-000007")
    assert same(found.shared_state, shared_state(7))
    assert same(found.rank_state, rank_state(7, 0))
    assert store.last_saved_step == 7
    elsewhere = store.load("meta")
    assert elsewhere is not None
    assert elsewhere.shared_state["model"]["layer0.weight"].is_meta
    assert same(elsewhere.rank_state, rank_state(7, 0))  # random states stay where torch wants them
    store.close()


def test_the_state_is_the_one_at_the_time_of_save(tmp_path: Path) -> None:
    gate = Gate()
    store = CheckpointStore(tmp_path, rank=0, world_size=1, exchange=gate)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()

    step()
    history = [1, 2]
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "history": {"list": history}}
    expected = {name: torch.load(_saved(tmp_path / "expected.pt", part)) for name, part in state.items()}
    store.save(1, state, {"rng": torch.get_rng_state(), "history": history})
    rng = torch.get_rng_state()
    for _ in range(3):  # before a byte is written
        step()
    history.append(3)
    gate.open.set()
    store.wait()
    found = store.load()
    assert found is not None
    assert same(found.shared_state, expected)
    assert same(found.rank_state, {"rng": rng, "history": [1, 2]})
    assert not same(found.shared_state["model"], model.state_dict())


def _saved(path: Path, state: object) -> Path:
    torch.save(state, path)
    return path


def test_staging_keeps_what_torch_save_keeps() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    base = torch.arange(12.0)
    state: dict[str, Any] = OrderedDict(
        tied=weight,
        tied_again=weight,
        view=base.view(3, 4).t(),
        part=base[3:7],
        half=torch.ones(3, dtype=torch.bfloat16),
        empty=torch.empty(0, 3),
        scalar=torch.tensor(3),
        conjugate=torch.tensor([1 + 2j]).conj(),
        sparse=torch.eye(3).to_sparse(),
        size=torch.Size([1, 2]),
        dtype=torch.float16,
        other=(1, None, "a", {2}, Counter(5)),
    )
    state._metadata = {"version": 2}  # type: ignore[attr-defined]  # as Module.state_dict() does
    copy = Staging().stage({"x": state})["x"].rebuild()
    assert type(copy) is OrderedDict
    assert copy._metadata == {"version": 2}  # type: ignore[attr-defined]
    assert copy["tied"] is copy["tied_again"]
    assert isinstance(copy["tied"], torch.nn.Parameter)
    assert copy["view"].stride() == (1, 4)
    assert copy["view"].untyped_storage().data_ptr() == copy["part"].untyped_storage().data_ptr()
    assert copy["other"][4].count == 5
    assert torch.equal(copy.pop("sparse").to_dense(), state.pop("sparse").to_dense())
    del copy["other"], state["other"]
    assert same(copy, state)


def test_buffers_are_used_again() -> None:
    staging = Staging()
    first = [t.data_ptr() for t in staging.stage({"x": shared_state(1)})["x"].tensors]
    again = staging.stage({"x": shared_state(2)})["x"]
    assert sorted(first) == sorted(t.data_ptr() for t in again.tensors)
    assert same(again.rebuild(), shared_state(2))


def test_saves_follow_each_other_and_the_last_are_kept(tmp_path: Path) -> None:
    store = single(tmp_path, keep=2)
    for step in (3, 1, 2, 2):  # newest is what was committed last, whatever its step
        store.save(step, shared_state(step), None)
    store.close()
    assert names(tmp_path) == ["step-000002", "step-000002-2"]
    found = store.load()
    assert found is not None
    assert found.path.name == "step-000002-2"


def test_nothing_is_removed_that_was_not_written(tmp_path: Path) -> None:
    foreign = ["notes.txt", "step-1", "step-000009x", ".saving-mine"]
    for name in foreign:
        (tmp_path / name).mkdir()
    make_temporary(tmp_path / ".saving-step-000001-0123abcd")
    (tmp_path / ".saving-step-000001-0123abcd" / "model.pt").write_bytes(b"half")
    alike = {  # called as ours, but not made by us
        ".saving-step-000001-76543210": "model.pt",
        ".removing-step-000001-76543210": "manifest.json",
        ".removing-step-000002-76543210": "notes.txt",
    }
    for folder, name in alike.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("mine")
    probe = tmp_path / f".meeting-{'0' * 32}"
    probe.write_text("mine")
    os.utime(probe, (0, 0))
    store = single(tmp_path, keep=1)
    save(store, 1)
    (tmp_path / "step-000001" / "KEEP").touch()
    for step in (2, 3):
        save(store, step)
    assert names(tmp_path) == sorted([*foreign, *alike, probe.name, "step-000001", "step-000003"])
    for folder, name in alike.items():
        assert (tmp_path / folder / name).read_text() == "mine"
    assert (tmp_path / "step-000001" / "model.pt").exists()


def test_a_checkpoint_that_is_only_linked_to_is_not_removed(tmp_path: Path) -> None:
    store = single(tmp_path / "first")
    save(store, 1)
    other = tmp_path / "other"
    other.mkdir()
    (other / "step-000001").symlink_to(tmp_path / "first" / "step-000001")
    before = {path.name: path.read_bytes() for path in (tmp_path / "first" / "step-000001").iterdir()}
    second = single(other, keep=1)
    for step in (2, 3):
        save(second, step)
    assert names(other) == ["step-000001", "step-000003"]
    assert {path.name: path.read_bytes() for path in (other / "step-000001").iterdir()} == before


def test_plain_torch_reads_a_checkpoint(tmp_path: Path) -> None:
    store = single(tmp_path)
    store.save(123, shared_state(123), rank_state(123, 0), block=True)
    script = """
import json, sys
from pathlib import Path
sys.modules["paceline"] = None  # importing it is an error now
import torch
folder = Path(sys.argv[1]) / "step-000123"
model = torch.load(folder / "model.pt", weights_only=True)
optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
own = torch.load(folder / "rank-00000.pt", weights_only=True)
print(model["layer3.weight"].sum().item(), optimizer["param_groups"][0]["lr"], own["position"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "1230000.0 61.5 861\n"


def test_a_state_of_a_class_that_is_not_marked_safe_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    store = single(tmp_path)
    refused = r"of type \S*Counter, which torch.load\(..., weights_only=True\) does not read; keep tensors, "
    with pytest.raises(CheckpointError, match=r"^cannot save step 1 in \S+: own.pt: \['a'\]\[1\] is " + refused):
        store.save(1, {**shared_state(1), "own": {"a": [0, Counter(5)]}}, None, block=True)
    with pytest.raises(CheckpointError, match=r"^cannot save step 1 in \S+: rank-00000.pt: the state is " + refused):
        store.save(1, shared_state(1), Counter(5), block=True)
    assert names(tmp_path) == []
    save(store, 2)
    with torch.serialization.safe_globals([Counter]):
        store.save(3, {"counter": Counter(5)}, None, block=True)
        found = store.load()
    assert found is not None
    assert found.shared_state["counter"].count == 5


class Malicious:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("import pathlib; pathlib.Path('executed').touch()",)


@pytest.mark.parametrize("name", ["model.pt", "rank-00000.pt"])
def test_code_in_a_checkpoint_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    store = single(tmp_path / "checkpoints")
    save(store, 1)
    folder = tmp_path / "checkpoints" / "step-000001"
    torch.save(Malicious(), folder / name)
    manifest = Manifest.from_json((folder / "manifest.json").read_bytes())
    data = (folder / name).read_bytes()
    record = FileRecord(len(data), f"{zlib.crc32(data):08x}")
    manifest = replace(manifest, files={**manifest.files, name: record})
    (folder / "manifest.json").write_text(manifest.to_json())
    with pytest.raises(
        CheckpointError, match=rf"^cannot load \S+: {name}: it holds builtins.exec, which could run code"
    ):
        store.load()
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"id": "../../x" + 25 * "0"},
        {"step": -1},
        {"serial": "1"},
        {"files": {"../model.pt": FileRecord(1, "00000000")}},
        {"files": {"a/b.pt": FileRecord(1, "00000000")}},
        {"files": {"manifest.json": FileRecord(1, "00000000")}},
        {"files": {"model.pt": FileRecord(-1, "00000000")}},
    ],
)
def test_a_manifest_leads_nowhere_else(tmp_path: Path, change: dict[str, Any]) -> None:
    save(single(tmp_path), 1)
    manifest = Manifest.from_json((tmp_path / "step-000001" / "manifest.json").read_bytes())
    with pytest.raises(DamagedCheckpoint, match=r"^manifest.json: "):
        Manifest.from_json(replace(manifest, **change).to_json().encode())


def test_what_cannot_be_copied_fails_this_save_alone(tmp_path: Path) -> None:
    store = single(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot save step 1 in .*: cannot copy 'hook.pt': .*lambda"):
        store.save(1, {"hook": lambda: None}, None)
    for name in ("../model", "", "rank-00001", ".hidden"):
        with pytest.raises(CheckpointError, match="cannot be the name of a file"):
            store.save(1, {name: {}}, None)
    assert names(tmp_path) == []
    save(store, 2)
    assert names(tmp_path) == ["step-000002"]


def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    store = single(folder)
    folder.rmdir()
    for call in (lambda: save(store, 2), store.load, store.latest, store.wait, store.close):
        store.save(1, shared_state(1), None)
        with pytest.raises(CheckpointError, match=r"^cannot save step 1 in \S+: No such file or directory$"):
            call()
    folder.mkdir()
    save(store, 3)


def test_a_class_that_is_no_longer_marked_safe_is_an_error_and_no_damage(tmp_path: Path) -> None:
    store = single(tmp_path)
    save(store, 1)
    with torch.serialization.safe_globals([Counter]):
        store.save(2, {"counter": Counter(5)}, None, block=True)
    with pytest.raises(CheckpointError, match=r"^cannot load \S+/step-000002: counter.pt: it holds \S+.Counter, which"):
        store.load()


def test_a_checkpoint_of_another_format_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr("paceline.train.checkpoint.disk_format.FORMAT", 2)
        save(single(tmp_path), 1)
    with pytest.raises(CheckpointError, match=r"step-000001: the checkpoint is of format 2 and this paceline reads"):
        single(tmp_path).load()
    assert json.loads((tmp_path / "step-000001" / "manifest.json").read_text())["version"] == 2


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep"):
        single(tmp_path, keep=0)


def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"^cannot write checkpoints to \S+/file/x: Not a directory$"):
        single(tmp_path / "file" / "x")


def in_process(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a process of its own."""
    ours, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=_answer, args=(theirs, function, args))
    process.start()
    theirs.close()
    answer = ours.recv()
    process.join()
    return answer


def _answer(end: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    end.send(function(*args))


def _save_and_leave(folder: Path) -> None:
    single(folder).save(1, shared_state(1), rank_state(1, 0))


def test_a_process_that_ends_finishes_its_save(tmp_path: Path) -> None:
    in_process(_save_and_leave, tmp_path)
    found = single(tmp_path).load()
    assert found is not None
    assert same(found.shared_state, shared_state(1))


def _open_as_nobody(folder: Path) -> str:
    if os.geteuid() == 0:
        os.setuid(65534)
    with pytest.raises(CheckpointError) as error:
        single(folder)
    return str(error.value)


def test_a_folder_without_permission_is_an_error_at_once(tmp_path: Path) -> None:
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o755)
    (tmp_path / "locked").mkdir(mode=0o555)
    message = in_process(_open_as_nobody, tmp_path / "locked")
    assert message == f"cannot write checkpoints to {tmp_path}/locked: Permission denied"


def _save_with_limit(folder: Path) -> str:
    import resource

    store = single(folder)
    save(store, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    with pytest.raises(CheckpointError) as error:
        save(store, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(folder) == ["step-000001"]
    assert store.latest() is not None
    save(store, 3)
    return str(error.value)


def test_a_limit_on_file_sizes_fails_the_save_alone(tmp_path: Path) -> None:
    message = in_process(_save_with_limit, tmp_path)
    assert message == f"cannot save step 2 in {tmp_path}: a file grew past the limit on the size of files (ulimit -f)"
    assert names(tmp_path) == ["step-000001", "step-000003"]


def test_a_full_disk_fails_the_save_alone(tmp_path: Path, small_disk: Callable[[Path, int], Path]) -> None:
    disk = small_disk(tmp_path / "disk", 800)
    store = single(disk)
    save(store, 1)
    with pytest.raises(
        CheckpointError, match=r"^cannot save step 2 in \S+: no space left: the checkpoint needs 0.5 MB"
    ):
        save(store, 2)
    assert names(disk) == ["step-000001"]
    found = single(disk).load()
    assert found is not None
    assert same(found.shared_state, shared_state(1))
    store.save(3, {"model": torch.ones(3)}, None, block=True)
    assert names(disk) == ["step-000001", "step-000003"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_tensors_of_a_gpu_are_saved_as_they_were(tmp_path: Path) -> None:
    gate = Gate()
    store = CheckpointStore(tmp_path, rank=0, world_size=1, exchange=gate)
    weight = torch.arange(1_000_000.0, device="cuda")
    expected = weight.cpu()
    store.save(1, {"model": {"weight": weight, "tail": weight[10:]}}, torch.cuda.get_rng_state())
    weight.zero_()
    gate.open.set()
    for device in ("cpu", "cuda"):
        found = store.load(device)
        assert found is not None
        assert found.shared_state["model"]["weight"].device.type == device
        assert torch.equal(found.shared_state["model"]["weight"].cpu(), expected)
        assert torch.equal(found.shared_state["model"]["tail"].cpu(), expected[10:])
        assert found.rank_state.device.type == "cpu"
    assert all(tensor.is_pinned() for tensor in Staging().stage({"x": weight})["x"].tensors)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_save_has_what_the_gpu_has_yet_to_compute_and_nothing_later(tmp_path: Path) -> None:
    """Kernels are queued: those before the save count, also of a stream that is waited for; those after it do not."""
    gate = Gate()
    store = CheckpointStore(tmp_path, rank=0, world_size=1, exchange=gate)
    weight, side = torch.zeros(1 << 24, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # cycles
        weight += 1
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda._sleep(200_000_000)
    weight += 1
    assert not torch.cuda.current_stream().query(), "the GPU has done all before the save begins"
    for step, expected in ((1, 2.0), (2, 3.0)):  # the second one uses the memory of the first again
        store.save(step, {"model": {"weight": weight}}, None)
        weight += 1  # as the next step of the optimizer, while the checkpoint is not written
        gate.open.set()
        found = store.load()
        assert found is not None
        assert torch.equal(found.shared_state["model"]["weight"], torch.full((1 << 24,), expected))
