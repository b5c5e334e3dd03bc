"""Scripts as they are written for Horovod, unmodified under `paceline run`."""

from __future__ import annotations

import json
import pickle
import sys
from typing import TYPE_CHECKING

import pytest

from paceline.horovod.runner import run
from tests.late import hvd, torch

if TYPE_CHECKING:
    from tests.conftest import Paceline

pytestmark = pytest.mark.torch

DIGITS = """
    import argparse
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    import torch.optim as optim
    import torch.utils.data.distributed
    import horovod.torch as hvd

    parser = argparse.ArgumentParser(description="digits")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--use-adasum", action="store_true")
    parser.add_argument("--batches-per-allreduce", type=int, default=1)
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    args = parser.parse_args()
    args.cuda = torch.cuda.is_available()


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3)
            self.norm = nn.BatchNorm2d(4)
            self.fc = nn.Linear(4 * 6 * 6, 10)

        def forward(self, x):
            x = F.relu(self.norm(self.conv(x)))
            return F.log_softmax(self.fc(x.flatten(1)), dim=1)


    def digits(count, seed):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(10, (count,), generator=generator)
        shapes = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        images = shapes[labels] + 0.3 * torch.randn(count, 1, 8, 8, generator=generator)
        return torch.utils.data.TensorDataset(images, labels)


    def train(epoch):
        model.train()
        train_sampler.set_epoch(epoch)
        for batch_idx, (data, target) in enumerate(train_loader):
            if args.cuda:
                data, target = data.cuda(), target.cuda()
            optimizer.zero_grad()
            for i in range(0, len(data), args.batch_size):
                loss = F.nll_loss(model(data[i : i + args.batch_size]), target[i : i + args.batch_size])
                loss.div(args.batches_per_allreduce).backward()
            optimizer.step()
            if batch_idx % 10 == 0 and hvd.rank() == 0:
                print(f"Train Epoch: {epoch} [{batch_idx * len(data)}/{len(train_sampler)}] Loss: {loss.item():.6f}")


    def metric_average(val, name):
        return hvd.allreduce(torch.tensor(val), name=name).item()


    def test():
        model.eval()
        test_loss = test_accuracy = 0.0
        for data, target in test_loader:
            if args.cuda:
                data, target = data.cuda(), target.cuda()
            with torch.no_grad():
                output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            test_accuracy += output.max(1)[1].eq(target).float().sum().item()
        test_loss = metric_average(test_loss / len(test_sampler), "avg_loss")
        test_accuracy = metric_average(test_accuracy / len(test_sampler), "avg_accuracy")
        if hvd.rank() == 0:
            print(f"Test set: Average loss: {test_loss:.4f}, Accuracy: {100 * test_accuracy:.2f}%")
        return test_accuracy


    hvd.init()
    torch.manual_seed(args.seed)
    if args.cuda:
        torch.cuda.set_device(hvd.local_rank())
    torch.set_num_threads(1)
    train_dataset, test_dataset = digits(640, 1), digits(200, 2)
    train_sampler = torch.utils.data.distributed.DistributedSampler(
        train_dataset, num_replicas=hvd.size(), rank=hvd.rank()
    )
    each = args.batch_size * args.batches_per_allreduce
    train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=each, sampler=train_sampler, drop_last=True)
    test_sampler = torch.utils.data.distributed.DistributedSampler(
        test_dataset, num_replicas=hvd.size(), rank=hvd.rank()
    )
    test_loader = torch.utils.data.DataLoader(test_dataset, batch_size=100, sampler=test_sampler)
    model = Net()
    lr_scaler = args.batches_per_allreduce * hvd.size() if not args.use_adasum else 1
    if args.cuda:
        model.cuda()
        if args.use_adasum and hvd.nccl_built():
            lr_scaler = args.batches_per_allreduce * hvd.local_size()
    optimizer = optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    for epoch in range(1, args.epochs + 1):
        train(epoch)
        accuracy = test()
    assert accuracy > 0.9, accuracy
    print("same", len({repr([p.tolist() for p in one]) for one in hvd.allgather_object(list(model.parameters()))}))
"""


def test_digits(paceline: Paceline) -> None:
    flags = ("--fp16-allreduce", "--gradient-predivide-factor", "2", "--batches-per-allreduce", "2")
    done = paceline.succeeds("run", "-n", "2", paceline.script(DIGITS), *flags)
    assert "Train Epoch: 3 [0/320] Loss: " in done.stdout
    assert "same 1" in done.stdout


WORDS = """
    import math
    import torch
    import torch.nn as nn
    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(1111 + hvd.rank())
    torch.set_num_threads(1)
    text = "the cat sat on the mat and the dog sat on the cat . " * 40
    words = sorted(set(text.split()))
    corpus = torch.tensor([words.index(word) for word in text.split()])
    corpus = corpus.chunk(hvd.size())[hvd.rank()]
    bptt, batch_size = 7, 4
    count = len(corpus) // batch_size
    source = corpus[: count * batch_size].view(batch_size, -1).t().contiguous()


    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Embedding(len(words), 16, sparse=True)
            self.rnn = nn.LSTM(16, 16)
            self.decoder = nn.Linear(16, len(words))

        def forward(self, x, hidden):
            output, hidden = self.rnn(self.encoder(x), hidden)
            return self.decoder(output).view(-1, len(words)), hidden


    model = Model()
    dense = [(name, p) for name, p in model.named_parameters() if not name.startswith("encoder")]
    sparse = [(name, p) for name, p in model.named_parameters() if name.startswith("encoder")]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.Adam([p for _, p in dense], lr=0.02), named_parameters=dense),
        hvd.DistributedOptimizer(torch.optim.SparseAdam([p for _, p in sparse], lr=0.02), named_parameters=sparse),
    ]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for optimizer in optimizers:
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    criterion = nn.CrossEntropyLoss()
    first = None
    for epoch in range(8):
        hidden, total, steps = None, 0.0, 0
        for i in range(0, len(source) - 1, bptt):
            length = min(bptt, len(source) - 1 - i)
            data, targets = source[i : i + length], source[i + 1 : i + 1 + length].view(-1)
            hidden = None if hidden is None else tuple(h.detach() for h in hidden)
            for optimizer in optimizers:
                optimizer.zero_grad()
            output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            loss.backward()
            for optimizer in optimizers:
                optimizer.synchronize()
            norm = torch.nn.utils.clip_grad_norm_([p for _, p in dense], 0.25)
            for optimizer in optimizers:
                with optimizer.skip_synchronize():
                    optimizer.step()
            total, steps = total + loss.item(), steps + 1
        mean = hvd.allreduce(torch.tensor(total / steps), name="loss").item()
        first = first or mean
        if hvd.rank() == 0:
            print(f"| epoch {epoch} | loss {mean:5.2f} | ppl {math.exp(mean):8.2f}")
    assert mean < first / 2, (first, mean)
    norms = hvd.allgather(norm.view(1), name="norms")
    assert len(set(norms.tolist())) == 1, norms
    print("same", len({repr(one) for one in hvd.allgather_object([p.tolist() for p in model.parameters()])}))
"""


def test_a_word_language_model_with_clipping(paceline: Paceline) -> None:
    done = paceline.succeeds("run", "-n", "2", paceline.script(WORDS))
    assert "| epoch 7 | loss" in done.stdout
    assert "same 1" in done.stdout


OBJECTS = """
    import os
    import sys
    import torch
    import horovod
    import horovod.torch as hvd
    from horovod.torch.functions import broadcast_object
    from horovod.torch.sync_batch_norm import SyncBatchNorm

    hvd.init()
    assert hvd.is_initialized() and hvd.gloo_built() and hvd.gloo_enabled() and not hvd.mpi_enabled()
    print(f"rank {hvd.rank()}/{hvd.size()} local {hvd.local_rank()}/{hvd.local_size()}", hvd.is_homogeneous())
    config = {"lr": 0.1, "layers": [4, 4], "seed": 7} if hvd.rank() == 0 else None
    config = hvd.broadcast_object(config, root_rank=0, name="config")
    folder = broadcast_object(os.getcwd() if hvd.rank() == 0 else None)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), SyncBatchNorm(4), torch.nn.Linear(4, 1))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)


    class Metric:
        def __init__(self, name):
            self.name, self.sum, self.n = name, torch.tensor(0.0), torch.tensor(0.0)

        def update(self, value):
            self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
            self.n += 1

        @property
        def avg(self):
            return self.sum / self.n


    metric = Metric("train_loss")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=config["lr"]), named_parameters=model.named_parameters(), groups=2
    )
    batches = 3 + 2 * hvd.rank()  # uneven
    for batch in range(batches):
        handle = hvd.allreduce_async(torch.tensor([1.0]), name="there", op=hvd.Sum)
        while not hvd.poll(handle):
            pass
        there = int(hvd.synchronize(handle))
        if there == hvd.size():
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            metric.update(loss)
    last = hvd.join()
    print("last", last, "metric", metric.n.item())
    results = hvd.allgather_object({"rank": hvd.rank(), "batches": batches})
    assert [one["batches"] for one in results] == [3, 5]
    if hvd.rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
    hvd.barrier()
    loaded = torch.load("checkpoint.pt")
    optimizer.load_state_dict(loaded["optimizer"])
    model.load_state_dict(loaded["model"])
    hvd.shutdown()
    print("over")
"""


def test_objects_metrics_and_uneven_batches_with_a_timeline(paceline: Paceline) -> None:
    trace = paceline.folder / "trace.json"
    flags = ("--timeline-filename", str(trace), "--timeline-mark-cycles", "--tee", "all")
    done = paceline.succeeds(
        "horovodrun", "-np", "2", *flags, sys.executable, paceline.script(OBJECTS), cwd=paceline.folder
    )
    for line in ("rank 0/2 local 0/2 True", "rank 1/2 local 1/2 True"):
        assert line in done.stdout
    assert done.stdout.count("last 1 metric 3.0") == 2
    assert done.stdout.count("over") == 2
    events = json.loads(trace.read_text())
    tensors = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"allreduce.train_loss", "allreduce.there", "broadcast.config.sz"} <= tensors
    assert any(event["name"] == "CYCLE_START" for event in events)


def total(start: float, *, step: float = 1.0) -> tuple[int, float]:
    hvd.init()
    return hvd.rank(), hvd.allreduce(torch.tensor(start + step * hvd.rank()), op=hvd.Sum).item()


def test_a_closure_and_a_lambda_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cloudpickle")
    factor = 3

    def scaled(value: int) -> int:
        return value * factor

    assert run(scaled, (2,), np=2) == [6, 6]
    assert run(lambda value: value + factor, (1,)) == [4]
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(pickle.PicklingError, match="top level of a module, or install cloudpickle"):
        run(scaled, (2,))


def test_a_function_is_run_on_ranks_of_this_machine_alone() -> None:
    assert run(total, (1.0,), {"step": 2.0}, num_proc=2, hosts="localhost:2", verbose=1) == [(0, 4.0), (1, 4.0)]
    for name, value in (("hosts", "node1:2,node2:2"), ("hostfile", "hosts"), ("use_mpi", True), ("max_num_proc", 4)):
        with pytest.raises(ValueError, match=rf"horovod.run\({name}=.* works on this machine only; .* paceline run -H"):
            run(total, (1.0,), np=2, **{name: value})
    with pytest.raises(TypeError, match="no argument 'nproc'"):
        run(total, (1.0,), nproc=2)
    with pytest.raises(ValueError, match="give one of them"):
        run(total, (1.0,), np=2, num_proc=3)
