"""The figures on docs/decisions.md are those of its records."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
ROWS = json.loads((ROOT / "studies" / "records" / "thresholds.json").read_text())["rows"]


def test_every_example_of_a_fitted_rule_keeps_validation_images_which_the_default_does_not() -> None:
    files = [*ROOT.glob("docs/*.md"), ROOT / "README.md", *ROOT.glob("src/lopsided/cli/*.py")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    examples = [line for line in lines if re.search(r'lopsided fit .*--decide "?(recall|tuned)', line)]
    assert len(examples) >= 2
    # The eggs of the demo have so few rare images that they are folded, and folds fit the rule as well.
    assert [line for line in examples if "val=0." not in line and "/eggs" not in line] == []


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("plain", "`plain`"),
        ("best threshold", "highest validation balanced accuracy"),
        ("balanced", "`balanced`"),
        ("balanced, calibrated", "`balanced`, calibrated"),
        ("tuned 0.25 1", "`tuned`"),
    ],
)
def test_the_simulation_is_told_as_it_was_recorded(rule: str, words: str) -> None:
    means = [
        np.mean([row["loses"] for row in ROWS if (row["rule"], row["rare"]) == (rule, n)]) for n in (5, 10, 20, 30, 100)
    ]
    assert f"| {words} | {' | '.join(f'{mean:.1f}' for mean in means)} |" in PAGE


def test_how_much_the_highest_uwa_flatters_itself_is_told_as_it_was_recorded() -> None:
    found = np.mean([row["flatters"] for row in ROWS if (row["rule"], row["rare"]) == ("best threshold", 5)])
    assert f"{found:.1f} points higher than on new ones" in PAGE.replace("\n", " ")


def test_the_widths_of_the_penalty_have_the_lowest_loss_of_all_that_were_tried() -> None:
    from lopsided.evaluation import decision

    means: dict[str, float] = {}
    for row in ROWS:
        if row["rule"].startswith("tuned"):
            means[row["rule"]] = means.get(row["rule"], 0.0) + row["loses"]
    assert min(means, key=lambda rule: means[rule]) == f"tuned {decision.SCALE_SPREAD:g} {decision.OFFSET_SPREAD:g}"


def test_the_table_of_real_runs_is_that_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "studies")
    import decisions

    text = (ROOT / "studies" / "records" / "decisions.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert decisions.rules_table([line for line in lines if line["study"] == "rules"]) in PAGE
    assert decisions.epochs_table([line for line in lines if line["study"] == "epochs"]) in PAGE
    for line in lines:
        if line["study"] != "rules":
            continue
        assert line["uwa"]["ceiling"] >= max(line["uwa"].values()) - 1e-9, line["run"]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("plain", "`plain`"),
        ("balanced", "`balanced`"),
        ("balanced, temperature", "`balanced`, temperature"),
        ("balanced, calibrated", "`balanced`, calibrated"),
        ("tuned", "`tuned`"),
        ("highest test UWA", "highest test balanced accuracy"),
    ],
)
def test_the_points_below_the_ceiling_are_those_of_the_record(rule: str, words: str) -> None:
    text = (ROOT / "studies" / "records" / "decisions.jsonl").read_text(encoding="utf-8")
    lines = [line for line in map(json.loads, text.splitlines()) if line["study"] == "rules"]
    cells = []
    for scenario in ("90:10", "95:5", "98:2"):
        own = [line for line in lines if line["scenario"] == scenario]
        methods = sorted({line["method"] for line in own})
        gaps = [
            np.mean([line["uwa"]["ceiling"] - line["uwa"][rule] for line in own if line["method"] == method])
            for method in methods
        ]
        cells.append(f"{np.mean(gaps):.1f} ({min(gaps):.1f} to {max(gaps):.1f})")
    assert f"| {words} | {' | '.join(cells)} |" in PAGE
