from __future__ import annotations

from typing import Any

import pytest

from lopsided.facts import Fact, cautions, merge_folds, notes

FALLING = cautions.falling_loss("encoder", 2.0, 1.25, "epochs")


def test_a_fact_of_all_folds_is_said_once_and_one_of_some_with_their_number() -> None:
    resized, mild = notes.resized(64), cautions.falling_loss("encoder", 9.0, 8.0, "epochs")
    second = cautions.falling_loss("classifier", 1.0, 0.5, "classifier_epochs")
    found = merge_folds([[resized, FALLING, second], [resized, second], [resized, mild, second]])
    assert [(fact.kind, fact.values.get("stage"), fact.folds) for fact in found] == [
        ("resized", None, None),
        ("falling_loss", "encoder", (2, 3)),
        ("falling_loss", "classifier", (3, 3)),
    ]
    assert [str(fact) for fact in found] == [str(resized), f"In 2 of 3 folds: {FALLING}", str(second)]


def test_a_fact_of_one_fold_is_none_of_the_run() -> None:
    own = [notes.split("stratified", auto=True), cautions.no_test_split(), notes.continued("encoder", 1)]
    of_fold = [notes.chosen_strength(0.1, 9, 5), notes.kept_epoch("encoder", 3, 5, "uwa", 0.9)]
    assert merge_folds([[*own, *of_fold], own]) == []


def test_the_model_of_all_images_speaks_for_the_run() -> None:
    before, now = notes.chosen_strength(0.1, 9, 5), notes.chosen_strength(1.0, 9, 5)
    kept = [notes.kept_epoch(stage, 3, 5, "uwa", 0.9) for stage in ("encoder", "classifier")]
    assert merge_folds([[before]], [before, *kept, now, notes.resized(8)]) == [now, *kept], "A resumed run has two."


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"kind": "no_such_kind", "values": {}},
        {"kind": "resized", "values": {}},
        {"kind": "resized", "values": {"side": 3, "more": 4}},
        {"kind": "kept_epoch", "values": {"stage": 1, "epoch": 1, "epochs": 1, "metric": 5, "value": "x"}},
        {"kind": ["resized"], "values": {"side": 3}},
        {"kind": "resized", "values": [3]},
        {"kind": "falling_loss", "values": dict(FALLING.values), "folds": 7},
        {"kind": "falling_loss", "values": dict(FALLING.values), "folds": ["a"]},
    ],
)
def test_a_damaged_fact_is_none(content: dict[str, Any]) -> None:
    assert Fact.from_dict(content) is None
