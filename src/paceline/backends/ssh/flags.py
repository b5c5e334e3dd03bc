"""The flags of the ssh backend; what they set is in `target.Options`."""

from __future__ import annotations

from paceline.backends.base import Flag

FLAGS = (
    Flag(
        "hosts",
        ("-H", "--hosts"),
        "HOST[:SLOTS],…",
        "Hosts that ssh reaches, and their slots.",
        names_hosts="list",
    ),
    Flag(
        "hosts",
        ("--hostfile",),
        "FILE",
        "The same from a file, with lines such as: node1 slots=2",
        names_hosts="file",
    ),
    Flag("port", ("--ssh-port",), "PORT", "Port of sshd on the hosts.", letter="-p", number=(1, 65535)),
    Flag("identity_file", ("--ssh-identity-file",), "FILE", "Private key for ssh.", letter="-i"),
    Flag("python", ("--ssh-python",), "PYTHON", "Python on the hosts.  [default: python3]"),
    Flag("root", ("--ssh-root",), "DIR", "Folder for the jobs on the hosts.  [default: ~/.local/state/paceline]"),
)
