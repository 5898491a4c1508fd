from __future__ import annotations

import csv
import io
import math
import re

import pytest
from rich.console import Console

from lopsided.paper.claims import BLIND, RULE
from lopsided.paper.compare import Comparison, Protocol, compare
from lopsided.paper.protocol import CL, Setting, base_recipe
from lopsided.paper.tables import axis, blocks, notes, print_table, title, to_csv, to_markdown, verdicts_to_markdown
from synthetic_records import figures, make_records, record


def of(table: str, **more: object) -> Comparison:
    records = make_records(table, **more)  # type: ignore[arg-type]
    return compare(records, table, Protocol.of(base_recipe(table)))


def ragged() -> Comparison:
    """One cell missing, one with a run less."""
    records = [
        r
        for r in make_records("gamma", lambda c, s: s.gamma)
        if (r.scenario, Setting.of(r)) != ("55:45", Setting(0, 4))
        and (r.scenario, Setting.of(r), r.seed) != ("50:50", Setting(0, 1), 3)
    ]
    return compare(records, "gamma", Protocol.of(base_recipe("gamma")))


@pytest.fixture(scope="module", params=["eta", "gamma", "isic", "ragged", "losses", "one run", "nothing"])
def comparison(request: pytest.FixtureRequest) -> Comparison:
    if request.param == "ragged":
        return ragged()
    if request.param == "losses":
        settings = [CL, Setting(300.0, 0.0), Setting(300.0, 7.0)]
        records = make_records("eta", settings=settings, scenarios=["50:50", "98:2"])
        return compare(records, "eta", Protocol.of(base_recipe("eta")), settings=settings)
    if request.param == "one run":
        return of("eta", runs=1)
    if request.param == "nothing":
        return of("eta", runs=0)
    return of(request.param)


def test_every_row_has_as_many_cells_as_the_header(comparison: Comparison) -> None:
    found = blocks(comparison)
    assert len(found) == 2
    for block in found:
        assert len(block.header) == 2 + len(comparison.settings)
        assert len(block.groups) == len(comparison.scenarios)
        for group in block.groups:
            assert len(group) == 1 + 2 * len(comparison.splits)
            assert {len(row) for row in group} == {len(block.header)}


@pytest.mark.parametrize(("table", "name"), [("gamma", "photos over gamma (eta = 0)"), ("isic", "photos by loss")])
def test_a_table_of_other_data_speaks_of_them_alone(table: str, name: str) -> None:
    other = of(table, source="photos")
    assert title(other) == name
    console = Console(file=io.StringIO(), width=200)
    print_table(other, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for text in (to_markdown(other), printed):
        assert name in text
        assert "The paper's claims are about other data, so there are no verdicts for these runs." in text
        for word in ("ISIC", "Fashion", "published", "misprint", "UWA of 50", "supported"):
            assert word not in text
    for block in blocks(other):
        assert {len(group) for group in block.groups} == {2 * len(other.splits)}


def test_a_table_of_other_data_without_any_run_has_rows_all_the_same() -> None:
    protocol = Protocol.of(base_recipe("eta"))
    empty = compare([], "eta", protocol, source="photos", scenarios=["90:10"], settings=[CL])
    assert [block.groups for block in blocks(empty)] == [[[["90:10", "-", "-"]]]] * 2


def test_a_source_with_an_odd_name_is_printed_without_steering_anything() -> None:
    assert title(of("eta", runs=1, source="pho\x1b[2Jtos")) == "pho\ufffd[2Jtos over eta (gamma = 0)"
    assert title(of("eta", runs=1, source="a\n# b")) == "a # b over eta (gamma = 0)"


def test_markdown_tables_are_rectangles(comparison: Comparison) -> None:
    for text in (to_markdown(comparison), verdicts_to_markdown(comparison)):
        for table in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE):
            lines = table.splitlines()
            assert len({line.count("|") for line in lines}) == 1
            assert set(lines[1]) <= set("| -")


def test_markdown_has_verdicts_with_their_rule_and_what_it_cannot_see(comparison: Comparison) -> None:
    text = verdicts_to_markdown(comparison)
    for verdict in comparison.verdicts:
        assert f"| {verdict.text} | {verdict.where} | " in text
        assert f"**{verdict.decision}**" in text or not verdict.decides
    assert BLIND in text
    for sentence in RULE:
        assert f"- {sentence}\n" in text
        assert f"- {sentence}\n" in to_markdown(comparison)


def test_csv_reads_back_to_the_same_numbers(comparison: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(comparison))))
    cells = len(comparison.scenarios) * len(comparison.settings)
    assert len(rows) == cells * len(comparison.splits) * 2

    def number(text: str) -> float:
        return float(text) if text else math.nan

    for row in rows:
        setting = Setting(float(row["eta"]), float(row["gamma"]))
        scenario, figure = row["scenario"] or None, row["figure"]
        assert setting.loss == row["loss"]
        entry = comparison.entry(scenario, setting, row["split"], figure)
        three = [number(row[name]) for name in ("mean", "low", "high")]
        if entry is None:
            assert row["runs"] == "0"
            assert all(map(math.isnan, three))
            continue
        assert int(row["runs"]) == entry.runs
        assert three == pytest.approx([entry.mean.value, entry.mean.low, entry.mean.high], abs=0, rel=0, nan_ok=True)
        value = entry.difference
        expected = [math.nan] * 3 if value is None else [value.value, value.low, value.high]
        three = [number(row[f"difference{name}"]) for name in ("", "_low", "_high")]
        assert three == pytest.approx(expected, abs=0, rel=0, nan_ok=True)
        assert int(row["pairs"]) == entry.pairs
        published = comparison.published(scenario, setting, figure)
        assert number(row["published"]) == pytest.approx(math.nan if published is None else published, nan_ok=True)
        assert row["published_is_misprint"] == str(int(comparison.is_misprint(scenario, setting, figure)))


def test_means_intervals_and_differences_stand_in_their_cells() -> None:
    comparison = of("eta", effect=lambda c, s: 20.0 * (s.eta == 300), noise=0.5)
    block = blocks(comparison)[0]
    assert block.header == ["scenario", "images", "eta 0", "60", "120", "180", "240", "300"]
    group = block.groups[8]
    assert [row[:2] for row in group] == [
        ["90:10", "published"],
        ["", "test, 4 runs"],
        ["", "held-out, 4 runs"],
        ["", "test - CL"],
        ["", "held-out - CL"],
    ]
    assert group[0][2:] == ["64.91", "68.61", "66.11", "64.02", "61.77", "72.58"]
    entry = comparison.entry("90:10", Setting(300.0, 0.0), "test", "uwa")
    assert entry is not None
    assert entry.difference is not None
    assert group[1][-1] == f"{entry.mean.value:.1f} ±{entry.mean.value - entry.mean.low:.1f}"
    assert group[3][-1] == f"+{entry.difference.value:.1f} ±{entry.difference.value - entry.difference.low:.1f}*"
    assert group[3][2] == ""


def test_what_is_missing_is_shown_and_listed() -> None:
    comparison = ragged()
    first, second = blocks(comparison)[0].groups[:2]
    assert first[1][1] == "test, 4 runs"
    assert first[1][3].endswith(" (3)")
    assert not first[1][2].endswith(")")
    assert second[0][5] == "79.96"
    assert [row[5] for row in second[1:]] == ["-"] * 4
    assert "1 cell has no run (-): 55:45 AFCL(0, 4)." in notes(comparison)


def test_the_misprint_is_marked_and_shows_no_number() -> None:
    comparison = of("gamma")
    uwa, accuracy = (block.groups[2] for block in blocks(comparison))
    assert uwa[0][1:] == ["published", *["misprint"] * 6]
    assert accuracy[0][2:] == ["79.42", "78.50", "77.92", "80.17", "80.67", "80.08"]
    told = "What is published for the UWA of 60:40 over gamma is a misprint and compared with nothing."
    assert told in notes(comparison)
    assert not any("misprint" in note for note in notes(of("eta")))


@pytest.mark.parametrize("table", ["eta", "gamma"])
def test_a_misprint_is_marked_where_losses_of_both_tables_stand_side_by_side(table: str) -> None:
    settings = [Setting(300.0, 0.0), Setting(0.0, 7.0)]
    records = make_records(table, settings=settings, scenarios=["60:40"], runs=1)
    comparison = compare(records, table, Protocol.of(base_recipe(table)), settings=settings)
    assert blocks(comparison)[0].groups[0][0][1:] == ["published", "81.66", "misprint"]
    assert any("UWA of 60:40 over gamma is a misprint" in note for note in notes(comparison))
    marks = [row["published_is_misprint"] for row in csv.DictReader(io.StringIO(to_csv(comparison)))]
    assert marks.count("1") == 2  # On test and on held-out images.


def test_an_interval_shows_no_share_above_all_or_below_none() -> None:
    records = [
        record(None, setting, seed, figures((1.0, uwa), 0.9))
        for setting, uwas in ((CL, (0.99, 0.9, 1.0)), (Setting(0.0, 1.0), (0.5, 0.51, 0.52)))
        for seed, uwa in enumerate(uwas)
    ]
    comparison = compare(records, "isic", Protocol.of(base_recipe("isic")))
    row = blocks(comparison)[0].groups[0][1]
    entry = comparison.entry(None, CL, "test", "uwa")
    assert entry is not None
    assert entry.mean.high > 100
    assert row[2] == f"98.2 [{entry.mean.low:.1f}, 100.0]"
    assert row[3] == "75.5 ±1.2"


def test_a_part_of_the_table_says_how_large_a_part_it_is() -> None:
    part = of("eta", runs=1, scenarios=["60:40", "90:10"])
    assert "This is a part of the paper's table: 12 of its 66 cells have a run here." in notes(part)
    assert not any("part of the paper's table" in note for note in notes(of("isic", runs=1)))


def test_one_run_has_no_interval_and_the_table_says_so() -> None:
    comparison = of("eta", runs=1)
    group = blocks(comparison)[0].groups[0]
    assert group[1][1] == "test, 1 run"
    assert not any("±" in cell for row in group for cell in row)
    told = "Each figure is the mean over runs with Student's 95 % interval."
    assert f"{told} One run has no interval, nor have runs that all agree." in notes(comparison)


@pytest.mark.parametrize("with_cl", [True, False])
def test_differences_to_cl_have_a_row_only_where_there_are_any(with_cl: bool) -> None:
    setting = Setting(300.0, 7.0)
    records = make_records("isic", settings=[CL, setting] if with_cl else [setting], runs=2)
    comparison = compare(records, "isic", Protocol.of(base_recipe("isic")), settings=[setting])
    rows = [row[1] for row in blocks(comparison)[0].groups[0]]
    assert rows == ["published", "test, 2 runs", *(["test - CL"] if with_cl else [])]


def test_losses_of_several_kinds_have_their_names_above_the_columns() -> None:
    settings = [CL, Setting(300.0, 0.0), Setting(0.0, 7.0)]
    records = make_records("eta", settings=settings, runs=2)
    comparison = compare(records, "eta", Protocol.of(base_recipe("eta")), settings=settings)
    assert axis(comparison) is None
    assert blocks(comparison)[0].header[2:] == ["CL", "ACL(300)", "AFCL(0, 7)"]
    assert title(comparison) == "Fashion-MNIST tops by loss"


def test_a_terminal_gets_all_of_it(comparison: Comparison) -> None:
    file = io.StringIO()
    print_table(comparison, Console(file=file, width=200))
    text = file.getvalue()
    for block in blocks(comparison):
        assert f"{title(comparison)}: {block.title}" in text
        for group in block.groups:
            for row in group:
                assert all(cell in text for cell in row)
    for verdict in comparison.verdicts:
        assert text.count(f"\n  {verdict.text}\n") == 1
        assert f"\n    {verdict.decision}  {verdict.where}: " in text
    told = " ".join(text.split())
    for sentence in (*notes(comparison), *RULE, BLIND):
        assert f"- {sentence}" in told
    assert "\x1b" not in text


def test_the_stars_are_explained_with_the_baseline_that_they_share() -> None:
    (note,) = (note for note in notes(of("eta")) if "*" in note)
    assert "not corrected for the number of cells" in note
    assert "All cells of a scenario are compared with the same runs of CL, so their stars are not independent" in note
    alone = make_records("eta", settings=[Setting(60.0, 0.0)], runs=2)
    assert not any("*" in note for note in notes(compare(alone, "eta", Protocol.of(base_recipe("eta")))))


def test_the_rule_says_how_intervals_are_corrected() -> None:
    (sentence,) = (sentence for sentence in RULE if "Bonferroni" in sentence)
    assert "1 - 0.025 / k" in sentence
    assert "at most 2.5 % of all repetitions" in sentence


def test_a_terminal_is_not_steered_by_what_a_record_says() -> None:
    records = make_records("eta", runs=1, encoder="evil\x1b[2J")
    comparison = compare(records, "eta", Protocol.of(records[0]))
    file = io.StringIO()
    print_table(comparison, Console(file=file, width=120, force_terminal=True, color_system=None))
    assert "evil" in file.getvalue()
    assert "\x1b[2J" not in file.getvalue()
