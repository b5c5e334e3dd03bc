"""The messages that webhooks take, and what their answers mean. All are plain text, for what a rank wrote is in it.

Sources: https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks (and formatting-message-text there),
https://open.feishu.cn/document/client-docs/bot-v3/add-custom-bot,
https://open.dingtalk.com/document/robots/customize-robot-security-settings (and custom-robot-access there),
https://developer.work.weixin.qq.com/document/path/91770.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import msgspec

from .notice import merged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .notice import Notice

_MOST_OTHERS = 100  # notices that are merged into one of JSON
# Bytes of a text: WeCom takes 2048; DingTalk 20,000 and Feishu 20 KB of all that is sent, Slack 40,000 characters.
_SIZES = {"wecom": 2048, "slack": 12_000}
_SIZE = 15_000


class Answer(NamedTuple):
    """How a service answers with HTTP's 200.

    Attributes:
        code: the key of a number that is 0 if the message was taken.
        why: the key of the reason.
        later: numbers of a service that is busy, or was sent too much: try again.
    """

    code: str
    why: str
    later: frozenset[int]


ANSWERS = {
    "feishu": Answer("code", "msg", frozenset({9499, 11232})),
    "dingtalk": Answer("errcode", "errmsg", frozenset({-1, 130101, 410100})),
    "wecom": Answer("errcode", "errmsg", frozenset({-1, 45009})),
}


def message(
    kind: str, url: str, secret: str, notices: Sequence[Notice], clock: Callable[[], float] = time.time
) -> tuple[str, bytes]:
    """The address and the body of a request that sends these notices at once."""
    text = cut(merged(notices), _SIZES.get(kind, _SIZE))
    if kind == "json":
        first, *others = (it.to_dict() for it in notices)
        short = [{**it, "text": None} for it in others[:_MOST_OTHERS]]
        return url, msgspec.json.encode({"version": 1, **first, "text": text, "others": short, "more": len(others)})
    if kind == "slack":
        for sign, name in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
            text = text.replace(sign, name)
        return url, msgspec.json.encode({"text": text})
    body: dict[str, object] = {"msgtype": "text", "text": {"content": text}}
    if kind == "feishu":
        body = {"msg_type": "text", "content": {"text": text.replace("<at", "< at")}}  # a tag that calls people
        if secret:
            body = {"timestamp": (now := str(int(clock()))), "sign": signature(f"{now}\n{secret}", ""), **body}
    elif kind == "dingtalk" and secret:
        now = str(int(clock() * 1000))
        sign = quote(signature(secret, f"{now}\n{secret}"), safe="")
        url = f"{url}{'&' if '?' in url else '?'}timestamp={now}&sign={sign}"
    return url, msgspec.json.encode(body)


def signature(key: str, text: str) -> str:
    """HMAC-SHA256 in base64."""
    return base64.b64encode(hmac.new(key.encode(), text.encode(), hashlib.sha256).digest()).decode()


def verdict(kind: str, body: bytes) -> tuple[str, bool]:
    """Why a service has not taken a message that it answered with 200 ("" if it has), and whether to try again."""
    if kind not in ANSWERS:
        return "", False
    keys = ANSWERS[kind]
    try:
        answer = json.loads(body)
        code, why = int(answer.get(keys.code, answer.get("StatusCode"))), str(answer.get(keys.why, ""))
    except (ValueError, TypeError, AttributeError):
        return f"answered 200, but not as {kind} does; check the address and format", False
    return (f"refuses it: {code} {why}".rstrip(), code in keys.later) if code else ("", False)


def cut(text: str, size: int) -> str:
    """The beginning of a text that is too long, in at most `size` bytes of UTF-8."""
    data = text.encode()
    return text if len(data) <= size else f"{data[: size - 3].decode(errors='ignore')}…"
