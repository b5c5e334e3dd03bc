"""Lock files as requirements of one machine: pylock.toml (PEP 751) and uv.lock."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from paceline.job.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .environment import Environment


_PYPI = "https://pypi.org/simple"


def toml(text: str, source: str) -> dict[str, Any]:
    """The content of a file in TOML."""
    try:
        found: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--environment {source}: {error}; correct the file") from None
    return found


def lines(environment: Environment, platform: Mapping[str, str]) -> list[str]:
    """The lines of a requirements file, or of environment.yml, for a machine; see `machine/environments.py`."""
    if environment.form in ("requirements", "conda"):
        return environment.text.splitlines()
    read = _of_pylock if environment.form == "pylock" else _of_uv
    found = read(toml(environment.text, environment.source), _markers(platform), environment.source)
    # As soon as one line has hashes, pip wants one for each.
    return sorted(set(found))


def _markers(platform: Mapping[str, str]) -> dict[str, str]:
    """The variables of markers on a machine. Source: PEP 508."""
    version = platform["version"]
    return {
        "implementation_name": "cpython", "implementation_version": version, "os_name": "posix",
        "platform_machine": platform["machine"], "platform_python_implementation": "CPython", "platform_release": "",
        "platform_system": "Linux", "platform_version": "", "python_full_version": version,
        "python_version": ".".join(version.split(".")[:2]), "sys_platform": "linux",
    }  # fmt: skip


def _of_pylock(lock: Mapping[str, Any], markers: dict[str, str], source: str) -> Iterable[str]:
    try:
        from packaging.pylock import Pylock, PylockSelectError, PylockUnsupportedVersionError, PylockValidationError
    except ImportError:
        raise UserError(f"--environment {source}: to read it, install packaging 26.1 or newer here") from None

    try:
        pylock = Pylock.from_dict(lock)
        chosen = list(pylock.select(environment=markers, tags=_all_tags(pylock)))  # type: ignore[arg-type]  # all keys
    except (PylockValidationError, PylockUnsupportedVersionError, PylockSelectError) as error:
        raise UserError(f"--environment {source}: {str(error).splitlines()[0]}; make the lock anew") from None
    for package, _ in chosen:
        if package.version is not None and (package.wheels or package.sdist):
            files = [*(package.wheels or ()), *([package.sdist] if package.sdist else ())]
            yield _line(package.name, str(package.version), [file.hashes for file in files])
            yield from _index(package.index)
        elif package.archive is not None and package.archive.url:
            yield _url_line(package.name, package.archive.url, package.archive.hashes)
        elif package.vcs is not None and package.vcs.url:
            folder = _within(package.vcs.subdirectory)
            yield f"{package.name} @ {package.vcs.type}+{package.vcs.url}@{package.vcs.commit_id}{folder}"
        else:
            raise UserError(
                f"--environment {source}: {package.name} is a folder of this machine; use --environment here, which "
                "brings its files along"
            )


def _all_tags(pylock: Any) -> list[Any]:
    """The tags of all wheels of a lock: which of them suits is for the builder there to say."""
    from packaging.utils import parse_wheel_filename

    return [
        tag
        for package in pylock.packages
        for wheel in package.wheels or ()
        for tag in parse_wheel_filename(wheel.filename)[3]
    ]


def _of_uv(lock: Mapping[str, Any], markers: dict[str, str], source: str) -> Iterable[str]:
    """The packages that the project of an uv.lock needs."""
    from packaging.markers import Marker

    def holds(it: Mapping[str, Any]) -> bool:
        return "marker" not in it or Marker(it["marker"]).evaluate(markers)

    def fits(package: Mapping[str, Any]) -> bool:
        own = package.get("resolution-markers")
        return own is None or any(Marker(it).evaluate(markers) for it in own)

    packages = [it for it in lock.get("package", []) if fits(it)]
    roots = [it for it in packages if {"editable", "virtual"} & it.get("source", {}).keys()]
    if not roots:
        raise UserError(f"--environment {source}: it has no project; make it with uv lock")
    wanted = [(root, "") for root in roots]
    seen: set[tuple[str, str, str]] = set()
    while wanted:
        package, extra = wanted.pop()
        key = package["name"], str(package.get("version", "")), extra
        if key in seen:
            continue
        seen.add(key)
        if package not in roots and not extra:
            yield _uv_line(package, source)
            yield from _index(package["source"].get("registry"))
        needs = package.get("optional-dependencies", {}).get(extra, []) if extra else package.get("dependencies", [])
        for need in filter(holds, needs):
            there = [
                it for it in packages if it["name"] == need["name"] and need.get("version") in (None, it.get("version"))
            ]
            for found in there[:1]:
                if found in roots and found is not package:  # its files are needed there, and nothing else brings them
                    yield _uv_line(found, source)
                wanted += [(found, ""), *((found, it) for it in need.get("extra", []))]


def _uv_line(package: Mapping[str, Any], source: str) -> str:
    kind = package.get("source", {})
    if "registry" in kind:
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        hashes = [dict([file["hash"].split(":", 1)]) for file in files if "hash" in file]
        return _line(package["name"], package["version"], hashes)
    if "git" in kind:
        address = urlsplit(kind["git"])
        folder = parse_qs(address.query).get("subdirectory", [""])[0]
        url = address._replace(query="", fragment="").geturl()
        return f"{package['name']} @ git+{url}@{address.fragment}{_within(folder)}"
    if "url" in kind:
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        return _url_line(package["name"], kind["url"], dict(it["hash"].split(":", 1) for it in files if "hash" in it))
    raise UserError(
        f"--environment {source}: {package['name']} is a folder of this machine; use --environment here, which brings "
        "its files along"
    )


def _within(folder: str | None) -> str:
    """The end of a line for a project in a folder of a repository."""
    return f"#subdirectory={folder}" if folder else ""


def _index(url: str | None) -> Iterable[str]:
    """The line for the index of a package; a machine has one of its own instead of PyPI."""
    if url is not None and url.startswith("http") and not url.startswith(_PYPI):
        yield f"--extra-index-url {url}"


def _url_line(name: str, url: str, hashes: Mapping[str, str]) -> str:
    return " ".join([f"{name} @ {url}", *(f"--hash={kind}:{value}" for kind, value in hashes.items())])


def _line(name: str, version: str, hashes: Iterable[Mapping[str, str]]) -> str:
    found = sorted({f"--hash={kind}:{value}" for each in hashes for kind, value in each.items()})
    return " ".join([f"{name}=={version}", *found])
