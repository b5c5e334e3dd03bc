"""The image of a job on machines: found there, or pulled on all at the same time, before anything starts.

It takes the place of an environment (`environments/machines.py`): what comes out are the same machines, on each of
which Python runs in a container of the image.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from paceline.backends.base import ImageLook
from paceline.backends.check.findings import grouped, line, software_findings
from paceline.backends.remote.crowd import at_once
from paceline.contract.nodejob import Order
from paceline.job.errors import UserError
from paceline.job.text import a_few, printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.backends.base import ProgressReporter
    from paceline.backends.remote.connection import Answer, Host
    from paceline.contract import messages
    from paceline.contract.facts import ImageFacts, Software
    from paceline.contract.messages import Container, PrepareContainer, WantedImage
    from paceline.contract.nodejob import NodeJob
    from paceline.contract.records import DataRecord

_SAID = 40  # letters of what each machine says
_Host = TypeVar("_Host", bound="Host")


class Containers:
    """The containers of a job, on each of its machines."""

    def __init__(self, job: NodeJob, program: str | None, data: tuple[DataRecord, ...], imports: Sequence[str]) -> None:
        """Ask nothing yet; `imports` is what its script imports as far as the client has it."""
        self._order, self.image, self._imports = Order(job=job, data=data), str(job.image), imports
        self.request: WantedImage = {"image": self.image, "program": program, "needs_devices": job.devices != 0}
        self._looks: dict[Host, ImageFacts] = {}

    def ask(self, hosts: Sequence[Host]) -> dict[Host, ImageFacts]:
        """Ask machines what would run it; the first one that cannot is an error."""
        request: Container = {"do": "container", **self.request}
        looks = _all(at_once(hosts, lambda host: host.answer(request)))
        self.choose(looks)
        return looks

    def choose(self, looks: Mapping[Host, ImageFacts]) -> None:
        """Refuse machines that cannot run it, each in a line."""
        problems = [(host.name, f"{host.name}: {it['problem']}") for host, it in looks.items() if "problem" in it]
        if problems:
            raise UserError("\n".join(grouped(problems)))
        self._looks.update(looks)

    def foreseen(self) -> str:
        """What will be pulled to the machines that were asked, for users."""
        missing = [host.name for host, it in self._looks.items() if not it["is_there"]]
        return f"{self.image} is pulled on {a_few(missing)} before it starts" if missing else ""

    def python(self, host: Host) -> str:
        """The Python of a machine: that of the image."""
        return "python3"

    def build(self, hosts: Sequence[_Host], progress: ProgressReporter) -> dict[_Host, _Host]:
        """Get the image where it is not, and look into it; returns for each machine the same one with its container."""
        missing = [host.name for host in hosts if not self._looks[host]["is_there"]]
        if missing:
            progress.say(f"pulling {self.image} on {a_few(missing)}")
        said: dict[Host, str] = {}
        found = _all(at_once(hosts, lambda host: self._prepare(host, said, progress)))
        self._check({host.name: it["facts"] for host, it in found.items()}, progress)
        return {host: replace(host, inside=tuple(found[host]["inside"])) for host in hosts}

    async def _prepare(self, host: Host, said: dict[Host, str], progress: ProgressReporter) -> messages.Pulled:
        request: PrepareContainer = {
            **self.request, "do": "container_prepare", "imports": self._imports,
            "order": replace(self._order, slots=host.slots).to_json(),
        }  # fmt: skip
        does = "looking into" if all(it["is_there"] for it in self._looks.values()) else "pulling"
        async with contextlib.aclosing(await host.connect(request)) as answers:
            async for answer in answers:
                if "inside" in answer:
                    found: messages.Pulled = answer
                    return found
                said[host] = printable(answer["says"])
                now = "; ".join(f"{it.name}: {said[it][:_SAID]}" for it in list(said))
                progress(f"{does} {self.image}", 0, None, now)
        raise UserError(f"{host.name}: the connection ended while {self.image} was pulled; try again")

    def _check(self, facts: Mapping[str, Software], progress: ProgressReporter) -> None:
        """Refuse an image that the job does not fit, or that is not the same everywhere."""
        about = f"image {self.image}"
        refused = [(name, f"{name}: {about}: {it['refused']}") for name, it in facts.items() if "refused" in it]
        if refused:
            raise UserError("\n".join(grouped(refused)))
        frameworks = {name for it in facts.values() for name in it["packages"]}
        for finding in software_findings(facts):
            if finding.where in ("Python", *frameworks):  # its ranks could not work together
                raise UserError(f"{about}: {line(finding)}: its name may mean another image on each host")
            progress.say(line(finding))


def look(hosts: Sequence[Host], image: str, program: str | None) -> list[ImageLook]:
    """What machines have for an image; see `base.RunsImages`."""
    request: Container = {"do": "container", "image": image, "program": program, "needs_devices": True}
    found = _all(at_once(hosts, lambda host: host.answer(request)))
    return [
        ImageLook(host.name, it.get("program", ""), it.get("is_there", False), it.get("problem", ""))
        for host, it in found.items()
    ]


def _all(results: Mapping[Host, Answer | UserError]) -> dict[Host, Answer]:
    """The results of all hosts; what is wrong with some is an error with a line for each."""
    wrong = [(host.name, str(it)) for host, it in results.items() if isinstance(it, UserError)]
    if wrong:
        raise UserError("\n".join(grouped(wrong)))
    return results  # type: ignore[return-value]  # none of them is an error
