"""The signals that agents handle."""

from __future__ import annotations

import signal

LEAVE = signal.SIGRTMIN  # this node is to leave its job, which goes on
HANDLED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, LEAVE,
)  # fmt: skip
