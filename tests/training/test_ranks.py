"""Whole runs on several ranks give the result of one rank, even if a rank dies and the run is resumed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lopsided.distributed import LostRankError
from lopsided.errors import InputError, RunError, SaidError
from lopsided.facts.log import LOG_NAME, Reporter
from lopsided.models.machine import pick_device
from lopsided.models.model import CARD_NAME, WEIGHTS_NAME
from lopsided.ranks import Ranks
from lopsided.training.checkpoint import FOLDER_NAME, STATE_NAME
from lopsided.training.fit import fit
from reporters import Ending
from training.conftest import stripes, tiny
from training.ranks import Gone, each, together

pytestmark = pytest.mark.slow

COUNTS = {"many": 40, "few": 12}
KINDS: dict[str, dict[str, Any]] = {
    "queue and chunks": {
        "encoder_training__queue": 20,
        "encoder_training__queue_balanced": True,
        "encoder_training__chunk_size": 6,
        "encoder_training__views": 2,
        "classifier__augment": True,
    },
    "batch norm": {"encoder__name": "test_resnet", "encoder_training__epochs": 2, "selection__patience": 1},
    "own batch norm": {
        "encoder__name": "test_resnet",
        "encoder_training__batch_norm": "rank",
        "encoder_training__loss": "ce",
        "encoder_training__epochs": 2,
    },
    "own batch norm in chunks": {
        "encoder__name": "test_resnet",
        "encoder_training__batch_norm": "rank",
        "encoder_training__chunk_size": 6,
        "encoder_training__queue": 20,
        "encoder_training__epochs": 1,
        "classifier__epochs": 1,
    },
    "scaled": {"precision": "fp16", "encoder_training__epochs": 2},
    "crt": {"encoder_training__loss": "ce", "classifier__kind": "crt", "encoder__views": "flips"},
    "lws": {"encoder_training__loss": "ce", "classifier__kind": "lws"},
    "tau-norm": {"encoder_training__loss": "ce", "classifier__kind": "tau-norm"},
}


class Fatal(Ending):
    """Kills its process."""

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def run(ranks: Ranks, folder: Path, kind: str, fatal: tuple[str, int] | None = None) -> dict[str, Any]:
    """Start or resume a run. Every rank gets its own folder, but only the first rank's folder is used."""
    own = folder if ranks.first else folder.with_name(f"{folder.name}-{ranks.rank}")
    reporter = Reporter() if fatal is None else Fatal("epoch", fatal)
    source = stripes(COUNTS)
    fitted = fit(tiny(**KINDS[kind]), source, own, resume=True, reporter=reporter, ranks=ranks)
    assert fitted.test is not None
    return {
        "weights": {name: value.clone() for name, value in fitted.model.state_dict().items()},
        "history": [{k: v for k, v in e.items() if k not in ("seconds", "images_per_second")} for e in fitted.history],
        "names": fitted.test.names,
        "labels": fitted.test.y_true,
        "probabilities": fitted.test.probabilities,
        "features": fitted.test.features,
    }


def assert_equal(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found["names"] == expected["names"]
    for name in ("labels", "probabilities", "features"):
        np.testing.assert_allclose(found[name], expected[name], rtol=tolerance, atol=tolerance)
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=tolerance, atol=tolerance)
    assert len(found["history"]) == len(expected["history"])
    for now, then in zip(found["history"], expected["history"], strict=True):
        assert now.keys() == then.keys()
        assert {k: v for k, v in now.items() if isinstance(v, float)} == pytest.approx(
            {k: v for k, v in then.items() if isinstance(v, float)}, rel=tolerance, abs=tolerance
        )


def notes(folder: Path) -> list[str]:
    events = [json.loads(line) for line in (folder / LOG_NAME).read_text().splitlines()]
    return [event["text"] for event in events if event["event"] == "note"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """The results of one process for each kind of run."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, {kind: run(Ranks(), folder / kind, kind) for kind in KINDS}


def all_kinds(ranks: Ranks, folder: Path) -> dict[str, dict[str, Any]]:
    return {kind: run(ranks, folder / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, dict[str, Any]]]]:
    """The results of each of two ranks for each kind of run."""
    folder = tmp_path_factory.mktemp("pair")
    return folder, together(2, folder, all_kinds, folder)


def test_two_ranks_make_the_run_of_one_and_one_of_them_writes_it(
    whole: tuple[Path, dict[str, dict[str, Any]]], pair: tuple[Path, list[dict[str, dict[str, Any]]]]
) -> None:
    folder, (first, second) = pair
    for kind in KINDS:
        assert_equal(second[kind], first[kind], tolerance=0.0)
        assert len(set(first[kind]["names"])) == len(first[kind]["names"]) == len(first[kind]["probabilities"])
        assert (folder / kind / WEIGHTS_NAME).exists()
        assert not (folder / f"{kind}-1").exists()
    for kind in ("queue and chunks", "crt", "lws", "tau-norm"):
        assert_equal(first[kind], whole[1][kind], tolerance=1e-3)
    # Batch norm over twelve images and Adam amplify float32 rounding. The exact comparison is in test_step.
    losses = [[epoch["loss"] for epoch in found["history"]] for found in (first["batch norm"], whole[1]["batch norm"])]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    said = {kind: notes(folder / kind) for kind in KINDS}
    assert "2 ranks share each batch of 16 images." in said["batch norm"]
    assert 'Batch norm computes its statistics over all ranks: batch_norm is "sync".' in said["batch norm"]
    assert (
        'Batch norm computes its statistics over each rank\'s own images: batch_norm is "rank", and the running '
        "statistics are averaged over the ranks after each epoch."
    ) in said["own batch norm"]
    assert not any("Batch norm" in text for text in said["queue and chunks"])
    chunks = "A batch goes through the encoder in chunks of 6 images"
    assert f"{chunks}." in said["queue and chunks"]
    assert f"{chunks}; batch norm treats each rank's share of a chunk as a batch." in said["own batch norm in chunks"]
    assert f"{chunks}; batch norm treats each chunk as a batch." in notes(whole[0] / "own batch norm in chunks")
    queue = "A batch is also contrasted with up to 20 features of past batches, "
    assert f"{queue}the most recent ones." in said["own batch norm in chunks"]
    assert not any("ranks" in text for text in notes(whole[0] / "batch norm"))


@pytest.mark.parametrize(
    ("kind", "fatal", "sizes"),
    [
        ("queue and chunks", ("encoder", 3), (2, 1)),
        ("queue and chunks", ("encoder", 2), (1, 2)),
        ("batch norm", ("classifier", 2), (2, 1)),
        ("scaled", ("encoder", 2), (2, 2)),
        ("lws", ("classifier", 2), (2, 1)),
    ],
)
def test_a_run_that_was_killed_goes_on_with_another_number_of_ranks(
    tmp_path: Path,
    whole: tuple[Path, dict[str, dict[str, Any]]],
    pair: tuple[Path, list[dict[str, dict[str, Any]]]],
    kind: str,
    fatal: tuple[str, int],
    sizes: tuple[int, int],
) -> None:
    folder = tmp_path / "run"
    died = each(sizes[0], tmp_path / "before", run, folder, kind, fatal)
    assert isinstance(died[0], Gone)
    assert died[0].code == -signal.SIGKILL
    assert all(type(error) is LostRankError for error in died[1:])
    assert (folder / FOLDER_NAME / STATE_NAME).exists()
    assert not (folder / CARD_NAME).exists()
    found = together(sizes[1], tmp_path / "after", run, folder, kind)
    expected = whole[1][kind] if sizes[0] == 1 else pair[1][0][kind]
    assert_equal(found[0], expected, tolerance=0.0 if sizes[0] == sizes[1] else 1e-3)
    change = f"The run started with ranks = {sizes[0]} and continues with ranks = {sizes[1]}, so the last digits may "
    change += "differ."
    assert (change in notes(folder)) == (sizes[0] != sizes[1])
    again = together(2, tmp_path / "again", run, folder, kind)  # The run is finished, so it is loaded.
    assert_equal(again[1], again[0], tolerance=0.0)
    np.testing.assert_allclose(again[0]["probabilities"], found[0]["probabilities"], rtol=1e-5, atol=1e-6)


def other_images(ranks: Ranks, folder: Path) -> None:
    fit(tiny(), stripes(COUNTS, seed=ranks.rank), folder, ranks=ranks)


def breaking(ranks: Ranks, folder: Path) -> None:
    fit(tiny(encoder_training__lr=1e30), stripes(COUNTS), folder, ranks=ranks)


def test_what_goes_wrong_is_said_once(tmp_path: Path) -> None:
    found = each(2, tmp_path / "a", other_images, tmp_path / "run")
    assert type(found[1]) is RunError
    assert str(found[1]).startswith("All ranks must have the same images, labels and splits, but rank 1")
    assert type(found[0]) is SaidError
    found = each(2, tmp_path / "b", breaking, tmp_path / "broken")
    assert [type(error) for error in found] == [RunError, SaidError]
    assert str(found[0]).startswith("The loss is not finite: nan in step ")
    assert str(found[0]) == str(found[1])


def test_a_change_on_resuming_is_noted_once(tmp_path: Path) -> None:
    change = "The run started with threads = 1 and continues with threads = 2, so the last digits may differ."
    for epoch, num_threads, number in ((2, 1, 0), (3, 2, 1), (4, 2, 1)):
        recipe = tiny(encoder_training__epochs=1, classifier__epochs=5, threads=num_threads)
        with pytest.raises(KeyboardInterrupt):
            fit(recipe, stripes(COUNTS), tmp_path / "run", resume=True, reporter=Ending("epoch", ("classifier", epoch)))
        found = notes(tmp_path / "run")
        assert found.count(change) == number
        assert sum("The run started with" in text for text in found) == number


def test_ranks_do_not_compute_on_mps() -> None:
    ranks = Ranks()
    ranks.size = 2
    message = (
        "several ranks must compute on the CPU or on CUDA devices, got 'mps'. Set device to cpu, or start one process."
    )
    with pytest.raises(InputError, match=re.escape(message)):
        pick_device("mps", ranks)
