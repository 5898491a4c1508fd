"""The open records of studies: what is written is read again, and intervals come from whole clusters."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "studies")
    return importlib.import_module("answers")


def made(module: ModuleType, method: str, right: list[bool], groups: list[str] | None = None, **fields: Any) -> Any:
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    decided = np.where(right, labels, 1 - labels)
    names = [f"{place}.jpg" for place in range(8)]
    key = {"data": "made", "cell": "all", "repeat": 0, "fold": 0} | fields
    return module.Answers(**key, method=method, images=names, labels=labels, decided=decided,
                          scores=np.linspace(-1, 1, 8), groups=groups)  # fmt: skip


def test_answers_that_are_written_in_parts_are_read_again(answers: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "made.csv.gz"
    first = made(answers, "one", [True] * 8, groups=list("aabbccdd"))
    many = made(answers, "two", [True] * 7 + [False], fold=1)
    object.__setattr__(many, "scores", np.array([[-0.5, -1.25, -3.0]] * 8))
    answers.add(path, first)
    answers.add(path, many)
    found = answers.read(path)
    assert [(one.method, one.fold) for one in found] == [("one", 0), ("two", 1)]
    assert found[0].groups == list("aabbccdd")
    assert found[0].images == first.images
    np.testing.assert_allclose(found[0].scores, first.scores, atol=5e-4)
    assert found[1].groups is None
    np.testing.assert_allclose(found[1].scores, many.scores)
    np.testing.assert_array_equal(found[1].decided, many.decided)


def test_the_balanced_accuracy_is_the_mean_of_the_recalls_over_all_answers(answers: ModuleType) -> None:
    one = made(answers, "one", [True] * 4 + [True, True, False, False])
    other = made(answers, "one", [True] * 8, fold=1)
    assert answers.balanced_accuracy([one]) == pytest.approx(75.0)
    assert answers.balanced_accuracy([one, other]) == pytest.approx(87.5)


def test_a_bootstrap_of_clusters_is_wider_if_the_images_of_a_cluster_are_alike(answers: ModuleType) -> None:
    right = [True, True, False, False, True, True, False, False]
    apart = answers.bootstrap([made(answers, "one", right)], rounds=400)
    together = answers.bootstrap([made(answers, "one", right, groups=list("aabbccdd"))], rounds=400)
    assert apart.value == together.value == pytest.approx(50.0)
    assert together.high - together.low > apart.high - apart.low


def test_the_difference_of_a_method_to_itself_has_no_width(answers: ModuleType) -> None:
    one = made(answers, "one", [True, False] * 4)
    assert answers.bootstrap([one], [one], rounds=50) == type(answers.bootstrap([one]))(0.0, 0.0, 0.0)


@pytest.mark.slow
def test_every_table_of_the_docs_is_that_of_its_records() -> None:
    words = [sys.executable, ROOT / "studies" / "rebuild.py", "--check", "--no-figures"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_table_without_a_source_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(ROOT / "studies")
    rebuild = importlib.import_module("rebuild")
    (tmp_path / "page.md").write_text("<!-- lost -->\n| a |\n<!-- end lost -->\n")
    monkeypatch.setattr(rebuild, "DOCS", tmp_path)
    with pytest.raises(SystemExit, match=r"docs/page\.md: nothing computes the table lost"):
        list(rebuild.pages())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- lost -->\n<!-- end lost -->\n", r"docs/few\.md: nothing computes the table lost"),
        ("<!-- few -->\n| a |\n<!-- end few -->\n" * 2, r"docs/few\.md has the table few twice"),
        ("Words.\n", r"docs/few\.md has no place for the table few, few-recall, few-balanced, story, few-local, "),
    ],
)
def test_a_table_that_was_emptied_or_removed_is_noticed(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "studies")
    rebuild = importlib.import_module("rebuild")
    (tmp_path / "few.md").write_text(text)
    monkeypatch.setattr(rebuild, "DOCS", tmp_path)
    with pytest.raises(SystemExit, match=said):
        list(rebuild.pages())


BY_HAND = {
    "dependencies.md", "encoder-tables.md", "information.md", "reliability.md", "scaling.md",
    "serve.md", "speed.md", "training.md", "which-recipe.md",
}  # fmt: skip
"""Pages of which docs/evidence.md says that tables were compared by hand, and tables that no record has."""


def test_a_table_of_numbers_is_computed_from_a_record_or_its_page_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "studies")
    rebuild = importlib.import_module("rebuild")
    found = set()
    for path in sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("[hu]*/*.md")]):
        text = path.read_text(encoding="utf-8")
        for name in rebuild.marks(text):
            text = rebuild.with_table(text, name, "")
        text = re.sub(r"<!-- ([a-z-]+): begin -->.*?<!-- \1: end -->", "", text, flags=re.DOTALL)
        for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
            cells = [cell.strip() for line in table.splitlines()[2:] for cell in line.strip("|").split("|")]
            if sum(bool(re.fullmatch(r"[+-]?\d[\d.,]*( .*|%)?", cell)) for cell in cells) > 2:
                found.add(path.name)
    assert found == BY_HAND


def test_a_prediction_is_open_until_each_test_has_run_and_then_judged_by_its_limits(
    answers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "studies")
    registered = importlib.import_module("registered")
    half = [True] * 4 + [True, True, False, False]
    folds = [made(answers, "quick", half, data="lesions", fold=fold) for fold in range(2)]
    first = made(answers, "thorough", [True] * 7 + [False], data="lesions")
    rows = registered.predictions([*folds, first]).splitlines()
    assert "| 1. lesions: `quick` between 68 and 76 | 75.0, as predicted |" in rows
    assert "| 1. lesions: `thorough` above it by 1 to 4 | open |" in rows
    second = made(answers, "thorough", half, data="lesions", fold=1)
    rows = registered.predictions([*folds, first, second]).splitlines()
    assert "| 1. lesions: `thorough` above it by 1 to 4 | +6.2, **not as predicted** |" in rows
