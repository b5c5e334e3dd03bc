"""Placeholder."""

from typing import Any


def fetch(*args: Any) -> dict[str, Any]:
    """Placeholder."""
    raise NotImplementedError
