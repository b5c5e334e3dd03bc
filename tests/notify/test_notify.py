"""`paceline notify` as users have it."""

from __future__ import annotations

import contextlib
import json
import signal
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import GENEROUS, eventually
from tests.typed import refusal, typed

from paceline.job.settings_files import user_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Paceline
    from tests.notify.conftest import Hook

FAILS = 'raise ValueError("no such colour")\n'


@pytest.fixture
def config(paceline: Paceline, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes the user's settings, and files beside them that only the user can read."""
    monkeypatch.setenv("XDG_CONFIG_HOME", paceline.env["XDG_CONFIG_HOME"])
    path = user_file()
    assert path is not None
    paceline.env.update(NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")

    def write(text: str, mode: int = 0o600, **files: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for name, content in files.items():
            (path.parent / name).write_text(content)
            (path.parent / name).chmod(mode)
        return path

    return write


@pytest.fixture
def watching(paceline: Paceline) -> Iterator[Callable[..., Any]]:
    """Starts `paceline notify`, and waits until it has looked at the jobs."""
    with contextlib.ExitStack() as stack:

        def start(*args: str) -> Any:
            process = paceline.start("notify", *args)
            stack.callback(process.wait, GENEROUS)
            stack.callback(process.kill)
            assert process.stderr is not None
            said = []
            while not (said and said[-1].endswith("Ctrl-C ends it\n")):
                said.append(process.stderr.readline())
                assert said[-1], "".join(said)
            return process

        yield start


def test_a_job_fails_and_a_restart_sends_what_was_not_sent(
    paceline: Paceline, config: Callable[..., Path], watching: Callable[..., Any], hook: Hook
) -> None:
    config('[notify.team]\nwebhook_file = "url"\non = ["failed"]\n', url=f"{hook.url}\n")
    first = watching()
    paceline.succeeds("submit", "--framework", "indexed", "--name", "one", paceline.script(FAILS))
    sent = hook.next()
    assert sent.path == "/hook/a-secret-token?key=another-secret"
    assert (sent.body["event"], sent.body["job"], sent.body["state"]) == ("failed", "one", "FAILED")
    assert (sent.body["error"], sent.body["rank"]) == ("rank 0: ValueError: no such colour", 0)
    assert sent.body["command"] == "paceline why one"
    assert first.stdout.readline().split(" ", 2)[2].startswith("team: job one failed on local (")
    assert f"another paceline notify runs (pid {first.pid})" in refusal(paceline, "notify")

    hook.answers = [503]  # it is to be tried again when the process is gone
    paceline.succeeds("submit", "--framework", "indexed", "--name", "two", "script.py")
    assert hook.next().body["job"] == "two"
    first.stderr.readline()
    first.kill()
    first.wait(GENEROUS)

    second = watching()
    assert hook.next().body["job"] == "two"
    second.stdout.readline()
    second.send_signal(signal.SIGTERM)
    assert second.wait(GENEROUS) == 0
    assert hook.requests.empty()  # nothing of the first job
    kept = json.loads((paceline.home / "notify" / "state.json").read_text())
    assert kept == {"version": 1, "marks": [], "waiting": {}}


def test_a_dry_run_prints_the_notices(
    paceline: Paceline, config: Callable[..., Path], watching: Callable[..., Any]
) -> None:
    config('[notify.me]\nwebhook = "http://127.0.0.1:1/"\n')
    process = watching("--dry-run")
    paceline.succeeds("submit", "--framework", "indexed", "--name", "one", paceline.script("print(1)\n"))
    lines = [process.stdout.readline() for _ in range(4)]
    assert lines[0].endswith(" to me:\n")
    assert lines[1].startswith("paceline: job one has ended (SUCCEEDED) on local (")
    process.send_signal(signal.SIGINT)
    assert process.wait(GENEROUS) == 0
    assert not (paceline.home / "notify").exists()


def test_a_test_says_what_each_has_answered(paceline: Paceline, config: Callable[..., Path], hook: Hook) -> None:
    config(f'[notify.a]\nwebhook = "{hook.url}"\n[notify.b]\nwebhook = "{hook.url}"\nformat = "slack"\n')
    hook.answers = [200, (404, {}, b"no_service")]
    done = typed(paceline, "notify", "--test")
    assert (done.returncode, done.stdout) == (1, "a: sent to 127.0.0.1\n")
    assert done.stderr == "paceline: b: 127.0.0.1 answers 404: no_service\n"
    assert [hook.next().body.get("event"), *hook.next().body] == ["test", "text"]
    assert typed(paceline, "notify", "--test", "b").returncode == 0


WEBHOOK = '[notify.x]\nwebhook_file = "url"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "",
            "nobody is to get notices; write a table such as [notify.me] with webhook_file or mail into {file} (do",
        ),
        ("[notify.x]\n", "{file}:1: notify.x: says not where notices go; add webhook_file, webhook or mail"),
        ('[notify.x]\nmail="a@b"\nwebhook="u"\n', "{file}:1: notify.x: has webhook and mail; leave one, of webhook,"),
        ('[notify.x]\nmail="a@b"\nformat="slack"\n', "{file}:3: notify.x.format: is for webhooks; mail is plain text"),
        ('[notify.x]\nmail="a b@c"\n', "{file}:2: notify.x.mail 'a b@c': not an address; write for example you@"),
        ('[notify.x]\nmail="-t@c, d@e"\n', "{file}:2: notify.x.mail '-t@c, d@e': not an address; write for example"),
        (f'{WEBHOOK}format="teams"\n', "{file}:3: notify.x.format 'teams': should be 'json', 'slack', 'feishu', "),
        (f'{WEBHOOK}on="fails"\n', "{file}:3: notify.x.on.0 'fails': should be 'failed', 'ended', 'hung' or"),
        (f"{WEBHOOK}on=[]\n", "{file}:3: notify.x.on: should have a length greater than or equal to 1"),
        (f'{WEBHOOK}slow_for="10"\n', "{file}:3: notify.x.slow_for: '10' has no unit; did you mean 10m?"),
        (f'{WEBHOOK}secret_file="s"\n', '{file}:3: notify.x.secret_file: is for format = "feishu" or "dingtalk"; '),
        (f'{WEBHOOK}targets="lap"\n', "{file}:3: notify.x.targets: no target 'lap'; "),
        (f"{WEBHOOK}wehbook=1\n", "{file}:3: notify.x.wehbook: unknown key; did you mean webhook?"),
        ('[notify.x]\nwebhook_file="no"\n', "{file}:2: notify.x.webhook_file 'no': cannot be read: No such file or"),
        (
            '[notify.x]\nwebhook_file="."\n',
            "{file}:2: notify.x.webhook_file '.': this is no file; name one with one line",
        ),
        ('[notify.x]\nwebhook_file="two"\n', "{file}:2: notify.x.webhook_file 'two': should hold the address in one "),
        ('[notify.x]\nwebhook="ftp://secret/"\n', "{file}:2: notify.x.webhook: the address does not begin with https:"),
        ('[notify.x]\nwebhook="https://h:x/secret"\n', "{file}:2: notify.x.webhook: the address has no host, or no v"),
        ('[notify.x]\nwebhook="https://u:secret@h"\n', "{file}:2: notify.x.webhook: the address has a user before i"),
        ('[notify.x]\nwebhook="https://h/ secret"\n', "{file}:2: notify.x.webhook: the address has spaces or letters "),
    ],
)
def test_bad_settings(paceline: Paceline, config: Callable[..., Path], text: str, expected: str) -> None:
    file = config(text, url="https://example.org/secret", two="https://a\nhttps://b")
    line = refusal(paceline, "notify", "--test")
    assert line.startswith(expected.format(file=file))
    assert "secret" not in line.replace("secret_file", "")


def test_a_file_that_others_may_read(paceline: Paceline, config: Callable[..., Path]) -> None:
    file = config(WEBHOOK, 0o644, url="https://example.org/secret")
    assert refusal(paceline, "notify") == (
        f"{file}:2: notify.x.webhook_file 'url': other users may read it; type: chmod 600 {file.parent}/url"
    )


def test_bad_command_lines(paceline: Paceline, config: Callable[..., Path]) -> None:
    config(WEBHOOK, url="https://example.org/")
    assert refusal(paceline, "notify", "--test", "y") == "no receiver y in the settings; choose one of x"
    assert refusal(paceline, "notify", "x").startswith("x: receivers are named for --test and --dry-run")
    assert refusal(paceline, "notify", "--test", "--dry-run").startswith("--test sends a notice, and --dry-run")


def test_a_project_sends_nothing_unasked(paceline: Paceline, config: Callable[..., Path]) -> None:
    config(WEBHOOK, url="https://example.org/")
    del paceline.env["PACELINE_TRUST"]
    (paceline.folder / "paceline.toml").write_text('[notify.x]\nwebhook_file = "/etc/passwd"\n')
    assert "paceline.toml:2: notify.x.webhook_file: a project's setting" in refusal(paceline, "notify", "--test")


def test_a_damaged_state_is_said(paceline: Paceline, config: Callable[..., Path], hook: Hook) -> None:
    config(WEBHOOK, url=hook.url)
    (paceline.home / "notify").mkdir(parents=True)
    (paceline.home / "notify" / "state.json").write_text("{")
    process = paceline.start("notify")
    assert "state.json cannot be read (it is damaged)" in process.stderr.readline()  # type: ignore[union-attr]
    eventually((paceline.home / "notify" / "lock").read_text, "it runs")
    process.kill()
    process.communicate(timeout=GENEROUS)
