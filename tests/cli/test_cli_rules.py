from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lopsided.cli.output import balanced_words
from lopsided.errors import InputError
from lopsided.evaluation.metrics import evaluate
from lopsided.recipe.rules import parse_rule, read_rule


@pytest.mark.parametrize("sign", [",", ";", "\t"])
def test_a_matrix_of_costs_may_have_the_separators_of_any_spreadsheet(sign: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.csv"
    rows = (("", "mel", "df"), ("mel", "0", "1"), ("df", "10", "0"))
    path.write_text("\n".join(map(sign.join, rows)) + "\n\n", encoding="utf-8-sig")
    text = read_rule(f"cost:{path}")
    assert text is not None
    assert json.loads(text.removeprefix("cost:")) == {"mel": {"mel": 0, "df": 1}, "df": {"mel": 10, "df": 0}}


def test_a_file_of_costs_that_is_no_csv_is_named(tmp_path: Path) -> None:
    path = tmp_path / "costs.txt"
    path.write_text("mel,df\n")
    with pytest.raises(InputError, match=r"must be a table that ends in \.csv, got .*costs\.txt"):
        read_rule(f"cost:{path}")
    assert read_rule("cost:mel=1,df=10") == "cost:mel=1,df=10"
    assert read_rule("cost:[[0, 1], [10.5, 0]]") == "cost:[[0, 1], [10.5, 0]]"


def test_shares_may_be_per_cent() -> None:
    assert parse_rule("prevalence:df=2%,mel=98 %").values == {"df": 0.02, "mel": 0.98}
    with pytest.raises(InputError, match="needs one share >= 0 per class"):
        parse_rule("prevalence:df=%,mel=98%")


def test_what_a_fit_prints_first_names_the_cost_only_under_a_rule_with_costs() -> None:
    labels, decided = np.array([0, 0, 0, 1, 1]), np.array([0, 0, 1, 0, 1])
    p = np.eye(2)[decided] * 0.8 + 0.1
    costly = evaluate(labels, p, decided, classes=["mel", "df"], costs=[[0, 1], [10, 0]]).to_dict()
    cost, accuracy = balanced_words(costly).splitlines()
    assert cost.startswith("Cost per image 2.200 [")  # (1 + 10) / 5
    assert cost.endswith("; always answering mel: 4.000")  # 2 * 10 / 5
    assert accuracy.startswith("Balanced accuracy 0.583 [")
    plain = evaluate(labels, p, decided, classes=["mel", "df"]).to_dict()
    assert balanced_words(plain) == accuracy
