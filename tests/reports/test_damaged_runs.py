"""Run folders that are not as a run leaves them: each gets a page or a sentence, never a false page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lopsided import files
from lopsided.data.sources import fashion
from lopsided.errors import DataError, RunError
from lopsided.paper.page import sweep_page
from lopsided.recipe import Recipe
from lopsided.reports import run_page as module
from lopsided.reports.report import write_report, write_run_reports
from lopsided.reports.run_data import open_finished, read_judged, read_stages
from lopsided.reports.run_page import run_page
from lopsided.runs.folder import Run
from lopsided.runs.records import Failure, append_failure, read_failures
from made_runs import make_run, read_rows
from reports.test_run_page import rewrite, text_of
from tiny_command import environment


def metrics_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return content


def keep_rows(folder: Path, keep: Callable[[str], bool]) -> None:
    """Keep the header of the predictions and the rows of some splits."""
    header, *rows = (folder / "predictions.csv").read_text().splitlines(keepends=True)
    (folder / "predictions.csv").write_text(header + "".join(row for row in rows if keep(row.partition(",")[0])))


def only_held_out(folder: Path) -> Path:
    """Make the test images of a run those that its scenario left."""
    rewrite(folder, test=None, val=None, held_out=metrics_of(folder)["test"])
    text = (folder / "predictions.csv").read_text()
    (folder / "predictions.csv").write_text(text.replace("\ntest,", "\nheld_out,"))
    keep_rows(folder, lambda split: split == "held_out")
    tensors = load_file(folder / "features.safetensors")
    save_file({"held_out": tensors["test"]}, folder / "features.safetensors")
    return folder


@pytest.mark.slow
def test_a_report_fetches_nothing_and_loads_no_torch_where_the_files_of_its_source_are_gone(tmp_path: Path) -> None:
    make_run(tmp_path / "run", recipe={"data.source": "fashion-mnist"})
    code = (
        "import sys, socket, lopsided.cli\n"
        "from lopsided.data.sources import fashion\n"
        "from pathlib import Path\n"
        f"fashion.DEBIAN = Path({str(tmp_path)!r})\n"
        "def refuse(*_, **__): raise AssertionError('asked the network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        f"code = lopsided.cli.run(['report', {str(tmp_path / 'run')!r}])\n"
        "print(code, [name for name in ('torch', 'torchvision') if name in sys.modules])"
    )
    places = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "LOPSIDED_DATA": ""}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**environment(), **places}, check=True
    )
    assert ended.stdout.splitlines()[-1] == "0 []"
    text = text_of((tmp_path / "run" / "report.html").read_text(encoding="utf-8"))
    assert "There are no pictures: fashion-mnist is not on this machine: " in text
    assert not (tmp_path / "cache").exists()


def test_fashion_mnist_that_is_not_there_is_refused_without_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fashion, "find_folder", lambda: None)
    monkeypatch.setattr(fashion, "_download", lambda: pytest.fail("asked the network"))
    with pytest.raises(
        DataError, match=r"^fashion-mnist is not on this machine: .* does not hold its files\. Put the four"
    ):
        fashion.list_fashion(download=False)


def test_a_run_that_was_judged_on_held_out_images_alone_shows_them(tmp_path: Path) -> None:
    page = run_page(only_held_out(make_run(tmp_path / "run")))
    text = text_of(page)
    assert "There is no test split. The metrics below are for the images that the scenario did not draw." in text
    assert "and evaluated on 52 new images" in text
    assert 'id="matrix"' in page
    assert 'id="map"' in page


def test_figures_without_predictions_are_refused(tmp_path: Path) -> None:
    for number, content in enumerate(("", "split,name,group,label,predicted,p:common,p:rare\n")):
        folder = make_run(tmp_path / f"run{number}")
        (folder / "predictions.csv").write_text(content)
        with pytest.raises(RunError, match=r"^predictions\.csv must hold the 52 images of test that metrics\.json"):
            run_page(folder)


def test_a_run_with_no_figures_and_an_empty_table_has_a_page(tmp_path: Path) -> None:
    folder = rewrite(make_run(tmp_path / "run"), test=None, val=None)
    (folder / "predictions.csv").write_text("")
    assert "No images were held out." in text_of(run_page(folder))


def test_predictions_that_were_cut_at_a_line_break_are_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    lines = (folder / "predictions.csv").read_text().splitlines(keepends=True)
    (folder / "predictions.csv").write_text("".join(lines[:-7]))
    must = (
        r"^predictions\.csv must hold the 52 images of test that metrics\.json counts, got 45 in .*predictions\.csv\. "
    )
    with pytest.raises(RunError, match=must):
        run_page(folder)
    (folder / "predictions.csv").write_text("".join(lines[:1] + lines[4:]))
    with pytest.raises(RunError, match=r"the 28 images of val that metrics\.json counts, got 25"):
        run_page(folder)


@pytest.mark.parametrize("bad", ["nan", "inf", "-0.5", "0.0001"])
def test_what_is_no_probability_is_refused(tmp_path: Path, bad: str) -> None:
    folder = make_run(tmp_path / "run")
    text = (folder / "predictions.csv").read_text()
    (folder / "predictions.csv").write_text(text[: text.rindex(",") + 1] + bad + "\n")
    last = read_rows(folder)[-1].name
    must = rf"predictions\.csv is not a valid table of predictions .*invalid probabilities of '{last}'"
    with pytest.raises(RunError, match=must):
        run_page(folder)


def test_a_recipe_that_was_cut_in_half_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", recipe={"encoder_training.epochs": 7})
    text = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(text[: text.index("[encoder_training]")])
    must = r"recipe\.toml is not the recipe of the figures in metrics\.json\. Restore"
    with pytest.raises(RunError, match=must):
        run_page(folder)


def test_a_hash_of_another_version_is_warned_of(tmp_path: Path) -> None:
    sentence = "The recipe cannot be checked. lopsided 0.0.1, which trained the run, computed the hash of the recipe"
    folder = make_run(tmp_path / "run", recipe={"encoder_training.epochs": 7})
    assert sentence not in text_of(run_page(rewrite(folder, lopsided="0.0.1")))
    assert sentence in text_of(run_page(rewrite(folder, recipe="0" * 64)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("classes", None),
        ("counts.train", None),
        ("leaks.duplicates", None),
        ("seconds", "long"),
        ("test.num_images", None),
        ("test.majority.uwa", None),
        ("test.figures.accuracy", None),
        ("test.figures.uwa.low", None),
        ("test.notes", 3),
        ("val.confusion", None),
        ("seconds", -1.0),
        ("counts.train", {}),
        ("test.confusion", [[10**400, 0], [0, 0]]),
        ("test.confusion", [[1, -5], [0, 0]]),
        ("test.figures.uwa.value", 10**400),
        ("test.figures.uwa.value", float("nan")),
    ],
)
def test_a_key_that_the_metrics_lack_is_named(tmp_path: Path, path: str, value: Any) -> None:
    folder = make_run(tmp_path / "run")
    metrics = metrics_of(folder)
    *outer, last = path.split(".")
    inner = metrics
    for name in outer:
        inner = inner[name]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    (folder / "metrics.json").write_text(json.dumps(metrics))
    must = rf"metrics\.json has a missing or invalid value: {re.escape(path)}[.\d]*\. Restore"
    with pytest.raises(RunError, match=must):
        run_page(folder)


def test_rows_of_too_few_classes_are_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    test = metrics_of(folder)["test"]
    rewrite(folder, test={**test, "per_class": test["per_class"][:1]})
    with pytest.raises(
        RunError, match=r"metrics\.json has a missing or invalid value: test\.per_class must have 2 classes\."
    ):
        open_finished(folder)


def test_lines_of_the_log_that_are_no_events_are_passed_over(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    before = read_stages(Run.open(folder))
    odd = [b"5", b"[]", b"null", b'"epoch"', b'{"event": "epoch", "epoch": 9}',
           b'{"event": "epoch", "stage": "encoder"}', b'{"event": "note"}',
           b'{"event": "note", "text": 5}', b'{"no": "event"}', b"\xff\xfe",
           b'{"event": "epoch", "stage": ["encoder"], "epoch": 9}', b"[" * 100_000,
           b'{"event": "epoch", "stage": "encoder", "epoch": true, "loss": 1}',
           b'{"event": "epoch", "stage": "encoder", "epoch": %d, "loss": 1}' % (10**400)]  # fmt: skip
    with (folder / "log.jsonl").open("ab") as log:
        log.write(b"\n".join(odd) + b"\n" + b'{"event": "note", "text": "caf\xe9"}\n')
    stages, notes = read_stages(Run.open(folder))
    assert [(stage.name, stage.epochs) for stage in stages] == [(stage.name, stage.epochs) for stage in before[0]]
    assert notes == [*before[1], "caf\ufffd"]
    assert "caf\ufffd" in run_page(folder)


def test_a_note_that_a_resumed_run_took_again_is_listed_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"event": "start"}\n{"event": "note", "text": "A note of the run."}\n')
    assert text_of(run_page(folder)).count("A note of the run.") == 1


def test_a_loss_that_is_not_a_number_is_left_out_of_the_curves(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with (folder / "log.jsonl").open("a") as log:
        for epoch, value in ((5, "NaN"), (6, "Infinity"), (7, '"many"')):
            facts = f'"loss": {value}, "val_uwa": {value}, "minority_loss_share": {value}'
            log.write(f'{{"event": "epoch", "stage": "encoder", "epoch": {epoch}, {facts}}}\n')
    stages, _ = read_stages(Run.open(folder))
    assert [epoch for epoch, _ in stages[0].series("loss")] == [1, 2, 3, 4]
    assert stages[0].taken == 3
    assert not re.findall(r'd="[^"]*(?:nan|inf)', run_page(folder))


def test_an_unfinished_run_is_to_be_continued_unless_it_is_still_running(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "metrics.json").unlink()
    with files.lock(folder), pytest.raises(RunError, match=r"run is still running\. Wait until it ends\.$"):
        run_page(folder)
    assert not (folder / ".lock").exists()
    (folder / ".lock").write_text("left behind by a crash")
    with pytest.raises(RunError, match=r"it has no metrics\.json\. Continue it with lopsided fit --out "):
        run_page(folder)


@pytest.mark.parametrize("error", ["cannot read caf\udce9.png", "a half pair \ud800"])
def test_an_error_of_any_text_is_kept_and_reported(tmp_path: Path, error: str) -> None:
    (tmp_path / "sweep.json").write_text('{"format": 1}')
    path = tmp_path / "failures.jsonl"
    failure = Failure.of(Recipe().override(**{"data.source": "fashion-mnist-tops"}), error)
    assert failure.error == re.sub("[\udce9\ud800]", "\ufffd", error)
    raw = json.loads(failure.to_json())
    path.write_bytes(json.dumps({**raw, "error": error}).encode() + b"\n")  # As it was written before.
    append_failure(path, failure)
    with path.open("ab") as file:
        file.write(json.dumps({**raw, "error": "odd byte: @"}).encode().replace(b"@", b"\xff") + b"\n")
    assert [each.error for each in read_failures(path)] == [failure.error, failure.error, "odd byte: \ufffd"]
    assert "odd byte: \ufffd" in sweep_page(tmp_path)


def test_a_run_of_a_sweep_that_cannot_be_read_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lopsided.cli import run as command

    sweep = tmp_path / "sweep"
    for name in "abc":
        make_run(sweep / "cells" / name, pictures=False)
    (sweep / "sweep.json").write_text('{"format": 1}')
    (sweep / "cells" / "b" / "predictions.csv").write_text("nothing\n")
    found = write_run_reports(sweep)
    assert found.written == 2
    assert [(path.name, "predictions.csv" in error) for path, error in found.failed] == [("b", True)]
    assert [(sweep / "cells" / name / "report.html").exists() for name in "abc"] == [True, False, True]
    assert command(["report", str(sweep), "--runs", "--quiet"]) == 1
    told = capsys.readouterr()
    assert "and 2 pages of runs." in told.out
    assert f"No page of {sweep / 'cells' / 'b'}: predictions.csv must hold" in told.err
    assert "1 of 3 runs have no page." in told.err
    assert command(["report", str(sweep), "--runs", "--json", "--quiet"]) == 1
    assert [failed["run"] for failed in json.loads(capsys.readouterr().out)["failed"]] == [str(sweep / "cells" / "b")]


@pytest.mark.parametrize("name", ["log.jsonl", "predictions.csv"])
def test_a_file_of_more_bytes_than_any_run_writes_is_refused_unread(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / "run", pictures=False)
    os.truncate(folder / name, 20 << 30)  # A hole, which takes no room on the disk.
    with pytest.raises(RunError, match=rf"^[^\n]*{name} \(more than [\d,]+ bytes\)\.[^\n]*$"):
        run_page(folder)


def test_no_page_is_written_where_a_link_in_a_sweep_leads_to(tmp_path: Path) -> None:
    elsewhere = make_run(tmp_path / "elsewhere" / "run", pictures=False)
    sweep = tmp_path / "sweep"
    make_run(sweep / "cells" / "a", pictures=False)
    (sweep / "sweep.json").write_text('{"format": 1}')
    (sweep / "cells" / "b").symlink_to(elsewhere)
    found = write_run_reports(sweep)
    said = f"the runs of a sweep must lie in its folder, got {sweep / 'cells' / 'b'}, which is a link. Put a copy in"
    assert (found.written, [(path.name, said in error) for path, error in found.failed]) == (1, [("b", True)])
    assert not (elsewhere / "report.html").exists()
    (sweep / "cells").rename(tmp_path / "cells")
    (sweep / "cells").symlink_to(elsewhere.parent)
    found = write_run_reports(sweep)
    assert (found.written, len(found.failed)) == (0, 1)
    assert not (elsewhere / "report.html").exists()


def test_the_names_of_odd_bytes_do_not_keep_a_page_from_being_written(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    test = metrics_of(folder)["test"]
    rewrite(
        folder,
        test={**test, "notes": ["no image of caf\udce9, \ud800"]},
        facts=[{"kind": "odd", "values": {}, "text": "odd \udfff"}],
    )
    write_report(folder)
    text = text_of((folder / "report.html").read_text(encoding="utf-8"))
    assert "no image of caf\ufffd, \ufffd" in text
    assert "odd \ufffd" in text


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_features_that_are_not_finite_have_no_map_and_a_sentence(tmp_path: Path, value: float) -> None:
    folder = make_run(tmp_path / "run")
    tensors = load_file(folder / "features.safetensors")
    tensors["test"][3, 2] = value
    save_file(tensors, folder / "features.safetensors")
    for kind in ("pca", "tsne"):
        page = run_page(folder, kind)
        expected = "There is no map: the features of the test images (features.safetensors) are not all finite numbers."
        assert expected in text_of(page)
        assert 'id="map"' not in page


def test_why_there_is_no_map_is_said(tmp_path: Path) -> None:
    without = text_of(run_page(make_run(tmp_path / "without", features=False)))
    assert "There is no map: the run has no features of the test images (features.safetensors)." in without
    single = text_of(run_page(make_run(tmp_path / "single", test=(1, 0), val=None)))
    assert "There is no map: there is only one test image." in single


def test_images_that_could_not_be_read_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_NOTED", 2)
    broken = [{"name": f"<{i}>.png", "reason": "it is cut off"} for i in range(3)]
    text = text_of(run_page(make_run(tmp_path / "run", unreadable=broken)))
    assert "3 images could not be read." in text
    assert (
        "Images that could not be read <0>.png : it is cut off <1>.png : it is cut off "
        "1 more image is listed in metrics.json." in text
    )
    assert "Images that could not be read" not in text_of(run_page(make_run(tmp_path / "whole")))


@pytest.mark.slow
def test_a_page_that_would_be_too_large_lists_fewer_images_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{i:03d}{'n' * 150}.png" for i in range(400)]
    folder = make_run(tmp_path / "run", test=(300, 100), names=names)
    whole = run_page(folder)
    assert "This page lists" not in text_of(whole)
    limit = len(whole.encode()) - 20_000
    monkeypatch.setattr(module, "LIMIT", limit)
    page = run_page(folder)
    assert len(page.encode()) <= limit
    assert "This page lists 200 of 400 images: " in text_of(page)
    monkeypatch.setattr(module, "LIMIT", 1000)
    assert "This page lists 50 of 400 images: " in text_of(run_page(folder)), "There is an end to it."


def test_probabilities_are_read_as_they_were_written(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    judged = read_judged(*open_finished(folder))
    expected = np.array([[row.p["common"], row.p["rare"]] for row in read_rows(folder)], dtype=np.float32)
    assert (judged["test"].p == expected).all()
