"""The patterns of `.pacelineignore`, in the syntax of .gitignore."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.contract import found
from paceline.job.errors import UserError

from .transfer import printable

if TYPE_CHECKING:
    from pathlib import Path

FILE = ".pacelineignore"
_CLASSES = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": r" \t",
    "digit": "0-9",
    "lower": "a-z",
    "space": r"\s",
    "upper": "A-Z",
    "xdigit": "0-9a-fA-F",
}


@dataclass(frozen=True)
class _Pattern:
    """A line with a pattern."""

    is_exception: bool  # whether what it matches is not ignored
    folders_only: bool  # whether it matches folders only
    is_anchored: bool  # whether it matches from the root, not at any depth
    parts: tuple[str, ...]  # the parts between slashes; "**" is any number of folders

    @classmethod
    def parse(cls, line: str) -> _Pattern | None:
        """The pattern of a line; None if the line has none."""
        line = re.sub(r"((?:[^\\ ]|\\.| +(?=[^ ]))*) *", r"\1", line, count=1) if line.endswith(" ") else line
        if not line or line.startswith("#"):
            return None
        body = line.removeprefix("!").rstrip("/")
        if not body:
            return None
        parts = [part if part == "**" else re.sub(r"\*\*+", "*", part) for part in body.split("/")]
        is_anchored = len(parts) > 1
        while len(parts) > 1 and parts[0] in ("", "**"):
            is_anchored = parts.pop(0) == "" and (parts[0] != "**" or len(parts) == 1)
        if parts == ["**"]:
            parts, is_anchored = ["*"], False
        kept = [part for n, part in enumerate(parts) if part and (part != "**" or parts[n - 1 : n] != ["**"])]
        return cls(line.startswith("!"), line.endswith("/"), is_anchored, tuple(kept))

    @property
    def regex(self) -> str:
        """The pattern as a regular expression for a path relative to the root."""
        found = "" if self.is_anchored else "(?:.*/)?"
        for number, part in enumerate(self.parts):
            is_last = number == len(self.parts) - 1
            if part == "**":
                found += ".+" if is_last else "(?:.*/)?"
            else:
                found += _part_regex(part) + ("" if is_last else "/")
        return found

    def rsync_rules(self) -> list[str]:
        """The pattern as rules for rsync."""
        variants = {self.parts}
        if "**" in self.parts[:-1]:  # in .gitignore it also matches no folder at all, but not in rsync
            last = len(self.parts) - 1
            variants.add(tuple(part for n, part in enumerate(self.parts) if part != "**" or n == last))
        rules = []
        for parts in sorted(variants):
            text = "/".join(parts)
            if not re.search(r"[*?\[]", text):  # without wildcards, rsync takes a backslash literally
                text = re.sub(r"\\(.)", r"\1", text)
            sign, start, end = "+" if self.is_exception else "-", "/" * self.is_anchored, "/" * self.folders_only
            rules.append(f"{sign} {start}{text}{end}")
        return rules


class Ignore:
    """The patterns of a .pacelineignore file."""

    def __init__(self, text: str, where: str) -> None:
        self._patterns: list[tuple[_Pattern, re.Pattern[str]]] = []
        for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
            try:
                pattern = _Pattern.parse(line.rstrip("\r"))
                if pattern is not None:
                    self._patterns.append((pattern, re.compile(pattern.regex, re.DOTALL)))
            except (ValueError, re.error):
                raise UserError(
                    f"{printable(where)} line {number}: {line!r} is not a valid pattern; write it as in .gitignore"
                ) from None

    @classmethod
    def of_folder(cls, folder: Path) -> Ignore:
        """The patterns of the file in `folder`; none if there is no file."""
        path = folder / FILE
        try:
            # Whoever may write it may write the code, too.
            return cls((found.read_of_anyone(path) or b"").decode("utf-8", "surrogateescape"), str(path))
        except ValueError as error:
            raise UserError(f"cannot read {printable(path)}: {error}") from None
        except OSError as error:
            raise UserError(f"cannot read {printable(path)}: {error.strerror}; check its permissions") from None

    def __call__(self, path: str, is_folder: bool) -> bool:
        """Whether to ignore a path relative to the folder. It is not called for what is in an ignored folder."""
        for pattern, regex in reversed(self._patterns):
            if (is_folder or not pattern.folders_only) and regex.fullmatch(path):
                return not pattern.is_exception
        return False

    def rsync_rules(self) -> list[str]:
        """The patterns as rules for rsync's `--filter`, of which the first that matches counts."""
        return [rule for pattern, _ in reversed(self._patterns) for rule in pattern.rsync_rules()]


def _part_regex(part: str) -> str:
    """A part between two slashes as a regular expression."""
    found = ""
    at = 0
    while at < len(part):
        sign = part[at]
        at += 1
        if sign == "*":
            found += "[^/]*"
        elif sign == "?":
            found += "[^/]"
        elif sign == "[":
            characters, at = _set_regex(part, at)
            found += characters
        elif sign == "\\":
            if at == len(part):
                raise ValueError(part)
            found += re.escape(part[at])
            at += 1
        else:
            found += re.escape(sign)
    return found


def _set_regex(part: str, at: int) -> tuple[str, int]:
    """A set of characters that begins at `at`, and where it ends."""
    match = re.compile(r"([!^]?)((?:]|\[:\w+:\]|\\.|[^]\\])(?:\[:\w+:\]|\\.|[^]\\])*)\]").match(part, at)
    if match is None:
        raise ValueError(part)
    inside = ""
    for token in re.findall(r"\[:\w+:\]|\\.|-|[^-]", match[2]):
        if token.startswith("[:"):
            if token[2:-2] not in _CLASSES:
                raise ValueError(part)
            inside += _CLASSES[token[2:-2]]
        else:
            inside += "-" if token == "-" else re.escape(token[-1])
    return f"(?!/)[{'^' if match[1] else ''}{inside}]", match.end()
