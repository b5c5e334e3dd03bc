"""Reads single values out of an environment, with errors that name the variable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .placement import ContractError, Placement

if TYPE_CHECKING:
    from collections.abc import Mapping

# JAX and TensorFlow meet over gRPC, which sends even 127.0.0.1 through http_proxy, so that the ranks wait forever. It
# looks at grpc_proxy first, and an empty one means no proxy; downloads keep theirs.
# Source: https://github.com/grpc/grpc/blob/master/doc/environment_variables.md
NO_GRPC_PROXY = {"grpc_proxy": ""}
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")  # what it looks at


def integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """`env[name]` as an integer, or `default` when it is not set."""
    text = env.get(name)
    if text is None:
        if default is None:
            raise ContractError(f"{name} is not set, though other variables of the same launcher are")
        return default
    try:
        return int(text)
    except ValueError:
        raise ContractError(f"{name}={text!r} is not a whole number") from None


def placement_from(env: Mapping[str, str], variables: Mapping[str, str], **others: Any) -> Placement:
    """A placement whose number fields are read from `variables` (field → variable); `others` are the other fields."""
    numbers: dict[str, Any] = {field: integer(env, name) for field, name in variables.items()}
    try:
        return Placement(**numbers, **others)
    except ContractError as error:
        seen = ", ".join(f"{name}={env[name]}" for name in variables.values())
        raise ContractError(f"{error} ({seen})") from None


def split_list(text: str) -> tuple[str, ...]:
    """The items of a comma-separated list; none for an empty text."""
    return tuple(text.split(",")) if text else ()


def join_address(host: str, port: int) -> str:
    """`host:port`, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(env: Mapping[str, str], name: str) -> tuple[str, int]:
    """The host and port in `env[name]`."""
    host, _, port = env[name].rpartition(":")
    if not host or not port.isdecimal():
        raise ContractError(f"{name}={env[name]!r} is not host:port")
    return host.strip("[]"), int(port)
