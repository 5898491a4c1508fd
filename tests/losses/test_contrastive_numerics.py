"""Values and gradients in single precision, against mpmath and float64, where the formula is hardest to compute."""

from __future__ import annotations

import itertools

import mpmath
import pytest
import torch
from batches import BATCHES, PATHS, unit

from lopsided.losses import asymmetric_focal_contrastive_loss, contrastive_loss
from lopsided.losses._kernel.formulas import _FEWEST_FOLDED, _sum_of_log_not_p
from lopsided.losses.contrastive import AsymmetricFocalContrastiveLoss

TEMPERATURES = (0.005, 0.02, 0.07, 0.5, 10.0)
GAMMAS = (0.0, 0.5, 1.0, 2.0, 7.0, 10.0)
ETAS = (0.0, 1.0, 300.0, 1e6)
ROUNDING = 2.0**-24
every_path = pytest.mark.parametrize("tile", PATHS.values(), ids=PATHS)
every_batch = pytest.mark.parametrize("batch", BATCHES)
# The paper's temperature, and the lowest, where the formula is hardest, are for every day.
every_temperature = pytest.mark.parametrize(
    "temperature", [t if t in (0.005, 0.07) else pytest.param(t, marks=pytest.mark.slow) for t in TEMPERATURES]
)


def golden_terms(z, y, temperature):
    """The recipe of the golden values: log p and log(1 - p) of every pair, from the stored features, with 60 digits."""
    mpmath.mp.dps = 60
    z, n = z.tolist(), len(z)
    z = [[mpmath.mpf(x) for x in row] for row in z]
    terms = []
    for i in range(n):
        s = [mpmath.fdot(z[i], z[k]) / mpmath.mpf(temperature) for k in range(n)]
        e = [mpmath.exp(s[k] - s[i]) if k != i else mpmath.mpf(0) for k in range(n)]
        total = mpmath.fsum(e)
        rest = [mpmath.fsum(e[:k] + e[k + 1 :]) for k in range(n)]  # not total - e[k], which no number of digits saves
        others = [k for k in range(n) if k != i] if n > 2 else []
        terms.append([(mpmath.log(e[k] / total), mpmath.log(rest[k] / total), bool(y[i] == y[k])) for k in others])
    return terms


def golden_value(terms, eta, gamma):
    """The mean over anchors of the printed formula."""
    total = mpmath.mpf(0)
    for row in terms:
        pull = [mpmath.exp(gamma * log_not_p) * log_p for log_p, log_not_p, same in row if same]
        push = [log_not_p for _, log_not_p, same in row if not same]
        total -= mpmath.fsum(pull) / max(len(pull), 1) + eta * mpmath.fsum(push) / max(len(push), 1)
    return total / len(terms)


def tolerance(temperature, gamma):
    """1e-5 from 0.07 up. Below, a few roundings of the similarities over the temperature, more under the power of a
    large gamma, which no method can undo once the similarities are single-precision numbers."""
    return 1e-5 if temperature >= 0.07 else max(1e-5, 4 * (1 + gamma) * ROUNDING / temperature)


@every_batch
@every_temperature
def test_single_precision_values_match_mpmath_and_are_finite(batch, temperature):
    z, y = BATCHES[batch]()
    z = z.float()
    terms = golden_terms(z, y, temperature)
    for gamma, eta in itertools.product(GAMMAS, ETAS):
        golden = golden_value(terms, eta, gamma)
        for tile in (None, 1, 3, 64):  # At these sizes, "auto" is one block like 64, and 5 cuts like 3.
            value = asymmetric_focal_contrastive_loss(z, y, eta=eta, gamma=gamma, temperature=temperature, tile=tile)
            assert torch.isfinite(value)
            error = abs(mpmath.mpf(value.item()) - golden)
            # The smallest single-precision number is 1e-45; nothing can be relative to less than that.
            assert error <= tolerance(temperature, gamma) * abs(golden) + 1e-37, (gamma, eta, tile)


def gradient(z, y, **options):
    z = z.detach().clone().requires_grad_()
    return torch.autograd.grad(asymmetric_focal_contrastive_loss(z, y, **options), z)[0]


@pytest.mark.slow
@every_batch
@every_temperature
def test_single_precision_gradients_match_float64_and_are_finite(batch, temperature):
    z, y = BATCHES[batch]()
    z = z.float()
    generator = torch.Generator().manual_seed(0)
    nudged = [z.double() * (1 + 2 * ROUNDING * torch.randn(z.shape, generator=generator)) for _ in range(3)]
    tiles = itertools.cycle((1, 3, 64))
    for gamma, eta in itertools.product(GAMMAS, ETAS):
        options = {"eta": eta, "gamma": gamma, "temperature": temperature}
        exact = gradient(z.double(), y, **options, tile=None)
        # Where large forces cancel, what remains is known as well as it survives a rounding of the features.
        unknowable = max((gradient(x, y, **options, tile=None) - exact).norm() for x in nudged)
        unknowable += ROUNDING * (1 + gamma + eta) / temperature / len(z)
        for tile in (None, next(tiles)):  # Every tile meets every gamma and every eta.
            found = gradient(z, y, **options, tile=tile)
            assert torch.isfinite(found).all()
            error = (found.double() - exact).norm()
            assert error <= 1e-5 * exact.norm() + 8 * unknowable + 1e-37, (gamma, eta, tile)


@every_path
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single_precision(tile, dtype):
    z, y = unit(9, 6).to(dtype).requires_grad_(), torch.arange(9) % 2
    options = {"eta": 100.0, "gamma": 2.0, "tile": tile}
    value = asymmetric_focal_contrastive_loss(z, y, **options)
    assert value.dtype == torch.float32
    assert torch.equal(value, asymmetric_focal_contrastive_loss(z.float(), y, **options))
    value.backward()
    assert z.grad.dtype == dtype
    assert torch.isfinite(z.grad).all()


@every_path
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_changes_nothing(tile, reduction):
    z, y = unit(9, 6).float().requires_grad_(), torch.arange(9) % 2
    options = {"eta": 100.0, "gamma": 2.0, "tile": tile, "reduction": reduction}
    plain = asymmetric_focal_contrastive_loss(z, y, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = asymmetric_focal_contrastive_loss(z, y, **options)
    assert torch.equal(plain, cast)
    assert torch.equal(torch.autograd.grad(plain.sum(), z)[0], torch.autograd.grad(cast.sum(), z)[0])


def test_a_module_takes_the_length_of_half_precision_features_in_single_precision():
    z, y = (3 * unit(9, 6)).half(), torch.arange(9) % 2
    loss = AsymmetricFocalContrastiveLoss(eta=10.0)
    assert torch.equal(loss(z, y), loss(z.float(), y))


@every_path
@pytest.mark.parametrize("position", [0, 6])
def test_nan_in_gives_nan_out(tile, position):
    z, y = unit(9, 6).float(), torch.arange(9) % 2
    z[position, 2] = torch.nan
    z.requires_grad_()
    value = asymmetric_focal_contrastive_loss(z, y, eta=1.0, gamma=2.0, tile=tile)
    assert value.isnan()
    assert torch.autograd.grad(value, z)[0].isnan().any()


@every_path
def test_flushed_denormals_do_not_turn_small_probabilities_into_nan(tile):
    if not torch.set_flush_denormal(True):
        pytest.fail("this processor cannot flush denormals, so that the case cannot be tried")
    try:
        for temperature in (0.033, 0.034, 0.01):
            z, y = BATCHES["antipodal clusters"]()
            z = z.float().requires_grad_()
            value = asymmetric_focal_contrastive_loss(
                z, 1 - y // 2 % 2, eta=1.0, gamma=2.0, temperature=temperature, tile=tile
            )
            assert torch.isfinite(value)
            assert torch.isfinite(torch.autograd.grad(value, z)[0]).all()
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("gamma", [0.0, 2.5])
def test_rows_with_and_without_a_dominating_entry_share_a_block(gamma):
    z, y = unit(40, 6), torch.arange(40) % 3
    z[1::4] = z[::4]  # some anchors have a twin, for which p is nearly 1
    options = {"eta": 30.0, "gamma": gamma, "temperature": 0.04}
    grads, values = [], []
    for tile in (None, 16):
        features = z.clone().requires_grad_()
        value = asymmetric_focal_contrastive_loss(features, y, **options, tile=tile, reduction="none")
        values.append(value.detach())
        grads.append(torch.autograd.grad(value.square().sum(), features)[0])
    p = torch.softmax((z @ z.t() / 0.04).fill_diagonal_(-torch.inf), 1).amax(1)
    assert 0 < (p > 0.5).sum() < 40
    torch.testing.assert_close(*values, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.5])
def test_a_row_whose_largest_p_rounds_to_1_leaves_its_neighbours_in_the_block_finite(gamma):
    z = torch.nn.functional.one_hot(torch.arange(12)).float()
    z[1] = z[0]  # twins, alone in their direction: their p is 1 to single precision; all other rows are even
    z[2:] = torch.nn.functional.normalize(z[2:] - 0.5 * z[0], dim=1)
    z.requires_grad_()
    y = torch.arange(12) % 3
    value = asymmetric_focal_contrastive_loss(z, y, eta=30.0, gamma=gamma, temperature=0.034, tile=6)
    exact = asymmetric_focal_contrastive_loss(z.double(), y, eta=30.0, gamma=gamma, temperature=0.034, tile=None)
    assert torch.isfinite(torch.autograd.grad(value, z, retain_graph=True)[0]).all()
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=0.0)


def test_features_that_are_not_contiguous_give_the_same():
    wide = unit(10, 12).float()
    y = torch.arange(10) % 2
    for z in (wide[:, ::2], wide[::2].expand(5, 12), wide.t().contiguous().t()):
        labels = y[: len(z)]
        assert torch.equal(contrastive_loss(z, labels), contrastive_loss(z.contiguous(), labels))


@every_path
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_row_of_zeros_has_no_direction_to_be_pushed_in_and_leaves_the_others_their_gradient(tile, dtype):
    z, y = (3 * unit(9, 6)).to(dtype), torch.arange(9) % 2
    z[4] = 0.0
    z.requires_grad_()
    loss = AsymmetricFocalContrastiveLoss(eta=10.0, gamma=2.0, tile=tile)
    (grad,) = torch.autograd.grad(loss(z, y), z)
    assert (grad[4] == 0).all()
    by_hand = z.detach().double().requires_grad_()
    rows = [row if i == 4 else row / row.norm() for i, row in enumerate(by_hand)]
    value = asymmetric_focal_contrastive_loss(torch.stack(rows), y, eta=10.0, gamma=2.0, tile=None)
    others = torch.arange(9) != 4
    expected = torch.autograd.grad(value, by_hand)[0][others]
    torch.testing.assert_close(grad[others].double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-5)


@every_path
def test_what_a_large_gamma_leaves_of_small_batches_keeps_its_digits(tile):
    """(1 - p)^30 is about 5e-6 where p is 1/3, and must not be added to anything of size 1 on the way."""
    generator = torch.Generator().manual_seed(0)
    z, y = 0.1 * torch.randn(4, 8, generator=generator), torch.tensor([0, 0, 1, 1])
    exact = gradient(z.double(), y, eta=0.0, gamma=30.0, temperature=1.0, tile=None)
    found = gradient(z, y, eta=0.0, gamma=30.0, temperature=1.0, tile=tile)
    assert 0 < exact.norm() < 1e-4
    assert (found - exact).norm() < 100 * ROUNDING * exact.norm()


def worst_errors(z, y, **options):
    """The largest relative error of any anchor's value, and the relative error of the gradient of their sum."""
    values, grads = [], []
    for dtype, tile in ((torch.float32, "auto"), (torch.float64, None)):
        features = z.float().to(dtype).requires_grad_()
        each = asymmetric_focal_contrastive_loss(features, y, reduction="none", **options, tile=tile)
        values.append(each.detach().double())
        total = asymmetric_focal_contrastive_loss(features, y, reduction="sum", **options, tile=tile)
        grads.append(torch.autograd.grad(total, features)[0].double())
    found, exact = values
    of_value = ((found - exact).abs() / exact.abs().clamp(min=1e-37)).max().item()
    return of_value, ((grads[0] - grads[1]).norm() / grads[1].norm()).item()


@pytest.mark.parametrize("n", [400, 601])
def test_the_push_of_many_small_p_keeps_digits_that_1_minus_p_would_lose(n):
    """Without positives there is nothing but log(1 - p), with p about 1/n; 1 - p would be wrong by n roundings."""
    of_value, _ = worst_errors(unit(n, 6), torch.arange(n), eta=1.0, temperature=1.0)
    assert of_value < 24 * ROUNDING


@pytest.mark.parametrize("classes", [603, 201])
def test_the_push_and_pull_of_p_near_one_half_keep_their_digits_in_large_blocks(classes):
    """Each feature occurs three times, so that each anchor has two others with a p of 1/2, of its class or of none."""
    z, y = unit(201, 6).repeat_interleave(3, 0), torch.arange(603) // (603 // classes)
    p = torch.softmax((z @ z.t() / 0.002).fill_diagonal_(-torch.inf), 1)
    assert (p.amax(1) > 0.4).all()
    for gamma in (0.0, 2.0, 7.0, 7.5):
        of_value, _ = worst_errors(z, y, eta=1.0, gamma=gamma, temperature=0.02)
        assert of_value < (4 + gamma) * 8 * ROUNDING / 0.02


@pytest.mark.parametrize("gamma", [*map(float, range(1, 13)), 29.0, 30.0, 32.0, 33.0, 34.0, 100.0])
def test_every_whole_gamma_is_as_exact_as_its_power_allows(gamma):
    """With three to five samples p is about 1/2 to 1/4, where the power of 1 - p is smallest beside its 1."""
    for n in (3, 4, 5):
        for seed in range(3):
            z, y = 0.1 * unit(n, 8, seed=seed), torch.arange(n) % 2
            of_value, of_grad = worst_errors(z, y, gamma=gamma, temperature=1.0)
            assert of_value < (16 + 4 * gamma) * ROUNDING
            assert of_grad < (100 + 4 * gamma) * ROUNDING


@pytest.mark.parametrize("tile", ["auto", 32])
@pytest.mark.parametrize("gamma", [1.0, 2.0, 7.0, 7.5, 30.0])
def test_a_whole_gamma_lies_between_its_neighbours_in_large_blocks(tile, gamma):
    """Products and logarithms are two ways to the same power: no step where one takes over from the other."""
    z, y = unit(300, 6).float(), torch.arange(300) % 3
    options = {"eta": 300.0, "temperature": 0.07, "tile": tile, "reduction": "none"}
    below, here, above = (
        asymmetric_focal_contrastive_loss(z, y, gamma=gamma * (1 + step), **options) for step in (-1e-6, 0.0, 1e-6)
    )
    torch.testing.assert_close(here, (below + above) / 2, rtol=4e-6, atol=0.0)


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_rows_are_folded_to_one_column_and_no_further(width):
    p = torch.rand(_FEWEST_FOLDED + 1, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / width
    expected = torch.log1p(-p).sum(1)
    found = _sum_of_log_not_p(p, torch.empty_like(p), p.new_ones(()))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
