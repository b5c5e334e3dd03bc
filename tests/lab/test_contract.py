"""Hosts that ssh reaches do what every backend does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.backends.contract import USUAL, Contract, Place

if TYPE_CHECKING:
    from .lab import Client


class TestSsh(Contract):
    @pytest.fixture
    def place(self, client: Client) -> Place:
        client.settings(hosts=["h1", "h2"])
        can = USUAL | {"held", "elastic", "tensorboards", "sizes"}
        folders, takes = (client.lab.folder,), frozenset({"--image"})
        return Place(client, ("--on", "lab"), "lab", can, folders, takes, nodes=2)
