"""The command ``lopsided find``, and ``fit --more`` with what it found."""

from __future__ import annotations

import csv
import json
import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from lopsided import cli, files
from lopsided.inference.pool import Mapper
from lopsided.recipe import named_recipe
from lopsided.reports.find_page import find_page
from lopsided.runs.engines.ray_map import make_scorer
from lopsided.runs.features import fill_cache
from lopsided.runs.find import find_in_pool, is_cached
from lopsided.runs.folder import Run
from tiny import write_photos
from tiny_command import Call, names_below

PHOTOS = {"cat": 30, "dog": 8}


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    run = tmp_path_factory.mktemp("frozen") / "run"
    small = ["--recipe", "quick", "--quiet", "--folds", "1", "--device", "cpu"]
    assert cli.run(["fit", str(photos), "--out", str(run), *small]) == 0
    return run


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    """Twenty cats and five dogs that are new, one dog that the run knows, and one file that is no image."""
    folder = write_photos(tmp_path_factory.mktemp("pool") / "pool", {"cat": 20, "dog": 5}, start=300)
    shutil.copy(photos / "dog" / "001.png", folder / "known.png")
    (folder / "broken.png").write_text("no image")
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("by", ["probability", "neighbours", "both"])
def test_the_rare_images_come_first(call: Call, frozen: Path, pool: Path, tmp_path: Path, by: str) -> None:
    out = tmp_path / "found.csv"
    options = ["--top", "9", "--by", by, "--unfamiliar", "mark", "--json"]  # Seven known dogs are few to tell others.
    ended = call("find", frozen, pool, "--class", "dog", "--out", out, *options)
    assert ended.code == 0
    told = json.loads(ended.out)
    assert (told["listed"], told["images"], told["known"], told["unreadable"]) == (9, 27, 1, 1)
    rows = rows_of(out)
    assert {Path(row["path"]).parent.name for row in rows[:5]} == {"dog"}
    assert [row["rank"] for row in rows] == [str(i) for i in range(1, 10)]
    assert ("nearness" in rows[0]) == (by != "probability")
    assert "One image is byte-identical to a labelled image of the run and left out." in ended.err
    assert "unreadable: " in ended.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.csv", "found.html", "found.unreadable.csv"]


def test_a_second_search_into_the_same_file_is_refused(call: Call, frozen: Path, pool: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.csv"
    with files.lock_output(out):
        ended = call("find", frozen, pool, "--class", "dog", "--out", out)
    assert (ended.code, names_below(tmp_path)) == (2, [])
    assert ended.err.startswith(f"lopsided: {out} is in use by process {os.getpid()} on ")


def test_known_images_can_be_named_and_the_page_left_out(
    call: Call, frozen: Path, photos: Path, pool: Path, tmp_path: Path
) -> None:
    out = tmp_path / "found.csv"
    arguments = ("find", frozen, pool, "--class", "DOG", "--out", out, "--no-page", "--like", photos / "dog")
    ended = call(*arguments)
    assert ended.err == (
        "lopsided: --like names known images, which --by probability does not use. Add --by neighbours or both.\n"
    )
    ended = call(*arguments, "--by", "neighbours", "--diverse", "0.3", "--top", "5")
    assert ended.code == 0
    assert "Compared with 8 known images of the class and 30 of other classes." in ended.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.csv", "found.unreadable.csv"]
    ended = call(*arguments[:-1], pool / "dog", "--by", "neighbours")
    assert {Path(row["path"]).parent.name for row in rows_of(out)} == {"cat"}
    assert "6 images are byte-identical to a labelled image of the run or of --like and left out." in ended.err


def test_a_class_name_that_is_no_utf8_can_be_searched_for(model: Path, pool: Path, tmp_path: Path) -> None:
    own = shutil.copytree(model, tmp_path / "own")
    card = (own / "model.json").read_text()
    (own / "model.json").write_text(card.replace('"dog"', '"caf\\udce9"'))
    found = find_in_pool(own, [str(pool)], "caf\udce9", tmp_path / "found.csv", top=3, device="cpu")
    assert find_page(found)[1] == 3


@pytest.mark.parametrize(("images", "views", "cached"), [(50_000, 1, True), (50_000, 8, False), (300_000, 1, False)])
def test_a_pool_is_cached_if_its_features_fill_little_of_the_cache(images: int, views: int, cached: bool) -> None:
    assert is_cached(images, views, 1280) == cached


def test_bad_input_is_one_sentence(
    call: Call, frozen: Path, model: Path, photos: Path, pool: Path, tmp_path: Path
) -> None:
    out = tmp_path / "found.csv"
    (tmp_path / "empty").mkdir()
    cases = [
        ((frozen, tmp_path / "empty", "--class", "dog"), "a folder of images must hold at least one, got none below "),
        ((frozen, photos, "--class", "dog"), "Each of the 38 images is labelled already: there is nothing to find."),
        ((frozen, pool, "--class", "dogs"), "--class must be one of cat, dog, got 'dogs'. Did you mean dog?"),
        (
            (frozen, pool, "--class", "dog", "--by", "luck"),
            "--by must be one of probability, neighbours, both, got luck",
        ),
        (
            (frozen, pool, "--class", "dog", "--engine", "slurm"),
            "--engine must be local, ray or ray:ADDRESS, got 'slurm'.",
        ),
        ((frozen, pool, "--class", "dog", "--out", tmp_path / "found.html"), "--out must be a CSV file, got "),
        ((model, pool, "--class", "dog", "--by", "both"), f"{model} holds no recipe.toml, so the images that it was"),
    ]
    for arguments, said in cases:
        ended = call("find", "--out", out, *arguments)
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith(f"lopsided: {said}")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_model_without_its_run_searches_and_says_what_it_cannot_do(
    call: Call, model: Path, pool: Path, tmp_path: Path
) -> None:
    ended = call("find", model, pool, "--class", "dog", "--out", tmp_path / "found.csv", "--no-page", "--quiet")
    assert ended.code == 0
    assert "Images that the run was trained on are not left out." in ended.err
    assert len(rows_of(tmp_path / "found.csv")) == 26


def test_features_are_made_ahead_of_a_run_here_or_elsewhere(
    call: Call, frozen: Path, photos: Path, tmp_path: Path
) -> None:
    told = json.loads(call("cache", "fill", photos, "--recipe", "quick", "--json").out)
    assert (told["images"], told["computed"], told["recipe"]) == (38, 0, "quick"), "The run has cached the features."
    other = write_photos(tmp_path / "other", {"cat": 6, "dog": 4}, start=700)

    def cluster(folder: Path) -> AbstractContextManager[Mapper]:
        content = {name: (folder / name).read_bytes() for name in ("model.json", "model.safetensors")}
        return nullcontext(make_scorer(content, None, True).map)

    assert fill_cache(named_recipe("quick"), str(other), cluster=cluster) == (10, 10)
    assert fill_cache(named_recipe("quick"), str(other)) == (10, 0)
    ended = call("cache", "fill", photos, "--recipe", "from-scratch")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert 'Only features of a frozen encoder are cached, but the method is "two-stage".' in ended.err


@pytest.mark.slow
def test_fit_takes_the_marks_as_further_training_images(call: Call, photos: Path, pool: Path, tmp_path: Path) -> None:
    marks = tmp_path / "marks.csv"
    rows = [(pool / "dog" / f"{i}.png", "dog", "yes") for i in (300, 301)]
    rows += [(pool / "cat" / "300.png", "cat", "no"), (pool / "cat" / "301.png", "", "skip")]
    marks.write_text("path,label,mark\n" + "".join(f"{path},{label},{mark}\n" for path, label, mark in rows))
    arguments = ("fit", photos, "--recipe", "quick", "--more", marks, "--folds", "2", "--device", "cpu")
    ended = call(*arguments, "--out", tmp_path / "run")
    assert ended.code == 2
    assert "paths must stay below the folder of the table" in ended.err
    ended = call(*arguments, "--out", tmp_path / "run", "allow_outside=true")
    assert ended.code == 0
    assert "Further labels: 1 cat, 2 dog. These images are for training only and are never tested." in ended.err
    run = Run.open(tmp_path / "run")
    assert run.metrics is not None
    assert run.metrics["counts"]["train"] == {"cat": 31, "dog": 10}
    assert run.metrics["counts"]["test"] == {"cat": 30, "dog": 8}
    assert len(run.predictions()) == 38
    assert run.recipe.data.more == (str(marks),)
    found = call("find", tmp_path / "run", pool, "--class", "dog", "--out", tmp_path / "f.csv", "--no-page", "--json")
    assert json.loads(found.out)["known"] == 4  # The three marked images, and the one that was labelled before.
    marks.write_text(f"path,label,mark\n{photos / 'dog' / '000.png'},cat,no\n")
    ended = call(*arguments, "--out", tmp_path / "other", "allow_outside=true")
    assert ended.code == 2
    assert ended.err.count("\n") == 1
    assert "One further label contradicts what is known of the same image" in ended.err


def test_without_a_class_the_rarest_one_is_looked_for_and_focus_names_another(
    call: Call, frozen: Path, pool: Path, tmp_path: Path
) -> None:
    for words, wanted in ((), "dog"), (("--focus", "cat"), "cat"):
        ended = call("find", frozen, pool, *words, "--out", tmp_path / f"{wanted}.csv", "--no-page", "--json")
        assert ended.code == 0, ended.err
        assert json.loads(ended.out)["class"] == wanted


def test_predict_and_find_take_a_table_whose_paths_have_another_name(
    call: Call, frozen: Path, pool: Path, tmp_path: Path
) -> None:
    listed = sorted(pool.rglob("3*.png"))[:3]
    table = pool.parent / "listed.csv"
    table.write_text("\n".join(["image", *(path.relative_to(table.parent).as_posix() for path in listed)]) + "\n")
    ended = call("predict", frozen, table, "--out", tmp_path / "answers.csv")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert ended.err.endswith("Name another one with --path-column.\n")
    ended = call("predict", frozen, table, "--path-column", "image", "--out", tmp_path / "answers.csv")
    assert ended.code == 0, ended.err
    assert len(rows_of(tmp_path / "answers.csv")) == 3
    words = ("--path-column", "image", "--unfamiliar", "mark", "--no-page", "--json")
    ended = call("find", frozen, table, *words, "--out", tmp_path / "found.csv")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["images"] == 3
