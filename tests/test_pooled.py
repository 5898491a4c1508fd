"""The model of all losses, against least squares on a design matrix, and the power of few runs, against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import f_oneway, t, ttest_1samp, ttest_rel

from lopsided.errors import InputError
from test_results import script

detectable, fit_additive = script.detectable, script.fit_additive


def made(losses: int, seeds: int, seed: int = 0) -> dict[str, dict[int, float]]:
    rng = np.random.default_rng(seed)
    level, shift = rng.normal(size=losses), 3.0 * rng.normal(size=seeds)
    return {
        f"loss {i}": {j: float(70 + level[i] + shift[j] + rng.normal()) for j in range(seeds)} for i in range(losses)
    }


@pytest.mark.parametrize(("losses", "seeds"), [(11, 4), (2, 3), (5, 2)])
def test_contrasts_are_those_of_least_squares(losses: int, seeds: int) -> None:
    values = made(losses, seeds)
    rows = [(i, j, values[name][j]) for i, name in enumerate(values) for j in range(seeds)]
    design = np.zeros((len(rows), losses + seeds - 1))
    for row, (i, j, _) in enumerate(rows):
        design[row, i] = 1.0
        if j:
            design[row, losses + j - 1] = 1.0
    y = np.array([value for *_, value in rows])
    coefficients, (squares,), rank, _ = np.linalg.lstsq(design, y, rcond=None)
    freedom = len(rows) - rank
    weights = np.zeros(design.shape[1])
    weights[0], weights[1:losses] = 1.0, -1.0 / (losses - 1)
    error = math.sqrt(squares / freedom * weights @ np.linalg.inv(design.T @ design) @ weights)
    half = t.ppf(0.975, freedom) * error

    model = fit_additive(values)
    names = list(values)
    found = model.contrast({names[0]: 1.0, **dict.fromkeys(names[1:], -1.0 / (losses - 1))})

    assert model.freedom == freedom == (losses - 1) * (seeds - 1)
    assert model.deviation == pytest.approx(math.sqrt(squares / freedom))
    assert (found.value, found.low, found.high) == pytest.approx(
        (weights @ coefficients, weights @ coefficients - half, weights @ coefficients + half)
    )


def test_two_losses_alone_have_the_interval_of_the_paired_test() -> None:
    values = made(2, 5)
    one, other = (list(row.values()) for row in values.values())
    interval = ttest_rel(one, other).confidence_interval(0.95)
    found = fit_additive(values).contrast({"loss 0": 1.0, "loss 1": -1.0})
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_without_differences_between_seeds_the_noise_is_that_of_all_runs_alike() -> None:
    values = made(4, 6, seed=1)
    mean = {seed: np.mean([row[seed] for row in values.values()]) for seed in range(6)}
    centred = {name: {seed: value - mean[seed] for seed, value in row.items()} for name, row in values.items()}
    model = fit_additive(centred)
    within = sum(np.var(list(row.values())) * 6 for row in centred.values())
    assert model.deviation**2 * model.freedom == pytest.approx(within)
    assert f_oneway(*(list(row.values()) for row in centred.values())).statistic == pytest.approx(
        6 * np.var(list(model.means.values()), ddof=1) / (within / (4 * 6 - 4))
    )


def test_a_seed_that_a_loss_lacks_is_left_out_for_all() -> None:
    values = made(3, 4)
    whole = fit_additive({name: {j: row[j] for j in range(3)} for name, row in values.items()})
    del values["loss 1"][3]
    assert fit_additive(values) == whole


def test_what_cannot_be_fitted_or_contrasted_is_refused() -> None:
    with pytest.raises(InputError, match=r"two losses and two seeds at least, got 3 and 1\."):
        fit_additive(made(3, 1))
    with pytest.raises(InputError, match=r"got 0 and 0\."):
        fit_additive({})
    with pytest.raises(InputError, match=r"The weights of a contrast must sum to 0, got 0\.5\."):
        fit_additive(made(3, 4)).contrast({"loss 0": 1.0, "loss 1": -0.5})


@pytest.mark.parametrize(("runs", "comparisons"), [(4, 1), (4, 5), (10, 1)])
def test_an_effect_that_is_called_detectable_is_detected_in_four_of_five_simulations(
    runs: int, comparisons: int
) -> None:
    effect = detectable(runs, comparisons=comparisons)
    samples = np.random.default_rng(0).normal(effect, 1.0, size=(20_000, runs))
    result = ttest_1samp(samples, 0.0, axis=1)
    share = np.mean((result.pvalue < 0.05 / comparisons) & (result.statistic > 0))
    assert share == pytest.approx(0.8, abs=0.012)  # four standard errors of 20,000 simulations
