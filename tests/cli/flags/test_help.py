"""What `--help`, `--help-all` and `paceline help` show."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from paceline.cli.flags.option import _PLURALS, _WORDS
from paceline.cli.main import VERBS, cli
from paceline.cli.terminal.write import has_colours

if TYPE_CHECKING:
    from pathlib import Path


def shown(*words: str) -> str:
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    return done.output


def flags(text: str) -> list[str]:
    """The first name of each flag, in order."""
    return re.findall(r"^  (-[-a-zA-Z]+)", text, flags=re.MULTILINE)


@pytest.mark.parametrize("verb", ["run", "submit"])
def test_help_has_what_people_use_first(verb: str) -> None:
    text = shown(verb, "--help")
    assert flags(text)[:5] == ["-n", "--gpus", "-H", "--on", "--nnodes"]
    assert "--help-all" in text
    assert "With --on slurm or --on kubernetes, --help has the flags of that backend." in text


def test_help_all_has_all_but_what_belongs_to_a_backend() -> None:
    first, everything = flags(shown("run", "--help")), flags(shown("run", "--help-all"))
    assert set(first) < set(everything)
    assert {"--rdzv-conf", "--ssh-root", "--stdin", "--role"} <= set(everything)
    assert not {"--selector", "--chain"} & set(everything)


@pytest.mark.parametrize(
    ("target", "its", "others"), [("slurm", "--chain", "--selector"), ("kubernetes", "--selector", "--chain")]
)
@pytest.mark.parametrize("how", ["--help", "--help-all"])
def test_the_flags_of_a_backend_are_shown_with_it(target: str, its: str, others: str, how: str) -> None:
    for words in (("--on", target, how), (how, f"--on={target}")):
        found = flags(shown("run", *words))
        assert its in found
        assert others not in found


def test_a_target_of_the_settings_is_of_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "paceline.toml").write_text('[targets.big]\nbackend = "slurm"\n')
    monkeypatch.chdir(tmp_path)
    assert "--chain" in flags(shown("run", "--on", "big", "--help"))


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb(verb: str) -> None:
    text = shown("help", verb)
    assert text == shown(verb, "--help")
    assert verb in text.partition("\n")[0]


@pytest.mark.parametrize("words", [*((verb,) for verb in VERBS), ("arena", "submit", "tf"), ("accelerate", "launch")])
def test_the_first_help_of_a_verb_is_one_screen(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert len(shown(*words, "--help").splitlines()) <= 40


def test_the_first_help_has_the_first_sentence_of_a_flag_and_help_all_the_whole_text() -> None:
    first, every = (" ".join(shown("run", flag).split()) for flag in ("--help", "--help-all"))
    assert "--keep-warm 10m|off Keep the framework imported after the job. -" in first
    assert "Keep the framework imported after the job; within this time the next job starts at once." in every


def test_every_verb_of_paceline_knows_help_all() -> None:
    for words in (("plan",), ("web",), ("checkpoint", "show")):
        assert shown(*words, "--help-all") == shown(*words, "--help")


def test_help_alone_lists_the_verbs() -> None:
    assert shown("help") == shown("--help")
    assert shown("help", "top", "job") == shown("top", "job", "--help")


@pytest.mark.parametrize("verb", VERBS)
def test_words_of_the_field_are_explained_where_they_stand_first(verb: str) -> None:
    text = " ".join(shown(verb, "--help-all" if verb in ("run", "submit") else "--help").split())
    for word, meaning in _WORDS.items():
        meanings = {meaning, _PLURALS.get(word, meaning)}
        assert sum(text.count(f"({it})") for it in meanings) <= 1
        # Names, values and titles are none of the field's words.
        either = f"[{word[0]}{word[0].upper()}]{word[1:]}s?"
        first = re.search(rf"(?<![-\w`\[.<=])(?<!coding )(?<!paceline ){either}(?![-\w`=:\]]|\.\w)(.{{80}})", text)
        if first is not None and word != verb:
            assert first[1].startswith(tuple(f" ({it})"[:80] for it in meanings)), (word, first[0])


def test_no_verb_that_deletes_is_guessed() -> None:
    for word in ("prun", "delet"):
        done = CliRunner().invoke(cli, [word])
        assert "prune" not in f"{done.exception}" and "mean delete" not in f"{done.exception}"


def test_a_terminal_without_colours_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TERM", "dumb"), ("NO_COLOR", "1")):
        with monkeypatch.context() as changed:
            changed.delenv("NO_COLOR", raising=False)
            changed.setenv("TERM", "xterm")
            assert has_colours()
            changed.setenv(name, value)
            assert not has_colours()
