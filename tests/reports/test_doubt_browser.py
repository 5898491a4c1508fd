"""What a page says about doubt, and where the model looked, in a real browser."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lopsided.errors import LopsidedError, RunError
from lopsided.reports.report import write_report
from lopsided.reports.run_data import WORST, shown_images
from lopsided.reports.run_page import run_page
from lopsided.runs.maps import MAPS, read_maps
from made_runs import Open, make_run, read_rows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "run", test=(40, 20), groups=True, signal=0.5)
    names = [name for name, _ in shown_images(folder)]
    maps = np.linspace(-1, 1, 16, dtype=np.float16).reshape(1, 4, 4).repeat(len(names), axis=0)
    sizes = np.full((len(names), 2), 8, dtype=np.int32)
    save_file({"maps": maps, "sizes": sizes}, folder / MAPS, metadata={"names": json.dumps(names)})
    return folder


def test_the_shown_images_are_mistakes_with_what_the_model_said(run: Path) -> None:
    rows = {row.name: row for row in read_rows(run)}
    shown = shown_images(run)
    assert 0 < len(shown) <= WORST
    for name, said in shown:
        assert rows[name].label != said == rows[name].predicted


def test_a_page_has_the_trade_off_and_the_sets(run: Path) -> None:
    page = run_page(run)
    assert page.count('class="heat"') == len(shown_images(run))
    rows = read_rows(run)
    asked = np.mean([max(row.p.values()) < 0.9 for row in rows])
    assert re.search(rf"<td class=\"number\">{100 * asked:.1f} % \[[\d.]+, [\d.]+\] seen<br>", page)
    assert "as stated" not in page
    assert "sets:0.95" in page
    assert "often not noticed" in page


def test_a_page_has_the_trade_off_at_the_shares_of_the_user(run: Path) -> None:
    counts = Counter(row.label for row in read_rows(run))
    other, rare = (name for name, _ in counts.most_common())
    page = run_page(run, prevalence=f"{rare}=0.004,{other}=0.996")
    assert '<th scope="row">0.4 %, as stated</th>' in page
    assert f"{rare} 0.4 %, as stated</li>" in page
    assert page.count('class="whisker c1"') > 3
    with pytest.raises(LopsidedError, match="nobody"):
        run_page(run, prevalence=f"nobody=0.5,{other}=0.5")


def test_a_damaged_file_of_maps_is_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / MAPS).write_bytes((run / MAPS).read_bytes()[:40])
    with pytest.raises(RunError, match=r"maps\.safetensors is no file of maps"):
        read_maps(tmp_path)
    assert read_maps(tmp_path / "nowhere") is None


@pytest.mark.slow
def test_a_map_appears_under_the_pointer(run: Path, show: Open) -> None:
    page = show(write_report(run).path)
    heat = page.locator("#cell-gallery .tile .heat").first
    assert heat.evaluate("each => getComputedStyle(each).opacity") == "0"
    page.locator("#cell-gallery .tile").first.hover()
    page.wait_for_timeout(400)  # The transition takes 0.15 s.
    assert heat.evaluate("each => getComputedStyle(each).opacity") == "1"
    assert heat.evaluate("each => each.complete && each.naturalWidth > 0")
    page.mouse.move(0, 0)
    page.locator("#cell-gallery .tile").nth(1).focus()
    page.wait_for_timeout(400)
    other = page.locator("#cell-gallery .tile .heat").nth(1)
    assert other.evaluate("each => getComputedStyle(each).opacity") == "1", "The Tab key and a tap give the focus."
    assert heat.evaluate("each => getComputedStyle(each).opacity") == "0"
    page.click("#all-mistakes")
    assert page.locator("#cell-gallery .tile .heat").count() == len(shown_images(run))
    assert page.locator("#doubt table").count() == 2
    assert page.locator("#doubt svg.plot circle").count() > 3
    page.set_viewport_size({"width": 380, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
