"""A sweep's page in a real browser; every number is recomputed here from records.jsonl."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

from lopsided.evaluation.intervals import mean_interval, paired_difference
from lopsided.paper.page import sweep_page
from lopsided.paper.protocol import CL, Setting, published
from lopsided.reports.report import RunReports, write_report, write_run_reports
from lopsided.runs.records import Failure, Record
from made_runs import Open, make_run
from synthetic_records import loss_table, make_records

pytestmark = pytest.mark.slow

SCENARIOS = ("60:40", "90:10")
ETAS = (0.0, 60.0, 300.0)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """Three runs of three etas, one gamma and one of both in two scenarios; eta helps by construction."""
    settings = [*(Setting(eta, 0.0) for eta in ETAS), Setting(0.0, 7.0), Setting(300.0, 7.0)]
    return make_records(
        "eta", lambda scenario, setting: setting.eta / 60, runs=3, scenarios=SCENARIOS, settings=settings
    )


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory, records: list[Record]) -> Path:
    """A sweep folder with two failed cells, one of which came to its end later; one run has a folder."""
    folder = tmp_path_factory.mktemp("sweeps") / "sweep"
    folder.mkdir()
    (folder / "sweep.json").write_text(json.dumps({"format": 1, "lopsided": "0"}))
    (folder / "records.jsonl").write_text("".join(record.to_json() + "\n" for record in records))
    loss = loss_table(Setting(10.0, 2.0))
    failed = Failure("feedbeef", "90:10", loss, 5, 'the loss must stay finite, got <nan> & "more".')
    late = Failure(records[0].cell, "60:40", loss_table(CL), 0, "the worker died.")
    (folder / "failures.jsonl").write_text("".join(f.to_json() + "\n" for f in (late, failed, failed)))
    make_run(folder / "cells" / records[0].cell)
    assert write_run_reports(folder) == RunReports(1, ())
    write_report(folder, sweep_page=sweep_page)
    return folder


def uwas(records: list[Record], scenario: str, setting: Setting, split: str) -> list[float]:
    found = [r for r in records if (r.scenario, Setting.of(r)) == (scenario, setting)]
    found.sort(key=lambda record: record.seed)
    return [100 * (r.test if split == "test" else r.held_out or r.test).uwa for r in found]


def test_a_heat_map_shows_means_with_intervals_and_follows_the_choices(
    sweep: Path, records: list[Record], show: Open
) -> None:
    page = show(sweep / "report.html")
    for split in ("held_out", "test"):
        page.check(f"input[name=show-split][value={split}]")
        heat = page.locator(f"#view-1-1 .one-of[data-figure=uwa][data-split={split}]")
        assert heat.is_visible()
        assert page.locator("#view-1-1 .one-of[data-split]:visible").count() == 1
        found = heat.locator("td.cell").all_inner_texts()
        expected = []
        for scenario in SCENARIOS:
            for eta in ETAS:
                figure = mean_interval(uwas(records, scenario, Setting(eta, 0.0), split))
                expected.append([f"{figure.value:.1f}", f"{figure.low:.1f} to {figure.high:.1f}"])
        assert [text.split("\n") for text in found] == expected
    page.check("input[name=show-figure][value=accuracy]")
    assert page.locator("#view-1-1 .one-of:visible").count() == 2, "A heat map, and the lines."
    assert page.locator("#view-1-1 .one-of[data-figure=uwa]:visible").count() == 0


def test_the_best_of_each_row_is_framed(sweep: Path, records: list[Record], show: Open) -> None:
    page = show(sweep / "report.html")
    heat = page.locator("#view-1-1 .one-of[data-figure=uwa][data-split=held_out]")
    for row, scenario in enumerate(SCENARIOS):
        means = [fmean(uwas(records, scenario, Setting(eta, 0.0), "held_out")) for eta in ETAS]
        cells = heat.locator("tbody tr").nth(row).locator("td")
        best = [("best" in (cells.nth(i).get_attribute("class") or "")) for i in range(len(ETAS))]
        assert best == [mean == max(means) for mean in means]


def test_lines_have_every_run_the_intervals_and_the_papers_values_as_hollow_marks(
    sweep: Path, records: list[Record], show: Open
) -> None:
    page = show(sweep / "report.html")
    plot = page.locator("#view-1-1 svg[aria-label='UWA at 90:10 over eta']")
    titles = plot.locator("title").all_text_contents()
    for eta in ETAS:
        setting = Setting(eta, 0.0)
        paper = published("eta").figure("90:10", setting, "uwa")
        assert f"published: {paper:.2f}" in titles
        for seed, value in enumerate(uwas(records, "90:10", setting, "test")):
            assert f"{setting}, seed {seed}: test UWA {value:.1f}" in titles
        figure = mean_interval(uwas(records, "90:10", setting, "held_out"))
        told = f"{setting}, held-out UWA {figure.value:.1f} [{figure.low:.1f}, {figure.high:.1f}], 3 runs"
        assert told in titles
    assert plot.locator("circle.hollow").count() == len(ETAS)
    assert plot.locator("path.whisker").count() == 2 * len(ETAS)


def test_a_cell_leads_to_its_runs_and_a_run_to_its_page(sweep: Path, records: list[Record], show: Open) -> None:
    page = show(sweep / "report.html")
    page.locator("#view-1-1 .one-of[data-figure=uwa][data-split=held_out] td.cell a").first.click()
    target = page.locator("tbody:target")
    assert target.locator("tr").count() == 3
    row = target.locator("tr").first.locator("td, th").all_inner_texts()
    assert row[:4] == ["60:40", "CL", "0", f"{records[0].test.uwa:.3f}"]
    assert target.get_by_text("open").count() == 1, "Only one of the runs has a page."
    target.get_by_text("open").click()
    page.wait_for_selector("#matrix button")
    assert records[0].cell in page.inner_text("footer")
    page.go_back()
    page.wait_for_selector("html[data-ready=true]", state="attached")
    page.locator("#view-1-1 svg a").first.click()
    page.wait_for_selector("#matrix button")


def test_differences_are_those_of_paired_runs_and_can_be_sorted(sweep: Path, records: list[Record], show: Open) -> None:
    page = show(sweep / "report.html")
    table = page.locator("#view-1-1 table.sortable")
    rows = [row.locator("td, th").all_inner_texts() for row in table.locator("tbody tr").all()]
    for scenario in SCENARIOS:
        for eta in ETAS[1:]:
            own, base = (uwas(records, scenario, Setting(e, 0.0), "test") for e in (eta, 0.0))
            value = paired_difference(own, base)
            star = "*" if value.low > 0 or value.high < 0 else ""
            texts = [f"{number:+.1f}".replace("-", "\N{MINUS SIGN}") for number in (value.value, value.low, value.high)]
            row = [scenario, f"ACL({eta:g})", "UWA", "test", "3", f"{texts[0]}{star}", f"[{texts[1]}, {texts[2]}]"]
            assert row in rows
    table.locator("th", has_text="points").locator("button").click()
    numbers = [
        float(re.sub(r"\*", "", row.locator("td").nth(4).inner_text()).replace("\N{MINUS SIGN}", "-"))
        for row in table.locator("tbody tr").all()
    ]
    assert numbers == sorted(numbers, reverse=True)


def test_failed_cells_are_listed_with_their_errors_and_those_that_ended_later_are_not(sweep: Path, show: Open) -> None:
    page = show(sweep / "report.html")
    rows = page.locator("#failures tbody tr")
    assert rows.count() == 1
    assert rows.first.locator("td, th").all_inner_texts() == [
        "90:10 AFCL(eta=10, eta_unit=absolute) seed 5", "2", 'the loss must stay finite, got <nan> & "more".',
    ]  # fmt: skip
    assert "1 cell failed" in page.inner_text(".warnings")


def test_eta_and_gamma_together_have_a_heat_map_for_each_scenario(
    sweep: Path, records: list[Record], show: Open
) -> None:
    page = show(sweep / "report.html")
    section = page.locator("section", has=page.get_by_role("heading", name="together"))
    heat = section.locator(".one-of[data-figure=uwa][data-split=held_out]")
    assert heat.count() == len(SCENARIOS)
    last = heat.nth(1).locator("tbody tr").last.locator("td")
    both = fmean(uwas(records, "90:10", Setting(300.0, 7.0), "held_out"))
    assert (last.nth(1).inner_text() or "").startswith(f"{both:.1f}")
    assert heat.nth(1).locator("tbody tr").nth(1).locator("td").nth(1).inner_text() == "\N{EN DASH}", "Not trained."


def test_verdicts_are_shown_with_their_reasons(sweep: Path, records: list[Record], show: Open) -> None:
    from lopsided.paper.compare import Protocol, compare

    page = show(sweep / "report.html")
    text = page.inner_text("#verdicts-1")
    verdicts = compare(records, "eta", Protocol.of(records[0])).verdicts
    assert verdicts
    for verdict in verdicts:
        assert verdict.text in text
        assert re.sub(r"(?<=[ \[])-(?=\d)", "\N{MINUS SIGN}", verdict.reason()) in text
        assert f"{verdict.where}:" in text


def test_without_a_script_all_figures_are_there_at_once_and_nothing_sticks_out(sweep: Path, show: Open) -> None:
    page = show(sweep / "report.html", ready=False, java_script_enabled=False)
    assert page.locator(".one-of").count() == page.locator(".one-of:visible").count() > 4
    assert page.is_hidden("#choices")
    narrow = show(sweep / "report.html", viewport={"width": 390, "height": 800})
    assert narrow.evaluate("document.documentElement.scrollWidth") == 390


def test_a_sweep_that_has_just_begun_has_a_page(tmp_path: Path, show: Open) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps({"format": 1, "lopsided": "0"}))
    page = show(write_report(tmp_path, sweep_page=sweep_page).path)
    assert "No run has come to its end yet." in page.inner_text("main")


def test_runs_on_other_data_are_not_set_beside_the_papers_values(
    tmp_path: Path, records: list[Record], show: Open
) -> None:
    from dataclasses import replace

    (tmp_path / "sweep.json").write_text(json.dumps({"format": 1, "lopsided": "0"}))
    others = [replace(record, source="<i>mine</i>") for record in records]
    (tmp_path / "records.jsonl").write_text("".join(record.to_json() + "\n" for record in others))
    page = show(write_report(tmp_path, sweep_page=sweep_page).path)
    assert page.locator("circle.hollow").count() == 0
    assert page.locator(".verdicts").count() == 0
    assert "<i>mine</i>" in page.inner_text("#view-1-1")
