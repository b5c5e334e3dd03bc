"""Knowledge about packages that scripts import before a framework."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

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


def chooses_python(job: NodeJob) -> bool:
    """Whether the ranks may run on another Python than this one, which is not known yet."""
    return bool(job.setup) or awaits_environment(job)


def awaits_environment(job: NodeJob) -> bool:
    """Whether a job has an environment that this interpreter is not of: it may still have to be installed."""
    digest = job.environment_digest
    return digest is not None and not os.path.basename(sys.prefix).startswith(digest)


def is_installed(top: str, job: NodeJob | None = None) -> bool:
    """Whether this interpreter finds a top-level module; that of a job, which may have a PYTHONPATH of its own."""
    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec(top) is not None:
            return True
    if job is None:
        return False
    given = filter(None, job.env.get("PYTHONPATH", "").split(os.pathsep))
    folders = [os.path.join(job.working_dir or "", folder) for folder in given]
    return importlib.machinery.PathFinder.find_spec(top, folders) is not None


def standard_library() -> frozenset[str]:
    """The top-level modules of the standard library."""
    names: frozenset[str] | None = getattr(sys, "stdlib_module_names", None)  # from Python 3.10 on
    if names is not None:
        return names
    files = Path(os.__file__).parent
    return frozenset({*sys.builtin_module_names, *(path.stem for path in files.iterdir())})
