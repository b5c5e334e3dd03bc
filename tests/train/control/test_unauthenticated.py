"""Connections of whoever does not know the job's key: they delay nobody, learn nothing and get nowhere."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import GENEROUS, eventually

torch = pytest.importorskip("torch")

from tests.train.checkpoint.checkpoint_ranks import save, single  # noqa: E402

from paceline.contract.handshake import derive_key  # noqa: E402
from paceline.contract.links import Link, initiate  # noqa: E402
from paceline.train.checkpoint.replication import _Fetcher, _Holder  # noqa: E402
from paceline.train.checkpoint.store import CheckpointError  # noqa: E402
from paceline.train.control import connect as star  # noqa: E402

if TYPE_CHECKING:
    from tests.conftest import Paceline

pytestmark = pytest.mark.torch

# Every rank but the first waits, each time that it is about to connect, until the test says so.
TRAIN = """
    import os, pathlib, time, torch, paceline
    from torch.utils.data import TensorDataset
    from paceline.train.control import connect as star

    folder, rank = pathlib.Path("gates"), int(os.environ["RANK"])
    reach, times = star._reach, 0

    def wait_and_reach(*args):
        global times
        times += 1
        (folder / f"{rank}-waits-{times}").touch()
        while not (folder / f"go-{times}").exists():
            time.sleep(0.01)
        return reach(*args)

    star._reach = wait_and_reach
    run = paceline.init(seed=0)
    samples = TensorDataset(torch.randn(96, 4))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = run.setup(model, optimizer)
    for _ in run.epochs(1):
        for (x,) in run.dataloader(samples, global_batch_size=24):
            run.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    run.save()
    run.close()
    print("rank", rank, "is done")
"""


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """The addresses and ports on which these processes listen, as the kernel says."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(descriptor))
    found = set()
    for family, size in ((socket.AF_INET, 4), (socket.AF_INET6, 16)):
        table = Path("/proc/net/tcp" if family == socket.AF_INET else "/proc/net/tcp6")
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                words = struct.pack(f"={size // 4}I", *struct.unpack(f">{size // 4}I", bytes.fromhex(address)))
                found.add((socket.inet_ntop(family, words), int(port, 16)))
    return found


def test_silent_connections_to_every_port_of_a_job_delay_no_rank(paceline: Paceline) -> None:
    ranks, gates = 6, paceline.folder / "gates"
    gates.mkdir()
    script = paceline.script(TRAIN)
    open_for: dict[tuple[str, int], list[socket.socket]] = {}
    with contextlib.ExitStack() as stack:
        job = paceline.start("run", "-n", str(ranks), "--checkpoint-dir", str(paceline.folder / "ckpt"), script)
        stack.callback(job.wait)
        stack.callback(job.terminate)
        for number in (1, 2):  # one meeting for checkpoints, one to watch each other
            eventually(
                lambda number=number: len(list(gates.glob(f"*-waits-{number}"))) == ranks - 1 or job.poll() is not None,
                "all ranks are about to connect",
            )
            for address in listening(paceline.processes()) - open_for.keys():
                open_for[address] = [socket.create_connection(address, GENEROUS) for _ in range(4)]
                for sock in open_for[address]:
                    stack.callback(sock.close)
                open_for[address][2].sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(100) if number == 2 else b"\0")
                open_for[address][3].sendall(b"paceln01\0\0")
            (gates / f"go-{number}").touch()
        out, err = job.communicate(timeout=GENEROUS)
        assert job.returncode == 0, err
        assert "rank 0 is done" in out
        assert "cannot connect" not in err
        assert "did not connect" not in err
    assert len(open_for) >= 3  # torch's store, and two of ours
    assert {address for address, _ in open_for} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


class Relay:
    """Sits between the ranks and rank 0, passes on all that comes, and writes it down.

    It changes the byte at `flip` of what rank 0 sends.
    """

    def __init__(self, port: int, flip: int = -1) -> None:
        self.port = port
        self._flip = flip
        self.server = socket.create_server(("127.0.0.1", 0))
        self.up: list[bytearray] = []
        self.down: list[bytearray] = []
        self._sockets: list[socket.socket] = [self.server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                rank = self.server.accept()[0]
                first = socket.create_connection(("127.0.0.1", self.port))
                self._sockets += [rank, first]
                for source, target, record in ((rank, first, self.up), (first, rank, self.down)):
                    record.append(bytearray())
                    threading.Thread(target=self._pump, args=(source, target, record[-1]), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(4096)):
                at = self._flip - len(record)
                if any(record is each for each in self.down) and 0 <= at < len(data):
                    data[at] ^= 1
                record += data
                target.sendall(data)

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


class Star:
    """Rank 0 of three waits; the others connect when the test lets them."""

    def __init__(self) -> None:
        self.offers: queue.Queue[star.Offer] = queue.Queue()
        self.answers: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._lead, daemon=True).start()
        self.offer = self.offers.get(timeout=GENEROUS)

    def _lead(self) -> None:
        try:
            self.answers.put(star.connect(0, 3, self._share, "test", local=True))
        except BaseException as error:
            self.answers.put(error)

    def _share(self, offer: star.Offer | None) -> star.Offer:
        assert offer is not None
        self.offers.put(offer)
        return offer

    def connect(self, rank: int, port: int | None = None, purpose: str = "test") -> Link:
        offer = (port or self.offer[0], *self.offer[1:])
        return star.connect(rank, 3, lambda _: offer, purpose, local=True)[0]


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PACELINE_RANK_KEY", 32 * "5a")
    return 32 * "5a"


def is_refused(port: int, *messages: bytes) -> bool:
    """Whether a peer that sends this is rejected."""
    with socket.create_connection(("127.0.0.1", port), GENEROUS) as sock, contextlib.suppress(OSError):
        received = b""
        for message in messages:
            sock.sendall(message)
            if message is not messages[-1]:
                received += sock.recv(64)
        while data := sock.recv(4096):
            received += data
        return len(received) <= 64
    return True


def test_a_sniffed_handshake_lets_nobody_in(key: str) -> None:
    ranks = Star()
    with contextlib.closing(Relay(ranks.offer[0])) as relay:
        genuine = {1: ranks.connect(1, relay.server.getsockname()[1])}
        eventually(lambda: len(relay.up[0]) == 76 and len(relay.down[0]) == 96, "all is written down")
        up, down = bytes(relay.up[0]), bytes(relay.down[0])
        for secret in (key.encode(), bytes.fromhex(key), star.job_key("test", ranks.offer[2])):
            assert secret not in up + down
            assert secret.hex().encode() not in up + down
        as_rank_2 = up[:8] + struct.pack("!I", 2) + up[12:44]
        assert is_refused(ranks.offer[0], up[:44], up[44:])  # as rank 1 again, which is there
        assert is_refused(ranks.offer[0], as_rank_2, up[44:])
        assert is_refused(ranks.offer[0], as_rank_2, down[32:64])
        with socket.create_server(("127.0.0.1", 0)) as impostor:  # and as rank 0

            def answer() -> None:
                with impostor.accept()[0] as sock:
                    sock.recv(44)
                    sock.sendall(down)

            thread = threading.Thread(target=answer)
            thread.start()
            with pytest.raises(star.NotConnected, match="does not know this job's key"):
                ranks.connect(2, impostor.getsockname()[1])
            thread.join(GENEROUS)
        for purpose, rank in (("other", 2), ("test", 1), ("test", 0), ("test", 3)):
            made = derive_key(key.encode(), purpose, ranks.offer[2])
            with (
                socket.create_connection(("127.0.0.1", ranks.offer[0]), GENEROUS) as sock,
                pytest.raises(ConnectionError),
            ):
                initiate(sock, made, rank)
        genuine[2] = ranks.connect(2)
        links = ranks.answers.get(timeout=GENEROUS)
        assert links.keys() == {1, 2}
        for rank, link in genuine.items():
            link.socket.sendall(b"%d" % rank)
            assert links[rank].socket.recv(1) == b"%d" % rank
            assert links[rank].key == link.key
            link.socket.close()
            links[rank].socket.close()


def test_ranks_without_a_secret_use_what_they_have_told_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_RANK_KEY", raising=False)
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    ranks = Star()
    with contextlib.ExitStack() as stack:
        for rank in (1, 2):
            stack.enter_context(ranks.connect(rank).socket)
        for link in ranks.answers.get(timeout=GENEROUS).values():
            stack.enter_context(link.socket)


@pytest.mark.parametrize("flip", [-1, 98, 120, 2000, 3000])  # none; in the manifest's size, in it, in the files
def test_a_checkpoint_that_is_changed_on_its_way_is_refused(key: str, tmp_path: Path, flip: int) -> None:
    save(single(tmp_path / "there"), 1)
    (tmp_path / "here").mkdir()
    saved = single(tmp_path / "there").latest()
    assert saved is not None
    made = star.job_key("transfer", key)
    with (
        contextlib.closing(_Holder(saved, {1}, local=True)) as holder,
        contextlib.closing(Relay(holder.port, flip)) as relay,
    ):
        holder.serve(made)
        fetcher = _Fetcher(1, 0, relay.server.getsockname()[1], ["127.0.0.1"], made)
        if flip == -1:
            assert fetcher.fetch(tmp_path / "here") == "step-000001"
            return
        with pytest.raises(CheckpointError):
            fetcher.fetch(tmp_path / "here")
    assert list((tmp_path / "here").iterdir()) == []


# What comes from rank 1 passes through a relay of the script, which adds to it what the test says.
FORGE = """
    import contextlib, os, pathlib, socket, threading, time, torch, paceline
    from torch.utils.data import TensorDataset
    from paceline.train.control import connect as star

    assert os.environ["PACELINE_ATTEMPT"] == "0", "the ranks did what was forged, and start again"
    rank, folder, reach, added = int(os.environ["RANK"]), pathlib.Path("."), star._reach, {added!r}
    times = 0

    def through_a_relay(number, port, places, key):
        global times
        times += 1
        if times == 1:  # the checkpoints' own
            return reach(number, port, places, key)
        server = socket.create_server(("127.0.0.1", 0))

        def pump(source, target, size, forged):
            with contextlib.suppress(OSError):
                while size and (data := source.recv(size)):  # the handshake
                    size -= len(data)
                    target.sendall(data)
                if forged:
                    threading.Thread(target=forge, args=(target,), daemon=True).start()
                while data := source.recv(4096):
                    target.sendall(data)

        def forge(target):
            while not (folder / "step").exists():
                time.sleep(0.01)
            target.sendall(added)

        def relay():
            theirs, first = server.accept()[0], socket.create_connection(("127.0.0.1", port))
            for args in ((theirs, first, 76, added), (first, theirs, 96, b"")):
                threading.Thread(target=pump, args=args, daemon=True).start()

        threading.Thread(target=relay, daemon=True).start()
        return reach(number, server.getsockname()[1], ["127.0.0.1"], key)

    star._reach = through_a_relay
    run = paceline.init(seed=0)
    samples = TensorDataset(torch.zeros(400, 4))
    model = torch.nn.Linear(4, 1)
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    train = run.dataloader(samples, global_batch_size=2)
    for _ in run.epochs(1):
        for (x,) in train:
            run.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            (folder / "step").touch()
            time.sleep(0.05)
    run.close()
    print("rank", rank, "is done")
"""


def test_what_is_added_to_a_connection_after_its_handshake_is_noticed(paceline: Paceline) -> None:
    forged = b'{"do": "stop", "signal": 15}\n'
    done = paceline.run("-n", "2", paceline.script(FORGE.format(added=forged)))
    assert done.returncode == 1, done.stderr
    assert "rank 1 failed (what came from it was changed on the way)" in done.stderr
    assert "is done" not in done.stdout
