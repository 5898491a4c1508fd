"""The command compare with folds: a tiny comparison to its table, answer and page, and bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from cli.test_cli_bad_input import assert_refused
from lopsided.runs import sweep
from lopsided.runs.plan import Cell
from lopsided.runs.records import Fold, append_records, read_records
from made_comparison import run
from tiny import write_photos
from tiny_command import Call, Ended, command_here, names_below
from tiny_sweep import record_of

PHOTOS = {"cat": 8, "dog": 6}
TINY = [
    *("encoder.name=mlp", "encoder_training.epochs=1", "encoder_training.batch_size=8"),
    *("classifier.epochs=1", "device=cpu", "--workers", "1"),
]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Ended]:
    """The photos, the folder and the output of two methods over three folds; not to be changed."""
    folder = tmp_path_factory.mktemp("compared")
    photos = write_photos(folder / "photos", {"cat": 15, "dog": 9})
    methods = ("--methods", "ce,cl", "--folds", "3")
    return photos, folder / "CMP", command_here("compare", photos, *methods, "--out", folder / "CMP", *TINY)


@pytest.mark.slow
def test_every_image_is_tested_once_by_each_method_and_all_methods_see_the_same_folds(
    comparison: tuple[Path, Path, Ended],
) -> None:
    _, out, ended = comparison
    assert ended.code == 0, ended.err
    records = read_records(out / "records.jsonl")[0]
    tested: dict[str, dict[int, set[str]]] = {}
    for record in records:
        assert record.fold is not None
        lines = (out / "cells" / record.cell / "predictions.csv").read_text().splitlines()
        names = {line.split(",")[1] for line in lines if line.startswith("test,")}
        tested.setdefault(str(record.compared_as), {})[record.fold.fold] = names
    assert set(tested) == {"ce", "cl"}
    assert tested["ce"] == tested["cl"]
    every = [name for names in tested["ce"].values() for name in names]
    assert len(every) == len(set(every)) == 24
    assert {record.data for record in records if record.compared_as == "ce"} == {
        record.data for record in records if record.compared_as == "cl"
    }
    assert ended.out.startswith("photos: out-of-fold images, per cent\n")
    assert "has the highest balanced accuracy, " in ended.out
    assert "Use c" in ended.out
    about = json.loads((out / "sweep.json").read_text())
    assert about["settings"]["data.folds"] == 3


@pytest.mark.slow
def test_more_repeats_only_add_and_the_page_has_the_folds(comparison: tuple[Path, Path, Ended], tmp_path: Path) -> None:
    photos, done, _ = comparison
    out = shutil.copytree(done, tmp_path / "CMP")
    before = (out / "records.jsonl").read_text()
    more = ("--methods", "ce", "--folds", "3", "--repeats", "2", "--json", "--quiet")
    ended = command_here("compare", photos, *more, "--out", out, *TINY)
    assert (ended.code, ended.err) == (0, "")
    content = json.loads(ended.out)
    assert (content["folds"], content["rare"], content["answers"][0]["best"]) == (3, 9, "ce")
    assert (out / "records.jsonl").read_text().startswith(before)
    folds = {(r.compared_as, r.fold.fold) for r in read_records(out / "records.jsonl")[0] if r.fold is not None}
    assert folds == {("ce", fold) for fold in range(1, 7)} | {("cl", fold) for fold in range(1, 4)}
    page = command_here("report", out)
    assert page.code == 0, page.err
    text = (out / "report.html").read_text()
    assert "cl is not ranked, because it has 3 of 6 folds." in text
    assert 'id="disagreements-1"' in text


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """The cells that were to be trained; each of them has a record at once."""
    cells: list[Cell] = []

    def run_sweep(wanted: Iterable[Cell], out: Path, *, about: dict[str, Any], **more: object) -> sweep.Outcome:
        sweep.open_sweep(out, about)
        for cell in wanted:
            cells.append(cell)
            data = cell.recipe.data
            fold = None if data.fold is None else Fold(data.fold, data.folds or 0, 10, 5)
            record = record_of(cell.recipe, 0.5 + (data.fold or 0) / 20)
            append_records(
                out / "records.jsonl", type(record)(**{**vars(record), "fold": fold, "data": f"{data.fold}"})
            )
        return sweep.Outcome([], [], 0)

    monkeypatch.setattr(sweep, "run_sweep", run_sweep)
    return cells


def test_cells_are_methods_by_folds_and_a_recipe_keeps_its_own_validation_share(
    call: Call, photos: Path, trained: list[Cell], tmp_path: Path
) -> None:
    ended = call(
        "compare", photos, "--folds", "3", "--repeats", "2", "--methods", "quick,ce", "--out", tmp_path / "CMP"
    )
    assert ended.code == 0, ended.err
    assert {
        (cell.compared_as, cell.recipe.data.fold, cell.recipe.data.folds, cell.recipe.seed) for cell in trained
    } == {(method, fold, 3, 0) for method in ("quick", "ce") for fold in range(1, 7)}
    assert {(cell.compared_as, cell.recipe.data.val) for cell in trained} == {("quick", 0.0), ("ce", 0.15)}
    about = json.loads((tmp_path / "CMP" / "sweep.json").read_text())
    assert about["baseline"] == "quick"
    assert ended.out.count("On all images, ") == 1


def test_a_group_of_several_classes_is_noted(call: Call, trained: list[Cell], tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", PHOTOS)
    rows = [f"{path.relative_to(photos)},{path.parent.name}" for path in sorted(photos.glob("*/*"))]
    groups = ["both" if place in (0, len(rows) - 1) else f"g{place}" for place in range(len(rows))]
    lines = ["path,label,patient", *(f"{row},{group}" for row, group in zip(rows, groups, strict=True))]
    (photos / "table.csv").write_text("\n".join(lines) + "\n")
    flags = ("--folds", "3", "--methods", "ce", "data.group=patient", "--out", tmp_path / "CMP")
    ended = call("compare", photos / "table.csv", *flags)
    assert ended.code == 0, ended.err
    assert ended.err == "One group holds images of several classes, for example both. Check its labels.\n"


def test_a_field_that_is_set_for_all_methods_holds_for_recipes_too(
    call: Call, photos: Path, trained: list[Cell], tmp_path: Path
) -> None:
    flags = ("--folds", "3", "--methods", "quick,ce", "data.val=0.1")
    assert call("compare", photos, *flags, "--out", tmp_path / "CMP").code == 0
    assert {cell.recipe.data.val for cell in trained} == {0.1}


def test_the_methods_of_folds_are_by_default_those_of_the_losses_beside_the_recipe_quick(
    call: Call, photos: Path, trained: list[Cell], tmp_path: Path
) -> None:
    assert call("compare", photos, "--folds", "2", "--out", tmp_path / "CMP").code == 0
    assert [cell.compared_as for cell in trained[:5]] == ["quick", "ce", "weighted-ce", "cl", "afcl"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--repeats", "3"), "--repeats repeats folds, but --folds is missing. Add it, such as --folds 5."),
        (
            ("--folds", "3", "--seeds", "3"),
            "--seeds is the number of runs without folds and cannot be used with --folds. Remove one of the two",
        ),
        (("--folds", "1"), "Invalid value for '--folds'"),
        (("--folds", "3", "--repeats", "0"), "Invalid value for '--repeats'"),
        (("--folds", "3", "data.folds=4"), "A comparison cannot set data.folds. Use --folds and --repeats."),
        (("--folds", "3", "data.fold=1"), "A comparison cannot set data.fold. Use --folds and --repeats."),
        (("--folds", "3", "--methods", "quik"), "Did you mean quick?"),
        (
            ("--folds", "3", "--methods", "quick,ce", "encoder.name=mlp"),
            "method 'quick': encoder.name must be one of tf_efficientnet_lite0, tf_efficientnet_lite1, ",
        ),
        (
            ("--folds", "7"),
            "the number of folds must be from 2 to the number of images of every class, got 7 for 6 images of 'dog' in "
            "photos. Use at most 6, or add images.",
        ),
        (("--folds", "3", "data.split=given"), 'data.folds cannot be used with data.split = "given"'),
        (("--folds", "3", "decision.rule=recall:bird>=0.9"), "bird"),
        (("--folds", "3", "data.val=0.7"), "data.val must be below 0.667 with 3 folds"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_leaves_nothing(
    arguments: tuple[str, ...], told: str, call: Call, photos: Path, tmp_path: Path
) -> None:
    before = names_below(tmp_path)
    assert_refused(call("compare", photos, *arguments, "--out", tmp_path / "CMP"), told)
    assert names_below(tmp_path) == before


def test_a_folder_of_other_images_or_other_folds_or_of_seeds_is_refused(
    call: Call, photos: Path, trained: list[Cell], tmp_path: Path
) -> None:
    out = tmp_path / "CMP"
    methods = ("--methods", "ce,cl", "--out", out)
    assert call("compare", photos, "--folds", "3", *methods).code == 0
    assert_refused(
        call("compare", photos, "--folds", "2", *methods),
        f"{out} has runs with other settings: data.folds was 3 and is now 2. Use the same settings, or choose another",
    )
    assert_refused(call("compare", photos, *methods), f"{out} has runs of folds, not of seeds. Choose another folder.")
    elsewhere = write_photos(tmp_path / "elsewhere" / "photos", {"cat": 7, "dog": 6})
    assert_refused(
        call("compare", elsewhere, "--folds", "3", *methods),
        f"{out} has runs on other images than 'photos' has now: names, labels, groups or the content of "
        "files differ. Choose another folder.",
    )
    for runs in (("--folds", "3"), ("--seeds", "1")):
        here, there = tmp_path / runs[0], tmp_path / "photos"
        shutil.copytree(photos, there)
        assert call("compare", there, *runs, "--methods", "ce", "--out", here).code == 0
        shutil.copy(there / "cat" / "001.png", there / "cat" / "000.png")
        same_names = call("compare", there, *runs, "--methods", "cl", "--out", here)
        assert_refused(same_names, f"{here} has runs on other images than 'photos' has now: names, labels, groups or")
        shutil.rmtree(there)
    seeds = sweep.open_sweep(tmp_path / "seeds", {"kind": "compare"})
    append_records(seeds / "records.jsonl", run("cl", 0, 0.5))
    assert_refused(
        call("compare", photos, "--folds", "3", "--methods", "cl", "--out", seeds),
        f"{seeds} has runs of seeds, not of folds. Choose another folder.",
    )
