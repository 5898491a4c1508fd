"""Folders and files from a stranger: they run no code, and what is wrong with them is one sentence."""

from __future__ import annotations

import ast
import csv
import hashlib
import io
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from safetensors.torch import load_file, save, save_file

from disk_jobs import TINY, call
from hostile import broken_safetensors, mutated, pickles, safetensors
from lopsided import TwoStageClassifier
from lopsided.cli import run
from lopsided.data.prepare import add_more
from lopsided.data.sources import open_source
from lopsided.errors import DataError, InputError, LopsidedError, RunError
from lopsided.models.encoders import build_encoder
from lopsided.recipe import Recipe
from lopsided.recipe.sections import Data
from lopsided.reports.run_page import run_page
from lopsided.reports.thumbnails import PICTURES
from lopsided.runs.folder import Run
from lopsided.runs.records import read_failures, read_records
from lopsided.runs.reopen import open_model
from lopsided.runs.sweep import about_sweep
from lopsided.training.checkpoint import FOLDER_NAME, STATE_NAME, Checkpoint, restore_training
from made_runs import make_run
from synthetic_records import make_records
from tiny import write_model, write_photos

SOURCE = Path(__file__).parents[1] / "src"
FUZZ = settings(max_examples=40, deadline=None, derandomize=True, database=None)


# No code


UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "runpy"}
UNSAFE_CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "torch.jit.load", "torch.export.load", "torch.hub.load",
    "np.load", "numpy.load", "np.fromfile", "pd.read_pickle", "pandas.read_pickle", "onnx.load", "os.system",
    "dist.broadcast_object_list", "dist.all_gather_object", "dist.gather_object", "load_state_dict_from_url",
}  # fmt: skip


def dotted(node: ast.expr) -> str:
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def unsafe(text: str) -> list[str]:
    """What a source could run a stranger's code with."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [name for name in names if name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.Call):
            found += [dotted(node.func)] if dotted(node.func) in UNSAFE_CALLS else []
            for keyword in node.keywords:
                on = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                found += [keyword.arg] if on and keyword.arg in ("allow_pickle", "pretrained", "shell") else []
    return found


@pytest.mark.slow
def test_no_source_has_what_could_run_a_strangers_code() -> None:
    sources = sorted(SOURCE.rglob("*.py"))
    assert len(sources) > 90
    assert {path.name: unsafe(path.read_text()) for path in sources if unsafe(path.read_text())} == {}


def test_the_search_finds_what_it_looks_for() -> None:
    text = "import pickle.x\nfrom joblib import load\ntorch.load(f)\nnp.load(f, allow_pickle=True)\neval('1')\nm.eval()"
    assert sorted(unsafe(text)) == ["allow_pickle", "eval", "joblib", "np.load", "pickle.x", "torch.load"]


def with_card(folder: Path, content: bytes) -> Path:
    """Put weights into a model's folder, and their hash into its card, as a stranger would."""
    card = json.loads((folder / "model.json").read_text())
    (folder / "model.safetensors").write_bytes(content)
    (folder / "model.json").write_text(json.dumps({**card, "sha256": hashlib.sha256(content).hexdigest()}))
    return folder


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """A run, a model, a sweep, a table and an estimator that all can be read."""
    make_run(tmp_path / "run", test=(6, 4), val=(4, 3), pictures=False)
    write_model(tmp_path / "model", encoder="mlp-4", image_size=4)
    checkpoint = tmp_path / "run" / FOLDER_NAME
    checkpoint.mkdir()
    state = {"recipe": "r", "data": "d", "stage": "encoder", "format": 1}
    save_file({"module.x": torch.ones(2)}, checkpoint / STATE_NAME, {"lopsided": json.dumps(state)})
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text('{"format": 1}')
    records = make_records("eta", runs=1, scenarios=["90:10"])
    (tmp_path / "sweep" / "records.jsonl").write_text("".join(f"{record.to_json()}\n" for record in records))
    photos = write_photos(tmp_path / "photos", {"cat": 2, "dog": 2})
    rows = [f"{path.relative_to(photos)},{path.parent.name}" for path in sorted(photos.rglob("*.png"))]
    (photos / "table.csv").write_text("\n".join(["path,label", *rows]))
    for name in ("table.parquet", "marks.csv"):
        shutil.copy(photos / "table.csv", photos / name)
    save_file(build_encoder("mlp-4", in_features=3)[0].state_dict(), tmp_path / "weights.safetensors")
    return tmp_path


READERS: dict[str, Callable[[Path], object]] = {
    "model/model.safetensors": lambda root: open_model(root / "model", "cpu"),
    "model/model.json": lambda root: open_model(root / "model", "cpu"),
    "model/estimator.json": lambda root: TwoStageClassifier.load(root / "model", "cpu"),
    "run/recipe.toml": lambda root: Run.open(root / "run"),
    "run/metrics.json": lambda root: run_page(root / "run"),
    "run/predictions.csv": lambda root: run_page(root / "run"),
    "run/features.safetensors": lambda root: run_page(root / "run"),
    "run/checkpoint/state.safetensors": lambda root: Checkpoint(root / "run").load(),
    "sweep/sweep.json": lambda root: about_sweep(root / "sweep"),
    "sweep/records.jsonl": lambda root: read_records(root / "sweep" / "records.jsonl"),
    "photos/table.csv": lambda root: open_source(root / "photos" / "table.csv"),
    "photos/table.parquet": lambda root: open_source(root / "photos" / "table.parquet"),
    "photos/marks.csv": lambda root: add_more(
        open_source(root / "photos"), Data(more=[str(root / "photos" / "marks.csv")], allow_outside=True)
    ),
    "weights.safetensors": lambda root: build_encoder(
        "mlp-4", in_features=3, weights=root / "weights.safetensors"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_a_pickle_under_any_name_that_is_read_is_refused_and_runs_nothing(stranger: Path, name: str) -> None:
    mark = stranger / "was here"
    if name not in ("model/estimator.json", "photos/table.parquet"):
        READERS[name](stranger)  # As it is, it can be read.
    for kind, content in pickles(mark).items():
        if name == "model/model.safetensors":
            with_card(stranger / "model", content)
        (stranger / name).write_bytes(content)
        with pytest.raises(LopsidedError) as caught:
            READERS[name](stranger)
        assert "\n" not in str(caught.value), kind
        assert not mark.exists(), kind


def test_the_pickles_would_have_run_and_lines_of_a_log_are_passed_over(stranger: Path) -> None:
    mark = stranger / "was here"
    content = pickles(mark)
    (stranger / "run" / "log.jsonl").write_bytes(content["pickle 0"])
    run_page(stranger / "run")
    (stranger / "sweep" / "failures.jsonl").write_bytes(content["pickle 2"] + b"\n")
    with pytest.raises(RunError, match=r"a line must be a failure of a sweep"):
        read_failures(stranger / "sweep" / "failures.jsonl")
    assert not mark.exists()
    pickle.loads(content["pickle 5"])
    assert mark.exists()


WITHOUT = {"model/estimator.json", "photos/table.parquet", "run/features.safetensors"}
"""What may be missing: features that are no ordinary file are none."""


@pytest.mark.parametrize("name", sorted(set(READERS) - WITHOUT))
def test_a_link_to_a_device_without_end_and_a_pipe_are_refused_unread(stranger: Path, name: str) -> None:
    path = stranger / name
    for make in (lambda: path.symlink_to("/dev/zero"), lambda: os.mkfifo(path)):
        path.unlink()
        make()
        with pytest.raises((LopsidedError, OSError)) as caught:
            READERS[name](stranger)
        assert isinstance(caught.value, LopsidedError), caught.value


def test_predict_does_not_wait_for_a_pipe(stranger: Path) -> None:
    os.mkfifo(stranger / "image.png")
    ended = call("predict", stranger / "model", stranger / "image.png")
    assert (ended.code, "image.png, which is neither." in ended.err) == (2, True)


# safetensors


@pytest.mark.parametrize(
    "name",
    ["model/model.safetensors", "run/features.safetensors", "run/checkpoint/state.safetensors", "weights.safetensors"],
)
def test_a_safetensors_file_that_is_broken_or_lies_is_refused(stranger: Path, name: str) -> None:
    whole = (stranger / name).read_bytes()
    tried = 0
    for what, content in broken_safetensors(whole):
        if name == "model/model.safetensors":
            with_card(stranger / "model", content)
        (stranger / name).write_bytes(content)
        with pytest.raises(LopsidedError) as caught:
            READERS[name](stranger)
        assert len(str(caught.value)) < 1000, what
        tried += 1
    assert tried > 30


def test_weights_that_do_not_fit_or_are_no_finite_numbers_are_refused(stranger: Path) -> None:
    model = stranger / "model"
    state = load_file(model / "model.safetensors")
    first = next(iter(state))
    nan, huge = state[first].clone(), state[first].clone()
    nan.view(-1)[0], huge.view(-1)[-1] = float("nan"), float("inf")
    for changed, told in (
        ({**state, first: state[first][..., :-1].contiguous()}, f"{first} is torch.float32 of shape "),
        ({**state, first: state[first].long()}, f"{first} is torch.int64 of shape "),
        ({**state, first: state[first].half()}, f"{first} is torch.float16 of shape "),
        ({**state, first: state[first].to(torch.complex64)}, f"holds complex numbers in {first}"),
        ({key: value for key, value in state.items() if key != first}, "Missing key"),
        ({**state, "more": torch.ones(3)}, "Unexpected key"),
        ({**state, first: nan}, "holds NaN or infinite numbers"),
        ({**state, first: huge}, "holds NaN or infinite numbers"),
    ):
        with pytest.raises(RunError) as caught:
            open_model(with_card(model, save(changed)), "cpu")
        assert told in str(caught.value)


@pytest.mark.parametrize("kind", ["card", "weights"])
@pytest.mark.parametrize("verb", ["predict", "predict --json", "predict --out", "evaluate"])
def test_a_model_that_answers_nan_is_refused(stranger: Path, kind: str, verb: str) -> None:
    model, photos = stranger / "model", write_photos(stranger / "photos", {"cat": 2, "dog": 2})
    card = json.loads((model / "model.json").read_text())
    if kind == "card":
        card.update(mean=[9e29] * 3, std=[1.1e-30] * 3)
        (model / "model.json").write_text(json.dumps(card))
    else:
        state = load_file(model / "model.safetensors")
        with_card(model, save({key: torch.full_like(value, 3e38) for key, value in state.items()}))
    name, *flags = verb.split()
    out = stranger / "answers.csv"
    ended = call(name, model, photos, *flags, *([out] if "--out" in flags else []))
    assert ended.code == 2
    assert "nan" not in ended.out.lower()
    assert ended.err.startswith("lopsided: The model returned NaN instead of probabilities. ")
    assert not out.exists()


def test_kinds_of_numbers_that_numpy_or_torch_do_not_have_are_refused(stranger: Path) -> None:
    for kind, size in (("BF16", 2), ("F8_E4M3", 1), ("F8_E8M0", 1), ("F4", 1), ("I64", 8)):
        header = {"test": {"dtype": kind, "shape": [2, 4], "data_offsets": [0, 8 * size]}}
        (stranger / "run" / "features.safetensors").write_bytes(safetensors(header, b"\1" * (8 * size)))
        with pytest.raises(RunError, match=r"features\.safetensors must "):
            Run.open(stranger / "run").features()


def test_weights_to_start_from_must_be_finite(stranger: Path) -> None:
    state = load_file(stranger / "weights.safetensors")
    first = next(iter(state))
    state[first].view(-1)[0] = float("nan")
    save_file(state, stranger / "weights.safetensors")
    with pytest.raises(InputError, match=rf"the numbers in {first} are not finite"):
        READERS["weights.safetensors"](stranger)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [3, 9000, 9000], "image_size": 9000},
        {"shape": [3, 8000, 8000], "image_size": 8000},
        {"encoder": "mlp-99999-99999-99999"},
        {"channels": 0, "mean": [], "std": []},
        {"channels": 7, "shape": [7, 4, 4], "mean": [0.5] * 7, "std": [0.5] * 7},
        {"image_size": 5},
        {"std": [1e-60, 1, 1]},
        {"classes": ["cat", "cat"]},
        {"classes": ["cat", "a\ud800"]},
        {"kind": "vector", "shape": [48], "mean": [0.0] * 48, "std": [1.0] * 48},
        {"encoder": "x" * 100_000},
        {"encoder": "hf-hub:someone/model"},
        {"format": "9" * 10_000},
    ],
)
def test_a_card_that_asks_for_the_impossible_is_refused_before_it_is_built(
    stranger: Path, changes: dict[str, Any]
) -> None:
    path = stranger / "model" / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(RunError) as caught:
        open_model(stranger / "model", "cpu")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("changed", ["classes", "weights"])
def test_a_classifier_of_another_number_of_classes_is_refused_before_anything_is_built(
    stranger: Path, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object, **__: object) -> None:
        raise AssertionError("It was built.")

    monkeypatch.setattr("lopsided.models.model._build", build)
    model = stranger / "model"
    if changed == "classes":
        card = json.loads((model / "model.json").read_text())
        changes = {"classes": [f"class {i}" for i in range(1000)], "prior": [0.001] * 1000}
        (model / "model.json").write_text(json.dumps({**card, **changes}))
    else:
        state = load_file(model / "model.safetensors")
        with_card(model, save({key: value for key, value in state.items() if key != "classifier.weight"}))
    with pytest.raises(RunError, match=r"must hold a classifier for (1,000|2) classes, got (one|none)"):
        open_model(model, "cpu")


def test_a_checkpoint_of_a_stranger_is_checked_field_by_field(stranger: Path) -> None:
    path = stranger / "run" / FOLDER_NAME / STATE_NAME
    good = {"recipe": "r", "data": "d", "stage": "encoder", "format": 1}
    for changes in (
        {"epoch": "many"}, {"epoch": -1}, {"stage": "../other"}, {"history": 3}, {"seconds": "NaN"},
        {"chosen": "../../../model.safetensors"}, {"chosen": "/etc/passwd"}, {"selection": []}, {"format": [[]] * 999},
        {"seconds": -1e308}, {"seconds": 1e999}, {"threads": -5}, {"threads": 0}, {"threads": 2**31}, {"ranks": -1},
        {"ranks": 0}, {"epoch": -(10**400)}, {"history": [3]}, {"history": [{"loss": [1]}]},
    ):  # fmt: skip
        save_file({"module.x": torch.ones(2)}, path, {"lopsided": json.dumps({**good, **changes})})
        with pytest.raises(RunError, match=r"Remove the checkpoint folder to start again\.$") as caught:
            Checkpoint(stranger / "run").load()
        assert len(str(caught.value)) < 400
    save_file({"x": torch.ones(1)}, path, {"lopsided": "[" * 100_000})
    with pytest.raises(RunError, match=r"does not hold the state of a run"):
        Checkpoint(stranger / "run").load()
    module = torch.nn.Linear(2, 2)
    tensors = {f"module.{key}": value for key, value in module.state_dict().items()}
    with pytest.raises(RunError, match=r"The checkpoint holds NaN or infinite numbers\."):
        restore_training(module, torch.optim.Adam(module.parameters()), {**tensors, "a": torch.tensor(float("nan"))})


def test_resuming_from_a_checkpoint_that_does_not_fit_is_one_sentence(stranger: Path) -> None:
    from lopsided.training import checkpoint

    photos, run = write_photos(stranger / "more", {"cat": 14, "dog": 8}), stranger / "fitted"
    arguments = ["fit", photos, "--out", run, *TINY, "--quiet"]
    assert call(*arguments).code == 0
    (run / "metrics.json").unlink()
    path = run / FOLDER_NAME / STATE_NAME
    state, _ = Checkpoint(run).load() or (None, None)
    assert state is not None
    state.finished, state.stage, state.epoch, state.history = False, "encoder", 0, []
    text = json.dumps(checkpoint.asdict(state))
    for tensors in (
        {"optimizer.99.exp_avg": torch.ones(1)},
        {"optimizer.x.y": torch.ones(1)},
        {"module.x": torch.ones(1)},
    ):
        save_file(tensors, path, {"lopsided": text})
        ended = call(*arguments, "--resume")
        said = [line for line in ended.err.splitlines() if not line.startswith("warning")]
        assert (ended.code, len(said)) == (2, 1)
        assert "The checkpoint does not fit the recipe: " in said[0]


# Text


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shelf")
    make_run(folder / "run", test=(6, 4), val=(4, 3), pictures=False)
    write_model(folder / "model", encoder="mlp-4", image_size=4)
    (folder / "sweep").mkdir()
    (folder / "sweep" / "sweep.json").write_text('{"format": 1, "lopsided": "0.1.0"}\n')
    records = make_records("eta", runs=1, scenarios=["90:10"])[:3]
    (folder / "sweep" / "records.jsonl").write_text("".join(f"{record.to_json()}\n" for record in records))
    photos = write_photos(folder / "photos", {"cat": 2, "dog": 2})
    rows = [f"{path.relative_to(photos)},{path.parent.name},g,train" for path in sorted(photos.rglob("*.png"))]
    (photos / "table.csv").write_text("\n".join(["path,label,group,split", *rows]))
    write_photos(folder / "found", {"dog": 2}, start=50)
    marks = [f"{path},dog,yes" for path in sorted((folder / "found").rglob("*.png"))]
    (photos / "marks.csv").write_text("\n".join(["path,label,mark", *marks]))
    paths = [path.relative_to(photos).as_posix() for path in sorted(photos.rglob("*.png"))]
    table = pyarrow.table({"path": paths, "label": [path.split("/")[0] for path in paths]})
    parquet.write_table(table, photos / "table.parquet")
    return folder


FUZZED = [
    "model/model.json", "run/recipe.toml", "run/metrics.json", "run/predictions.csv", "sweep/sweep.json",
    "sweep/records.jsonl", "photos/table.csv", "photos/table.parquet", "photos/marks.csv",
]  # fmt: skip


def is_refused(shelf: Path, name: str) -> bool:
    """Read a file of a stranger; any other error than a sentence is the test's failure."""
    try:
        READERS[name](shelf)
    except LopsidedError:
        return True
    return False


@pytest.mark.parametrize("name", FUZZED)
def test_a_text_of_any_bytes_is_read_or_refused_in_a_sentence(shelf: Path, name: str) -> None:
    whole = (shelf / name).read_bytes()
    refused: list[bool] = []

    @FUZZ
    @given(mutated(whole))
    def check(content: bytes) -> None:
        (shelf / name).write_bytes(content)
        refused.append(is_refused(shelf, name))

    try:
        check()
    finally:
        (shelf / name).write_bytes(whole)
    assert sum(refused) > 5, "What was changed was looked at."


ODD: list[Any] = [
    None, True, -1, 0, 10**30, 1e308, float("nan"), float("-inf"), "", "x", "\ud800", [], {}, [[]], {"a": 1}, ["x"],
    "9" * 5000, [None] * 3,
]  # fmt: skip


@pytest.mark.parametrize("name", ["model/model.json", "run/metrics.json", "sweep/records.jsonl"])
def test_a_record_with_any_value_in_any_place_is_read_or_refused_in_a_sentence(shelf: Path, name: str) -> None:
    whole = (shelf / name).read_text()
    values = json.loads(whole.splitlines()[0] if name.endswith("jsonl") else whole)
    refused: list[bool] = []

    @FUZZ
    @given(st.data())
    def check(data: st.DataObject) -> None:
        changed = inner = json.loads(json.dumps(values))
        while True:
            key = data.draw(st.sampled_from(list(inner) if isinstance(inner, dict) else range(len(inner))))
            if not (isinstance(inner[key], dict | list) and inner[key] and data.draw(st.integers(0, 9))):
                break
            inner = inner[key]
        inner[key] = data.draw(st.sampled_from(ODD))
        (shelf / name).write_text(json.dumps(changed) + "\n")
        refused.append(is_refused(shelf, name))

    try:
        check()
    finally:
        (shelf / name).write_text(whole)
    assert sum(refused) > 5, "What was changed was looked at."


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("counts", None),
        ("loss", None),
        ("loss", 3),
        ("source", None),
        ("unreadable", None),
        ("val", None),
        ("test", "x"),
        ("test.figures.uwa.value", 10**400),
        ("val.figures.uwa.low", "null"),
        ("test.per_class.0.label", 3),
        ("test.per_class.1.recall.high", "null"),
        ("test.majority.uwa", 10**400),
        ("test.majority.macro_f1", "x"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_resuming_a_finished_run_prints_no_metrics_that_were_not_checked(
    tmp_path: Path, path: str, value: object
) -> None:
    run = make_run(tmp_path / "run", test=(6, 4), val=(4, 3), pictures=False)
    resume = ("fit", "--out", run, "--resume", "--quiet")
    assert call(*resume).code == 0
    metrics = inner = json.loads((run / "metrics.json").read_text())
    *names, last = (int(name) if name.isdigit() else name for name in path.split("."))
    for name in names:
        inner = inner[name]
    inner[last] = None if value == "null" else value
    if value is None:
        del inner[last]
    (run / "metrics.json").write_text(json.dumps(metrics))
    ended = call(*resume)
    said = ended.err.splitlines()
    assert (ended.code, ended.out, len(said)) == (2, "", 1)
    assert f"metrics.json has a missing or invalid value: {path.split('.', maxsplit=1)[0]}" in said[0]


@pytest.mark.parametrize(
    "text",
    [
        "self = 1",
        "a" * 400_000 + " = 1",
        '"\\' * 200_000,
        "".join(f"[t{i}]\n" for i in range(2000)),
        "a = " + "[" * 100_000,
        "seed = " + "9" * 5000,
        "\ufeffseed = 1",
        "seed = 1\nseed = 2",
        "[data]\nimage_size = 1000000",
        "[encoder_training]\nepochs = 1000000000000",
        "[encoder_training]\nbatch_size = 1000000000000",
        "[encoder_training]\nbatch_size = -8",
        "[encoder_training.loss]\nname = 'cl'\ntemperature = 5e-324",
        "[encoder_training.loss]\nname = '" + "x" * 100_000 + "'",
        "[encoder_training.loss]\nname = 'cl'\n" + "x" * 100_000 + " = 1",
        "[encoder_training]\nloss = " + "{ a = " * 100 + "1" + " }" * 100,
        "[encoder_training]\nlr = nan",
        "[encoder_training.loss]\nname = 'acl'\neta = inf",
        "[head]\nout = 2147483647",
        "threads = 2147483647",
    ],
)
def test_a_recipe_that_would_take_for_ever_or_all_memory_is_refused_at_once(text: str) -> None:
    with pytest.raises(InputError) as caught:
        Recipe.from_toml(text)
    assert len(str(caught.value)) < 400


def test_many_dots_in_texts_and_comments_are_no_nesting() -> None:
    dots = "." * 500
    text = (
        f'description = """\n{dots}\n\'{dots}"""  # {dots}\n[data]\nsource = \'{dots}\'\nclasses = ["{dots}\\"", "b"]'
    )
    assert Recipe.from_toml(text).data.source == dots


# Tables and names


def test_a_path_that_a_link_leads_out_of_the_folder_of_its_table_needs_to_be_allowed(tmp_path: Path) -> None:
    outside = write_photos(tmp_path / "outside", {"cat": 2, "dog": 2})
    inside = write_photos(tmp_path / "inside", {"dog": 1})
    (inside / "cat").symlink_to(outside / "cat")
    (inside / "one.png").symlink_to(outside / "cat" / "000.png")
    (inside / "own.png").symlink_to(inside / "dog" / "000.png")
    for path in (
        "cat/001.png",
        "one.png",
        str(outside / "cat" / "000.png"),
        "../outside/cat/000.png",
        "dog/../../x.png",
    ):
        table = inside / "table.csv"
        table.write_text(f"path,label\n{path},cat\nown.png,dog\n")
        with pytest.raises(DataError, match=r"^paths must stay below the folder.*, got .*--allow-outside\.$"):
            open_source(table)
    table.write_text("path,label\ncat/000.png,cat\nown.png,dog\n")
    assert len(open_source(table, allow_outside=True)) == 2
    (tmp_path / "linked").symlink_to(inside)
    table.write_text("path,label\nown.png,cat\ndog/000.png,dog\n")
    assert len(open_source(tmp_path / "linked" / "table.csv")) == 2, "The folder itself may be a link."


def test_every_command_that_takes_a_table_asks_for_the_flag_and_a_recipe_cannot_speak_for_report(
    tmp_path: Path,
) -> None:
    outside = write_photos(tmp_path / "outside", {"cat": 14, "dog": 8})
    rows = [f"{path},{path.parent.name}" for path in sorted(outside.rglob("*.png"))]
    table = tmp_path / "tables" / "table.csv"
    table.parent.mkdir()
    table.write_text("\n".join(["path,label", *rows]))
    run = tmp_path / "run"
    told = "paths must stay below the folder of the table"
    for arguments in (["data", table], ["fit", table, "--out", run, *TINY], ["evaluate", run, table]):
        refused = call(*arguments, "--quiet") if arguments[0] != "evaluate" or run.exists() else None
        assert refused is not None
        assert (refused.code, told in refused.err) == (2, True)
        flag = "allow_outside=true" if arguments[0] == "fit" else "--allow-outside"
        allowed = call(*arguments, "--quiet", flag)
        assert allowed.code == 0, allowed.err
    assert Run.open(run).recipe.data.allow_outside, "It is kept, so that the run can be resumed and repeated."
    pages = []
    assert call("report", run, "--quiet").code == 0
    assert "data:image/webp" in (run / "report.html").read_text(), "The user allowed fit to keep pictures."
    (run / PICTURES).unlink()  # A stranger's recipe allows what this user did not.
    for flags in ([], ["--allow-outside"]):
        assert call("report", run, "--quiet", *flags).code == 0
        pages.append((run / "report.html").read_text())
    assert f"There are no pictures: {told}" in pages[0]
    assert "data:image/webp" not in pages[0]
    assert "data:image/webp" in pages[1]


NAMES = {
    "html": "<script>alert(1)</script>",
    "lines": "a\nlopsided: all is well",
    "direction": "abc\u202etxt.exe",
    "escape": "\x1b[2J\x1b]0;title\x07",
    "long": "x" * 10_000,
    "formula": '=HYPERLINK("x")',
    "latex": "\\input{x}%",
    "path": "../../etc",
    "template": "{{7*7}}",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", NAMES)
def test_a_class_of_any_name_goes_through_every_command(tmp_path: Path, kind: str) -> None:
    name = NAMES[kind]
    other = "dog"
    photos = write_photos(tmp_path / "photos", {"cat": 14, "dog": 8})
    table = photos / "table.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label"])
        for path in sorted(photos.rglob("*.png")):
            writer.writerow([path.relative_to(photos), name if path.parent.name == "cat" else other])
    run, answers = tmp_path / "run", tmp_path / "answers.csv"
    for arguments in (
        ["data", table], ["fit", table, "--out", run, *TINY], ["evaluate", run, table], ["report", run],
        ["predict", run, photos, "--out", answers],
    ):  # fmt: skip
        ended = call(*arguments, "--quiet")
        assert ended.code == 0, ended.err
        assert all(c.isprintable() or c == "\n" for c in ended.out + ended.err)
        assert "lopsided: all is well" not in [line.strip() for line in ended.out.splitlines()], "A line of its own."
        assert max(map(len, ended.out.splitlines())) < 400
    assert set(json.loads((run / "model.json").read_text())["classes"]) == {name, other}
    with answers.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {f"p:{name}", f"p:{other}"} <= set(rows[0]), "A file holds the name as it is."
    assert {row["predicted"] for row in rows} <= {name, other}
    page = (run / "report.html").read_text(encoding="utf-8")
    for never in ("<script>alert", "\u202e", "\x1b", "{{7*7}}</script>"):
        assert never not in page
    assert ("a spreadsheet may read the class name" in call("predict", run, photos).err) == (kind == "formula")


def test_a_nul_in_a_table_is_refused_with_its_line(tmp_path: Path) -> None:
    for row in ("a.png,x\0", "a\0.png,x"):
        (tmp_path / "t.csv").write_bytes(f"path,label\n{row}\n".encode())
        with pytest.raises(
            DataError, match=r"the column (label|path) must not contain NUL characters, got one in line 2 of "
        ):
            open_source(tmp_path / "t.csv")


def test_a_path_that_is_too_long_is_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"path,label\n{'x' * 5000}.png,x\n")
    with pytest.raises(DataError, match=r"lists missing images: 1 of 1"):
        open_source(tmp_path / "t.csv")


def test_a_line_break_inside_a_cell_stays_what_it_is(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", {"cat": 1, "dog": 1})
    (photos / "t.csv").write_bytes(b'path,label\r\ncat/000.png,"a\rb"\r\ndog/000.png,"c\nd"\r\n')
    assert open_source(photos / "t.csv").classes == ("a\rb", "c\nd")


def test_a_terminal_gets_no_control_characters_from_predict(
    stranger: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stranger / "model" / "model.json"
    names = ["\x1b[2J", "a\nb"]
    path.write_text(json.dumps({**json.loads(path.read_text()), "classes": names}))
    for terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        assert run(["predict", str(stranger / "model"), str(stranger / "photos"), "--quiet"]) == 0
        assert ("\x1b" in capsys.readouterr().out) == (not terminal)


ZHE = "\N{CYRILLIC CAPITAL LETTER ZHE} ".encode() + b"\xff\n"
"""What a program reads that compares names with those of files."""


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("cp1252", b"\\u0416 \\udcff\n"),
        ("ascii", ZHE),
        ("utf-8", ZHE),
    ],
)
def test_what_the_encoding_of_the_output_does_not_have_is_escaped(
    monkeypatch: pytest.MonkeyPatch, encoding: str, expected: bytes
) -> None:
    out, err = io.BytesIO(), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(err, encoding=encoding, write_through=True))

    def examine() -> list[object]:
        for stream in (sys.stdout, sys.stderr):
            print("\N{CYRILLIC CAPITAL LETTER ZHE} \udcff", file=stream)
        return []

    monkeypatch.setattr("lopsided.cli.doctor.examine", examine)
    assert run(["doctor", "--json"]) == 0
    assert out.getvalue() == expected + b"[]\n"
    assert err.getvalue() == (expected.replace(b"\xff", b"\\udcff") if encoding == "utf-8" else b"\\u0416 \\udcff\n")


def test_a_stem_and_a_scenario_of_any_text_are_harmless_in_latex() -> None:
    from lopsided.paper.compare import Protocol, compare
    from lopsided.paper.latex import escape, to_latex

    records = make_records("eta", runs=1, scenarios=["90:10"])
    text = to_latex(compare(records, "eta", Protocol.of(records[0])), "a}\\input{x}%")
    assert "\\input" not in text
    assert escape("\\input{x}^\n") == "\\textbackslash{}input\\{x\\}\\textasciicircum{} "


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")]
)
def test_memory_that_is_exhausted_is_one_sentence(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def examine() -> None:
        raise error

    monkeypatch.setattr("lopsided.cli.doctor.examine", examine)
    ended = call("doctor")
    assert ended.code == 2
    assert ended.err.startswith("lopsided: not enough memory")
    assert ended.err.endswith(
        "Reduce the batch size, the image size or encoder_training.chunk_size, or use a smaller encoder.\n"
    )


def test_a_library_that_does_not_fit_into_memory_is_no_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine() -> None:
        raise ImportError("libtorch_cpu.so: failed to map segment from shared object")

    monkeypatch.setattr("lopsided.cli.doctor.examine", examine)
    ended = call("doctor")
    assert ended.code == 2
    assert ended.err == (
        "lopsided: not enough memory (libtorch_cpu.so: failed to map segment from shared object). "
        "Close other programs, or raise the limit of this process.\n"
    )
