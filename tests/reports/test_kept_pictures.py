"""Pictures that a run keeps, so that its page has them when the images have moved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lopsided.errors import RunError
from lopsided.reports.report import write_report
from lopsided.reports.run_data import shown_images
from lopsided.reports.thumbnails import PICTURES, keep_shown_pictures, kept_pictures
from made_runs import make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", test=(40, 20), signal=0.5)


def _move(run: Path, part: str = "") -> None:
    source = run.parent / f"{run.name}-source"
    shutil.move(source / part, run.parent / "elsewhere")


@pytest.mark.parametrize("part", ["", "images"])
def test_a_report_whose_images_have_moved_shows_the_pictures_that_the_run_kept(run: Path, part: str) -> None:
    keep_shown_pictures(run, allow_outside=False)
    names = {name for name, _ in shown_images(run)}
    assert set(kept_pictures(run)) == names
    _move(run, part)
    report = write_report(run)
    page = report.path.read_text(encoding="utf-8")
    assert "data:image/webp;base64," in page
    assert page.count('<span class="thumb') >= len(names)
    assert any("could not be found" in note for note in report.notes)


def test_without_kept_pictures_such_a_page_has_none(run: Path) -> None:
    _move(run)
    keep_shown_pictures(run, allow_outside=False)
    assert not (run / PICTURES).exists()
    assert "data:image/webp;base64," not in write_report(run).path.read_text(encoding="utf-8")


def test_kept_pictures_have_the_same_bytes_when_made_again(run: Path) -> None:
    keep_shown_pictures(run, allow_outside=False)
    first = (run / PICTURES).read_bytes()
    (run / PICTURES).unlink()
    keep_shown_pictures(run, allow_outside=False)
    assert (run / PICTURES).read_bytes() == first


def test_the_recipe_of_a_stranger_does_not_let_files_outside_become_pictures(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", test=(40, 20), signal=0.5, recipe={"data.allow_outside": True})
    table = next(path for path in tmp_path.rglob("*.csv") if path.parent != run)
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    shutil.copytree(table.parent / "images", outside)
    table.write_text(table.read_text().replace("images/", f"../{outside.name}/"))
    keep_shown_pictures(run, allow_outside=False)
    assert not (run / PICTURES).exists()


@pytest.mark.parametrize("damage", [lambda content: content[:50], lambda content: content[:-200] + bytes(200)])
def test_a_damaged_file_of_pictures_is_named(run: Path, damage: object) -> None:
    keep_shown_pictures(run, allow_outside=False)
    path = run / PICTURES
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(RunError, match=r"pictures\.safetensors is no file of pictures"):
        kept_pictures(run)
