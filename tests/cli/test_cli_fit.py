from __future__ import annotations

import csv
import json
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from lopsided import cli
from lopsided.evaluation.metrics import balanced_accuracy
from lopsided.models.machine import threads
from lopsided.recipe import Recipe
from lopsided.runs.folder import Run
from tiny_command import SMALL, Call, command_here, names_below, start

FILES = [
    "checkpoint/state.safetensors",
    "familiar.safetensors",
    "features.safetensors",
    "log.jsonl",
    "metrics.json",
    "model.json",
    "model.safetensors",
]
FILES += ["predictions.csv", "recipe.toml"]


def metrics_of(run: Path) -> dict:
    return json.loads((run / "metrics.json").read_text())


def rows_of(run: Path) -> list[dict[str, str]]:
    with (run / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_folder_holds_what_is_promised_and_nothing_else(finished: Path, photos: Path) -> None:
    assert names_below(finished) == FILES
    metrics = metrics_of(finished)
    assert metrics["format"] == 1
    assert metrics["seed"] == 3
    assert metrics["source"] == str(photos)
    assert metrics["source_name"] == photos.name
    counts = metrics["counts"]
    assert {name: sum(split[name] for split in counts.values()) for name in ("cat", "dog")} == {"cat": 40, "dog": 16}
    for split in ("val", "test"):
        figures = metrics[split]["figures"]
        assert all(figure["low"] <= figure["value"] <= figure["high"] for figure in figures.values())
        assert metrics[split]["majority"]["label"] == "cat"
        assert [row["label"] for row in metrics[split]["per_class"]] == ["cat", "dog"]
        assert sum(map(sum, metrics[split]["confusion"])) == sum(counts[split].values())
    assert metrics["environment"]["packages"]["torch"]
    assert metrics["environment"]["threads"] == 1
    assert metrics["seconds"] > 0
    assert metrics["unreadable"] == []
    assert metrics["leaks"] == {"groups": [], "duplicates": []}


def test_the_predictions_give_the_figures_back(finished: Path) -> None:
    metrics, rows = metrics_of(finished), rows_of(finished)
    assert list(rows[0]) == ["split", "name", "group", "label", "predicted", "p:cat", "p:dog"]
    for split in ("val", "test"):
        part = [row for row in rows if row["split"] == split]
        assert len(part) == sum(metrics["counts"][split].values())
        found = balanced_accuracy([row["label"] for row in part], [row["predicted"] for row in part])
        assert found == pytest.approx(metrics[split]["figures"]["uwa"]["value"])
        for row in part:
            assert row["label"] == row["name"].partition("/")[0]
            assert row["predicted"] == ("cat" if float(row["p:cat"]) >= float(row["p:dog"]) else "dog")
            assert float(row["p:cat"]) + float(row["p:dog"]) == pytest.approx(1)


def test_the_log_has_one_event_a_line(finished: Path) -> None:
    events = list(Run.open(finished).events())
    epochs = [(event["stage"], event["epoch"]) for event in events if event["event"] == "epoch"]
    assert epochs == [("encoder", 1), ("encoder", 2), ("classifier", 1), ("classifier", 2)]


@pytest.mark.slow
def test_the_recipe_of_a_run_repeats_it_to_the_byte_from_another_folder(finished: Path, tmp_path: Path) -> None:
    recipe = finished / "recipe.toml"
    ended = command_here("fit", "--recipe", recipe, "--out", "again", "--json", "--quiet", cwd=tmp_path)
    assert ended.code == 0
    again = tmp_path / "again"
    for name in ("recipe.toml", "predictions.csv", "model.safetensors", "model.json"):
        assert (again / name).read_bytes() == (finished / name).read_bytes()
    result, before = json.loads(ended.out), metrics_of(finished)
    assert result.pop("run") == "again"
    assert result == metrics_of(again)
    for metrics in (result, before):
        del metrics["seconds"]
    assert result == before
    assert all(line.startswith("warning: ") for line in ended.err.splitlines())


def test_the_flags_reach_the_recipe(call: Call, photos: Path, tmp_path: Path) -> None:
    flags = "--recipe from-scratch --loss acl eta=0.25 --encoder mlp-8 weights=none image_size=6 epochs=1 "
    flags += "classifier_epochs=1 batch_size=16 lr=0.01 val=0 test=0.25 split=random "
    flags += "scenario=80:20,total=40 --seed 5 --device cpu encoder_training.loss.temperature=0.2 "
    flags += "encoder_training.sampler=sqrt classifier.loss=weighted-ce data.cache='none'"
    ended = call("fit", photos, "--out", tmp_path / "run", *flags.split(), "skip_unreadable=true", "--quiet")
    assert ended.code == 0
    recipe = Recipe.load(tmp_path / "run" / "recipe.toml")
    training, classifier, data = recipe.encoder_training, recipe.classifier, recipe.data
    assert (training.loss.name, training.loss.eta, training.loss.temperature) == ("acl", 0.25, 0.2)
    assert (training.epochs, training.batch_size, training.lr, training.sampler) == (1, 16, 0.01, "sqrt")
    assert (classifier.epochs, classifier.loss.name, classifier.batch_size) == (1, "weighted-ce", 16)
    assert (recipe.encoder.name, recipe.encoder.weights, recipe.seed, recipe.device) == ("mlp-8", "none", 5, "cpu")
    assert (data.image_size, data.val, data.test, data.split) == (6, 0.0, 0.25, "random")
    assert (data.scenario, data.cache, data.skip_unreadable) == ("80:20,total=40", "none", True)
    metrics = metrics_of(tmp_path / "run")
    assert metrics["val"] is None
    assert sum(sum(split.values()) for split in metrics["counts"].values()) == 40
    assert json.loads((tmp_path / "run" / "model.json").read_text())["image_size"] == 6


def test_a_classification_loss_trains_end_to_end_for_the_epochs_of_both_stages(
    call: Call, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "short.toml").write_text(
        '[encoder]\nname = "mlp"\n[encoder_training]\nepochs = 2\n[classifier]\nepochs = 1\n'
    )
    arguments = ("fit", photos, "--recipe", tmp_path / "short.toml", "--out", tmp_path / "run", "--loss", "focal")
    ended = call(*arguments)
    assert ended.code == 0
    assert ended.out.startswith(f"Focal loss on {photos}: ")
    events = Run.open(tmp_path / "run").events()
    epochs = [(event["stage"], event["epoch"]) for event in events if event["event"] == "epoch"]
    assert epochs == [("end-to-end", 1), ("end-to-end", 2), ("end-to-end", 3)]


def test_the_epochs_of_both_flags_are_those_of_a_classification_loss(call: Call, photos: Path, tmp_path: Path) -> None:
    flags = "--encoder mlp-8 --device cpu --loss weighted-ce epochs=3 classifier_epochs=2 --quiet"
    ended = call("fit", photos, "--out", tmp_path / "run", *flags.split())
    assert ended.code == 0
    events = Run.open(tmp_path / "run").events()
    epochs = [(event["stage"], event["epoch"]) for event in events if event["event"] == "epoch"]
    assert epochs == [("end-to-end", epoch) for epoch in range(1, 6)]


def test_any_field_can_be_set(call: Call, photos: Path, tmp_path: Path) -> None:
    changes = [
        "augment.vertical_flip=true",
        "augment.rotation = 5",
        "data.classes=['dog', \"cat\"]",
        "head.out=8",
        "encoder_training.loss={ name = 'fcl', temperature = 0.2 }",
        "encoder_training.loss.gamma=3",
        "description=as it comes",
        "encoder_training.weight_decay=0.1",
    ]
    ended = call("fit", photos, "--out", tmp_path / "run", *SMALL, *changes, "--quiet")
    assert ended.code == 0, ended.err
    recipe = Recipe.load(tmp_path / "run" / "recipe.toml")
    assert (recipe.augment.vertical_flip, recipe.augment.rotation, recipe.data.classes) == (True, 5, ("dog", "cat"))
    assert (recipe.head.out, recipe.encoder_training.weight_decay) == (8, 0.1)
    loss = {"name": "fcl", "gamma": 3.0, "temperature": 0.2, "normalization": "paper"}
    assert recipe.encoder_training.loss.model_dump() == loss
    assert recipe.description == "as it comes"


def test_without_a_held_out_image_there_is_a_model_and_no_figure(call: Call, photos: Path, tmp_path: Path) -> None:
    ended = call("fit", photos, "--out", tmp_path / "run", *SMALL, "val=0", "test=0")
    assert ended.code == 0
    assert "There are no metrics" in ended.out
    assert rows_of(tmp_path / "run") == []
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_plain_lines_tell_of_each_epoch_where_there_is_no_terminal(call: Call, photos: Path, tmp_path: Path) -> None:
    ended = call("fit", photos, "--out", tmp_path / "run", *SMALL)
    lines = [line for line in ended.err.splitlines() if line.startswith(("encoder ", "classifier "))]
    assert [line.partition(":")[0] for line in lines] == [
        "encoder 1/2",
        "encoder 2/2",
        "classifier 1/2",
        "classifier 2/2",
    ]
    for line in lines:
        assert all(word in line for word in ("loss ", "balanced accuracy ", " images/s", " left"))
    assert "\x1b" not in ended.err + ended.out


def test_a_finished_run_is_shown_again_when_it_is_resumed(call: Call, finished: Path) -> None:
    before = {name: (finished / name).read_bytes() for name in names_below(finished)}
    ended = call("fit", "--out", finished, "--resume", "--json")
    assert ended.code == 0
    assert ended.err == f"The run in {finished} is already finished.\n"
    assert json.loads(ended.out) == {"run": str(finished), **metrics_of(finished)}
    assert {name: (finished / name).read_bytes() for name in names_below(finished)} == before


def test_a_folder_that_holds_something_is_not_written_to(call: Call, finished: Path, photos: Path) -> None:
    ended = call("fit", photos, "--out", finished)
    assert ended.code == 2
    do = "Choose another folder, or continue its run with --resume."
    assert ended.err == f"lopsided: The folder {finished} is not empty. {do}\n"


def test_a_run_is_not_resumed_with_another_recipe(call: Call, finished: Path) -> None:
    ended = call("fit", "--out", finished, "--resume", "epochs=7")
    assert ended.code == 2
    must = f"The run in {finished} has encoder_training.epochs = 2, but the recipe has 7."
    assert must in ended.err


def test_resume_refuses_a_folder_that_is_no_run(call: Call, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear reader")
    ended = call("fit", photos, "--out", tmp_path, "--resume", *SMALL)
    assert ended.code == 2
    assert ended.err == f"lopsided: RUN must be the folder of a run, got {tmp_path}, which has no recipe.toml.\n"


def wait_for_epochs(run: Path, number: int, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        log = run / "log.jsonl"
        if log.exists() and log.read_text().count('"event": "epoch"') >= number:
            return
        time.sleep(0.01)
    raise AssertionError("the run did not get so far")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])  # tests/runs/test_kill.py has SIGKILL.
def test_a_run_that_is_stopped_and_resumed_ends_as_if_it_had_not_been(
    how: signal.Signals, call: Call, photos: Path, other_photos: Path, tmp_path: Path, whole: Path
) -> None:
    run = tmp_path / "run"
    process = start("fit", photos, "--out", run, *LONG)
    wait_for_epochs(run, 3)
    if how == signal.SIGINT:
        process.send_signal(signal.SIGSTOP)  # It would end too soon on a fast machine.
        check_that_others_leave_it_alone(call, run, process.pid, photos, other_photos)
        process.send_signal(signal.SIGCONT)
        wait_for_epochs(run, 5)
    process.send_signal(how)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 128 + how
    assert not (run / ".lock").exists()
    assert err.splitlines()[-1] == f"lopsided: interrupted. Continue with: lopsided fit --out {run} --resume"
    assert not (run / "metrics.json").exists()
    assert f"The run in {run} is not finished." in call("export", run).err
    with threads(1):  # As the process had it.
        ended = call("fit", "--out", run, "--resume")
    assert ended.code == 0, ended.err
    for name in ("recipe.toml", "predictions.csv", "model.safetensors", "model.json"):
        assert (run / name).read_bytes() == (whole / name).read_bytes()
    assert names_below(run) == FILES


def check_that_others_leave_it_alone(call: Call, run: Path, pid: int, photos: Path, other_photos: Path) -> None:
    held, unfinished = f"{run} is in use by process {pid} on ", f"The run in {run} is not finished."
    for arguments, sentence in (
        (("fit", photos, "--out", run, *LONG), held),
        (("fit", "--out", run, "--resume"), held),
        (("report", run), f"The run in {run} is still running."),
        (("predict", run, other_photos), unfinished),
        (("evaluate", run, other_photos), unfinished),
        (("export", run), unfinished),
    ):
        ended = call(*arguments)
        assert (ended.code, ended.out) == (2, ""), arguments
        assert ended.err.startswith(f"lopsided: {sentence}"), ended.err
        assert ended.err.count("\n") == 1


LONG = ["--encoder", "mlp-256-256", "epochs=30", "classifier_epochs=2", "batch_size=4", "--device", "cpu"]
"""A run of a few seconds, so that there is time to stop it."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    with threads(1):
        assert cli.run(["fit", str(photos), "--out", str(folder), *LONG]) == 0
    return folder


def test_of_two_fits_that_come_to_one_folder_at_once_the_later_is_refused_and_clears_nothing_away(
    call: Call, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lopsided.files import lock
    from lopsided.runs import run as runs

    run, first = tmp_path / "run", ExitStack()
    run.mkdir()
    prepare = runs.Sources.open

    def slowly(*arguments: object, **named: object) -> object:
        first.enter_context(lock(run))
        (run / "recipe.toml").write_text("what the first process wrote meanwhile")
        return prepare(*arguments, **named)

    monkeypatch.setattr(runs.Sources, "open", slowly)
    with first:
        ended = call("fit", photos, "--out", run, *SMALL)
    assert ended.code == 2
    assert f"{run} is in use by process {os.getpid()} on " in ended.err
    assert names_below(tmp_path) == ["run/recipe.toml"]


@pytest.mark.slow
def test_the_demo_finds_cracked_eggs_and_notices_what_is_no_egg(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    ended = call("demo", "--out", out, "--quiet")
    assert ended.code == 0
    tested = json.loads((out / "run" / "metrics.json").read_text())["test"]
    rows, confusion = tested["per_class"], tested["confusion"]
    assert [(row["label"], row["support"]) for row in rows] == [("cracked", 24), ("intact", 216)]
    found, alarms = confusion[0][0], confusion[1][0]
    assert f"cracked: finds {found} of 24 (" in ended.out
    assert f"; {alarms} false alarms among 216 other images" in ended.out
    assert found >= 12
    commands = [line for line in ended.out.splitlines() if line.startswith("$ ")]
    assert [line.split()[2] for line in commands] == ["fit", "report", "predict"]
    assert (out / "run" / "report.html").is_file()
    answers = {line.split()[0]: line for line in ended.out.splitlines() if ".jpg" in line}
    assert sorted(answers) == ["egg-1.jpg", "egg-2.jpg", "egg-3.jpg", "tomato.jpg"]
    assert [name for name, line in answers.items() if "unlike the training images" in line] == ["tomato.jpg"]
    assert "lopsided demo --losses" in ended.out

    written = {name: (out / name).stat().st_mtime_ns for name in names_below(out) if not name.endswith("report.html")}
    again = json.loads(call("demo", "--out", out, "--json").out)
    assert again["headlines"] == [line for line in ended.out.splitlines() if line.startswith("cracked: ")]
    assert [row["unfamiliar"] for row in again["new"]] == [False, False, False, True]
    assert [row["predicted"] for row in again["new"]] == [
        "cracked" if row["p:cracked"] >= 0.1 else "intact" for row in again["new"]
    ]  # The share of cracked eggs in training decides.
    assert {name: (out / name).stat().st_mtime_ns for name in written} == written

    metrics = json.loads((out / "run" / "metrics.json").read_text())
    (out / "run" / "metrics.json").write_text(json.dumps(metrics | {"test": None}))
    refused = call("demo", "--out", out)
    assert refused.code == 2
    assert refused.err.endswith("is not a run of the demo: it has no test images. Choose another folder.\n")


@pytest.mark.slow
def test_the_demo_compares_three_losses_and_the_default_and_takes_finished_runs_as_they_are(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lopsided.runs import demo

    small = {"encoder.name": "mlp", "encoder_training.epochs": 1, "classifier.epochs": 1}
    monkeypatch.setattr(demo, "SMALL", demo.SMALL | small | {"data.scenario": "90:10,total=200"})
    out = tmp_path / "demo"
    ended = call("demo", "--losses", "--out", out)
    assert ended.code == 0
    assert ended.out.splitlines()[0] == "Trained on 99 T-shirt/top, 11 Shirt; tested on 54 T-shirt/top, 6 Shirt."
    rows = [line for line in ended.out.splitlines() if line.startswith(("CE ", "CL ", "AFCL ", "quick ", "always "))]
    assert len(rows) == 5
    assert rows[4].split() == ["always", "T-shirt/top", "0.500", "0.900"]
    assert all(row.count("[") == 2 for row in rows[:4])
    assert json.loads((out / "quick" / "metrics.json").read_text())["method"] == "frozen"
    assert f"Written to {out}" in ended.out
    assert [json.loads((out / loss / "metrics.json").read_text())["loss"] for loss in ("ce", "cl", "afcl")] == [
        "ce",
        "cl",
        "afcl",
    ]
    assert Run.open(out / "ce").recipe.encoder_training.epochs == 2
    written = {name: (out / name).stat().st_mtime_ns for name in names_below(out) if name != "summary.json"}
    again = call("demo", "--losses", "--out", out, "--json")
    assert [run["loss"] for run in json.loads(again.out)["runs"]] == ["ce", "cl", "afcl", "quick"]
    assert json.loads(again.out)["majority"] == {"label": "T-shirt/top", "accuracy": 0.9, "uwa": 0.5}
    assert {name: (out / name).stat().st_mtime_ns for name in written} == written

    metrics = json.loads((out / "cl" / "metrics.json").read_text())
    (out / "cl" / "metrics.json").write_text(json.dumps(metrics | {"test": None}))
    refused = call("demo", "--losses", "--out", out)
    assert refused.code == 2
    assert refused.err.endswith("cl is not a run of the demo: it has no test metrics. Choose another folder.\n")


def test_the_demo_holds_the_images_and_the_budget_equal() -> None:
    from lopsided.runs.demo import demo_recipes

    recipes = demo_recipes(4)
    assert list(recipes) == ["ce", "cl", "afcl", "quick"]
    assert {recipe.data for recipe in recipes.values()} == {recipes["ce"].data}
    assert {recipe.seed for recipe in recipes.values()} == {4}
    assert recipes.pop("quick").method == "frozen"
    budgets = {
        recipe.encoder_training.epochs + (recipe.classifier.epochs if recipe.method == "two-stage" else 0)
        for recipe in recipes.values()
    }
    assert len(budgets) == 1
    assert recipes["ce"].data.source == "fashion-mnist-tops"
    assert recipes["ce"].data.scenario.startswith("90:10")


def test_an_interrupt_advises_to_resume_only_where_there_is_a_run(
    call: Call, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lopsided.runs import run as runs

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "my run"
    monkeypatch.setattr(runs.Sources, "open", stop)
    assert call("fit", photos, "--out", out, *SMALL).err == "lopsided: interrupted. Nothing was written.\n"
    monkeypatch.undo()
    monkeypatch.setattr(runs, "write_results", stop)
    told = call("fit", photos, "--out", out, *SMALL, "--quiet")
    assert told.code == 130
    assert told.err.splitlines()[-1] == f"lopsided: interrupted. Continue with: lopsided fit --out '{out}' --resume"
