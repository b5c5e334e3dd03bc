"""A job in words, the same on the screen, in a notebook and on the page."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .quantities import show_duration

if TYPE_CHECKING:
    from .job import Job


def ago(seconds: float) -> str:
    """How long ago a time is."""
    return show_duration(int(max(0.0, time.time() - seconds)))


def lasted(job: Job) -> str | None:
    """How long it has run: to its end, or to now."""
    seconds = job.duration(time.time())
    return None if seconds is None else show_duration(seconds)


def reason(job: Job) -> str | None:
    """Why it failed, or waits."""
    return job.error or job.waiting


def share(job: Job) -> float | None:
    """How much of the training is done, of 1; None if the library does not know."""
    if not (it := job.progress) or not (epochs := it.get("epochs")):
        return None
    steps = it.get("steps")
    return min(1.0, (it["epoch"] + (it["step"] / steps if steps else 0.0)) / epochs)


def done(job: Job) -> str | None:
    """How much of the training is done: its part in percent where the library knows that."""
    if not (progress := job.progress):
        return None
    epoch, epochs, step = progress["epoch"], progress.get("epochs"), progress["step"]
    if (part := share(job)) is not None and progress.get("steps"):
        return f"{100 * part:.0f} %"
    if epochs:
        return f"epoch {epoch + 1}/{epochs}"
    return f"epoch {epoch + 1}" if epoch else f"step {step}"


def left(job: Job) -> str | None:
    """The time that the training will take from now on."""
    seconds = (job.progress or {}).get("seconds_left")
    return None if seconds is None or job.state != "RUNNING" else show_duration(int(seconds))


def progress_of(job: Job) -> str:
    """Where its training is: epoch, step, speed and what is left; nothing if no loop counts the steps."""
    progress = job.progress
    if not progress or not (progress.get("began") or progress.get("step")):
        return ""
    of = f"/{progress['epochs']}" if progress.get("epochs") else ""
    steps = f"/{progress['steps']}" if progress.get("steps") else ""
    text = f"epoch {progress['epoch'] + 1}{of}, step {progress['step']}{steps}"
    if progress.get("samples_per_second"):
        text += f", {progress['samples_per_second']:.4g} samples/s"
    if (remaining := progress.get("seconds_left")) is not None and not job.is_over:
        text += f", {show_duration(remaining)} left"
    return text
