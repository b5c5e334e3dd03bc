"""Reads YAML that a person has written, of which aliases may not make much more than there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST = 10_000  # values, where aliases stand for some of them


class Loader(yaml.SafeLoader):
    """Refuses a document whose aliases stand for too many values, before it makes any."""

    def compose_document(self) -> yaml.Node | None:
        root: yaml.Node | None = super().compose_document()
        if root is not None and _size(root, {}) > max(_MOST, self.index):  # each character that was read is one at most
            what = f"its aliases (*NAME) stand for more than {_MOST} values; write them out"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=root.start_mark)
        return root


def load(text: str) -> Any:
    """The only document of a text."""
    return yaml.load(text, Loader)


def load_all(text: str) -> Iterator[Any]:
    """The documents of a text."""
    return yaml.load_all(text, Loader)


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node stands for; one that contains itself counts once in it."""
    if id(node) not in known:
        known[id(node)] = 1
        inner = node.value if isinstance(node.value, list) else ()
        known[id(node)] += sum(
            _size(it, known) for each in inner for it in (each if isinstance(each, tuple) else [each])
        )
    return known[id(node)]
