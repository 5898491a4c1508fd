from __future__ import annotations

import json
import math
import string
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopsided import files
from lopsided.errors import RunError
from lopsided.evaluation.metrics import evaluate
from lopsided.recipe import Recipe
from lopsided.runs import records as record_module
from lopsided.runs.folder import Run
from lopsided.runs.keys import LossTable, data_key, family_of, treatment_of
from lopsided.runs.records import (
    Failure,
    Fold,
    Record,
    Scores,
    append_failure,
    append_records,
    read_failures,
    read_records,
)
from lopsided.runs.run import settle
from tiny_command import environment
from tiny_sweep import record_of

CLASSES = ["top", "shirt", "coat"]

shares = st.floats(0, 1).map(lambda value: float(f"{value:.5g}"))
names = st.text(string.ascii_letters + string.digits + "-_. ", min_size=1, max_size=24)
figures = st.builds(
    Scores,
    images=st.integers(1, 100_000),
    minority=st.integers(0, 50_000),
    accuracy=shares,
    uwa=shares,
    recalls=st.tuples(shares | st.just(math.nan), shares | st.just(math.nan)),
    auroc=shares | st.none(),
    majority_vote=shares,
    rules=st.just(()) | st.tuples(st.tuples(st.just("plain"), shares)),
    log_loss=st.floats(0, 99) | st.none(),
)
values = st.floats(-1e6, 1e6) | st.integers(-9, 9) | st.booleans() | names
losses = st.builds(
    lambda name, parameters: LossTable.read({**parameters, "name": name}),
    names,
    st.dictionaries(st.sampled_from(["eta", "eta_unit", "gamma", "temperature"]), values),
)
counts = st.integers(1, 10**6)
any_record = st.builds(
    Record,
    cell=st.text("0123456789abcdef", min_size=16, max_size=16),
    source=names,
    scenario=st.sampled_from(["50:50", "98:2", "long-tail:100,step"]) | st.none(),
    method=st.sampled_from(["two-stage", "end-to-end"]),
    loss=losses,
    classifier_loss=losses,
    encoder=names,
    image_size=st.integers(1, 512) | st.none(),
    split=st.sampled_from(["auto", "random", "group"]),
    weights=st.sampled_from(["none", "timm", "file"]),
    seed=st.integers(0, 2**63 - 1),
    test=figures,
    held_out=figures | st.none(),
    seconds=st.floats(0, 1e5),
    threads=st.integers(1, 512),
    lopsided=st.just("0.1.0"),
    torch=st.just("2.15.0+cpu"),
    data=st.text("0123456789abcdef", min_size=16, max_size=16),
    compared_as=names | st.none(),
    family=st.text("0123456789abcdef", min_size=16, max_size=16),
    epochs=st.tuples(st.integers(1, 9999), st.integers(1, 9999)),
    classes=st.tuples(names, names),
    fold=st.builds(Fold, fold=counts, folds=st.integers(2, 99), rest=counts, rest_minority=counts) | st.none(),
)


def some_records(number: int) -> list[Record]:
    recipe = settle(Recipe(), "photos")
    return [record_of(recipe.override(seed=seed)) for seed in range(number)]


def write_records(path: Path, number: int) -> list[Record]:
    found = some_records(number)
    path.write_text("".join(f"{record.to_json()}\n" for record in found))
    return found


@given(any_record)
def test_a_record_is_one_short_line_of_json_that_gives_the_same_record(record: Record) -> None:
    line = record.to_json()
    assert "\n" not in line
    assert len(line.encode()) < 1400
    assert Record.from_json(line) == Record.from_json(line.encode()) == record


def metrics_of(recipe: Recipe, test: list[int], held_out: list[int] | None = None) -> dict[str, Any]:
    """What ``metrics.json`` holds of a run whose model takes every other image for the first class."""

    def evaluated(labels: list[int]) -> dict[str, Any]:
        p = np.full((len(labels), 3), 0.1)
        p[np.arange(len(labels)), np.where(np.arange(len(labels)) % 2, labels, 0)] = 0.8
        return evaluate(labels, p, classes=CLASSES, bootstrap=100).to_dict()

    return {
        "format": 1,
        "lopsided": "0.1.0",
        "classes": CLASSES,
        "counts": {"train": {"top": 70, "shirt": 7, "coat": 20}, "val": {}, "test": {"top": 4, "coat": 2}},
        "val": None,
        "test": evaluated(test),
        **({} if held_out is None else {"held_out": evaluated(held_out)}),
        "environment": {"threads": 2, "packages": {"torch": "2.6.0"}},
        "seconds": 123.456789,
    }


def write_run(folder: Path, recipe: Recipe, metrics: dict[str, Any] | None) -> Run:
    (folder / "recipe.toml").write_text(recipe.to_toml())
    if metrics is not None:
        (folder / "metrics.json").write_text(json.dumps(metrics))
    return Run.open(folder)


RECIPE = settle(
    Recipe().override(
        seed=3,
        **{
            "data.source": "/some/where/photos",
            "data.scenario": "90:10,total=1000",
            "data.split": "random",
            "data.image_size": 64,
            "encoder.weights": "/some/where/w.safetensors",
            "encoder_training.loss": "acl",
            "encoder_training.loss.eta": 300.0,
            "encoder_training.loss.eta_unit": "absolute",
            "encoder_training.loss.normalization": "released",
        },
    )
)


def test_a_record_holds_the_figures_of_a_run_and_no_path(tmp_path: Path) -> None:
    held_out = [0, 1, 2, 0, 1, 2]
    record = Record.from_run(write_run(tmp_path, RECIPE, metrics_of(RECIPE, [0, 0, 0, 0, 2, 2, 2], held_out)))
    assert "where" not in record.to_json()
    assert record.cell == RECIPE.content_hash()[:16]
    assert (record.source, record.scenario, record.weights, record.split) == ("photos", "90:10", "file", "random")
    parameters = {"eta": 300.0, "eta_unit": "absolute", "normalization": "released", "temperature": 0.07}
    assert (record.loss.to_dict(), record.seed) == ({"name": "acl", **parameters}, 3)
    assert (record.classifier_loss, record.encoder, record.image_size) == (LossTable("ce"), "resnet18", 64)
    assert (record.treatment, record.compared_as) == (treatment_of(RECIPE), None)
    assert (record.seconds, record.threads, record.lopsided, record.torch) == (123.46, 2, "0.1.0", "2.6.0")
    assert (record.family, record.epochs) == (family_of(RECIPE), (30, 10))
    assert record.name == "90:10 ACL(eta=300, eta_unit=absolute, normalization=released) seed 3"
    assert replace(record, compared_as="mine").name == "90:10 mine seed 3"
    # Of the coats at 4, 5 and 6 the one at 5 is recognised; shirts, the rarest in the draw, are not in the test split.
    assert (record.test.images, record.test.minority) == (7, 0)
    assert record.test.recalls[0] == 1.0
    assert math.isnan(record.test.recalls[1])
    assert record.test.recalls[2] == 0.33333
    assert (record.test.accuracy, record.test.uwa, record.test.majority_vote) == (0.71429, 0.66667, 0.57143)
    assert record.held_out is not None
    assert (record.held_out.images, record.held_out.minority, record.held_out.majority_vote) == (6, 2, 0.33333)
    assert Record.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 7},
        {"threads": 3, "description": "mine", "device": "cpu"},
        {"encoder_training.loss": {"name": "afcl", "eta": 60.0, "gamma": 7.0}},
        {"encoder_training.loss.normalization": "paper", "encoder_training.loss.temperature": 0.5},
        {"data.scenario": "50:50,total=1000"},
        {"data.source": "/else/where/pictures", "encoder.weights": "/else/where/w.safetensors"},
        {"encoder_training.queue": 0, "precision": "float32"},
    ],
)
def test_what_a_table_compares_leaves_a_recipe_in_its_family(changes: dict[str, Any]) -> None:
    assert family_of(RECIPE.override(**changes)) == family_of(RECIPE)


@pytest.mark.parametrize(
    "changes",
    [
        {"encoder_training.epochs": 3},
        {"classifier.epochs": 3},
        {"data.scenario": "90:10,total=500"},
        {"data.scenario": "90:10"},
        {"data.test": 0.3},
        {"augment.rotation": 5.0},
        {"encoder.weights": "/some/where/other.safetensors"},
        {"encoder_training.queue": 64},
        {"classifier.loss": "focal"},
        {"encoder_training.loss": "ce"},
    ],
)
def test_whatever_else_decides_a_run_makes_another_family(changes: dict[str, Any]) -> None:
    assert family_of(RECIPE.override(**changes)) != family_of(RECIPE)


def test_the_folder_of_further_labels_decides_nothing_and_their_name_does() -> None:
    metrics = metrics_of(RECIPE, [0, 1, 2])
    here, there, other = (RECIPE.override(**{"data.more": [p]}) for p in ("/a/marks.csv", "/b/marks.csv", "/a/m.csv"))
    for key in (family_of, lambda recipe: data_key(recipe, metrics)):
        assert key(here) == key(there)
        assert len({key(here), key(other), key(RECIPE)}) == 3
    assert here.content_hash() != there.content_hash()


def test_the_family_with_weights_begins_with_that_from_scratch() -> None:
    scratch = family_of(RECIPE.override(**{"encoder.weights": "none"}))
    assert family_of(RECIPE).startswith(f"{scratch}+")
    assert family_of(RECIPE.override(**{"encoder.weights": "timm"})).startswith(f"{scratch}+")


def test_a_record_has_the_name_of_what_was_opened_and_its_classes(tmp_path: Path) -> None:
    metrics = {**metrics_of(RECIPE, [0, 1, 2]), "source_name": "isic2018"}
    record = Record.from_run(write_run(tmp_path, RECIPE, metrics))
    assert (record.source, record.classes) == ("isic2018", tuple(CLASSES))
    odd = {**metrics, "source_name": "caf\udce9", "classes": ["a\udce9", *CLASSES[1:]]}
    record = Record.from_run(write_run(tmp_path, RECIPE, {**odd, "counts": {}}))
    assert (record.source, record.classes) == ("caf\ufffd", ("a\ufffd", *CLASSES[1:]))


def test_a_scenario_that_is_none_is_refused_with_its_line(tmp_path: Path) -> None:
    first, second = (record.to_json() for record in some_records(2))
    path = tmp_path / "records.jsonl"
    odd = {**json.loads(second), "scenario": "ninety"}
    path.write_text(f"{first}\n{json.dumps(odd)}\n")
    with pytest.raises(RunError, match=r"records\.jsonl, line 2: .*, got 'ninety' at scenario\. Remove that line"):
        read_records(path)


def test_a_loss_of_a_package_that_is_not_here_is_named_with_all_its_parameters() -> None:
    assert LossTable("proxy", (("margin", 0.5), ("tail", True))).label == "proxy(margin=0.5, tail=True)"
    assert LossTable("acl", (("eta", "much"),)).label == "acl(eta=much)"


@pytest.mark.parametrize(
    "changes",
    [
        {"encoder_training.loss": "ce"},
        {"encoder.name": "resnet50", "data.image_size": 32, "data.channels": 1},
        {"data.held_out": False, "data.skip_unreadable": True},
        {"data.source": "/else/where/photos"},
    ],
)
def test_what_is_done_to_images_does_not_change_which_they_are(changes: dict[str, Any]) -> None:
    metrics = {**metrics_of(RECIPE, [0, 1, 2]), "source_name": "photos"}
    assert data_key(RECIPE.override(**changes), metrics) == data_key(RECIPE, metrics)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 4},
        {"data.scenario": "90:10,total=500"},
        {"data.test": 0.3},
        {"data.val": 0.2},
        {"data.split": "stratified"},
        {"data.group": "patient"},
        {"data.classes": ("top", "shirt", "coat")},
    ],
)
def test_whatever_draws_or_splits_images_makes_other_data(changes: dict[str, Any]) -> None:
    metrics = metrics_of(RECIPE, [0, 1, 2])
    assert data_key(RECIPE.override(**changes), metrics) != data_key(RECIPE, metrics)


def test_data_are_the_same_for_all_seeds_that_do_not_draw_anew_and_others_once_images_were_added() -> None:
    metrics, still = metrics_of(RECIPE, [0, 1, 2]), RECIPE.override(**{"data.redraw": False})
    assert data_key(still, metrics) == data_key(still.override(seed=9), metrics)
    assert data_key(still, metrics) == data_key(RECIPE.override(seed=0), metrics)
    counts = {**metrics["counts"], "train": {"top": 71, "shirt": 7, "coat": 20}}
    assert data_key(still, {**metrics, "counts": counts}) != data_key(still, metrics)


def test_a_run_without_an_area_under_the_curve_has_none(tmp_path: Path) -> None:
    record = Record.from_run(write_run(tmp_path, RECIPE, metrics_of(RECIPE, [0, 0])))
    assert record.test.auroc is None
    assert record.held_out is None


def test_of_equally_many_the_last_class_is_the_minority(tmp_path: Path) -> None:
    metrics = metrics_of(RECIPE, [0, 1, 1, 2, 2, 2])
    metrics["counts"] = {"train": {"top": 5, "shirt": 5, "coat": 5}}
    assert Record.from_run(write_run(tmp_path, RECIPE, metrics)).test.minority == 3


def test_only_a_finished_run_with_test_images_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^The run in .* is not finished\. Finish it before recording it\.$"):
        Record.from_run(write_run(tmp_path, RECIPE, None))
    metrics = {**metrics_of(RECIPE, [0, 1]), "test": None}
    with pytest.raises(RunError, match=r"^The run in .* has no test images\. Set data\.te"):
        Record.from_run(write_run(tmp_path, RECIPE, metrics))


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("test.figures.accuracy.value", -5, r"-5\.0 at test\.accuracy"),
        ("test.figures.accuracy.value", math.nan, r"None at test\.accuracy"),
        ("test.figures.uwa", 3, "not subscriptable"),
        ("test.num_images", "x", r"'x' at test\.images"),
        ("test.per_class", [], "list index out of range"),
        ("test", "x", "string indices"),
        ("lopsided", "\ud800", "at the line"),
        ("counts", [1], "no attribute 'get'"),
        ("counts.train", [1], "no attribute 'get'"),
        ("classes", [], "empty"),
        pytest.param("seconds", 10**400, "too large", id="seconds beyond float"),
        ("environment", {}, "no 'threads'"),
    ],
)
def test_metrics_that_could_not_be_read_again_as_a_record_are_refused_with_their_run(
    tmp_path: Path, path: str, value: object, why: str
) -> None:
    metrics = inner = metrics_of(RECIPE, [0, 1, 2])
    *names, last = path.split(".")
    for name in names:
        inner = inner[name]
    inner[last] = value
    (tmp_path / "run").mkdir()
    run = write_run(tmp_path / "run", RECIPE, metrics)
    with pytest.raises(
        RunError, match=rf"^The metrics of the run in \S*run are damaged \(.*{why}.*\)\. Train the run again"
    ):
        Record.from_run(run)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_a_line_that_a_crash_cut_off_is_passed_over_and_repaired(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("sweep") / "records.jsonl"
    first, second, third = write_records(path, 3)
    content = path.read_bytes()
    last = len(third.to_json()) + 1
    path.write_bytes(content[: len(content) - data.draw(st.integers(2, last - 1), label="bytes lost")])
    found, notes = read_records(path)
    assert found == [first, second]
    assert notes == [f"Skipped the last line of {path}: it is incomplete."]
    assert append_records(path, third) == notes
    assert path.read_bytes() == content
    assert read_records(path) == ([first, second, third], [])


def test_zeros_at_the_end_of_a_file_are_a_line_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    written = write_records(path, 2)
    path.write_bytes(path.read_bytes() + bytes(100))
    assert read_records(path)[0] == written


def test_a_last_line_that_lacks_only_its_break_counts(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    written = write_records(path, 2)
    path.write_text(path.read_text().rstrip("\n"))
    assert read_records(path) == (written, [])
    more = some_records(3)[2]
    assert append_records(path, more) == []
    assert read_records(path) == ([*written, more], [])


def test_of_two_records_of_a_cell_the_first_counts(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    first, second = write_records(path, 2)
    other = replace(first, seconds=9.0)
    assert append_records(path, other) == []
    assert read_records(path) == ([first, second], [])
    path.write_text(path.read_text() + other.to_json() + "\n")
    found, notes = read_records(path)
    assert found == [first, second]
    assert notes == [f"Skipped 1 records of {path}: their cells have earlier records."]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", r"a line must be a record of a sweep, got '\{'\."),
        ("[]", r"a line must be a record of a sweep, got '\[\]'\."),
        ('{"a": 1}', r"a line must be a record of a sweep, got '\{\"a\": 1\}'\."),
        ('{"format": 1}', r"a line must be of format 2, got 1\. Read it with the version of lopsided that wrote it\."),
        ('{"format": 2}', r"a line must be a record of a sweep, got .* at cell\."),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "records.jsonl"
    first, second = write_records(path, 2)
    content = f"{first.to_json()}\n{line}\n{second.to_json()}\n"
    path.write_text(content)
    for reading in (lambda: read_records(path), lambda: append_records(path, some_records(3)[2])):
        with pytest.raises(RunError, match=rf"records\.jsonl, line 2: {sentence} Remove that line and start the sweep"):
            reading()
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", "3"), ("loss", "cl"), ("loss", {"name": "cl", "eta": None}), ("test", {}), ("cell", 1), ("seed", 1.5)],
)
def test_a_field_of_another_kind_is_named(name: str, value: object) -> None:
    values = {**json.loads(some_records(1)[0].to_json()), name: value}
    with pytest.raises(RunError, match=rf"^a line must be a record of a sweep, got .* at {name}"):
        Record.from_json(json.dumps(values))


@pytest.mark.parametrize("value", [1e300, 1.00001, -0.1, math.inf, -math.inf, 5])
@pytest.mark.parametrize("name", ["accuracy", "uwa", "auroc", "majority_vote", "recalls"])
def test_a_share_must_lie_between_0_and_1(name: str, value: float) -> None:
    values = json.loads(some_records(1)[0].to_json())
    values["test"][name] = [0.5, value] if name == "recalls" else value
    with pytest.raises(RunError, match=rf"^a line must be a record of a sweep, got \S+ at test\.{name}"):
        Record.from_json(json.dumps(values))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"gone\.jsonl cannot be read \(No such file or dir"):
        read_records(tmp_path / "gone.jsonl")
    with pytest.raises(RunError, match=r"\(Is a directory\)\.$"):
        read_records(tmp_path)


def test_failures_are_kept_in_their_order_and_their_torn_line_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "failures.jsonl"
    assert read_failures(path) == []
    attempts = [Failure.of(RECIPE, error) for error in ("one.", 'two: "\n\x1b".', "three.")]
    for attempt in attempts[:2]:
        append_failure(path, attempt)
    assert attempts[0].name == "90:10 ACL(eta=300, eta_unit=absolute, normalization=released) seed 3"
    path.write_bytes(path.read_bytes() + b'{"format":1,"cell"')
    append_failure(path, attempts[2])
    assert read_failures(path) == attempts


def test_many_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    written = some_records(24)

    def write(part: list[Record]) -> None:
        for record in part:
            append_records(path, record)

    threads = [threading.Thread(target=write, args=(written[i : i + 9],)) for i in range(0, 24, 3)]  # They overlap.
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = path.read_text().splitlines()
    assert len(lines) == 24
    assert {Record.from_json(line) for line in lines} == set(written)


def test_whoever_waits_too_long_for_its_turn_is_told_who_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_module, "LOCK_SECONDS", 0.05)
    with files.lock(tmp_path), pytest.raises(RunError, match=r"in use by process \d+ on .*\. Wait for it to end\.$"):
        append_records(tmp_path / "records.jsonl", some_records(1)[0])


def test_what_the_disk_refuses_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"^cannot write .*exists"):
        append_records(tmp_path / "file" / "records.jsonl", some_records(1)[0])


def test_records_are_read_without_torch() -> None:
    script = "import sys, lopsided.runs.records; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], env=environment(), check=False).returncode == 0


FOLDED = RECIPE.override(**{"data.folds": 5, "data.fold": 7})


def folded(**val: int) -> dict[str, Any]:
    """The metrics of a fold; the images of ``val`` are taken from the training images."""
    metrics = metrics_of(RECIPE, [0, 0, 0, 0, 2, 2])
    train = metrics["counts"]["train"]
    rest = {name: number - val.get(name, 0) for name, number in train.items()}
    return {**metrics, "counts": {**metrics["counts"], "train": rest, "val": val}}


def test_the_record_of_a_fold_says_which_one_and_how_many_images_are_outside_it(tmp_path: Path) -> None:
    record = Record.from_run(write_run(tmp_path, FOLDED, folded(top=10, shirt=1)))
    assert record.fold == Fold(fold=7, folds=5, rest=97, rest_minority=7)
    assert record.fold.repeat == 1
    assert record.name.endswith(" fold 7")
    assert Record.from_json(record.to_json()) == record
    failure = Failure.of(FOLDED, "it broke.", "mine")
    assert failure.name.endswith("mine fold 7")
    assert Failure.from_json(failure.to_json()) == failure


def test_folds_of_one_recipe_are_runs_of_one_treatment_and_other_numbers_of_folds_are_not() -> None:
    other = FOLDED.override(**{"data.fold": 8})
    assert family_of(other) == family_of(FOLDED)
    assert family_of(FOLDED.override(**{"data.folds": 4})) != family_of(FOLDED)
    assert data_key(other, folded()) != data_key(FOLDED, folded())


def test_two_runs_of_a_fold_saw_the_same_test_images_whatever_they_validated_on() -> None:
    other = FOLDED.override(**{"data.val": 0.05})
    assert data_key(other, folded(top=10, shirt=1)) == data_key(FOLDED, folded())
    more = folded()
    more["counts"]["train"]["top"] += 1
    assert data_key(FOLDED, more) != data_key(FOLDED, folded())
