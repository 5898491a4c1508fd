"""A sweep's page as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from lopsided.paper.page import sweep_page
from lopsided.paper.protocol import Setting
from lopsided.runs.records import Record
from synthetic_records import make_records

ETAS = (0.0, 60.0, 300.0)


def write(folder: Path, records: Sequence[Record]) -> Path:
    folder.mkdir()
    (folder / "sweep.json").write_text('{"format": 1}')
    (folder / "records.jsonl").write_text("".join(record.to_json() + "\n" for record in records))
    return folder


def made(runs: int, *scenarios: str) -> list[Record]:
    """Eta hurts by construction, so that the verdicts have negative numbers."""
    return make_records(
        "eta",
        lambda scenario, setting: -setting.eta / 30,
        runs=runs,
        scenarios=scenarios,
        settings=[Setting(eta, 0.0) for eta in ETAS],
    )


def test_negative_numbers_of_verdicts_have_minus_signs(tmp_path: Path) -> None:
    page = sweep_page(write(tmp_path / "sweep", made(4, "60:40", "90:10")))
    reasons = re.findall(r'<p class="[^"]*(?:decides|beside-verdict)">.*?</p>', page)
    assert any("\N{MINUS SIGN}" in reason for reason in reasons)
    assert not [reason for reason in reasons if re.search(r"(?:[\s\[])-\d", reason)]


def test_a_cell_of_one_run_opens_the_page_of_the_run_where_it_has_one(tmp_path: Path) -> None:
    records = made(1, "90:10")
    folder = write(tmp_path / "sweep", records)
    (folder / "cells" / records[1].cell).mkdir(parents=True)
    (folder / "cells" / records[1].cell / "report.html").write_text("a page")
    cells = re.findall(r'<td class="cell q\d+[^"]*"><a href="([^"]*)">', sweep_page(folder))
    assert cells[:3] == ["#runs-1-90-10-0-0", f"cells/{records[1].cell}/report.html", "#runs-1-90-10-300-0"]


def test_a_cell_of_several_runs_leads_to_their_list(tmp_path: Path) -> None:
    records = made(2, "90:10")
    folder = write(tmp_path / "sweep", records)
    for record in records:
        (folder / "cells" / record.cell).mkdir(parents=True)
        (folder / "cells" / record.cell / "report.html").write_text("a page")
    cells = re.findall(r'<td class="cell q\d+[^"]*"><a href="([^"]*)">', sweep_page(folder))
    assert set(cells) == {f"#runs-1-90-10-{eta:g}-0" for eta in ETAS}
