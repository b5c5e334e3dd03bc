"""What really goes over the network for gradients, beside what each method's formula says."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .lab import Client

pytestmark = pytest.mark.torch
STEPS, SIZE, LAYERS = 10, 512, 8
WEIGHTS, BIASES = LAYERS * SIZE * SIZE, LAYERS * SIZE
METHODS = {  # bytes that a rank of two sends per step, by the formulas of docs/communication.md
    "AllReduce()": 4 * (WEIGHTS + BIASES),
    "AllReduce(wire='fp16')": 2 * (WEIGHTS + BIASES),
    "AllReduce(wire='int8')": 260 / 256 * (WEIGHTS + BIASES),
    "PowerSGD(rank=16, warmup=0)": 2 * 16 * LAYERS * 2 * SIZE + 4 * BIASES,  # biases are sent as they are
    "TopK(fraction=0.01)": 8 * LAYERS * (-(-SIZE * SIZE // 100) + -(-SIZE // 100)),
}
OVERHEAD = 0.05  # of the formula: headers of TCP and of gloo, acknowledgements, and what the launcher says meanwhile

COUNTING = f"""
    import json
    from pathlib import Path
    import torch
    import paceline

    def sent():
        (line,) = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in line)
        return int(line.split(":")[1].split()[8])

    with paceline.init(seed=0, progress=False) as run:
        torch.set_num_threads(1)
        found = {{}}
        for name in {list(METHODS)!r}:
            model = torch.nn.Sequential(*(torch.nn.Linear({SIZE}, {SIZE}) for _ in range({LAYERS})))
            sync = eval("paceline." + name)
            wrapped = run.setup(model, strategy=paceline.Strategy(sync=sync))
            for step in range(2 + {STEPS}):
                if step == 2:  # those before also agree on buckets
                    run.barrier()
                    before = sent()
                run.backward(wrapped(torch.randn(4, {SIZE})).square().mean())
                model.zero_grad()
            run.barrier()
            found[name] = sent() - before
        print(json.dumps(found), flush=True)
"""


def test_what_goes_over_the_network_is_what_the_formulas_say(client: Client) -> None:
    client.settings(python=sys.executable)
    done = client.succeeds("run", "--on", "lab", "-n", "1", "--nnodes", "2", "--tee", "3", client.script(COUNTING))
    lines = [line.partition("{")[1:] for line in done.stdout.splitlines()]
    ranks = [json.loads("".join(each)) for each in lines if each[0]]
    assert len(ranks) == 2
    for found in ranks:
        for name, formula in METHODS.items():
            assert STEPS * formula <= found[name] <= (1 + OVERHEAD) * STEPS * formula, (name, found[name], formula)
