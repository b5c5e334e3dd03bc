"""A job to be made in a cluster. Pure, like `objects`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.job.errors import UserError

from . import kept
from .names import check_image, users_labels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.backends.kubernetes.options import Options
    from paceline.contract.records import CodeRecord
    from paceline.job.spec import JobSpec

    from .cloning import Clone


@dataclass(frozen=True)
class Role:
    """Pods of a job with the same template.

    Attributes:
        first: the node rank of the first one.
        index: the field with a pod's number in the role; None if the role has one pod, or its controller sets the
            variable.
    """

    first: int = 0  # the node rank of the first one
    index: str | None = None


ALL = Role()  # of a job whose pods have one template


@dataclass(frozen=True)
class Order:
    """A job to be made."""

    name: str
    spec: JobSpec
    options: Options
    namespace: str
    job_id: str  # identifier that its nodes share
    archive: bytes = b""  # of paceline, in gzip; b"" for a job without an agent
    code: bytes | None = None  # of the job, packed (tar.gz); None if it has none of its own
    clone: Clone | None = None  # the code, if the pods fetch it by git; then `code` is None
    record: CodeRecord | None = None
    secrets: Mapping[str, str] = field(default_factory=dict)  # variables that are never shown
    kind: Any = field(kw_only=True)  # the `Kind` of object that it becomes; kinds import this module
    minor: int = 24  # version of the server: 24 is 1.24

    @property
    def image(self) -> str:
        """The image of its containers."""
        image = self.spec.image or self.options.image
        if not image:
            raise UserError("a job on Kubernetes needs an image; name one with --image, or image = in the target")
        return image

    @property
    def nodes(self) -> int:
        """How many pods it has at most."""
        return self.spec.node_range[1]

    def check(self) -> None:
        """Refuse a job that lacks what its manifests need."""
        check_image("--image", self.image)
        for flag, image in (("--worker-image", self.options.worker_image), ("--git-image", self.options.git_image)):
            if image is not None:
                check_image(flag, image)
        users_labels(self.spec.labels)
        if "topology" in self.spec.options and self.options.placement is None:
            raise UserError("--topology: pods are spread or packed over it; add --placement spread, or pack")
        self.kept_logs()

    def kept_logs(self) -> kept.Kept | None:
        """Where copies of the logs are kept; None for nowhere."""
        if self.options.plain:
            if self.spec.log_dir:
                raise UserError("--log-dir: without an agent (--plain) nothing writes there; leave one out")
            return None
        return kept.kept(self.spec, self.name, self.job_id)

    @property
    def is_queued(self) -> bool:
        """Whether it begins suspended, until Kueue admits it."""
        return bool(self.spec.queue) and self.options.gang != "volcano"
