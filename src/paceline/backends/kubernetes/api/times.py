"""Times as the API server writes them."""

from __future__ import annotations

from datetime import datetime, timezone


def moment(text: str | None) -> float | None:
    """Seconds since the epoch of a time as the API server writes it."""
    return None if not text else datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def text(seconds: float) -> str:
    """A time in seconds since the epoch, as the API server writes it."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
