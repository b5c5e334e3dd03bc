"""The container in which the agents and ranks of a job run, and what they see of the machine there.

Sources: https://apptainer.org/docs/user/main/bind_paths_and_mounts.html and https://github.com/NVIDIA/pyxis.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.node.errors import Refused
from paceline.node.machine.containers import binds_of, whole

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.contract.nodejob import NodeJob
    from paceline.contract.records import ContainerRecord, DataRecord

_PATHS = ("/", "./", "../", "~")  # what the image of pyxis begins with if it is a file


def described(
    given: ContainerRecord | None, job: NodeJob, place: Path, data: Iterable[DataRecord]
) -> ContainerRecord | None:
    """The container of a job: its `program`, its `image` and the `binds`, folders that it sees; None if it has none."""
    if given is None:
        return None
    binds = binds_of(given["program"], [place.parent.parent], job, data)
    return {"program": given["program"], "image": _image(given["program"], given["image"]), "binds": binds}


def flags(container: ContainerRecord | None) -> list[str]:
    """Flags of srun."""
    if container is None or container["program"] != "pyxis":
        return []
    mounts = ",".join(f"{folder}:{folder}" for folder in container["binds"])
    image = [f"--container-image={container['image']}", f"--container-mounts={mounts}"]
    return [*image, "--container-mount-home", "--no-container-remap-root"]


def command(container: ContainerRecord | None) -> list[str]:
    """What goes before the command that runs in the container."""
    if container is None or container["program"] == "pyxis":
        return []
    binds = [f"--bind={folder}" for folder in container["binds"]]
    return [container["program"], "exec", "--nv", *binds, container["image"]]


def _image(program: str, image: str) -> str:
    """An image as the program takes it: the whole path of a file, or where it comes from."""
    if "://" in image or (program == "pyxis" and not image.startswith(_PATHS)):
        return image
    path = whole(image)
    if not path.exists():
        raise Refused(
            f"--image {image}: no {path} here; name a file on the shared disk, or for example docker://{image}"
        )
    return str(path)
