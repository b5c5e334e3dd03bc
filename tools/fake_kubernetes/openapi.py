"""The kinds as OpenAPI 2 in protobuf, which kubectl asks for where an object holds others: names alone, without fields.

The numbers are those of gnostic's OpenAPIv2.proto.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import Api

TYPE = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"


def document(api: Api) -> bytes:
    """The whole document."""
    info = _field(1, b"Kubernetes") + _field(2, f"v1.{api.minor}.0".encode())
    kinds = [(one.group, one.version, one.kind) for one in api.served()] + [("", "v1", "List")]
    return _field(1, b"2.0") + _field(2, info) + _field(8, b"") + _field(9, b"".join(map(_definition, kinds)))


def _definition(kind: tuple[str, str, str]) -> bytes:
    """One kind, whose fields may be anything."""
    group, version, name = kind
    meant = json.dumps([{"group": group, "version": version, "kind": name}]).encode()
    extension = _field(1, b"x-kubernetes-group-version-kind") + _field(2, _field(2, meant))
    return _field(1, _field(1, ".".join(filter(None, kind)).encode()) + _field(2, _field(31, extension)))


def _field(number: int, value: bytes) -> bytes:
    """Bytes, or a message, as a field."""
    return _number(number << 3 | 2) + _number(len(value)) + value


def _number(value: int) -> bytes:
    result = b""
    while value > 127:
        result += bytes([value & 127 | 128])
        value >>= 7
    return result + bytes([value])
