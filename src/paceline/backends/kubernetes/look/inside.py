"""What a pod that runs says of its part of a job: its program is asked, through the API server."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from paceline.backends import limits
from paceline.backends.kubernetes.manifests.objects import PACKAGE, ROOT
from paceline.job.errors import UserError
from paceline.node.readers import at_once

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.contract.messages import Request

    from .pods import Pod

_PROTOCOLS = ["v5.channel.k8s.io", "v4.channel.k8s.io"]
_OUT, _END = 1, 3  # channels
_QUIET_SECONDS = 30.0  # for a pod to print more
_AT_ONCE = 16  # pods
_ASK = (
    "import sys; sys.path.insert(0, sys.argv[1]); from paceline.node.host.serve import main; "
    "main(sys.argv[2], sys.argv[3].encode())"
)


def asked(
    cluster: Cluster, pods: Sequence[Pod], request: Request, python: str, failed: dict[int, UserError] | None = None
) -> dict[int, Any]:
    """Node rank → the answer of the program in its pod (see `messages`); why others do not is put in `failed`."""
    cluster.namespace  # noqa: B018  # before the threads ask, so that the connection is made once
    seconds = limits.load().look

    def ask(pod: Pod) -> Any:
        try:
            return answer_of(cluster, pod, request, python, seconds)
        except UserError as error:
            if failed is not None:
                failed[pod.index] = error
            return None

    answers = zip(pods, at_once(ask, pods, _AT_ONCE), strict=True)
    return {pod.index: answer for pod, answer in answers if answer is not None}


def answer_of(cluster: Cluster, pod: Pod, request: Request, python: str, seconds: float) -> Any:
    """The answer of the program in a pod to one request."""
    command = [python, "-c", _ASK, PACKAGE, ROOT, json.dumps(request)]
    text = b"".join(chunks(cluster, pod, command, time.monotonic() + seconds))
    try:
        answer = json.loads(text.partition(b"\n")[0])
    except ValueError:
        raise UserError(f"the program in pod {pod.name} gives no answer; has the pod just begun?") from None
    if "error" in answer:
        raise UserError(f"pod {pod.name}: {answer['error']}")
    return answer


def chunks(cluster: Cluster, pod: Pod, command: Sequence[str], until: float | None = None) -> Iterator[bytes]:
    """What a command in a pod prints, as it comes."""
    import queue

    import httpx2
    from httpx2.websockets import HTTPXWSException

    params: list[tuple[str, str | int | float | bool | None]] = [("command", word) for word in command]
    params += [("container", pod.container), ("stdout", "true"), ("stderr", "false")]
    url = cluster.path("v1", "pods", pod.name, "exec")
    try:
        with cluster.access.http.websocket(url, subprotocols=_PROTOCOLS, params=params) as connection:
            while True:
                remaining = _QUIET_SECONDS if until is None else until - time.monotonic()
                data = connection.receive_bytes(timeout=max(0.01, remaining))
                if data[:1] == bytes([_OUT]):
                    yield data[1:]
                elif data[:1] == bytes([_END]):
                    if json.loads(data[1:] or b"{}").get("status") != "Success":
                        raise UserError(f"the program in pod {pod.name} does not answer")
                    return
    except (httpx2.HTTPError, HTTPXWSException, queue.Empty, OSError, ValueError) as error:
        raise UserError(f"pod {pod.name} does not answer: {error or type(error).__name__}") from None
