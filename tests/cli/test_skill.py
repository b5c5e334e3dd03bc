"""What coding agents read: SKILL.md, which knows each kind of fault and each action that `get -o json` may say."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, get_args

import yaml
from tests.docs.pages import DOCS, SKILL
from tests.docs.test_blocks import parse
from tests.typed import typed

from paceline.backends.facts import WAYS
from paceline.contract import records
from paceline.node.usual_messages import USUAL

if TYPE_CHECKING:
    from tests.conftest import Paceline


def test_it_is_printed_as_it_is_in_the_package(paceline: Paceline) -> None:
    done = typed(paceline, "skill")
    assert (done.returncode, done.stdout) == (0, SKILL.read_text())
    _, front, _ = done.stdout.split("---\n", 2)
    assert yaml.safe_load(front).keys() == {"name", "description"}


def _listed(text: str) -> dict[str, str]:
    """Kind → action, as a table has them."""
    rows = re.findall(r"^\| `([a-z ]+)` \| ([^|]+) \|", text, re.MULTILINE)
    return {kind.strip("` "): action for action, kinds in rows for kind in kinds.split(",")}


def test_every_kind_of_fault_is_in_it_with_its_action() -> None:
    kinds = {*WAYS, *get_args(records.Cause), *(usual.kind for usual in USUAL)} - {""}
    actions = {kind: WAYS[kind].action if kind in WAYS else "edit" for kind in kinds}
    for page in (SKILL, DOCS / "agents.md"):
        listed = _listed(page.read_text())
        assert {kind: listed.get(kind) for kind in kinds} == actions, page.name


def test_command_lines_within_sentences_are_parsed() -> None:
    found = re.findall(r"`(paceline [a-z][^`]*)`", SKILL.read_text())
    assert len(found) > 5
    for line in found:
        if "VERB" not in line:
            parse(line.replace("TARGET", "lab"))
