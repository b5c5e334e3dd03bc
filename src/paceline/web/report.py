"""One file of HTML with all about jobs: it loads nothing, and shows the same in ten years.

The data is JSON in the file, the code is the page's, as one script. The content security policy allows that script and
that style sheet, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import posixpath
import re
import time
from typing import TYPE_CHECKING, Any

from paceline._version import __version__
from paceline.job.quantities import show_time

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .views import JobView

_STYLES = ("vendor/uplot.css", "style.css")
_MAIN = "report.js"
_GENERATOR = '<meta name="generator" content="paceline report">'
_IMPORT = re.compile(
    r"""^[ \t]*(?:export\s*(?P<again>\{[^}]*\})|import\s*(?:(?P<default>\w+)\s*,?)?\s*(?P<names>\{[^}]*\})?)"""
    r"""\s*from\s*["'](?P<path>\.[^"']+)["'];?""",
    re.MULTILINE,
)
_NAMED = re.compile(r"^export\s+(?=(?:async\s+)?(?:const|let|function\*?|class)\s+(\w+))", re.MULTILINE)
_LIST = re.compile(r"\bexport\s*(\{[^}]*\});?")
_CLASS = re.compile(r"\.([a-z][\w-]*)")
_PAIR = re.compile(r'"([^"]+)": "[^"]+"')
_AROUND = re.compile(r"\s*([:;,])\s*")
_MARGIN = re.compile(r"^ +(?://.*)?|^//.*\n", re.MULTILINE)  # and comments
_DEFAULT = re.compile(r"\bexport default ")


def report(views: Sequence[JobView]) -> str:
    """The file."""
    data = {"version": __version__, "time": show_time(time.time()), "jobs": views, "sentences": _sentences(views)}
    script = _translations(script_of(_MAIN), _json(views))
    style = "\n".join(_rules(_text(name), script) for name in _STYLES)
    names = ", ".join(view["job"]["name"] for view in views)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    plain = "\n\n".join("\n".join(view["why"]) for view in views)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'{_GENERATOR}\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_escaped(names)} &ndash; paceline</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<div id="page"></div>\n<noscript><pre>{_escaped(plain)}</pre></noscript>\n'
        f'<script type="application/json" id="data">{_json(data)}</script>\n<script>{script}</script>\n'
        "</body>\n</html>\n"
    )


def _escaped(text: str) -> str:
    return html.escape(_encodable(text))


def _encodable(text: str) -> str:
    """The text with ? for what UTF-8 does not have: halves of a pair."""
    return text.encode("utf-8", "replace").decode()


def is_report(path: Path) -> bool:
    """Whether a file is a report, which another one may replace."""
    try:
        with open(path, "rb") as file:
            return _GENERATOR.encode() in file.read(1024)
    except OSError:
        return False


def _json(data: Any) -> str:
    """JSON that no parser of HTML ends early."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return _encodable(text.replace("<", "\\u003c"))


def _sentences(views: Sequence[JobView]) -> dict[str, str]:
    """Of the sentences in Chinese those whose longest words in English the views have."""
    text, chinese = _json(views), json.loads(_text("zh.json"))
    return {key: chinese[key] for key in chinese if _json(max(re.split(r"\{[^}]*\}", key), key=len))[1:-1] in text}


def _translations(script: str, data: str) -> str:
    """The script, and of its table of texts in Chinese those whose English the rest of it has, or the data."""
    before, begin, rest = script.partition("const ZH = {")
    table, end, after = rest.partition("\n};")
    texts = "".join((before, after, data))
    pairs = (f"{pair[0]}," for pair in _PAIR.finditer(table) if pair[1] in texts)
    return "".join((before, begin, *pairs, end, after))


def _rules(style: str, script: str) -> str:
    """Of a style sheet those rules whose classes a script names, whole or as `beginning-${…}`."""

    def is_there(name: str) -> bool:
        return name in script or f"{name.rpartition('-')[0]}-${{" in script

    def rule(found: re.Match[str]) -> str:
        several = (map(is_there, _CLASS.findall(selector)) for selector in found[1].split(","))
        body = _AROUND.sub(r"\1", found[2]).strip()
        return f"{found[1].strip()}{{{body}}}\n" if any(map(all, several)) else ""

    return re.sub(r"([^{};]+)\{([^{}]*)\}\s*", rule, re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _text(name: str) -> str:
    return (importlib.resources.files("paceline.web") / "static" / name).read_text(encoding="utf-8")


# -- one script of several modules ------------------------------------------------------------------------------------


def script_of(main: str) -> str:
    """A module of the page, and all that it imports, as one script. No module imports itself by way of others."""
    done: dict[str, str] = {}
    _add(main, done)
    script = '(() => { "use strict"; const modules = {};\n' + "".join(done.values()) + "})();\n"
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _add(name: str, done: dict[str, str]) -> None:
    if name in done:
        return
    exports: dict[str, str] = {}

    def imported(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), found["path"]))
        _add(path, done)
        module = f"modules[{json.dumps(path)}]"
        if found["again"]:
            exports.update({shown: f"{module}.{own}" for own, shown in _pairs(found["again"])})
            return ""
        names = [*([f"default: {found['default']}"] if found["default"] else [])]
        names += [f"{theirs}: {mine}" for theirs, mine in _pairs(found["names"] or "{}")]
        return f"const {{ {', '.join(names)} }} = {module};"

    def listed(found: re.Match[str]) -> str:
        exports.update({shown: own for own, shown in _pairs(found[1])})
        return ""

    text = _IMPORT.sub(imported, _MARGIN.sub("", _text(name)))
    exports.update({it: it for it in _NAMED.findall(text)})
    text = _LIST.sub(listed, _NAMED.sub("", text))
    if _DEFAULT.search(text):
        text, exports["default"] = _DEFAULT.sub("const default_ = ", text), "default_"
    shown = ", ".join(f"{json.dumps(shown)}: {own}" for shown, own in exports.items())
    done[name] = f"modules[{json.dumps(name)}] = (() => {{\n{text}\nreturn {{ {shown} }}; }})();\n"


def _pairs(names: str) -> list[tuple[str, str]]:
    """The names in `{a, b as c}`, each with the name behind `as`."""
    parts = [part.split() for part in names.strip("{}").split(",") if part.strip()]
    return [(part[0], part[-1]) for part in parts]
