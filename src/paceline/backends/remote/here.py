"""This machine among the hosts: it needs no ssh server, as a shell of the same user is there without one."""

from __future__ import annotations

import ipaddress
import shlex
import socket

# The shell in between takes the signals that would be ssh's: what it has started sees its stdin end, as over ssh.
_APART = 'exec 3<&0; setsid sh -c "$1" <&3 3<&- & wait $!'


def is_here(name: str) -> bool:
    """Whether a host's name is one of this machine: localhost, its host name, or an address that it has."""
    own = socket.gethostname()
    if name.lower() in {"localhost", own.lower(), own.partition(".")[0].lower()}:
        return True
    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))  # addresses of other machines are refused
        except OSError:
            return False
    return not address.is_unspecified


def command(line: str, *, has_terminal: bool) -> list[str]:
    """The argument vector that runs a line of a shell as ssh would: in the home folder."""
    line = f"cd && {line}"
    return ["sh", "-c", line] if has_terminal else ["sh", "-c", _APART, "sh", line]


def forward(port: int) -> str:
    """What a person types on another machine to reach a port of this one."""
    return shlex.join(["ssh", "-N", "-L", f"{port}:127.0.0.1:{port}", socket.gethostname()])
