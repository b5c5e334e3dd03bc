"""What Kubernetes' API takes and gives."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]  # an object of it, or a part of one, in JSON: its schema is Kubernetes' own
