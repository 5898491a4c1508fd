from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from PIL import Image

from lopsided.paper.compare import Comparison, Protocol, compare
from lopsided.paper.figures import FONTS, draw, write_figures
from lopsided.paper.protocol import CL, Setting, base_recipe, published
from synthetic_records import figures, make_records, record


def of(table: str, **more: object) -> Comparison:
    records = make_records(table, **more)  # type: ignore[arg-type]
    return compare(records, table, Protocol.of(base_recipe(table)))


def panels(comparison: Comparison, figure: str) -> dict[str, Axes]:
    return {panel.get_title(): panel for panel in draw(comparison, figure).axes if panel.axison}


def bars(panel: Axes) -> list[ErrorbarContainer]:
    return [container for container in panel.containers if isinstance(container, ErrorbarContainer)]


def hollow(panel: Axes) -> list[float]:
    lines = [line for line in panel.get_lines() if line.get_markerfacecolor() == "none"]
    return [] if not lines else [float(value) for value in lines[0].get_ydata()]  # type: ignore[union-attr]


def test_each_scenario_has_a_panel_with_means_intervals_and_hollow_published_marks() -> None:
    comparison = of("eta", runs=3)
    found = panels(comparison, "uwa")
    assert list(found) == list(comparison.scenarios)
    for scenario, panel in found.items():
        assert hollow(panel) == [comparison.published(scenario, s, "uwa") for s in comparison.settings]
        drawn = bars(panel)
        assert len(drawn) == 2
        for split, bar in zip(("test", "held_out"), drawn, strict=True):
            entries = [comparison.entry(scenario, setting, split, "uwa") for setting in comparison.settings]
            means = [entry.mean for entry in entries if entry is not None]
            assert list(bar.lines[0].get_ydata()) == pytest.approx([mean.value for mean in means])  # type: ignore[arg-type]
            segments = bar.lines[2][0].get_segments()
            ends = [(segment[0][1], segment[1][1]) for segment in segments]
            assert ends == [pytest.approx((mean.low, mean.high)) for mean in means]


@pytest.mark.slow
def test_the_misprinted_row_is_not_drawn() -> None:
    found = panels(of("gamma", runs=1), "uwa")
    assert hollow(found["60:40"]) == []
    assert len(hollow(found["65:35"])) == 6
    assert len(hollow(panels(of("gamma", runs=1), "accuracy")["60:40"])) == 6


def test_missing_cells_leave_a_gap_and_one_run_has_no_bar() -> None:
    records = [r for r in make_records("eta", runs=1) if (r.scenario, Setting.of(r)) != ("90:10", Setting(120, 0))]
    comparison = compare(records, "eta", Protocol.of(base_recipe("eta")))
    bar = bars(panels(comparison, "uwa")["90:10"])[0]
    means = list(bar.lines[0].get_ydata())  # type: ignore[arg-type]
    assert [math.isnan(mean) for mean in means] == [False, False, True, False, False, False]
    assert all(segment[0][1] == segment[1][1] for segment in bar.lines[2][0].get_segments() if len(segment))


@pytest.mark.parametrize("scenarios", [["50:50"], ["60:40", "90:10"], ["60:40", "80:20", "90:10"]])
@pytest.mark.parametrize("number", [2, 3, 6])
def test_nothing_of_a_small_figure_is_cut_off(scenarios: list[str], number: int) -> None:
    settings = published("gamma").settings[:number]
    with mpl.rc_context(FONTS):
        drawn = draw(of("gamma", runs=2, scenarios=scenarios, settings=settings), "accuracy")
        drawn.canvas.draw()
    page = drawn.bbox
    title = next(text for text in drawn.texts if "Fashion" in text.get_text())
    for part in (drawn.legends[0], title):
        box = part.get_window_extent()
        assert page.x0 <= box.x0
        assert box.x1 <= page.x1
        assert page.y0 <= box.y0


def test_intervals_end_where_shares_end() -> None:
    records = [record(None, CL, seed, figures((1.0, uwa), 0.9)) for seed, uwa in enumerate((0.99, 0.9, 1.0))]
    comparison = compare(records, "isic", Protocol.of(base_recipe("isic")))
    (panel,) = draw(comparison, "uwa").axes
    entry = comparison.entry(None, CL, "test", "uwa")
    assert entry is not None
    (segment,) = bars(panel)[0].lines[2][0].get_segments()
    assert [segment[0][1], segment[1][1]] == pytest.approx([entry.mean.low, 100.0])


def test_losses_have_their_names_below_and_no_line_between_them() -> None:
    (panel,) = draw(of("isic", runs=2), "uwa").axes
    assert [label.get_text() for label in panel.get_xticklabels()] == [
        "CL",
        "FCL",
        "ACL(300)",
        "AFCL(300, 2)",
        "AFCL(300, 7)",
    ]
    assert bars(panel)[0].lines[0].get_linestyle() == "None"


def test_marks_differ_in_shape_as_well_as_in_colour() -> None:
    panel = panels(of("eta", runs=2), "uwa")["50:50"]
    lines = [bar.lines[0] for bar in bars(panel)]
    assert len({line.get_marker() for line in lines} | {"D"}) == 3
    assert len({line.get_color() for line in lines}) == 2


@pytest.mark.slow
def test_files_are_pictures_and_the_same_bytes_every_time(tmp_path: Path) -> None:
    settings = [CL, Setting(300.0, 7.0)]
    comparison = of("eta", runs=2, scenarios=["50:50"], settings=settings)
    written = write_figures(comparison, tmp_path / "one", "eta")
    assert sorted(path.name for path in written) == sorted(path.name for path in (tmp_path / "one").iterdir())
    assert {path.suffix for path in written} == {".svg", ".png"}
    for path in written:
        if path.suffix == ".svg":
            assert ET.parse(path).getroot().tag.endswith("svg")
            assert "UWA" in path.read_text() or "accuracy" in path.read_text()
        else:
            with Image.open(path) as image:
                image.load()
                assert min(image.size) > 200
    again = write_figures(comparison, tmp_path / "two", "eta")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]


def test_the_name_of_a_source_is_printed_as_it_is(tmp_path: Path) -> None:
    comparison = of("eta", runs=1, scenarios=["90:10"], source="cost_$1_$2")
    (path,) = write_figures(comparison, tmp_path, "mine", formats=("svg",))[:1]
    assert "cost_$1_$2 over eta (gamma = 0)" in path.read_text()
