"""Make what a release publishes, in dist/: `make release`, on a clean tree whose version has no tag yet.

The wheel and the source are built twice from the commit, and have to be the same bytes. The wheel is installed into an
empty environment and tried there. Beside them lie sbom.json (CycloneDX: what that environment and the page have) and
SHA256SUMS. Nothing is published and no tag is made: docs/contributing/release.md says how.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
LARGEST = 1_875_000  # bytes of the wheel
_VENDORED = ROOT / "src" / "paceline" / "web" / "static" / "vendor" / "VERSIONS"
_LIST = """
import importlib.metadata as metadata, json
print(json.dumps(sorted(
    (it.metadata["Name"], it.version, it.metadata.get("License-Expression") or it.metadata.get("License") or "")
    for it in metadata.distributions() if it.metadata["Name"] != "pip"
)))
"""


def wrong(text: str) -> SystemExit:
    """End with one line."""
    return SystemExit(f"make release: {text}")


def run(*command: str | Path, cwd: Path = ROOT, **more: str) -> str:
    """Run a command that has to succeed; returns what it prints."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **more}, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise wrong(f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def version_of(root: Path = ROOT) -> str:
    """The version, which pyproject.toml, the package, the changelog and the recipe for conda have to agree on."""
    places = {
        "pyproject.toml": r'^version = "(.*)"',
        "src/paceline/_version.py": r'^__version__ = "(.*)"',
        "CHANGELOG.md": r"^## (\d\S*)",
        "conda/recipe.yaml": r'^  version: "(.*)"',
    }
    found = {}
    for name, pattern in places.items():
        match = re.search(pattern, (root / name).read_text(), re.M)
        found[name] = match[1] if match else "none"
    if len(set(found.values())) != 1:
        raise wrong("; ".join(f"{name} has version {version}" for name, version in found.items()))
    return found["pyproject.toml"]


def check(version: str) -> None:
    """Refuse a tree that is not the commit, a version that has a tag, and one whose jobs were not recorded."""
    if changed := run("git", "status", "--porcelain").strip():
        raise wrong(f"the tree is not clean; commit or remove these first:\n{changed}")
    if run("git", "tag", "--list", f"v{version}").strip():
        raise wrong(f"the tag v{version} exists; raise the version")
    if not (ROOT / "tests" / "stable" / "written" / f"{version}.tar.gz").exists():
        raise wrong("jobs of this version are not recorded; run: python -m tests.stable.written")


def build(source: Path, out: Path, epoch: str) -> list[Path]:
    """Build the wheel and the source from a folder."""
    run(sys.executable, "-m", "hatchling", "build", "-d", out, cwd=source, SOURCE_DATE_EPOCH=epoch)
    return sorted(out.iterdir())


def build_twice(work: Path) -> list[Path]:
    """Build from two copies of the commit, in folders of different names, and compare the bytes."""
    epoch = run("git", "log", "-1", "--format=%ct").strip()
    built = []
    for name in ("first", "again-in-another-folder"):
        source = work / name
        source.mkdir()
        run("git", "archive", "--output", work / "source.tar", "HEAD")
        run("tar", "-xf", work / "source.tar", "-C", source)
        built.append(build(source, work / f"{name}-dist", epoch))
    for one, other in zip(*built, strict=True):
        if one.name != other.name or one.read_bytes() != other.read_bytes():
            raise wrong(f"{one.name} differs between two builds")
    return built[0]


def try_out(wheel: Path, work: Path, version: str) -> Path:
    """Install the wheel into an empty environment and use it; returns the Python there."""
    env, home = work / "env", work / "home"
    run(sys.executable, "-m", "venv", env)
    python, own = env / "bin" / "python", env / "bin" / "paceline"
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", f"{wheel}[kubernetes,web]")
    project = work / "project"
    project.mkdir()
    (project / "hello.py").write_text("import os\nprint('rank', os.environ['PACELINE_RANK'])\n")
    where = {"PACELINE_HOME": str(home), "XDG_CONFIG_HOME": str(work / "config"), "PYTHONPATH": ""}
    tries = {
        ("--version",): version,
        ("run", "-n", "2", "hello.py"): "rank 0",
        ("submit", "-n", "2", "--name", "hello", "hello.py"): "",
        ("wait", "hello"): "",
        ("get", "hello", "-o", "json"): '"SUCCEEDED"',
    }
    for arguments, expected in tries.items():
        if expected not in run(own, *arguments, cwd=project, **where):
            raise wrong(f"paceline {' '.join(arguments)} does not print {expected}")
    if not (env / "share" / "man" / "man1" / "paceline-run.1").read_text().startswith("."):
        raise wrong("the wheel has no manual page of paceline run")
    command = [own, "web", "--no-browser", "--port", "0"]
    page = subprocess.Popen(command, cwd=project, env={**os.environ, **where}, stdout=subprocess.PIPE, text=True)
    try:
        assert page.stdout is not None
        with urllib.request.urlopen(page.stdout.readline().strip(), timeout=30) as answer:
            if b"<title>" not in answer.read():
                raise wrong("paceline web does not serve its page")
    finally:
        page.terminate()
        page.communicate()
    return python


def sbom(version: str, installed: list[list[str]]) -> dict[str, Any]:
    """What is in the wheel and what is installed with it, as CycloneDX."""

    def component(name: str, its: str, kind: str, licence: str = "") -> dict[str, Any]:
        purl = f"pkg:{kind}/{name.lower() if kind == 'pypi' else name}@{its}"
        found: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": its, "purl": purl}
        short = licence.splitlines()[0][:80] if licence else ""
        return {**found, "licenses": [{"license": {"name": short}}]} if short else found

    own, *others = sorted(
        (component(*it[:2], "pypi", it[2]) for it in installed), key=lambda it: it["name"] != "paceline"
    )
    page = [component(*it, "npm") for it in re.findall(r"^[0-9a-f]+ +(.+)-(\S+)\.tgz$", _VENDORED.read_text(), re.M)]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**own, "type": "application", "version": version}},
        "components": [*others, *page],
    }


def main() -> int:
    """Check, build, try, and write all of it into dist/."""
    version = version_of()
    check(version)
    with tempfile.TemporaryDirectory(prefix="paceline-release-") as name:
        work = Path(name)
        built = build_twice(work)
        (wheel,) = (path for path in built if path.suffix == ".whl")
        if wheel.stat().st_size > LARGEST:
            raise wrong(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {LARGEST}")
        python = try_out(wheel, work, version)
        listed = sbom(version, json.loads(run(python, "-c", _LIST)))
        shutil.rmtree(DIST, ignore_errors=True)
        DIST.mkdir()
        for path in built:
            shutil.copy(path, DIST)
    (DIST / "sbom.json").write_text(json.dumps(listed, indent=1) + "\n")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(DIST.iterdir())]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    print(
        "".join(sums)
        + f"dist/ is complete. Next: git tag -s v{version} -m 'paceline {version}' && git push origin v{version}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
