from __future__ import annotations

import json
import shutil
import webbrowser
from pathlib import Path

import pytest

from made_runs import make_run
from tiny_command import Call


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A finished run of the test's own, really trained."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_the_report_of_a_run_lies_in_its_folder(run: Path, call: Call) -> None:
    ended = call("report", run)
    assert ended.code == 0, ended.err
    page = (run / "report.html").read_text(encoding="utf-8")
    assert f"Written to {run / 'report.html'} ({len(page.encode()) / 1e6:.1f} MB)." in ended.out
    assert page.startswith("<!doctype html>")
    assert "There is no map" not in page
    assert "There are no pictures" not in page


def test_pictures_that_are_missing_are_said_on_the_terminal(tmp_path: Path, call: Call) -> None:
    moved = make_run(tmp_path / "moved", test=(6, 4), pictures=False)
    ended = call("report", moved)
    assert ended.code == 0
    assert ended.err.startswith("There are no pictures: ")
    outside = make_run(tmp_path / "outside", test=(6, 4), recipe={"data.allow_outside": True})
    table = tmp_path / "outside-source"
    for image in list(table.rglob("*.png")):
        image.rename(tmp_path / image.name)
        image.symlink_to(tmp_path / image.name)
    ended = call("report", outside)
    assert "images outside the folder of its table. If the run is yours, add --allow-outside." in ended.err
    assert call("report", outside, "--allow-outside").err == ""


def test_a_report_goes_where_it_is_asked_for(run: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "for a friend.html"
    ended = call("report", run, "--out", out, "--map", "tsne", "--json")
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert told == {"file": str(out), "about": "run", "bytes": out.stat().st_size, "runs": 0}
    assert "t-SNE" in out.read_text(encoding="utf-8")
    assert not (run / "report.html").exists()


def test_the_page_is_opened_if_asked(run: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert call("report", run).code == 0
    assert opened == []
    assert call("report", run, "--open").code == 0
    assert opened == [(run / "report.html").resolve().as_uri()]


def test_what_cannot_be_reported_is_said_in_a_sentence(run: Path, tmp_path: Path, call: Call) -> None:
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "sweep.json").write_text('{"form')
    for arguments, sentence in (
        ((tmp_path / "gone",), "FOLDER must be the folder of a run or of a sweep, got "),
        ((run, "--out", tmp_path), f"{tmp_path} is a folder. Set --out to "),
        ((run, "--out", tmp_path / "no" / "where.html"), f"{tmp_path / 'no' / 'where.html'} is in a folder that "),
        ((run, "--map", "mercator"), "--map must be one of pca, tsne, umap, got mercator."),
        ((run, "--runs"), "--runs is for the folder of a sweep, got "),
        ((torn,), f"{torn / 'sweep.json'} cannot be read ("),
        ((torn, "--runs"), f"{torn / 'sweep.json'} cannot be read ("),
    ):
        ended = call("report", *arguments)
        assert ended.code == 2
        assert ended.err.startswith(f"lopsided: {sentence}")
        assert ended.out == ""
    assert not (run / "report.html").exists()
    assert [path.name for path in torn.iterdir()] == ["sweep.json"]
