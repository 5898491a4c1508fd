"""A request to stop ends the step and saves it, and the run continues to the bytes of one that was not stopped."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lopsided import stopping
from lopsided.errors import RunError
from lopsided.facts.log import Reporter
from lopsided.models.model import CARD_NAME, WEIGHTS_NAME
from lopsided.ranks import ALONE, Ranks
from lopsided.stopping import STOPPING
from lopsided.training import checkpoint
from lopsided.training.checkpoint import Checkpoint, State
from lopsided.training.fit import fit
from lopsided.training.methods import trainer
from training.conftest import stripes, tiny
from training.ranks import together

COUNTS = {"many": 20, "few": 8}
NORMED = {"encoder.name": "test_resnet", "encoder_training__epochs": 3, "encoder_training__batch_norm": "rank"}
CHANGES: dict[str, dict[str, Any]] = {
    "end-to-end": {"method": "end-to-end", "encoder_training__loss": "focal", "encoder_training__epochs": 4},
    "two-stage": {"encoder_training__loss": "acl", "encoder_training__queue": 8, "classifier__augment": True},
    "batch norm and averages": {**NORMED, "encoder_training__ema": 0.9, "encoder_training__views": 2},
    "sharpness and mixing": {
        **{"method": "end-to-end", "encoder_training__loss": "ce", "encoder_training__sam_rho": 0.05},
        **{"encoder_training__mixup": 0.4, "encoder_training__chunk_size": 4, "encoder_training__optimizer": "sgd"},
    },
    "equal average": {**NORMED, "encoder_training__swa_from": 0.3, "data__val": 0.0},
}


class Requesting(Reporter):
    """Asks the process to stop after a step of an epoch of a stage, all counted from 0."""

    def __init__(self, stage: int = 0, epoch: int = 2, step: int = 0) -> None:
        self.moment, self.now = [stage, epoch, step], [-1, 0, 0]

    def stage(self, name: str, epochs: int, steps_per_epoch: int) -> None:
        self.now = [self.now[0] + 1, 0, 0]

    def step(self, loss: float, images: int) -> None:
        if self.now == self.moment:
            STOPPING.request()
        self.now[2] += 1

    def epoch(self, index: int, facts: object) -> None:
        self.now[1:] = [index, 0]


class AtOnce(Requesting):
    """Asks the process to stop after its first step."""

    def step(self, loss: float, images: int) -> None:
        STOPPING.request()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checkpoint, "TIMES_AS_LONG", 1e9)  # Otherwise each epoch is saved anyway.
    before = signal.getsignal(signal.SIGALRM)
    yield
    STOPPING.requested = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def results(folder: Path, kind: str, *, stopped: Requesting | None = None, ranks: Ranks = ALONE) -> list[Any]:
    """Train, or continue, and return the bytes of the model and the facts of the epochs. [] if it was stopped."""
    STOPPING.requested = False
    recipe, source = tiny(encoder_training__batch_size=6, **CHANGES[kind]), stripes(COUNTS)
    try:
        fitted = fit(recipe, source, folder, resume=folder.exists(), reporter=stopped, ranks=ranks)
    except KeyboardInterrupt:
        return []
    timeless = [{k: v for k, v in e.items() if k not in ("seconds", "images_per_second")} for e in fitted.history]
    return [*((folder / name).read_bytes() for name in (WEIGHTS_NAME, CARD_NAME)), json.dumps(timeless)]


def saved(folder: Path) -> State:
    found = Checkpoint(folder).load()
    assert found is not None
    return found[0]


@pytest.mark.parametrize("kind", list(CHANGES))
def test_a_run_that_is_stopped_after_a_step_continues_with_the_next_to_the_same_bytes(
    tmp_path: Path, kind: str
) -> None:
    whole = results(tmp_path / "whole", kind)
    assert whole
    for epoch, step in ((0, 0), (2, 1)):
        folder = tmp_path / f"{epoch}-{step}"
        assert results(folder, kind, stopped=Requesting(0, epoch, step)) == []
        state = saved(folder)
        assert (state.epoch, state.step) == (epoch, step + 1)
        assert results(folder, kind) == whole
        assert not list(folder.rglob("*.tmp"))


@pytest.mark.parametrize("kind", ["end-to-end", "sharpness and mixing"])
def test_an_encoder_with_dropout_continues_with_the_masks_that_were_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    masks: list[torch.Tensor] = []

    def dropped(module: torch.nn.Module, _: object, x: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.dropout(x, 0.5, module.training)
        masks.append(out.detach() == 0)
        return out

    def build(*args: Any, **kwargs: Any) -> tuple[torch.nn.Module, int]:
        encoder, features = build_encoder(*args, **kwargs)
        encoder.register_forward_hook(dropped)
        return encoder, features

    build_encoder = trainer.build_encoder
    monkeypatch.setattr(trainer, "build_encoder", build)
    whole = results(tmp_path / "whole", kind)
    assert len({mask.numpy().tobytes() for mask in masks if mask.any()}) > 10
    assert results(tmp_path / "stopped", kind, stopped=Requesting(0, 1, 1)) == []
    assert saved(tmp_path / "stopped").step == 2
    assert results(tmp_path / "stopped", kind) == whole


def test_a_run_is_stopped_after_each_step_of_both_stages_and_ends_the_same(tmp_path: Path) -> None:
    whole, found, stops = results(tmp_path / "whole", "two-stage"), [], 0
    while not found:
        found = results(tmp_path / "run", "two-stage", stopped=AtOnce())
        stops += not found
        assert stops < 50
    assert stops > 5
    assert found == whole


def test_the_last_step_of_an_epoch_is_saved_before_the_epoch_is_judged(tmp_path: Path) -> None:
    whole = results(tmp_path / "whole", "end-to-end")
    steps = 0
    while not results(tmp_path / str(steps), "end-to-end", stopped=Requesting(0, 1, steps)):
        steps += 1
        assert steps < 9
    last = tmp_path / str(steps - 1)
    assert (saved(last).epoch, saved(last).step) == (1, steps)
    assert results(last, "end-to-end") == whole


class Judging(Requesting):
    """Asks the process to stop while the last epoch is judged."""

    def epoch(self, index: int, facts: object) -> None:
        super().epoch(index, facts)
        if index == 4:
            STOPPING.request()


def test_a_request_while_the_last_epoch_is_judged_saves_that_epoch(tmp_path: Path) -> None:
    whole = results(tmp_path / "whole", "end-to-end")
    assert results(tmp_path / "run", "end-to-end", stopped=Judging(9)) == []
    assert (saved(tmp_path / "run").epoch, saved(tmp_path / "run").step) == (4, 0)
    assert results(tmp_path / "run", "end-to-end") == whole


def one_is_asked(ranks: Ranks, folder: Path, kind: str, stop: bool) -> list[Any]:
    checkpoint.TIMES_AS_LONG = 1e9
    asked = Requesting(0, 1, 0) if stop and ranks.first else None
    return results(folder, kind, stopped=asked, ranks=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["two-stage", "batch norm and averages"])
def test_two_ranks_of_which_one_is_asked_stop_after_the_same_step_and_continue(tmp_path: Path, kind: str) -> None:
    whole = together(2, tmp_path / "a", one_is_asked, tmp_path / "whole", kind, False)
    assert together(2, tmp_path / "b", one_is_asked, tmp_path / "run", kind, True) == [[], []]
    assert saved(tmp_path / "run").step == 2  # What the first rank was asked after a step, all know after the next.
    assert together(2, tmp_path / "c", one_is_asked, tmp_path / "run", kind, False) == whole


@pytest.mark.slow
def test_another_number_of_ranks_continues_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    kind = "batch norm and averages"
    assert together(2, tmp_path / "b", one_is_asked, tmp_path / "run", kind, True) == [[], []]
    _, _, history = results(tmp_path / "run", kind)
    losses = [epoch["loss"] for epoch in json.loads(history)]
    expected = [epoch["loss"] for epoch in json.loads(results(tmp_path / "whole", kind)[2])]
    assert losses == pytest.approx(expected, rel=0.5)


def test_a_step_that_takes_too_long_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "SECONDS", 1e-6)
    assert results(tmp_path / "run", "end-to-end", stopped=Requesting(0, 2, 1)) == []
    assert saved(tmp_path / "run").epoch < 2


def test_outside_of_a_training_the_interrupt_comes_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        STOPPING.request()


@pytest.mark.parametrize(
    "change",
    [
        lambda state, tensors: (replace(state, step=99), tensors),
        lambda state, tensors: (replace(state, step=-1), tensors),
        lambda state, tensors: (state, {k: v for k, v in tensors.items() if k != "midway.sum.loss"}),
        lambda state, tensors: (state, tensors | {"midway.sum.loss": torch.zeros(1, 3, dtype=torch.float64)}),
        lambda state, tensors: (state, tensors | {"midway.random.cpu": torch.zeros(1, 9, dtype=torch.uint8)}),
        lambda state, tensors: (state, tensors | {"epoch.seconds": torch.tensor(float("nan"))}),
    ],
)
def test_a_state_in_the_middle_of_an_epoch_that_no_run_writes_is_one_sentence(tmp_path: Path, change: Any) -> None:
    assert results(tmp_path / "run", "end-to-end", stopped=Requesting()) == []
    kept = Checkpoint(tmp_path / "run")
    found = kept.load()
    assert found is not None
    kept.save(*change(*found))
    with pytest.raises(RunError, match="Remove the checkpoint folder to start again"):
        results(tmp_path / "run", "end-to-end")
