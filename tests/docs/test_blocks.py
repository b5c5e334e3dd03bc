"""Every block of the pages is run, or says above it in a comment why it is only shown.

What GitHub and the site do not show stands in the line above a block:

    <!-- shown: needs hosts over ssh -->     why the block is not run; command lines of paceline are parsed all the same
    <!-- run: tests/examples/test_x.py -->   which other test runs it

A block without a mark is run here: `console` blocks line by line (`run`, `submit`, `resubmit` and `tune` dry),
Python as a script, TOML and YAML by the loaders of settings and job files. `text` is printed by programs, or a drawing.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

import click
import pytest
from tests import journals
from tests.backends.slurm.fake import Login
from tests.backends.ssh.many import ManyHosts
from tests.backends.test_contract import install
from tests.conftest import all_end
from tests.docs.pages import CHINESE, DOCS, PAGES, ROOT, SKILL, Block, blocks

from paceline.cli.dialects.tools import explained
from paceline.cli.main import DIALECTS, cli
from paceline.job import reading, settings

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Paceline

BLOCKS = [block for page in (*PAGES, SKILL) if page not in CHINESE for block in blocks(page)]  # see test_chinese.py
LANGUAGES = {"console", "python", "toml", "yaml", "json", "diff", "text"}
DRY = ("run", "submit", "resubmit", "tune")
JOB = r"(?:digits|train|resnet)(?:-\w+)?"  # how the jobs of the pages are called
SCRIPT = "import sys\nprint(*sys.argv[1:])\n"
HEADER = b'{"0.weight":{"dtype":"F32","shape":[10,64],"data_offsets":[0,2560]}}'
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(2560)
TARGETS = """
[local]
devices = 8

[targets.lab]
backend = "ssh"
hosts = ["node1", "node2", "node5"]
"""


def commands(block: Block) -> list[str]:
    """The command lines of a block, without their prompts and what the shell takes for comments."""
    found: list[str] = []
    for line in block.text.splitlines():
        prompted = re.match(r"[\w@]*\$ (.*)", line)
        if prompted:
            found.append(prompted[1])
        elif found and found[-1].endswith("\\"):
            found[-1] = found[-1][:-1] + line.strip()
    return [re.sub(r"\s+# .*$", "", line) for line in found]


def words(line: str) -> list[str]:
    """The words of a command line of paceline, without variables before it and what is behind `|` and `;`."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&")
    lexer.whitespace_split = True
    typed = list(lexer)
    start = typed.index("paceline")
    end = next((place for place, word in enumerate(typed) if word in {"|", ";", "&&"}), len(typed))
    return typed[start + 1 : end]


def parse(line: str) -> None:
    """Parse a command line of paceline as the program does."""
    verb, *rest = words(line)
    if verb in DIALECTS and verb != "explain":
        explained(line.replace("paceline ", "", 1))
        return
    with click.Context(cli, info_name="paceline") as outer:
        command = cli.get_command(outer, verb)
        assert command is not None, f"there is no verb {verb}"
        while isinstance(command, click.Group):
            inner, *rest = rest
            command = command.get_command(outer, inner)
            assert command is not None, f"{verb} has no {inner}"
        with contextlib.suppress(click.exceptions.Exit):  # --help
            command.make_context(verb, rest, parent=outer)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project as the pages have it: scripts, a job file, weights, and the examples."""
    for name in ("train.py", "score.py"):
        (tmp_path / name).write_text(SCRIPT)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    (tmp_path / "job.yaml").write_text("script: train.py\n")
    (tmp_path / "paceline.toml").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture
def reader(folder: Path) -> Iterator[Paceline]:
    """Who types the lines: hosts answer over ssh and Slurm takes jobs, as stand-ins do; `shelf` is installed."""
    it = Login(folder)
    install(it)
    with (folder / "paceline.toml").open("a") as file:
        file.write(TARGETS)
    (folder / "hosts").mkdir()
    it.env["PATH"] = f"{ManyHosts(folder / 'hosts', 8).folder}/bin:{it.env['PATH']}"
    yield it
    all_end(it.processes, "the job", it.home / "jobs")
    journals.check(it.home / "jobs")


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_has_a_language_and_a_mark_that_is_meant(block: Block) -> None:
    assert block.language in LANGUAGES, f"{block}: one of {LANGUAGES}"
    assert block.mark in {"", "shown", "run"}, f"{block}: {block.mark}"
    assert not block.mark or block.reason, f"{block}: why is it only {block.mark}?"
    if block.mark == "run":
        assert block.page.name in (ROOT / block.reason).read_text(), f"{block}: {block.reason} does not read the page"


def test_few_command_lines_are_only_shown() -> None:
    lines = [(line, block) for block in BLOCKS if block.language == "console" for line in commands(block)]
    shown = [f"{block}: {line}" for line, block in lines if block.mark == "shown"]
    assert len(shown) <= 0.05 * len(lines), "\n".join(shown)


@pytest.mark.parametrize("block", [it for it in BLOCKS if it.language == "console"], ids=str)
def test_command_lines_are_parsed(block: Block, folder: Path) -> None:
    for line in commands(block):
        if re.search(r"(^|\s)paceline [a-z]", line):
            parse(line)
        elif line.startswith("pip install "):
            _install(line)


def test_flags_in_place_of_the_fields_of_a_form_are_parsed() -> None:
    text = re.sub(r"\n +", " ", (DOCS / "from-cube-studio.md").read_text())
    flags = [it for it in re.findall(r"→ `(--[^`]+)`", text) if " " in it]
    assert len(flags) > 15
    for it in flags:
        parse(f"paceline submit --on kubernetes {it} train.py")


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(it, marks=[pytest.mark.torch] if re.search(r"paceline (plan|checkpoint) ", it.text) else [])
        for it in BLOCKS
        if it.language == "console" and not it.mark
    ],
    ids=str,
)
def test_command_lines_run(block: Block, folder: Path, reader: Paceline) -> None:
    lines = commands(block)
    assert lines, f"{block}: nothing is typed; if a program prints it, its language is text"
    started = {word for line in lines for word in line.split() if re.fullmatch(JOB, word)}
    for name in sorted(started):
        reader.succeeds("run", "-n", "2", "--name", name, "train.py")
    if any(line.startswith("paceline warm") for line in lines):
        (folder / "warm").mkdir(mode=0o700)
        reader.env["PACELINE_WARM_DIR"] = str(folder / "warm")
        lines.append("paceline warm --stop")
    for line in lines:
        if line.startswith("make "):
            _make(line)
        elif line.startswith("pip install "):
            pass  # see above
        elif line.startswith("python -m "):
            flags = shlex.split(line)[1:]
            subprocess.run([sys.executable, *flags, "--help"], cwd=ROOT, capture_output=True, timeout=60, check=True)
        elif line.startswith("python "):
            ast.parse((folder / line.split()[1]).read_text())
        elif line == ".ci/run":
            subprocess.run(["bash", "-n", ROOT / line], timeout=60, check=True)
        elif line.startswith("torchrun "):
            explained(line)
        elif completion := re.search(r"_PACELINE_COMPLETE=\w+ paceline", line):
            _shell(completion[0], reader)  # not every machine has every shell
        elif "paceline " in line:
            _paceline(line, reader)
        else:
            _shell(line, reader)


def _make(line: str) -> None:
    subprocess.run([*line.split(), "--dry-run"], cwd=ROOT, capture_output=True, timeout=60, check=True)


def _install(line: str) -> None:
    """All extras that a line of pip names are there, and none of paceline's is a package of that name."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert re.search(r"-e ('?\.|git)|paceline", line), line
    for extras in re.findall(r"\[([\w,]+)\]", line):
        assert set(extras.split(",")) <= set(known), line


def _paceline(line: str, paceline: Paceline) -> None:
    verb, *rest = words(line)
    dry = ["--dry-run"] if verb in DRY and "--dry-run" not in rest else []
    if "--name" in rest:
        rest[rest.index("--name") + 1] += "-"  # a job of that name is there for the lines that follow
    if verb in DIALECTS and verb != "explain":
        explained(line.replace("paceline ", "", 1))
        return
    done = paceline(verb, *dry, *rest)
    assert done.returncode == 0, f"{line}: {done.returncode}\n{done.stdout}{done.stderr}"


def _shell(line: str, paceline: Paceline) -> None:
    environment = {**paceline.env, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-ec", line],
        cwd=paceline.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{line}: {done.stderr}"


@pytest.mark.parametrize("block", [it for it in BLOCKS if it.language == "python"], ids=str)
def test_python_is_compiled_and_runs(block: Block, folder: Path) -> None:
    compile(block.text, str(block), "exec")
    if not block.mark:
        done = subprocess.run(
            [sys.executable, "-c", block.text], cwd=folder, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{block}: {done.stderr}"


@pytest.mark.parametrize("block", [it for it in BLOCKS if it.language in {"toml", "yaml", "json"}], ids=str)
def test_files_are_read_by_what_reads_them(block: Block, folder: Path) -> None:
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "yaml":
        reading.read("job.yaml", text=block.text)
    elif "pyproject.toml" in block.text:
        tomllib.loads(block.text)
    else:
        (folder / "paceline.toml").write_text(block.text)
        settings.load(folder)


@pytest.mark.parametrize("block", [it for it in BLOCKS if it.language == "diff"], ids=str)
def test_differences_are_compared_by_another_test(block: Block) -> None:
    assert block.mark == "run", f"{block}: name the test that compares it"


if __name__ == "__main__":  # how much is run: `python -m tests.docs.test_blocks`
    counts = Counter[tuple[str, str]]()
    for block in BLOCKS:
        lines = len(commands(block)) if block.language == "console" else 1
        counts[block.language, block.mark or "run here"] += lines
    for (language, mark), number in sorted(counts.items()):
        print(f"{language:8} {mark:8} {number}")
