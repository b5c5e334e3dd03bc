"""Messages reach a real server, are tried again when it makes sense, and tell no secrets."""

from __future__ import annotations

import email
import email.policy
import queue
from typing import TYPE_CHECKING, Any

import pytest
from tests.cli.screens.cases import NOW, job, progress
from tests.conftest import GENEROUS, eventually

from paceline.job.errors import UserError
from paceline.notify.delivery import Mail, Outcome, Pace, Sender, Webhook
from paceline.notify.notice import Notice, notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.notify.conftest import Hook

    Start = Callable[..., "Running"]


def failed(name: str = "it", **changes: Any) -> Notice:
    found = job(name, "FAILED", **changes)
    vars(found).update(error="rank 3: ValueError: 5", advice="look at the data")
    return notice("failed", found, "", NOW)


class Running:
    """A sender, and what it says."""

    def __init__(self, hook: Hook, waiting: list[Notice], kind: str = "json", pace: Pace | None = None) -> None:
        self.told: queue.Queue[str] = queue.Queue()
        self.warned: list[str] = []
        self.sender = Sender(
            "team", Webhook(hook.url, kind, seconds=1.0), waiting, tell=self.told.put, warn=self.warned.append,
            changed=lambda: None, pace=pace or Pace(first=0.01),
        )  # fmt: skip
        self.sender.start()


@pytest.fixture
def start(hook: Hook) -> Iterator[Start]:
    started: list[Running] = []

    def new(waiting: list[Notice], **options: Any) -> Running:
        started.append(Running(hook, waiting, **options))
        return started[-1]

    yield new
    for it in started:
        hook.is_over.set()
        it.sender.close()
        it.sender.join(GENEROUS)


@pytest.mark.parametrize("answers", [[500, 503], [429], ["close", 500], ["never"]])
def test_what_may_work_later_is_tried_again(hook: Hook, start: Start, answers: list[Any]) -> None:
    hook.answers = [*answers]
    running = start([failed()])
    assert running.told.get(timeout=GENEROUS) == "team: job it failed on local (" + _host() + ")"
    bodies = [hook.next().body for _ in range(len(answers) + 1)]
    assert all(body == bodies[0] for body in bodies)
    assert bodies[0]["job"] == "it"
    assert not running.sender.waiting
    assert len(running.warned) == len(answers)
    assert all(it.endswith("; it is tried again") for it in running.warned)


@pytest.mark.parametrize("status", [400, 404, 410, 301])
def test_other_answers_are_said_once_and_no_secret_with_them(hook: Hook, start: Start, status: int) -> None:
    body = f"no hook at {hook.url}\x1b[2J".encode()
    hook.answers = [(status, {"Location": f"{hook.url}2"}, body)] * 2
    running = start([failed("a"), failed("b")])
    eventually(lambda: not running.sender.waiting, "both were tried")
    running.sender.close()
    running.sender.join(GENEROUS)
    assert hook.requests.qsize() == 2
    (said,) = running.warned
    assert said.startswith(f"team: 127.0.0.1 answers {status}")
    assert "secret" not in said and "\x1b" not in said
    assert said.endswith("; 1 notice could not be delivered")


def test_how_long_a_receiver_asks_to_wait(hook: Hook) -> None:
    hook.answers = [(429, {"Retry-After": "7"}, b"")]
    outcome = Webhook(hook.url, "slack").send([failed()])
    assert (outcome.is_later, outcome.after) == (True, 7.0)
    pace = Pace(chance=lambda: 0.0)
    pace.tried(100.0, outcome)
    assert pace.wait(101.0) == 6.0
    assert pace.wait(107.0) == 0.0


def test_what_was_taken_is_not_sent_again_when_the_answer_breaks_off(hook: Hook) -> None:
    hook.answers = [(200, {"Transfer-Encoding": "chunked"}, b"ff\r\nab")]
    assert Webhook(hook.url, "json").send([failed()]) == Outcome("")


def test_pauses_grow_and_end_with_success() -> None:
    pace, now, pauses = Pace(chance=lambda: 1.0), 0.0, []
    for _ in range(12):
        pace.tried(now, Outcome("no", is_later=True))
        pauses.append(pace.wait(now))
        now += pauses[-1]
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert pauses[-1] == 300.0
    pace.tried(now, Outcome())
    assert pace.wait(now) == 0.0


def test_no_more_than_20_messages_a_minute() -> None:
    pace, now, sent, waiting = Pace(), 0.0, [], 7
    for second in range(600):
        now, waiting = float(second), waiting + 1  # a job fails every second
        while waiting and not pace.wait(now):
            waiting -= pace.size(waiting, now)
            pace.tried(now, Outcome())
            sent.append(now)
    assert all(sum(start <= it < start + 60 for it in sent) <= 20 for start in sent)
    assert waiting <= 60  # what has come since the last message
    assert Pace().size(20, 0.0) == 1
    assert Pace().size(50, 0.0) == 50


def test_50_jobs_that_fail_at_once_are_one_message(hook: Hook, start: Start) -> None:
    running = start([failed(f"job{n}") for n in range(50)])
    body = hook.next().body
    assert (body["job"], body["more"], len(body["others"])) == ("job0", 49, 49)
    assert body["text"].splitlines()[-1] == "and 29 others"
    assert running.told.get(timeout=GENEROUS).endswith(" and 49 more")


def test_a_service_that_refuses_with_200(hook: Hook, start: Start) -> None:
    hook.answers = [
        (200, {}, b'{"errcode": 130101, "errmsg": "send too fast"}'),
        (200, {}, b'{"errcode": 310000, "errmsg": "keywords not in content"}'),
        (200, {}, b'{"errcode": 0, "errmsg": "ok"}'),
        (200, {}, b"<html>sign in"),
    ]
    running = start([failed("a"), failed("b"), failed("c")], kind="dingtalk")
    assert running.told.get(timeout=GENEROUS).startswith("team: job b failed")
    eventually(lambda: len(running.warned) == 3, "the third is refused")
    assert running.warned == [
        "team: 127.0.0.1 refuses it: 130101 send too fast; it is tried again",
        "team: 127.0.0.1 refuses it: 310000 keywords not in content; 1 notice could not be delivered",
        "team: 127.0.0.1 answered 200, but not as dingtalk does; check the address and format; 1 notice could not be "
        "delivered",
    ]


def test_at_the_end_what_can_be_sent_is_sent_and_the_rest_stays(hook: Hook, start: Start) -> None:
    hook.answers = [500]
    running = start([failed("a")], pace=Pace(first=1000.0))
    hook.next()
    eventually(lambda: running.warned, "it waits to try again")
    running.sender.close()
    running.sender.join(GENEROUS)
    assert [it.job for it in running.sender.waiting] == ["a"]


def test_a_receiver_that_nobody_answers_for(hook: Hook) -> None:
    hook.close()
    assert Webhook(hook.url, "json").send([failed()]) == Outcome("127.0.0.1: Connection refused", is_later=True)


def test_a_host_that_cannot_be_one() -> None:
    outcome = Webhook("https://a..b/a-secret-token", "json").send([failed()])
    assert outcome.is_later and outcome.problem.startswith("a..b: ")
    assert "secret" not in outcome.problem


def test_mail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "sendmail"
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/flags\ncat > {tmp_path}/mail\n[ ! -e {tmp_path}/busy ] || '
                      'exit 75\n[ ! -e no ] || { echo "no such user" >&2; exit 67; }\n')  # fmt: skip
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    mail = Mail(["ada@example.org", "bob@example.org"])
    assert mail.send([failed("训练", target="x\r\nBcc: eve@example.org"), failed()]) == Outcome()
    sent = email.message_from_bytes((tmp_path / "mail").read_bytes(), policy=email.policy.default)
    assert (tmp_path / "flags").read_text().split() == ["-t", "-i"]
    assert sent["To"] == "ada@example.org, bob@example.org"
    assert sent["Bcc"] is None
    assert sent["Subject"] == r"paceline: job 训练 failed on x\r\nBcc: eve@example.org, and 1 more"
    assert sent["Date"] and sent["Message-ID"] and sent["Auto-Submitted"] == "auto-generated"
    assert "rank 3: ValueError: 5" in sent.get_content()
    (tmp_path / "busy").touch()
    assert mail.send([failed()]).is_later
    (tmp_path / "busy").unlink()
    (tmp_path / "no").touch()
    assert mail.send([failed()]) == Outcome(f"{script} ends with exit code 67: no such user")
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(UserError, match="needs a program sendmail"):
        Mail(["ada@example.org"])


def test_what_a_notice_says() -> None:
    found = job("vit", "FAILED", target="lab", hosts=("a", "b"), progress=progress(1, 120), labels={"team": "v"})
    vars(found).update(error="rank 3: ValueError: 5", advice="look at the data", exit_code=1, cause="exception")
    shown = notice("failed", found, " --on lab", NOW)
    assert shown.text.splitlines() == [
        "paceline: job vit failed on lab",
        "rank 3: ValueError: 5",
        "advice: look at the data",
        "first to fail: rank 3 on b",
        "ran for 1h01m; epoch 2/10, step 120/500, 812.5 samples/s, loss 0.25",
        "more: paceline why --on lab vit",
    ]
    assert (shown.rank, shown.node, shown.epoch, shown.step, shown.loss) == (3, "b", 2, 120, 0.25)
    assert (shown.exit_code, shown.cause, shown.labels) == (1, "exception", {"team": "v"})


def test_a_notice_of_a_hang_and_of_slowness() -> None:
    found = job("vit", target="lab", hosts=("a", "b"))
    vars(found).update(waiting="it hangs: rank 2 on b has not entered all_reduce 7")
    shown = notice("hung", found, "", NOW)
    assert (shown.cause, shown.rank, shown.node) == ("hang", 2, "b")
    assert "look at: rank 2 on b" in shown.text.splitlines()
    vars(found).update(waiting=None, slow=["40 % of the time waits for data", "more"])
    assert notice("slow", found, "", NOW).error == "40 % of the time waits for data; more"


def _host() -> str:
    import socket

    return socket.gethostname()
