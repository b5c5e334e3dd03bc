"""What type checkers have to find: an error that is not found any more makes the comment behind it an error."""

import torch

import paceline
from paceline import Strategy, jobs

Strategy(precision="fp8")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Strategy(accumlate=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
paceline.init(checkpoint_every=2.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
paceline.init().backward(torch.ones(1).item())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
jobs.wait(7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
jobs.LogQuery(rank=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
try:
    paceline.init()
except paceline.PeerLoss:  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    raise
