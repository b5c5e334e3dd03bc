"""Images: names that stand for what a pod finds on its disk."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

_BIN = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Image:
    """What differs from the machine's own files.

    Attributes:
        path: the folders of programs that come first.
        hidden: paths that are not there.
        files: further files by path; "-> target" is a link, and what starts with "#!" may be run.
        error: why it cannot be pulled, "" if it can.
        entrypoint: what runs where the pod says nothing.
        env: variables that it sets.
        user: whose its processes are, None for root.
    """

    path: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    error: str = ""
    entrypoint: tuple[str, ...] = ("sh",)
    env: dict[str, str] = field(default_factory=dict)
    user: int | None = None

    def variables(self) -> dict[str, str]:
        return {"PATH": ":".join((*self.path, _BIN)), "HOME": "/root", **self.env}

    def without(self, *paths: str) -> Image:
        return replace(self, hidden=(*self.hidden, *paths))


def _site() -> Path:
    return Path(sys.prefix, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")


def usual() -> Image:
    """The machine with the tests' Python and its packages, but without paceline."""
    site = _site()
    ours = [*site.glob("*paceline*"), Path(sys.prefix, "bin", "paceline")]
    machine = ("/root/.config", "/root/.local", "/root/.kube", "/root/.ssh")
    return Image((f"{sys.prefix}/bin",), (*map(str, ours), *machine))


def without_torch() -> Image:
    """As `usual`, but torch is not installed."""
    site = _site()
    return usual().without(
        *map(str, [*site.glob("torch"), *site.glob("torch-*"), *site.glob("functorch*"), site / "torchgen"])
    )


def without_python() -> Image:
    """No Python anywhere."""
    folders = [Path(folder) for folder in _BIN.split(":")]
    found = {str(path) for folder in folders if folder.is_dir() for path in folder.glob("python*")}
    return Image((), tuple(sorted({*found, sys.prefix, sys.base_prefix, "/root/.pyenv", "/root/.config"})))


def with_old_python() -> Image:
    """A Python 3.8, without packages."""
    image = without_python()
    for folder in sorted(Path("/root/.pyenv/versions").glob("3.8*")):
        links = {
            f"/usr/local/bin/{name}": f"-> /opt/python3.8/bin/{name}" for name in ("python", "python3", "python3.8")
        }
        hidden = tuple(path for path in image.hidden if not path.startswith(("/usr/local/bin/python", "/root/.pyenv")))
        others = [str(one) for one in folder.parent.iterdir() if one != folder]
        links["/opt/python3.8"] = f"-> {folder}"
        return replace(image, hidden=(*hidden, *others), files=links)
    # None is here: the tests' own Python that takes itself for one.
    text = 'import sys\nsys.version_info = type(sys.version_info)((3, 8, 18, "final", 0))\nsys.version = "3.8.18"\n'
    return replace(usual().without(), files={str(_site() / "sitecustomize.py"): text})
