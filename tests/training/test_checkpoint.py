from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lopsided.errors import RunError
from lopsided.training.checkpoint import (
    ENCODER_NAME,
    FOLDER_NAME,
    STATE_NAME,
    Checkpoint,
    State,
    all_finite,
    restore_training,
    training_tensors,
)

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
    again = r"Remove the checkpoint folder to start the run anew\."
    path.write_bytes(b"\0" * 5)
    with pytest.raises(RunError, match=rf"must be a whole safetensors file, got .*{again}"):
        Checkpoint(tmp_path).load()
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(RunError, match=rf"checkpoint must hold the state of a run, got another file\. {again}"):
        Checkpoint(tmp_path).load()
    save_file({"x": torch.zeros(1)}, path, {"lopsided": '{"format": 7}'})
    with pytest.raises(RunError, match=rf"checkpoint must be of format 1, got format 7\. {again}"):
        Checkpoint(tmp_path).load()
    module = nn.Linear(2, 2)
    with pytest.raises(
        RunError, match=rf"must fit the recipe that it is resumed with, got weights of another.*{again}"
    ):
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
