"""README: its commands and its code run, its numbers are those of other pages, and it describes the same product."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

import lopsided
from lopsided.cli import run
from lopsided.data.eggs import unpack_eggs
from test_site_pages import shell_lines

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_readme_citation_package_and_command_describe_one_product() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    words = project["description"]
    assert f"**{words}.**" in README
    assert f"**{words}.**" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert (lopsided.__doc__ or "").startswith(f"{words}.\n")
    assert f"{words}." in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert words in (ROOT / "src" / "lopsided" / "cli" / "app.py").read_text(encoding="utf-8")


def test_numbers_of_readme_are_those_of_the_tables_and_of_the_demo() -> None:
    peers = (ROOT / "docs" / "peers.md").read_text(encoding="utf-8")
    fair = re.search(r"<!-- peers-short -->.*?<!-- end peers-short -->", peers, flags=re.DOTALL)
    assert fair is not None
    assert fair[0] in README
    finds, of, share, alarms = re.findall(r"finds (\d+) of (\d+) \((.*?)\) with (\d+) false alarms", README)[0]
    shown = (ROOT / "docs" / "figures" / "start_demo.txt").read_text(encoding="utf-8")
    assert f"cracked: finds {finds} of {of} ({share}); {alarms} false alarms among" in shown
    intervals = (ROOT / "docs" / "understand" / "how-many-images.md").read_text(encoding="utf-8")
    low_high = re.findall(r"If 8 of 10 rare images are found, the recall is (\d+ to \d+ %)", README)[0]
    assert re.search(rf"^\| 10 \|[^|]*\| {low_high} \|", intervals, flags=re.MULTILINE)


def test_the_loss_of_readme_runs() -> None:
    names: dict[str, Any] = {}
    exec(BLOCKS[1], names)
    assert names["z"].grad is not None


@pytest.mark.slow
def test_the_commands_and_the_code_of_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    photos, new = unpack_eggs(tmp_path / "given")
    shutil.copytree(photos, "photos")
    shutil.copytree(new, "new")
    shutil.copytree(new, "archive")
    tried = 0
    for line in shell_lines(README):
        words = line.partition("#")[0].split()
        if words[:1] == ["lopsided"] and words[1] != "demo":  # The demo has a test of its own.
            assert run(words[1:]) == 0
            tried += 1
    assert tried == 2
    assert (tmp_path / "predictions.csv").is_file()
    exec(BLOCKS[0], {})
    assert (tmp_path / "runs" / "1" / "model.onnx").is_file()
    assert (tmp_path / "runs" / "1" / "report.html").is_file()
