"""The page about finding images says what its record says."""

from __future__ import annotations

import json
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
RECORDS = Path(__file__).parents[1] / "studies" / "records"


def test_the_looks_are_those_of_the_record() -> None:
    page = (DOCS / "find.md").read_text(encoding="utf-8")
    record = json.loads((RECORDS / "find.json").read_text(encoding="utf-8"))
    cases = [record["isic"], record["fashion"]]
    for name in cases[0]["looks"]:
        found = [case["looks"][name] for case in cases]
        cells = [f"{each['mean']:.0f} ({min(each['each'])} to {max(each['each'])})" for each in found]
        shown = f"`{name}`" if name.startswith("find") else "plain: logistic regression on 16 x 16 pixels"
        assert f"| {shown} | {' | '.join(cells)} |" in page
    chance = [f"{case['random']:,.0f}" for case in cases]
    assert f"| random, expected | {' | '.join(chance)} |" in page
    assert [case["pool"]["rare"] for case in cases] == [80, 80]
    assert "hidden among about 763 melanomas" in page
    assert round(cases[0]["pool"]["all"] - 80) == 763
