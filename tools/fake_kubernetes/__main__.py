"""A cluster by hand: `python -m fake_kubernetes`, as root. It is removed with Ctrl-C."""

from __future__ import annotations

import argparse
import signal
import sys

from .cluster import Cluster
from .machine import missing
from .resources import CUSTOM


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fake_kubernetes", description="A fake Kubernetes on this machine.")
    parser.add_argument("--nodes", type=int, default=2, help="how many (2)")
    parser.add_argument("--minor", type=int, default=31, help="of the version: 31 is 1.31, the default")
    parser.add_argument(
        "--install",
        action="append",
        default=[],
        choices=[*CUSTOM],
        help="an operator, whose kinds are served; repeatable",
    )
    given = parser.parse_args()
    if why := missing():
        sys.exit(why)
    cluster = Cluster(given.nodes, minor=given.minor, operators=given.install)
    try:
        cluster.start()
        print(f"export KUBECONFIG={cluster.kubeconfig}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    finally:
        cluster.stop()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
