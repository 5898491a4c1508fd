"""The page of a comparison over folds as text, and the predictions behind it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from lopsided.reports.comparison_page import comparison_page
from lopsided.reports.fold_page import OutOfFold, read_out_of_fold
from lopsided.runs.comparison import name_methods
from lopsided.runs.records import read_records
from made_folds import make_comparison

MISSES = {"ce": {0, 1, 24, 25, 26}, "weighted-ce": {1, 2, 26}}
"""Images 24 to 31 are the rare ones."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, four folds, two repeats; not to be changed."""
    folder = tmp_path_factory.mktemp("folds") / "CMP"
    return make_comparison(folder, MISSES, repeats=2, seconds={"ce": 60.0, "weighted-ce": 120.0})


def out_of_fold(folder: Path) -> tuple[OutOfFold | None, list[str]]:
    records = read_records(folder / "records.jsonl")[0]
    return read_out_of_fold(folder, records, name_methods(records))


def words(page: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


def test_every_image_has_the_mean_of_its_predictions_over_the_repeats(made: Path) -> None:
    data, notes = out_of_fold(made)
    assert notes == []
    assert data is not None
    assert (len(data.names), data.methods, data.rarest) == (32, ("ce", "weighted-ce"), 1)
    assert all((data.times[method] == 2).all() for method in data.methods)
    for method, missed in MISSES.items():
        assert np.flatnonzero(data.hits[method] == 0).tolist() == sorted(missed)
        truth = data.p[method][np.arange(32), data.labels]
        assert truth == pytest.approx([0.2 if i in missed else 0.9 - i / 100 for i in range(32)], abs=1e-6)
    assert data.uwa("ce") == pytest.approx((22 / 24 + 5 / 8) / 2)


def test_images_that_only_one_method_recognises_are_listed_the_clearest_first(made: Path) -> None:
    data, _ = out_of_fold(made)
    assert data is not None
    assert data.only("weighted-ce", "ce", 1).tolist() == [24, 25]
    assert data.only("weighted-ce", "ce", 0).tolist() == [0]
    assert data.only("ce", "weighted-ce", 0).tolist() == [2]
    assert data.only("ce", "weighted-ce", 1).tolist() == []


def test_the_page_has_the_answer_the_curves_and_the_pictures_of_disagreements(made: Path) -> None:
    page = comparison_page(made)
    text = words(page)
    assert "16 runs on photos: 2 methods, 8 folds." in text
    assert "On all images, weighted-ce has the highest balanced accuracy, " in text
    assert "Use " in text
    assert "corrected resampled t interval" in text
    assert "weighted-ce recognises, ce misses: 3 images" in text
    assert "ce recognises, weighted-ce misses: 1 image" in text
    first = page.index("recognises, <bdi>ce</bdi> misses")
    gallery = page[first : page.index("</ul>", first)].replace("<wbr>", "")
    names = re.findall(r'class="name" title="[^"]*"><bdi>(.*?)</bdi>', gallery)
    assert names == [
        "rare/024.png",
        "rare/025.png",
        "common/000.png",
    ]
    assert gallery.count('class="thumb s0 ') == 3
    assert len(re.findall(r'<path class="line c1"', page)) == 3  # Two plots and a legend.
    assert "log loss on out-of-fold images:" in page
    assert '<th scope="col" class="number">fold</th>' in page


def test_missing_run_folders_are_said_and_the_figures_stay(made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made, tmp_path / "CMP")
    gone = sorted((folder / "cells").iterdir())[:3]
    for cell in gone:
        shutil.rmtree(cell)
    text = words(comparison_page(folder))
    assert "3 run folders missing or unreadable: the views of images lack these folds." in text
    assert "On all images, weighted-ce has the highest balanced accuracy, " in text
    shutil.rmtree(folder / "cells")
    page = comparison_page(folder)
    assert "16 run folders missing or unreadable" in words(page)
    assert "disagreements-1" not in page


def test_a_run_with_other_labels_of_the_same_images_is_left_out(made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made, tmp_path / "CMP")
    record = read_records(folder / "records.jsonl")[0][-1]
    table = folder / "cells" / record.cell / "predictions.csv"
    table.write_text(table.read_text().replace(",common,common,", ",rare,common,", 1))
    data, notes = out_of_fold(folder)
    assert data is not None
    assert notes == ["1 run with other labels of the images: the views of images lack these folds."]
    assert (data.times["weighted-ce"] == 1).any()


def test_a_record_whose_cell_is_a_path_is_not_followed(made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made, tmp_path / "CMP")
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    lines[0]["cell"] = f"../../{made.name}/cells/{lines[0]['cell']}"
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data, _ = out_of_fold(folder)
    assert data is not None
    assert (data.times["ce"] == 1).any()


def test_names_in_the_data_cannot_change_the_page(made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made, tmp_path / "CMP")
    for table in (folder / "cells").glob("*/predictions.csv"):
        table.write_text(table.read_text().replace("rare/024.png", "<script>alert(1)</script>"))
    assert "<script>alert" not in comparison_page(folder)
