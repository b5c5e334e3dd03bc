"""docs/notebooks.md is a notebook: its blocks of Python are cells, and below them is what they show."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytestmark = pytest.mark.torch
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

if TYPE_CHECKING:
    from tests.conftest import Paceline

PAGE = Path(__file__).resolve().parents[2] / "docs" / "notebooks.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def shown(outputs: list[dict]) -> str:
    """What a cell shows; of an exception the last line."""
    texts = []
    for it in outputs:
        if it["output_type"] == "error":
            texts.append(f"{it['ename']}: {it['evalue']}\n")
        else:
            texts.append(it["text"] if it["output_type"] == "stream" else it["data"]["text/plain"] + "\n")
    return "".join(texts)


def test_the_page(paceline: Paceline, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = BLOCK.findall(PAGE.read_text())
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code, _ in cells])
    client = nbclient.NotebookClient(notebook, kernel_name="python3", timeout=600, allow_errors=True)
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(paceline.folder / "jupyter"))
    env = {name: value for name, value in paceline.env.items() if name != "PYTEST_CURRENT_TEST"}  # ipykernel reads it
    env["IPYTHONDIR"] = str(paceline.folder / "ipython")
    asyncio.run(client.async_execute(env=env, cwd=str(paceline.folder)))  # `execute` would leave its loop open
    for cell, (_, expected) in zip(notebook.cells, cells, strict=True):
        assert shown(cell.outputs) == expected
