"""Takes the pictures in docs/web.md: `make web-screens`. It starts a few jobs of its own, and needs chromium."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.lab.web.browser import browser

ROOT = Path(__file__).parents[3]
INTO = ROOT / "docs" / "images"
EVALUATE = """
import itertools, sys, time
for step in itertools.count():
    print(f"\\x1b[32mstep {step}\\x1b[0m of rank 0: all is well", flush=True)
    time.sleep(0.2)
"""
FAILS = "raise FileNotFoundError(2, 'No such file or directory', '/data/train/labels.json')\n"


def main() -> None:
    """Start the jobs and the page, and take the pictures."""
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
        words = [sys.executable, "-m", "paceline", "web", "--no-browser", "--port", "0"]
        with subprocess.Popen(words, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            _pictures(server.stdout.readline().strip())
            server.terminate()
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
