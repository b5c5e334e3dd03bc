"""Values that no flag can have: empty, no time, no number, a file where none can be; each is refused in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import pytest
from tests.typed import refusal

from paceline.cli.flags.option import Number, Option
from paceline.cli.main import VERBS, cli
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Paceline

# What torchrun has empty by default.
MAY_BE_EMPTY = {
    "--rdzv-endpoint", "--rdzv-conf", "--local-ranks-filter", "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
}  # fmt: skip


def flags_with_values() -> Iterator[tuple[str, str, int]]:
    """Verb, flag, and how many values it takes, for all flags of all verbs that are commands of their own."""
    with click.Context(cli, **cli.context_settings) as root:
        for verb in VERBS:
            command = cli.get_command(root, verb)
            for option in [] if command is None else command.params:
                if isinstance(option, Option) and not option.is_flag and option.nargs >= 1:
                    name = next((it for it in option.opts if it.startswith("--")), option.opts[0])
                    yield verb, name, option.nargs


def said_of(verb: str, words: list[str]) -> str:
    """Why a verb refuses words; "" if it takes them."""
    with click.Context(cli, **cli.context_settings) as root:
        command = cli.get_command(root, verb)
        assert command is not None
        words = [*words, *["x"] * any(isinstance(it, click.Argument) and it.required for it in command.params)]
        try:
            command.make_context(verb, words, parent=root)
        except UserError as error:
            return str(error)
        except click.ClickException as error:
            return error.format_message()
    return ""


def test_an_empty_value_is_refused_by_every_flag() -> None:
    tried = set()
    for verb, flag, count in flags_with_values():
        tried.add(flag)
        said = said_of(verb, [flag, *[""] * count])
        if flag in MAY_BE_EMPTY:
            assert not said, flag
        else:
            assert said.startswith(f"{flag} is empty; "), (verb, flag, said)
    assert {"--setup", "--queue", "--start-timeout", "--nnodes", "--tee", "--output", "--slurm", "--run-as"} <= tried


@pytest.mark.parametrize("verb", ["get", "wait", "resubmit", "checkpoint show", "plan", "scaleout"])
def test_an_empty_name_is_refused(paceline: Paceline, verb: str) -> None:
    assert refusal(paceline, *verb.split(), "").endswith(" is empty; name one")


def test_a_number_is_one() -> None:
    for text in ("nan", "inf", "-inf", "1e400"):
        with pytest.raises(click.BadParameter, match=f"'{text}' is not a number"):
            Number(0).convert(text, None, None)
    with pytest.raises(click.BadParameter, match=r"2\.5 is more than 2"):
        Number(0, 2).convert("2.5", None, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--start-timeout", "0"), "--start-timeout: '0' is no time; give 1s or more"),
        (("--time-limit", "0"), "--time-limit: '0' is no time; for no limit, leave it out"),
        (("--time-limit", "0h0m"), "--time-limit: '0h0m' is no time; for no limit, leave it out"),
        (("--ttl", "0.0"), "--ttl: '0.0' is no time; to keep the job, leave it out"),
        (("--keep-warm", "0s"), "--keep-warm: '0s' is no time; write off"),
        (("--hang-after", "0"), "--hang-after: '0' is no time; to watch for no hang, write --hang off"),
        (("--grace", "0"), "--grace: '0' has no unit; did you mean 0s?"),
        (("--ttl", f"{'9' * 400}d"), "…: it is longer than any job; write for example 90s"),
        (("--nnodes", "9" * 20), f"--nnodes '{'9' * 20}' is more than 65536 machines; give fewer"),
        (("--nnodes", "9" * 5000), f"--nnodes '{'9' * 20}…' is more than 65536 machines; give fewer"),
        (("-np", "0"), "Invalid value for '-np': 0 is less than 1"),
        (("--shutdown-timeout", "1e400"), "Invalid value for '--shutdown-timeout': '1e400' is not a number"),
        (("--checkpoint-dir", "/dev/null/c"), "--checkpoint-dir /dev/null/c: /dev/null is no folder; name another one"),
        (("--hostfile", "/nope"), "--hostfile /nope: No such file or directory; name a file with a line for each host"),
        (("-H", "h", "-i", "/"), "--ssh-identity-file: no file '/'; name the private key that the hosts accept"),
    ],
)
def test_what_is_said_of_a_value(paceline: Paceline, words: tuple[str, ...], said: str) -> None:
    paceline.script("open('ran', 'w')", "ok.py")
    line = refusal(paceline, "run", *words, "ok.py")
    assert said in line
    assert not (paceline.folder / "ran").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("report", "-o", "{}", "a-job"), ("explain", "-o", "{}", "torchrun x.py"), ("init", "--file", "{}"),
        ("checkpoint", "export", "-o", "{}", "a-job"), ("tune", "--write", "{}", "script.py"),
    ],
)  # fmt: skip
def test_a_file_where_none_can_be_is_refused_before_any_work(paceline: Paceline, words: tuple[str, ...]) -> None:
    paceline.script("")
    ending = ".pt" if "export" in words else ".yaml"
    for folder in ("nope", "script.py"):
        file = f"{paceline.folder / folder / 'new'}{ending}"
        said = refusal(paceline, *(word.format(file) for word in words))
        why = f"there is no folder {paceline.folder / folder}; name another file"
        assert said.endswith(f"{file}: {why}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nope.py",), "no script nope.py in {}; check the name and the folder"),
        (("/dev/null",), "/dev/null is a device or a socket, not a script; name a file"),
        (("script.sh",), "script.sh is no script of Python, and paceline plan measures no others; name one"),
        (("job.yaml",), "job.yaml is no script of Python, and paceline plan measures no others; name one"),
    ],
)
def test_plan_looks_at_its_script_first(paceline: Paceline, words: tuple[str, ...], said: str) -> None:
    paceline.script("echo", "script.sh")
    paceline.script("script: it.py", "job.yaml")
    assert refusal(paceline, "plan", *words) == said.format(paceline.folder)
