from __future__ import annotations

import io

from rich.console import Console

from lopsided.runs.answer import blocks, notes, print_comparison
from lopsided.runs.comparison import compare
from made_comparison import runs


def test_of_one_scenario_figures_stand_side_by_side() -> None:
    comparison = compare([*runs("ce", 0.50, 0.60), *runs("cl", 0.52, 0.64)])
    (block,) = blocks(comparison)
    assert block.title == "photos at 90:10: test images, per cent"
    assert [column[0] for column in block.columns] == [
        "balanced accuracy",
        "accuracy",
        "AUROC",
        "recall of cat",
        "recall of dog",
    ]
    rows = list(block.rows(comparison))
    assert [row[0] for row in rows] == ["ce", "cl", "  less ce"]
    assert rows[2][1] == "+3.0 ±12.7 (2)"
    assert rows[2][2] == "+0.0 (2)"  # Accuracies are all the same: there is no interval.


def test_of_several_scenarios_each_figure_has_a_table_with_gaps_for_what_has_no_run() -> None:
    comparison = compare([*runs("ce", 0.50, 0.60), *runs("cl", 0.52, scenario="50:50")])
    found = blocks(comparison)
    assert [block.title for block in found[:2]] == [
        "photos: balanced accuracy on test images, per cent",
        "photos: accuracy on test images, per cent",
    ]
    assert list(found[0].rows(comparison))[1:] == [["cl", "52.0 (1)", "-"], ["  less ce", "-", "-"]]


def test_of_many_classes_the_terminal_has_no_recalls() -> None:
    names = tuple("abcde")
    comparison = compare(runs("ce", 0.5, classes=names))
    assert [column[0] for column in blocks(comparison)[0].columns] == ["balanced accuracy", "accuracy", "AUROC"]


def test_the_last_words_are_the_sentence_of_the_comparison() -> None:
    comparison = compare([*runs("[ce]", 0.50, 0.60), *runs("cl", 0.52, 0.64), *runs("cl", 0.5, cell="again")])
    out = io.StringIO()
    print_comparison(comparison, Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert lines[-1] == (
        "At 90:10, cl has the highest balanced accuracy on test images, 58.0 per cent (2 runs); [ce] is not "
        "reliably lower."
    )
    assert "Time of a run at 90:10: [ce] 60 s, cl 60 s." in lines
    assert notes(comparison)[-1] == "1 run ignored: an earlier run has the same method, data and seed."
    assert "Bonferroni's correction for the number of methods" in out.getvalue()
