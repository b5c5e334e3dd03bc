"""Fetches another version of Slurm into a folder, for PACELINE_SLURM: `python -m tests.lab.slurm.fetch`.

It comes from a release of Debian, or from an archive for Debian or Ubuntu that a line of sources.list names.
Its programs run on this machine with the libraries in that folder, and change nothing of the machine's own Slurm.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .programs import LIBRARIES

_PACKAGES = "slurmctld,slurmd,slurm-client,slurmdbd,slurm-wlm-mysql-plugin"
_DEBIAN = "deb http://deb.debian.org/debian {release} main"


def main(source: str, folder: Path) -> None:
    """Fetch it; the folder must not be there."""
    options = [f"--include={_PACKAGES}", "--aptopt=Acquire::Check-Valid-Until false"]
    line = source if source.startswith("deb ") else _DEBIAN.format(release=source)
    subprocess.run(["mmdebstrap", "--variant=extract", *options, "", str(folder), line], check=True)
    for path in (folder / "usr" / "sbin").glob("slurm*-wlm"):
        path.with_name(path.name.removesuffix("-wlm")).symlink_to(path.name)
    libraries = [folder / LIBRARIES, folder / LIBRARIES.parent]
    (loader,) = (folder / "usr" / "lib64").glob("ld-linux-*")
    own = ["--force-rpath", "--set-rpath", ":".join(map(str, libraries))]
    plugins = [path for path in (folder / LIBRARIES).glob("*.so") if not path.is_symlink()]
    subprocess.run(["patchelf", *own, *map(str, plugins)], check=True)
    names = [*(folder / "usr" / "sbin").glob("slurm*"), *(folder / "usr" / "bin").glob("s*")]
    programs = [path for path in names if not path.is_symlink() and path.read_bytes()[:4] == b"\x7fELF"]
    subprocess.run(["patchelf", "--set-interpreter", str(loader), *own, *map(str, programs)], check=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m tests.lab.slurm.fetch SOURCE FOLDER, such as trixie /opt/slurm-24.11")
    main(sys.argv[1], Path(sys.argv[2]).absolute())
