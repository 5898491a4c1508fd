"""A request to stop saves the epoch, and the run continues with the same result."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lopsided import stopping
from lopsided.stopping import STOPPING
from lopsided.training import checkpoint
from lopsided.training.checkpoint import Checkpoint
from lopsided.training.fit import fit
from lopsided.training.reporter import Reporter
from training.conftest import stripes, tiny

COUNTS = {"many": 20, "few": 8}
CHANGES = {"encoder_training__loss": "focal", "encoder_training__epochs": 4}


class Requesting(Reporter):
    """Asks the process to stop at the second step of the third epoch."""

    steps = 0
    epochs = 0

    def step(self, loss: float, images: int) -> None:
        self.steps += 1
        if (self.epochs, self.steps) == (2, 2):
            STOPPING.request()

    def epoch(self, index: int, facts: object) -> None:
        self.epochs, self.steps = index, 0


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    STOPPING.requested = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_the_epoch_is_finished_and_saved_and_the_run_continues_to_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, source = tiny(**CHANGES), stripes(COUNTS)
    whole = fit(recipe, source, tmp_path / "whole")
    monkeypatch.setattr(checkpoint, "TIMES_AS_LONG", 1e9)  # Otherwise each epoch is saved anyway.
    with pytest.raises(KeyboardInterrupt):
        fit(recipe, source, tmp_path / "run", reporter=Requesting())
    state, _ = Checkpoint(tmp_path / "run").load() or (None, None)
    assert state is not None
    assert state.epoch == 3
    STOPPING.requested = False
    again = fit(recipe, source, tmp_path / "run", resume=True)
    assert whole.test is not None
    assert again.test is not None
    assert np.array_equal(again.test.probabilities, whole.test.probabilities)


def test_a_long_epoch_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "SECONDS", 1e-6)
    with pytest.raises(KeyboardInterrupt):
        fit(tiny(**CHANGES), stripes(COUNTS), tmp_path / "run", reporter=Requesting())
    state, _ = Checkpoint(tmp_path / "run").load() or (None, None)
    assert state is not None
    assert state.epoch < 3


def test_outside_of_a_training_the_interrupt_comes_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        STOPPING.request()
