"""The Python of the pages runs, here or in the test of its page that is named below."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import lopsided
from test_docs_commands import write_world
from test_site_pages import PAGES

TESTS = Path(__file__).parent
ROOT = TESTS.parent
ELSEWHERE = {
    "README": "test_readme.py",
    "add-a-loss": "example_losses.py",
    "add-a-method": "example_methods.py",
    "lightning": "losses/test_lightning.py",
    "notebook": "test_notebook.py",
    "onnx": "inference/test_export.py",
    "other-libraries": "losses/test_other_libraries.py",
    "own-loop": "losses/test_own_loop.py",
    "scaling": "test_distributed.py",
    "serve": "test_serve_page.py",
    "trackers": "trackers/test_trackers.py",
}
"""Where the Python of other pages runs."""
NOT_RUN = {
    "paper-tables": "needs the images of ISIC 2018",
    "share": "inference/test_hub.py runs the same code as it stands in the exported folder",
}
HERE = ("data", "evidence", "fine-tuning", "information", "own-weights", "python", "threshold")


def blocks(page: str) -> list[str]:
    path = next(path for path in PAGES if path.stem == page)
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def given(page: str) -> dict[str, Any]:
    """What the code of a page takes for granted: names here, files in the present folder."""
    if page == "information":
        return {"y": ["top", "top", "shirt"], "predicted": ["top", "shirt", "shirt"]}
    if page == "data":
        matrix = np.ones((4, 3))
        return {"numpy": np, "matrix": matrix, "labels": ["a", "a", "b", "b"], "patients": ["1", "2", "3", "4"]}
    if page == "fine-tuning":
        write_world(Path(), page)
        for run in ("longer", "frozen"):
            lopsided.fit("photos/", out=run, recipe="quick", image_size=32, quiet=True)
    if page == "own-weights":
        state = timm.create_model("resnet18").state_dict()
        torch.save({"state_dict": {f"module.{name}": value for name, value in state.items()}}, "checkpoint.pth")
        Path("run").mkdir()
        save_file({"encoder.weight": torch.ones(2), "head.weight": torch.ones(2)}, "run/model.safetensors")
    return {}


def test_every_page_with_python_has_a_test_of_it() -> None:
    found = {page.stem for page in PAGES if "```python\n" in page.read_text(encoding="utf-8")}
    assert found == {*ELSEWHERE, *NOT_RUN, *HERE}
    for page, test in ELSEWHERE.items():
        text = (TESTS / test).read_text(encoding="utf-8")
        assert f"{page}.md" in text
        assert "```python" in text or "PAGE" in text or "page" in text


@pytest.mark.slow
@pytest.mark.parametrize("page", HERE)
def test_the_python_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT if page == "evidence" else tmp_path)
    if page in ("evidence", "python"):
        pytest.importorskip("pandas")
    if page == "python":
        write_world(tmp_path, "data")  # Whose rare class is melanoma, as on this page.
    if page == "own-weights":  # Without a network.
        encoder = timm.create_model("resnet18")
        monkeypatch.setattr(timm, "create_model", lambda name, **_: encoder)
    names = given(page)
    for code in blocks(page):
        exec(code, names)
    if page == "evidence":
        difference = re.findall(r"print\(.*\)  # ([\d.]+)", "".join(blocks(page)))[0]
        assert f"{float(capsys.readouterr().out):.1f}" == difference
    if page == "own-weights":
        assert list(load_file("encoder.safetensors")) == ["weight"]
    if page == "python":
        assert Path("runs/1/model.onnx").is_file()
        assert Path("found.csv").is_file()
