"""Takes pictures of the page: `make web-screens`. It needs chromium, and takes a few minutes.

Those in docs/web.md are of a few jobs that it starts. Those in build/web-screens are of each view, at two widths, in
both themes and both languages, with few, many and very many jobs that never ran; index.html there shows all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.web.browser import browser

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.web.browser import Browser

ROOT = Path(__file__).parents[3]
INTO = ROOT / "docs" / "images"
ALL = ROOT / "build" / "web-screens"
COUNTS = (3, 226, 10_000)  # of jobs
SIZES = ((1280, 800), (390, 844))
TARGET = "gpu-cluster"
VIEWS = {  # name → address, and what it shows once it is there
    "jobs": ("#/jobs", "document.querySelectorAll('tr.job a').length > 1"),
    "groups": ("#/jobs?group=name", "document.querySelectorAll('tr.group').length > 1"),
    "nothing": ("#/jobs?q=no-such-job", "document.querySelector('#total')?.textContent.startsWith('0')"),
    "running": (f"#/jobs/{TARGET}/resnet50-0", "document.querySelectorAll('.uplot').length > 4"),
    "failed": (f"#/jobs/{TARGET}/llama-7b-1", "document.querySelectorAll('.uplot').length > 4"),
    "logs": (f"#/jobs/{TARGET}/llama-7b-1/logs", "document.querySelectorAll('.line').length > 9"),
    "stop": (f"#/jobs/{TARGET}/resnet50-0", "document.querySelectorAll('.uplot').length > 4"),
    "compare": (
        f"#/compare?job={TARGET}/resnet50-0&job={TARGET}/llama-7b-1", "document.querySelectorAll('.uplot').length > 1"
    ),
    "machines": ("#/machines", "document.body.innerText.includes('gpu-01')"),
    "submit": ("#/submit", "!!document.querySelector('textarea')"),
    "report": ("report", "document.querySelectorAll('.uplot').length > 4"),
}  # fmt: skip
WHOLE = ("running", "failed", "compare", "report")  # are shown whole, however long they are
EVALUATE = """
import itertools, sys, time
for step in itertools.count():
    print(f"\\x1b[32mstep {step}\\x1b[0m of rank 0: all is well", flush=True)
    time.sleep(0.2)
"""
_WEB = [sys.executable, "-m", "paceline", "web", "--no-browser", "--port", "0"]
FAILS = "raise FileNotFoundError(2, 'No such file or directory', '/data/train/labels.json')\n"


def main() -> None:
    """Take all pictures, or those of the documents or of all views alone."""
    for name in sys.argv[1:] or ("docs", "all"):
        {"docs": _documents, "all": _all}[name]()


def _all() -> None:
    shutil.rmtree(ALL, ignore_errors=True)
    ALL.mkdir(parents=True)
    for count in COUNTS:
        with tempfile.TemporaryDirectory() as folder:
            site, info = Path(folder, "site"), Path(folder, "site", "pictured-1.dist-info")
            info.mkdir(parents=True)
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pictured\nVersion: 1\n")
            (info / "entry_points.txt").write_text("[paceline.backends]\npictured = tests.lab.web.pictured:Pictured\n")
            settings = f'[targets.{TARGET}]\nbackend = "pictured"\ncount = {count}\n'
            Path(folder, "paceline.toml").write_text(settings)
            environment = {
                **os.environ, "PACELINE_HOME": str(Path(folder, "home")), "PYTHONPATH": f"{site}{os.pathsep}{ROOT}",
            }  # fmt: skip
            words = [sys.executable, "-m", "paceline", "report", "--on", TARGET, "llama-7b-1"]
            subprocess.run(words, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)
            with _page_at(environment, folder) as url, browser() as page:
                _views(page, url, count, Path(folder, "llama-7b-1.html").as_uri())
    pictures = "".join(
        f'<figure><img src="{it.name}"><figcaption>{it.stem}</figcaption></figure>' for it in sorted(ALL.iterdir())
    )
    (ALL / "index.html").write_text(
        f"<style>figure {{ display: inline-block; width: 24% }} img {{ width: 100% }}</style>{pictures}"
    )


@contextlib.contextmanager
def _page_at(environment: dict[str, str], folder: str | Path) -> Iterator[str]:
    """The address of a server of the page, which ends with this context."""
    with subprocess.Popen(_WEB, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def _views(page: Browser, url: str, count: int, report: str) -> None:
    base = url.partition("#")[0]
    page.open(url)
    for language, theme in itertools.product(("en", "zh"), ("light", "dark")):
        page.emulate(prefers_color_scheme=theme)
        for origin in (report, base):
            page.open(origin)
            page.run(f"localStorage.setItem('paceline.language', '{language}')")
        for (name, (address, is_there)), (width, height) in itertools.product(VIEWS.items(), SIZES):
            page.resize(width, height)
            page.open("about:blank")
            page.open(report if name == "report" else f"{base}{address}")
            page.until(is_there)
            if name == "stop":
                page.click("button", {"en": "Stop", "zh": "停止"}[language])
                page.until("document.querySelector('dialog[open] button')")
            page.screenshot(ALL / f"{name}-{count}-{width}-{theme}-{language}.png", whole=name in WHOLE)


def _documents() -> None:
    folder = Path(tempfile.gettempdir(), "vision")  # it is on the pictures
    folder.mkdir()
    environment = {**os.environ, "PACELINE_HOME": str(folder / "home"), "CUDA_VISIBLE_DEVICES": ""}

    def paceline(*words: str) -> None:
        subprocess.run([sys.executable, "-m", "paceline", *words], env=environment, cwd=folder, check=False)

    try:
        shutil.copy(ROOT / "examples" / "digits_library.py", folder / "train.py")
        (folder / "evaluate.py").write_text(EVALUATE)
        (folder / "convert.py").write_text(FAILS)
        (folder / "paceline.toml").write_text("[local]\ndevices = 2\n")
        paceline("run", "-n", "2", "--name", "digits", "--label", "team=vision", "train.py")
        paceline("run", "-n", "1", "--name", "convert", "convert.py")
        paceline("submit", "-n", "2", "--gpus", "2", "--name", "evaluate", "evaluate.py")
        paceline("submit", "-n", "2", "--gpus", "2", "--name", "digits-large", "train.py", "--epochs", "90")
        with _page_at(environment, folder) as url:
            _pictures(url)
    finally:
        paceline("delete", "--force", "digits-large", "evaluate")
        shutil.rmtree(folder)


def _pictures(url: str) -> None:
    base = url.partition("#")[0]
    with browser() as page:
        page.resize(1200, 620)
        page.open(url)
        page.shows("evaluate")
        page.shows("labels.json")
        page.screenshot(INTO / "web-jobs.png")
        page.resize(1200, 1300)
        page.click("tr.job a", "digits")
        page.open(f"{base}#/jobs/local/digits")
        page.until("document.querySelectorAll('canvas').length > 4")
        page.screenshot(INTO / "web-job.png")
        page.resize(1200, 620)
        page.open(f"{base}#/jobs/local/evaluate/logs")
        page.until("document.querySelectorAll('.line').length > 9")
        page.click("button", "Stop")
        page.shows("SIGTERM")
        page.screenshot(INTO / "web-stop.png")
        page.open("about:blank")
        page.emulate(prefers_color_scheme="dark")
        page.open(f"{base}#/jobs/local/evaluate/logs")
        page.until("document.querySelectorAll('.line').length > 9")
        page.screenshot(INTO / "web-logs.png")
        page.open(f"{base}#/machines")
        page.shows("slots in use")
        page.resize(1200, 300)
        page.screenshot(INTO / "web-machines.png")


if __name__ == "__main__":
    main()
