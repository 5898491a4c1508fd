"""The notebook runs, and its page on the site has the same cells."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CELLS = json.loads((ROOT / "examples" / "start.ipynb").read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def run_cell(code: str, names: dict[str, Any]) -> Any:
    """Run a cell and return the value of its last expression, which a notebook would show."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_the_page_of_the_notebook_has_its_cells() -> None:
    page = (ROOT / "docs" / "notebook.md").read_text(encoding="utf-8")
    assert re.findall(r"```python\n(.*?)\n```", page, flags=re.DOTALL) == CODE
    for cell in CELLS[2:]:
        if cell["cell_type"] == "markdown":
            assert "".join(cell["source"]) in page


@pytest.mark.slow
def test_every_cell_of_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    _, run, _, answers, eager, page, model = (run_cell(code, names) for code in CODE)
    assert "found of cracked" in run._repr_html_()
    assert "cracked: recall 0." in capsys.readouterr().out
    assert [Path(path).name for path in answers["path"][answers["unfamiliar"]]] == ["tomato.jpg"]
    assert (eager["predicted"] == "cracked").sum() >= (answers["predicted"] == "cracked").sum()
    assert page.is_file()
    assert model.suffix == ".onnx"
