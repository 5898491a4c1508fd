"""Commands without the name of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiny_command import SMALL, Call

PHOTOS = {"cat": 20, "dog": 10}


def test_a_run_without_a_name_is_numbered_and_the_other_commands_take_the_newest(
    call: Call, photos: Path, other_photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = call("fit", photos, *SMALL)
    assert ended.code == 0
    assert "Written to runs/1 in " in ended.out
    assert "lopsided report runs/1 --open" in ended.out
    assert call("train", photos, *SMALL, "--seed", "1").code == 0
    metrics = json.loads((tmp_path / "runs/2/metrics.json").read_text())
    assert metrics["seed"] == 1

    ended = call("predict", other_photos, "--out", "answers.csv", "--json")
    assert json.loads(ended.out)["images"] == 15
    assert "runs/2 is the newest run." in ended.err.splitlines()
    named = call("predict", "runs/1", other_photos, "--json", "--out", "first.csv")
    assert "newest" not in named.err
    assert Path("first.csv").read_bytes() != Path("answers.csv").read_bytes()
    assert json.loads(call("evaluate", "--json").out)["figures"] == metrics["test"]["figures"]
    assert json.loads(call("evaluate", other_photos, "--json").out)["run"] == "runs/2"
    ended = call("find", other_photos, "--class", "dog", "--no-page", "--json")
    assert json.loads(ended.out)["listed"] == 15
    assert len(Path("found.csv").read_text().splitlines()) == 16
    assert call("report", "-q").out.startswith("Written to runs/2/report.html")
    assert call("export", "--to", "card").out.startswith("Written to runs/2/README.md")

    ended = call("fit", "--resume")
    assert "The run in runs/2 is already finished." in ended.err
    assert sorted(path.name for path in Path("runs").iterdir()) == ["1", "2"]


@pytest.mark.parametrize(
    "words", [["fit", "."], ["fit", ".", "--out", "new"], ["fit", ".", "--auto"], ["compare", ".", "--out", "new"]]
)
def test_a_run_is_not_written_among_the_images_where_it_would_be_a_class(
    call: Call, photos: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(photos)
    folder = "new" if "new" in words else "runs/1"
    ended = call(*words)
    assert ended.code == 2
    assert ended.err.startswith(f"lopsided: The run {folder} would be inside the folder of the images: ")
    assert sorted(path.name for path in photos.iterdir()) == sorted(PHOTOS)


def test_fit_ends_with_counts_and_details_come_with_v(call: Call, photos: Path, tmp_path: Path) -> None:
    ended = call("fit", photos, "--out", tmp_path / "run", *SMALL)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    (cats, dogs), confusion = metrics["test"]["per_class"], metrics["test"]["confusion"]
    found, recall = confusion[1][1], dogs["recall"]
    share = f"{100 * found / dogs['support']:.0f} %, {100 * recall['low']:.0f} to {100 * recall['high']:.0f} %"
    alarms = "1 false alarm" if confusion[0][1] == 1 else f"{confusion[0][1]} false alarms"
    line = f"dog: finds {found} of {dogs['support']} ({share}); {alarms} among {cats['support']} other images"
    assert line in ended.out.splitlines()
    assert "precision" not in ended.out
    assert "precision" in call("fit", "--out", tmp_path / "run", "--resume", "-v").out


def test_without_any_run_the_error_says_so(
    call: Call, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["predict", photos], ["evaluate"], ["report"], ["export"], ["fit", "--resume"]):
        ended = call(*words)
        assert ended.code == 2
        assert "run in the folder runs. Name the folder of a run." in ended.err
    assert call("predict", "gone", photos).err.startswith("lopsided: gone holds no model.json.")
    assert not (tmp_path / "runs").exists()


def test_a_failed_fit_leaves_no_folder(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("fit", "gone").code == 2
    assert list(tmp_path.iterdir()) == []
