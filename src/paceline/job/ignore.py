"""What `.pacelineignore` names, in the syntax of .gitignore."""

from __future__ import annotations

import re
from pathlib import Path

from .errors import UserError
from .transfer import printable

FILE = ".pacelineignore"


class Ignore:
    """The patterns of a .pacelineignore file.

    Raises:
        UserError: a pattern is malformed; the line is named.
    """

    def __init__(self, text: str, where: str) -> None:
        self._lines = text.splitlines()
        if not self._lines:
            self._spec = None
            return
        from pathspec import GitIgnoreSpec

        for number, line in enumerate(self._lines, 1):
            try:
                GitIgnoreSpec.from_lines([line])
            except ValueError:
                raise UserError(
                    f"{printable(where)} line {number}: {line!r} is no pattern; write it as in .gitignore"
                ) from None
        self._spec = GitIgnoreSpec.from_lines(self._lines)

    @classmethod
    def of_folder(cls, folder: Path) -> Ignore:
        """What the file in `folder` says; nothing where there is none.

        Raises:
            UserError: it cannot be read, or a pattern is malformed.
        """
        path = folder / FILE
        try:
            return cls(path.read_text("utf-8", "surrogateescape"), str(path))
        except FileNotFoundError:
            return cls("", str(path))
        except OSError as error:
            raise UserError(f"cannot read {printable(path)}: {error.strerror}; check its permissions") from None

    def __call__(self, path: str, is_folder: bool) -> bool:
        """Whether it names a path relative to the folder. What lies in an ignored folder is not asked for."""
        return self._spec is not None and self._spec.match_file(path + "/" if is_folder else path)

    def rsync_rules(self) -> list[str]:
        """The same as rules for rsync's `--filter`, where the first that matches counts."""
        return [rule for line in reversed(self._lines) for rule in _rsync_rules(line)]


def _rsync_rules(line: str) -> list[str]:
    pattern = re.sub(r"(?<!\\) +$", "", line)
    if not pattern or pattern.startswith("#"):
        return []
    sign = "- "
    if pattern.startswith("!"):
        sign, pattern = "+ ", pattern[1:]
    pattern, is_folder = pattern.rstrip("/"), pattern.endswith("/")
    if not pattern:
        return []
    # Two stars mean something only as a whole part of a path.
    parts = [part if part == "**" else re.sub(r"\*\*+", "*", part) for part in pattern.split("/")]
    if parts[0] == "**" and len(parts) > 1:
        while parts[0] == "**" and len(parts) > 1:
            parts.pop(0)
    elif len(parts) > 1:
        parts = ["", *(part for part in parts if part)]
    variants = ["/".join(parts)]
    if "**" in parts[1:-1]:  # they also stand for no folder at all
        variants.append("/".join(part for n, part in enumerate(parts) if part != "**" or n == len(parts) - 1))
    if not re.search(r"[*?\[]", pattern):  # without wildcards a backslash is just that to rsync
        variants = [re.sub(r"\\(.)", r"\1", variant) for variant in variants]
    return [sign + variant + ("/" if is_folder else "") for variant in variants]
