from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lopsided.errors import RunError
from lopsided.models.model import all_finite
from lopsided.training.checkpoint import (
    ENCODER_NAME,
    FOLDER_NAME,
    STATE_NAME,
    Checkpoint,
    State,
    restore_training,
    training_tensors,
)
from lopsided.training.fit import fit
from reporters import Ending
from training.conftest import stripes, tiny

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / FOLDER_NAME).iterdir()}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_training_goes_on_from_a_file_to_the_same_bits(tmp_path: Path, name: str) -> None:
    whole = network()
    optimizer = OPTIMIZERS[name](whole.parameters())
    steps(whole, optimizer, 0, 3)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(State("r", "d", "encoder", epoch=3), training_tensors(whole, optimizer))
    steps(whole, optimizer, 3, 6)

    loaded = Checkpoint(tmp_path).load()
    assert loaded is not None
    state, tensors = loaded
    resumed = network()
    other = OPTIMIZERS[name](resumed.parameters())
    steps(resumed, other, 50, 51)
    restore_training(resumed, other, tensors)
    steps(resumed, other, state.epoch, 6)
    for key, value in resumed.state_dict().items():
        assert torch.equal(value, whole.state_dict()[key]), key


def test_a_state_comes_back_field_by_field(tmp_path: Path) -> None:
    history = [{"loss": 0.1 + 0.2, "stage": "encoder", "share": None}]
    state = State("r", "d", "encoder", 2, {"best": 1 / 3}, history, "chosen-encoder-1.safetensors", seconds=1e-17)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.load() is None
    checkpoint.save(state, {"x": torch.arange(3)})
    loaded = checkpoint.load()
    assert loaded is not None
    assert loaded[0] == state
    assert torch.equal(loaded[1]["x"], torch.arange(3))


def test_files_that_the_state_does_not_name_are_removed(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    for name in ("chosen-encoder-1.safetensors", "chosen-encoder-2.safetensors", ENCODER_NAME):
        checkpoint.save_weights(name, {"x": torch.zeros(1)})
    (tmp_path / FOLDER_NAME / ".state.safetensors.99.tmp").touch()
    checkpoint.save(State("r", "d", "encoder", 2, chosen="chosen-encoder-2.safetensors"), {})
    assert names(tmp_path) == {STATE_NAME, "chosen-encoder-2.safetensors"}
    checkpoint.save_weights(ENCODER_NAME, {"x": torch.zeros(1)})
    checkpoint.save(State("r", "d", "classifier", 0), {})
    assert names(tmp_path) == {STATE_NAME, ENCODER_NAME}
    checkpoint.save(State("r", "d", "classifier", 2, finished=True), {})
    assert names(tmp_path) == {STATE_NAME}


def test_without_a_folder_nothing_is_written_and_the_sentence_says_so() -> None:
    checkpoint = Checkpoint(None)
    checkpoint.save(State("r", "d", "encoder"), {})
    checkpoint.save_weights("x", {})
    assert checkpoint.load() is None
    assert checkpoint.last_good() == "There is no checkpoint, because no folder was given."


def test_the_last_good_checkpoint_is_named_with_its_epoch(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.last_good() == "There is no checkpoint yet."
    state = State("r", "d", "encoder", epoch=4)
    checkpoint.save(state, {})
    state.epoch = 5
    path = tmp_path / FOLDER_NAME / STATE_NAME
    expected = f"The last good checkpoint is {path}, after epoch 4 of stage encoder."
    assert checkpoint.last_good() == expected
    other = Checkpoint(tmp_path)
    other.load()
    assert other.last_good() == expected


def test_a_checkpoint_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER_NAME
    folder.mkdir()
    path = folder / STATE_NAME
    again = r"Remove the checkpoint folder to start again\."
    path.write_bytes(b"\0" * 5)
    with pytest.raises(RunError, match=rf"is not a complete safetensors file \(.*{again}"):
        Checkpoint(tmp_path).load()
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(RunError, match=rf"checkpoint does not hold the state of a run\. {again}"):
        Checkpoint(tmp_path).load()
    save_file({"x": torch.zeros(1)}, path, {"lopsided": '{"format": 7}'})
    with pytest.raises(RunError, match=rf"checkpoint must have format 1, got format 7\. {again}"):
        Checkpoint(tmp_path).load()
    module = nn.Linear(2, 2)
    with pytest.raises(RunError, match=rf"does not fit the recipe: it holds the weights of another model\. {again}"):
        restore_training(module, torch.optim.SGD(module.parameters()), {"module.weight": torch.zeros(1, 1)})


def test_weights_are_finite_or_not() -> None:
    assert all_finite([torch.zeros(2), torch.arange(3)])
    for value in (float("nan"), float("inf")):
        assert not all_finite([torch.zeros(2), torch.tensor([1.0, value])])


def test_a_state_is_due_when_writing_the_last_took_a_twentieth_of_the_time_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    checkpoint = Checkpoint(tmp_path)
    monkeypatch.setattr("lopsided.training.checkpoint.perf_counter", lambda: now[0])
    assert checkpoint.due()  # nothing is saved yet
    write = checkpoint._write

    def slowly(*content: object) -> None:
        write(*content)
        now[0] += 2.0

    monkeypatch.setattr(checkpoint, "_write", slowly)
    checkpoint.save(State("recipe", "data", "encoder"), {})
    now[0] += 39.0
    assert not checkpoint.due()
    now[0] += 1.0
    assert checkpoint.due()
    assert not Checkpoint(None).due()


def test_only_the_checkpoints_own_files_are_removed(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(State("r", "d", "encoder", epoch=1, chosen="chosen-encoder-1.safetensors"), {})
    folder = tmp_path / FOLDER_NAME
    weights = ("chosen-encoder-1.safetensors", "chosen-encoder-2.safetensors", ENCODER_NAME)
    for name in ("notes.txt", ".notes.tmp", *weights):
        (folder / name).write_text("x")
    checkpoint.save(State("r", "d", "encoder", epoch=2, chosen="chosen-encoder-2.safetensors"), {})
    assert names(tmp_path) == {STATE_NAME, "notes.txt", ".notes.tmp", "chosen-encoder-2.safetensors"}


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs that stopped after the checkpoint of the first epoch."""
    folder = tmp_path_factory.mktemp("unfinished")
    with pytest.raises(KeyboardInterrupt):
        fit(RECIPE, SOURCE, folder, reporter=Ending("epoch", nth=2))
    return folder


RECIPE, SOURCE = tiny(encoder_training__epochs=3), stripes({"many": 40, "few": 12})
ROW = {"stage": "encoder", "epoch": 1}


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"epoch": 4}, "it is at epoch 4 of 3 in stage encoder"),
        ({"epoch": 10**400}, "it is at epoch 1000"),
        ({"epoch": 2}, "its history does not match epoch 2 of stage encoder"),
        ({"epoch": 0}, "its history does not match epoch 0"),
        ({"history": []}, "its history does not match epoch 1"),
        ({"history": [{"a": 1}]}, "its history does not match epoch 1"),
        ({"history": [ROW, ROW]}, "its history does not match epoch 1"),
        ({"history": [{**ROW, "stage": "classifier"}]}, "its history does not match epoch 1"),
        ({"stage": "classifier"}, "its history does not match epoch 1 of stage classifier"),
        (
            {"stage": "classifier", "epoch": 0, "history": [{**ROW, "epoch": i + 1} for i in range(4)]},
            "its history does not",
        ),
        ({"stage": "end-to-end"}, "it is in stage end-to-end"),
        ({"selection": {"best": "x"}}, "the selection has no usable best"),
        ({"selection": {"chosen": 7}}, r"the selection names an epoch that is not done \(1 done\)"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_state_that_no_run_of_its_recipe_comes_to_is_not_resumed(
    unfinished: Path, tmp_path: Path, changes: dict[str, Any], got: str
) -> None:
    assert_not_resumed(unfinished, tmp_path, rf"{got}[^\n]*\. Remove the checkpoint folder", **changes)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda key, value: {key: value.long()}, r"is torch\.int64, not torch\.float32"),
        (lambda key, value: {key: value.double()}, r"is torch\.float64, not torch\.float32"),
        (lambda key, value: {}, "it holds no weights after epoch 1"),
        (lambda key, value: {key: value, "optimizer.-1.evil": torch.zeros(())}, "state for weight '-1', but there are"),
        (lambda key, value: {key: value, "optimizer.0.evil": torch.zeros(())}, "optimizer state of torch"),
        (lambda key, value: {key: value.new_zeros(()) if key.endswith("exp_avg") else value}, "optimizer state of tor"),
        (lambda key, value: {key: value.long() if key.endswith("exp_avg") else value}, r"state of torch\.int64"),
        (lambda key, value: {} if key.endswith("exp_avg") else {key: value}, "state of weight 0 must be exp_avg, "),
    ],
    ids=[
        "integers", "doubles", "nothing", "a negative index", "another name", "one number", "a moment of integers",
        "no moment",
    ],
)  # fmt: skip
def test_tensors_that_are_not_those_of_the_recipe_are_not_resumed(
    unfinished: Path, tmp_path: Path, change: Callable[[str, Tensor], dict[str, Tensor]], got: str
) -> None:
    assert_not_resumed(unfinished, tmp_path, rf"{got}[^\n]*\. Remove the checkpoint folder", change)


def assert_not_resumed(
    unfinished: Path,
    folder: Path,
    sentence: str,
    change: Callable[[str, Tensor], dict[str, Tensor]] = lambda key, value: {key: value},
    **fields: Any,
) -> None:
    """Change the checkpoint in a copy of a run. Resuming must fail and leave the checkpoint unchanged."""
    shutil.copytree(unfinished, folder, dirs_exist_ok=True)
    path = folder / FOLDER_NAME / STATE_NAME
    state, tensors = Checkpoint(folder).load() or pytest.fail("There is no checkpoint.")
    assert (state.epoch, state.history[0]["stage"], len(state.history)) == (1, "encoder", 1)
    changed: dict[str, Tensor] = {}
    for key, value in tensors.items():
        changed |= change(key, value)
    save_file(changed, path, {"lopsided": json.dumps({**asdict(state), **fields})})
    before = path.read_bytes()
    with pytest.raises(RunError, match=rf"^The checkpoint does not fit the recipe: [^\n]*{sentence}"):
        fit(RECIPE, SOURCE, folder, resume=True)
    assert path.read_bytes() == before
