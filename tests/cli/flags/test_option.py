"""Values of flags: what is well formed is read back, what is not is refused by name."""

from __future__ import annotations

import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.flags.given import flags_of_backends
from paceline.cli.flags.job import Given
from paceline.cli.flags.option import parse_address, parse_numbers, parse_pairs, parse_streams
from paceline.job.errors import UserError

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,10}", fullmatch=True)


@given(st.dictionaries(names, st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_env_is_read_back(env: dict[str, str]) -> None:
    assert parse_pairs("--env", (f"{name}={value}" for name, value in env.items()), variable=True) == env


@given(st.dictionaries(st.integers(0, 7), st.integers(0, 3), min_size=1))
def test_streams_are_read_back(streams: dict[int, int]) -> None:
    text = ",".join(f"{rank}:{value}" for rank, value in streams.items())
    assert parse_streams("--tee", text, 8) == {**dict.fromkeys(range(8), 0), **streams}


@given(st.text(max_size=8))
def test_streams_are_read_or_refused(text: str) -> None:
    try:
        assert set(parse_streams("--tee", text, 4)) == {0, 1, 2, 3}
    except UserError as error:
        assert "--tee" in str(error)


@given(st.lists(st.integers(0, 999), min_size=1))
def test_numbers_are_read_back(numbers: list[int]) -> None:
    assert parse_numbers("--x", ",".join(map(str, numbers))) == numbers


@given(st.from_regex(r"[a-z0-9.-]{1,20}", fullmatch=True), st.none() | st.integers(0, 65535))
def test_addresses_are_read_back(host: str, port: int | None) -> None:
    assert parse_address("--x", host if port is None else f"{host}:{port}") == (host, port)


def test_ipv6_addresses_stand_in_brackets() -> None:
    assert parse_address("--x", "[::1]:29400") == ("::1", 29400)
    with pytest.raises(UserError):
        parse_address("--x", "::1")


@pytest.mark.parametrize("verb", ["run", "submit", "tune"])
def test_each_flag_of_a_job_is_an_attribute_of_what_a_line_has_given(verb: str) -> None:
    command = importlib.import_module(f"paceline.cli.verbs.{verb}")
    given = getattr(command, "_Given", Given)
    of_backends = {flag.parameter for _, flag in flags_of_backends()}
    names = {str(it.name) for it in getattr(command, verb).params} - of_backends
    assert names and not [name for name in names if not hasattr(given, name)]
