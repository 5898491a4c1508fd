from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lopsided.evaluation.metric_table import figure_of
from lopsided.training.selection import MAX_PROBE, Selection, centroid_logits, figures, probe_rows, tempered_log_loss


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
@settings(deadline=None, max_examples=50)
def test_the_chosen_epoch_is_the_last_of_the_best(values: list[float]) -> None:
    selection = Selection()
    for epoch, value in enumerate(values):
        selection.update(epoch, value)
    assert selection.chosen == max(i for i, value in enumerate(values) if value == max(values))
    assert selection.best == max(values)


def test_without_figures_every_epoch_is_taken_so_that_the_last_one_stays() -> None:
    selection = Selection(patience=1)
    assert [selection.update(epoch, None) for epoch in range(3)] == [True, True, True]
    assert selection.chosen == 2
    assert not selection.exhausted(3)


@pytest.mark.parametrize(
    ("figures_seen", "stops_after"),
    [([0.5, 0.6, 0.6, 0.6, 0.9], 4), ([0.5, 0.4, 0.3, 0.9], 3), ([0.1, 0.2, 0.3], None)],
)
def test_patience_counts_epochs_without_a_gain_and_a_tie_is_none(
    figures_seen: list[float], stops_after: int | None
) -> None:
    selection, stopped = Selection(patience=2), None
    for epoch, value in enumerate(figures_seen):
        selection.update(epoch, value)
        if selection.exhausted(epoch + 1):
            stopped = epoch + 1
            break
    assert stopped == stops_after


def test_a_selection_goes_on_from_its_fields() -> None:
    selection = Selection(patience=3)
    selection.update(0, 0.5)
    selection.update(1, 0.4)
    assert Selection(**selection.to_dict()) == selection  # type: ignore[arg-type]


def test_figures_are_those_of_the_confusion() -> None:
    found = figures(np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1]), 3)
    assert found["accuracy"] == 0.75
    assert found["uwa"] == 0.75
    assert figures(np.zeros(10, dtype=np.int64), np.array([0] * 9 + [1]), 2)["uwa"] == 0.5


def test_the_nearest_centroid_ignores_lengths_and_classes_without_samples() -> None:
    known = torch.tensor([[10.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    queries = torch.tensor([[0.1, 0.01], [3.0, 100.0], [-0.1, 7.0]])
    logits = centroid_logits(known, torch.tensor([0, 0, 2]), queries, 4)
    assert logits.argmax(axis=1).tolist() == [0, 2, 2]
    assert np.isfinite(logits).all()


def test_the_probe_takes_up_to_a_hundred_of_each_class_by_seed() -> None:
    labels = np.repeat([0, 1], [500, 7])
    rows = probe_rows(labels, 3)
    assert np.bincount(labels[rows]).tolist() == [MAX_PROBE, 7]
    assert len(np.unique(rows)) == len(rows)
    assert np.array_equal(rows, probe_rows(labels, 3))
    assert not np.array_equal(rows, probe_rows(labels, 4))


def test_the_log_loss_of_selection_weighs_classes_equally_and_ignores_the_scale() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], [90, 10])
    logits = np.stack([np.zeros(100), rng.normal(2.0 * labels - 1.0)], axis=1)
    found = tempered_log_loss(logits, labels)
    doubled = np.concatenate([np.arange(90), *[np.arange(90, 100)] * 9])  # Each rare image nine times.

    def mean_loss(scale: float) -> float:
        z = scale * logits[doubled]
        return float(np.mean(np.log(np.exp(z).sum(axis=1)) - z[np.arange(180), labels[doubled]]))

    assert found == pytest.approx(min(mean_loss(scale) for scale in np.linspace(0.01, 10, 2000)), abs=1e-4)
    assert tempered_log_loss(7 * logits, labels) == pytest.approx(found, abs=1e-4)


@pytest.mark.parametrize(
    ("metric", "epoch"), [("uwa", 0), ("log_loss", 2), ("smooth_log_loss", 3), ("last", 4), ("accuracy", 4)]
)
def test_each_metric_selects_its_epoch(metric: str, epoch: int) -> None:
    losses, uwas = (0.9, 0.8, 0.1, 0.5, 2.5), (0.9, 0.5, 0.6, 0.7, 0.8)
    history: list[dict[str, float]] = []
    selection = Selection()
    for index, (loss, uwa) in enumerate(zip(losses, uwas, strict=True)):
        history.append({"val_log_loss": loss, "val_uwa": uwa})
        selection.update(index, figure_of(metric, history))
    assert selection.chosen == epoch
