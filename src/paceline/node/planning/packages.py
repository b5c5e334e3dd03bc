"""Knowledge about packages that scripts import before a framework."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from paceline.contract.nodejob import NodeJob

# What the fork server imports for a framework.
PRELOAD = {
    "torch": ("torch", "torch.distributed"),
    "paddle": ("paddle",),
    "tensorflow": ("tensorflow",),
    "jax": ("jax",),
}
# The first optimizer that a process makes imports this, which takes as long as the import of torch itself.
WITH_OPTIMIZERS = ("torch._dynamo",)
# Scripts of Keras need not mention TensorFlow.
TENSORFLOW = frozenset({"tensorflow", "keras"})
# Importing one of these imports a framework: what a script does afterwards does not matter.
FRAMEWORKS = frozenset({
    "accelerate", "deepspeed", "fastai", "horovod", "jax", "jaxlib", "keras", "lightning", "paddle", "peft",
    "pytorch_lightning", "tensorflow", "timm", "torch", "torch_geometric", "torchaudio", "torchdata", "torchmetrics",
    "torchtext", "torchvision", "trl",
})  # fmt: skip
# Packages that must be imported before torch; otherwise they warn or fail. Like most packages they are not known here;
# their names are needed for a message.
BEFORE_TORCH = frozenset({"comet_ml", "isaacgym", "isaaclab", "isaacsim", "omni", "open3d", "unsloth"})
# Packages whose import changes no variable that a framework reads.
HARMLESS = frozenset({
    "PIL", "absl", "attr", "attrs", "cloudpickle", "cv2", "datasets", "dill", "einops", "filelock", "fire", "fsspec",
    "gym", "gymnasium", "h5py", "imageio", "joblib", "loguru", "matplotlib", "ml_collections", "mpi4py", "mpl_toolkits",
    "networkx", "numpy", "omegaconf", "packaging", "pandas", "psutil", "pyarrow", "pydantic", "regex", "requests",
    "rich", "scipy", "seaborn", "sentencepiece", "skimage", "sklearn", "sympy", "tabulate", "tensorboard", "tokenizers",
    "tqdm", "typer", "typing_extensions", "click", "wandb", "yaml",
})  # fmt: skip


class Packages(NamedTuple):
    """What is known, before a job starts, of the Python packages that its ranks will find."""

    folders: tuple[str, ...]  # of its own PYTHONPATH
    are_elsewhere: bool  # in an environment or an image that this process is not in
    are_unknown: bool  # elsewhere, or of another Python, which the setup may choose

    @classmethod
    def of(cls, job: NodeJob, *, is_outside: bool) -> Packages:
        """Those of a job; `is_outside` says whether it has an image that this process is not in."""
        given = filter(None, job.env.get("PYTHONPATH", "").split(os.pathsep))
        folders = tuple(os.path.join(job.working_dir or "", folder) for folder in given)
        digest = job.environment_digest  # that environment may still have to be installed
        is_awaited = digest is not None and not os.path.basename(sys.prefix).startswith(digest)
        are_elsewhere = is_outside or is_awaited
        return cls(folders, are_elsewhere, are_elsewhere or bool(job.setup))

    def has(self, top: str) -> bool:
        """Whether this interpreter finds a top-level module, or the job's PYTHONPATH has it."""
        with contextlib.suppress(ImportError, ValueError):
            if importlib.util.find_spec(top) is not None:
                return True
        return importlib.machinery.PathFinder.find_spec(top, list(self.folders)) is not None


def standard_library() -> frozenset[str]:
    """The top-level modules of the standard library."""
    names: frozenset[str] | None = getattr(sys, "stdlib_module_names", None)  # from Python 3.10 on
    if names is not None:
        return names
    files = Path(os.__file__).parent
    return frozenset({*sys.builtin_module_names, *(path.stem for path in files.iterdir())})
