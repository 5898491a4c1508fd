"""A run that is killed at any moment and resumed writes the same bytes as a run that was never killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forked import CONTEXT, forked
from lopsided import files
from lopsided.facts.log import Reporter
from lopsided.models.model import CARD_NAME, WEIGHTS_NAME
from lopsided.training.fit import fit
from training.conftest import stripes, tiny

pytestmark = pytest.mark.slow

COUNTS = {"many": 40, "few": 12}
CHANGES = {
    "two-stage": {"selection__patience": 2, "classifier__epochs": 2},
    "end-to-end": {"encoder_training__loss": "focal", "encoder_training__epochs": 3},
    "no-validation": {"data__val": 0.0, "encoder_training__optimizer": "sgd", "classifier__augment": True},
}


class Moments(Reporter):
    """Counts the moments of a run (before and after each rename and report) and kills the process at one of them."""

    def __init__(self, fatal: int) -> None:
        self.count, self.fatal = 0, fatal
        self.replace = os.replace
        files.os.replace = self._replace  # type: ignore[assignment, attr-defined]

    def _moment(self) -> None:
        self.count += 1
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def _replace(self, *names: Any) -> None:
        self._moment()
        self.replace(*names)
        self._moment()

    def stage(self, name: str, epochs: int, steps_per_epoch: int) -> None:
        self._moment()

    def step(self, loss: float, images: int) -> None:
        self._moment()

    def epoch(self, index: int, facts: Mapping[str, Any]) -> None:
        self._moment()


def run(folder: Path, kind: str, fatal: int = 0) -> None:
    """Run in a new process until the fatal moment or to the end, and write the results."""
    moments = Moments(fatal)
    fitted = fit(tiny(**CHANGES[kind]), stripes(COUNTS), folder, resume=True, reporter=moments)
    assert fitted.test is not None
    np.save(folder / "test.npy", fitted.test.probabilities)
    timeless = [{k: v for k, v in e.items() if k not in ("seconds", "images_per_second")} for e in fitted.history]
    (folder / "history.json").write_text(json.dumps(timeless))
    (folder / "moments").write_text(str(moments.count))


def child(*arguments: Any) -> int | None:
    return forked(run, *arguments)


def outcome(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (WEIGHTS_NAME, CARD_NAME, "test.npy", "history.json")}


@pytest.mark.parametrize("kind", list(CHANGES))
def test_a_run_killed_at_any_moment_ends_as_if_it_never_was(tmp_path: Path, kind: str) -> None:
    assert child(tmp_path / "whole", kind) == 0
    expected = outcome(tmp_path / "whole")
    moments = int((tmp_path / "whole" / "moments").read_text())
    assert moments > 20
    # Every ninth moment: an epoch has 4 steps here, so a stride of 9 hits a different kind of moment each time.
    killed = 0
    for fatal in range(1 + list(CHANGES).index(kind), moments + 1, 9):
        folder = tmp_path / str(fatal)
        ended = child(folder, kind, fatal)
        assert ended in (0, -signal.SIGKILL)  # How often the state is written, which is a moment, depends on the time.
        killed += ended != 0
        assert child(folder, kind) == 0
        assert outcome(folder) == expected, f"killed at moment {fatal}"
        assert not list(folder.rglob("*.tmp"))
    assert killed >= 4


def test_a_run_killed_again_and_again_still_ends_the_same(tmp_path: Path) -> None:
    assert child(tmp_path / "whole", "two-stage") == 0
    killed = 0
    while child(tmp_path / "run", "two-stage", 15) == -signal.SIGKILL:
        killed += 1
        assert killed < 50
    assert killed > 3
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


NETWORK = {"encoder.name": "test_resnet", "data__cache": "none", "encoder_training__views": 2}


class Telling(Reporter):
    """Tells of each step, and waits to be told to go on."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def step(self, loss: float, images: int) -> None:
        self.pipe.send("step")
        self.pipe.recv()


def tell(folder: Path, pipe: Connection) -> None:
    fit(tiny(**NETWORK), stripes(COUNTS), folder, reporter=Telling(pipe))


def test_a_network_with_batch_norm_that_is_killed_from_outside_ends_the_same(tmp_path: Path) -> None:
    pipe, end = CONTEXT.Pipe()
    process = CONTEXT.Process(target=tell, args=(tmp_path / "run", end))
    process.start()
    for step in range(7):
        if step:  # It waits after each step to be told to go on, and so is killed at the seventh on any machine.
            pipe.send("go on")
        assert pipe.recv() == "step"
    process.kill()
    process.join()
    assert not (tmp_path / "run" / CARD_NAME).exists()
    assert (tmp_path / "run" / "checkpoint").exists()
    for name in ("run", "whole"):
        fit(tiny(**NETWORK), stripes(COUNTS), tmp_path / name, resume=True)
    for name in (WEIGHTS_NAME, CARD_NAME):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
