"""The label check of a run with folds: its tables and its section of the page."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest

from lopsided.data.sources import source_from_arrays
from lopsided.evaluation.labels import check_labels, labels_table
from lopsided.facts import notes as facts
from lopsided.recipe import Recipe
from lopsided.reports.run_data import SHOWN_LABELS
from lopsided.reports.run_page import run_page
from lopsided.runs.folder import Run
from lopsided.runs.results import LABELS, NEAR_DUPLICATES, read_table, write_label_check
from lopsided.runs.run import run_recipe
from made_runs import make_run, read_rows
from tiny import write_photos


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three folds of photos of which two cats lie in the folder of dogs."""
    folder = tmp_path_factory.mktemp("labels")
    photos = write_photos(folder / "photos", {"cat": 30, "dog": 12})
    for name in ("028.png", "029.png"):
        (photos / "cat" / name).rename(photos / "dog" / f"was-a-cat-{name}")
    changes = {
        "encoder.name": "mlp-8", "encoder_training.loss": "ce", "encoder_training.epochs": 6,
        "encoder_training.batch_size": 8, "data.folds": 3, "threads": 1, "data.source": str(photos),
    }  # fmt: skip
    return run_recipe(Recipe().override(**changes), folder / "run")


def test_a_run_with_folds_lists_flipped_labels_first(trained: Run) -> None:
    rows = read_table(trained.folder / LABELS, 1 << 20)
    assert len(rows) == 42
    assert {row["name"] for row in rows[:2]} == {"dog/was-a-cat-028.png", "dog/was-a-cat-029.png"}
    assert [(row["label"], row["suggested"]) for row in rows[:2]] == [("dog", "cat")] * 2
    assert "yes" in {row["suspect"] for row in rows[:2]}
    assert not (trained.folder / NEAR_DUPLICATES).exists(), "The folds have different encoders."


def test_the_page_shows_doubtful_labels_with_pictures(trained: Run) -> None:
    page = run_page(trained.folder)
    section = page[page.index('<section id="labels">') : page.index('<section id="threshold">')].replace("<wbr>", "")
    number = sum(row["suspect"] == "yes" for row in read_table(trained.folder / LABELS, 1 << 20))
    assert f"of {len(list(trained.predictions()))} labels" in section
    assert f"Shown: {number} of {number}" in section
    names = re.findall(r'class="name" title="[^"]*"><bdi>(.*?)</bdi>', section)
    assert len(names) == number
    assert set(names[:2]) <= {"dog/was-a-cat-028.png", "dog/was-a-cat-029.png"}
    assert section.count('class="thumb ') == len(names)
    assert '<a href="#labels">Labels</a>' in page


HEADER = "rank,name,group,label,suggested,suspect,p_label,p_suggested\n"
FOLDS = {
    "wrong_labels": {"value": 3.2, "low": 0.0, "high": 7.7},
    "folds": 2, "repeats": 1, "by": "stratified", "final": "refit", "members": 1, "parameters": 9,
    "per_fold": [{"fold": 1, "repeat": 1, "images": 52, "uwa": 0.8, "recall": [0.8, 0.8]}],
}  # fmt: skip


def written(folder: Path) -> Path:
    """A run with folds whose tables are those of its predictions."""
    run = make_run(folder, val=None, folds=FOLDS)
    rows = read_rows(run)
    classes = ("common", "rare")
    p = np.array([[row.p[name] for name in classes] for row in rows])
    y = [classes.index(row.label) for row in rows]
    check = check_labels(y, p)
    names = [row.name for row in rows]
    (run / LABELS).write_bytes(labels_table(check, names, classes))
    pairs = f"0.9900,label,{names[0]},common,,{names[45]},rare,\n0.9500,image,{names[1]},common,,{names[2]},common,\n"
    header = "similarity,across,name,label,group,other_name,other_label,other_group\n"
    (run / NEAR_DUPLICATES).write_text(header + pairs)
    return run


def test_the_page_shows_near_duplicates_in_pairs(tmp_path: Path) -> None:
    page = run_page(written(tmp_path / "run"))
    section = page[page.index("<h3>Near-duplicates</h3>") : page.index('<section id="threshold">')]
    assert "2 pairs of images with nearly the same features; 1 of them with different labels." in section
    assert section.count('class="thumb ') == 4
    assert section.index("0.9900") < section.index("0.9500")


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00", b"name,label\n1,2\n", b"rank,name\n" + b"x," * 9 + b"\n"], ids=range(4)
)
def test_a_damaged_table_only_removes_the_section(content: bytes, tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    (run / LABELS).write_bytes(content)
    (run / NEAR_DUPLICATES).write_bytes(content)
    assert '<section id="labels">' not in run_page(run)


def test_a_table_with_odd_numbers_or_names_does_no_harm(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    (run / LABELS).write_text(HEADER + "1,<script>alert(1)</script>,,a,b,yes,0.1,0.9\n2,x,,a,b,yes,nan,0.9\n")
    page = run_page(run)
    assert "<script>alert" not in page
    assert "2 images look like another class than the label says" in page


def shown_labels(run: Path) -> tuple[str, list[str]]:
    """The first sentences of the section on labels, and the names of the images that it shows."""
    page = run_page(run).replace("<wbr>", "")
    section = page[page.index('<section id="labels">') : page.index("<h3>Near-duplicates</h3>")]
    takeaway = re.search(r'<p class="takeaway">(.*?)</p>', section)
    assert takeaway is not None
    return takeaway[1], re.findall(r'class="name" title="[^"]*"><bdi>(.*?)</bdi>', section)


def mixed_table(suspects: int) -> str:
    """A table in which ten images that are no suspects come first, and then one before each suspect."""
    marks = ["no"] * 10 + ["no", "yes"] * suspects
    return HEADER + "".join(f"{i + 1},{i:03d}-{mark}.png,,a,b,{mark},{i / 1000},0.5\n" for i, mark in enumerate(marks))


@pytest.mark.parametrize("suspects", [1, 3, SHOWN_LABELS, SHOWN_LABELS + 6])
def test_the_page_shows_suspects_although_other_labels_are_less_probable(suspects: int, tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    (run / LABELS).write_text(mixed_table(suspects))
    words, names = shown_labels(run)
    shown = min(suspects, SHOWN_LABELS)
    assert names == [f"{11 + 2 * i:03d}-yes.png" for i in range(shown)]
    assert words.endswith(f"Shown: {shown} of {suspects}, the most doubtful first.")
    assert words.startswith(f"About 3 of {10 + 2 * suspects} labels may be wrong (95 % interval 0 to 8)")


def test_the_page_shows_no_label_where_none_is_suspect(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    (run / LABELS).write_text(mixed_table(0))
    assert shown_labels(run) == ("No label of 10 images is in doubt, by models that did not see the image.", [])


def test_a_suspect_without_a_number_leaves_its_place_to_the_next(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    (run / LABELS).write_text(mixed_table(SHOWN_LABELS + 1).replace("yes,0.011,", "yes,nan,"))
    words, names = shown_labels(run)
    assert names[0] == "013-yes.png"
    assert words.endswith(f"Shown: {SHOWN_LABELS} of {SHOWN_LABELS + 1}, the most doubtful first.")


def test_a_run_without_folds_has_no_label_check(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / LABELS).write_text(HEADER)
    assert '<section id="labels">' not in run_page(run)


def test_near_duplicates_are_those_of_frozen_features_and_of_few_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (12, 4, 4), dtype=np.uint8)
    source = source_from_arrays(pixels, ["a"] * 6 + ["b"] * 6)
    p = np.where(np.eye(2, dtype=bool)[source.labels], 0.8, 0.2)
    features = rng.normal(size=(12, 32)).astype(np.float32)
    features[11] = features[0] + 0.001
    _, (_, *notes) = write_label_check(tmp_path, source, p, features)
    with (tmp_path / NEAR_DUPLICATES).open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [(row["across"], row["label"], row["other_label"]) for row in rows] == [("label", "a", "b")]
    assert notes == [facts.near_duplicates(1, NEAR_DUPLICATES)]
    alike = features.copy()
    alike[5] = alike[1] + 0.001
    again = write_label_check(tmp_path, source, p, alike)[1][1:]
    assert again == [*notes, facts.alike_images(1, NEAR_DUPLICATES)]
    monkeypatch.setattr("lopsided.runs.results.MOST_COMPARED", 11)
    (tmp_path / NEAR_DUPLICATES).unlink()
    assert write_label_check(tmp_path, source, p, features)[1][1:] == [facts.near_duplicates_not_searched(11)]
    assert not (tmp_path / NEAR_DUPLICATES).exists()
    wrong, (note,) = write_label_check(tmp_path, source, p, None)
    assert (note.values["value"], note.values["suspects"]) == (wrong.value, 0)
