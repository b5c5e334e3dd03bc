"""Messages have the shapes that the services document."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from paceline.notify.formats import message, verdict
from paceline.notify.notice import Notice

NOTICE = Notice("failed", "paceline: a", 'paceline: a\n<at user_id="all">x</at> & <!channel>', 0.0, job="a")


def sent(kind: str, *notices: Notice, secret: str = "") -> tuple[str, Any]:
    url, body = message(kind, "https://h/robot?access_token=t", secret, notices or [NOTICE], lambda: 1_700_000_000.5)
    return url, json.loads(body)


def test_json() -> None:
    _, body = sent("json", NOTICE, NOTICE)
    assert (body["version"], body["event"], body["job"], body["time"]) == (1, "failed", "a", "1970-01-01T00:00:00.000Z")
    assert (body["more"], body["others"][0]["job"]) == (1, "a")


def test_slack() -> None:
    text = 'paceline: a\n&lt;at user_id="all"&gt;x&lt;/at&gt; &amp; &lt;!channel&gt;'
    assert sent("slack") == ("https://h/robot?access_token=t", {"text": text})


def test_wecom() -> None:
    assert sent("wecom")[1] == {"msgtype": "text", "text": {"content": NOTICE.text}}


# The signatures are those that `openssl dgst -sha256 -mac HMAC -binary | base64` makes.
def test_feishu() -> None:
    text = {"text": NOTICE.text.replace("<at", "< at")}
    assert sent("feishu")[1] == {"msg_type": "text", "content": text}
    assert sent("feishu", secret="s3cret")[1] == {
        "timestamp": "1700000000", "sign": "IX3eHI0/v/Td7jqJ0ynSEK3Dq5JY3HUZeoeMgVZeZGo=", "msg_type": "text",
        "content": text,
    }  # fmt: skip


def test_dingtalk() -> None:
    assert sent("dingtalk")[0] == "https://h/robot?access_token=t"
    url, body = sent("dingtalk", secret="s3cret")
    assert body == {"msgtype": "text", "text": {"content": NOTICE.text}}
    assert parse_qs(urlsplit(url).query) == {
        "access_token": ["t"], "timestamp": ["1700000000500"], "sign": ["6i7Fx9pwZ9L3LlJz++hZgXydS29zzBnl5Cy5jhb7NVg="],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "size"), [("wecom", 2048), ("dingtalk", 20_000), ("feishu", 20_480), ("slack", 40_000)]
)
def test_long_texts_fit(kind: str, size: int) -> None:
    long = Notice("failed", "t", "训" * 30_000, 0.0)
    _, body = message(kind, "https://h/", "", [long])
    inner = json.loads(body)
    text = inner.get("text") or inner["content"]["text"]
    text = text["content"] if isinstance(text, dict) else text
    assert len(text.encode() if kind == "wecom" else body) <= size
    assert text.endswith("训…")


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        ("feishu", b'{"code": 0, "msg": "success"}', ("", False)),
        ("feishu", b'{"StatusCode": 0, "StatusMessage": "success"}', ("", False)),
        ("feishu", b'{"code": 19021, "msg": "sign match fail"}', ("refuses it: 19021 sign match fail", False)),
        ("feishu", b'{"code": 11232, "msg": "busy"}', ("refuses it: 11232 busy", True)),
        ("wecom", b'{"errcode": 45009, "errmsg": "api freq"}', ("refuses it: 45009 api freq", True)),
        ("slack", b"ok", ("", False)),
        ("json", b"", ("", False)),
    ],
)
def test_answers(kind: str, body: bytes, expected: tuple[str, bool]) -> None:
    assert verdict(kind, body) == expected
