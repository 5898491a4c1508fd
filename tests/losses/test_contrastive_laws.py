"""Laws that every contrastive loss obeys on every path."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from batches import BATCHES, LOSSES, PATHS, unit
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from lopsided.losses import (
    asymmetric_contrastive_loss,
    asymmetric_focal_contrastive_loss,
    contrastive_loss,
    focal_contrastive_loss,
    parity_eta,
)
from lopsided.losses.reference import reference_loss

every_path = pytest.mark.parametrize("tile", PATHS.values(), ids=PATHS)
every_loss = pytest.mark.parametrize("loss", LOSSES)
every_batch = pytest.mark.parametrize("batch", BATCHES)


def value_and_grad(function, z, *args, **options):
    z = z.clone().requires_grad_()
    value = function(z, *args, **options)
    (grad,) = torch.autograd.grad(value.sum(), z)
    return value.detach(), grad


def assert_same(found, expected, rtol=1e-9, atol=1e-11):
    for one, other in zip(found, expected, strict=True):
        scale = max(1.0, other.abs().max().item())
        assert_close(one, other, rtol=rtol, atol=atol * scale)


@functools.cache
def specification(batch, **options):
    """What every path is held against, and is slow: once for all of them."""
    return value_and_grad(reference_loss, *BATCHES[batch](), **options)


@every_batch
@every_path
@pytest.mark.parametrize("normalization", ["paper", "released"])
def test_every_path_gives_value_and_gradient_of_the_specification(batch, tile, normalization):
    z, y = BATCHES[batch]()
    for eta, gamma, temperature in [
        (0.0, 0.0, 0.07),
        (60.0, 0.5, 0.07),
        (300.0, 7.0, 0.5),
        (1.0, 1.0, 0.01),
        (5.0, 2.0, 3.0),
    ]:
        options = {"eta": eta, "gamma": gamma, "temperature": temperature, "normalization": normalization}
        found = value_and_grad(asymmetric_focal_contrastive_loss, z, y, **options, tile=tile)
        assert_same(found, specification(batch, **options))


cases = st.fixed_dictionaries(
    {
        "n": st.integers(1, 9),
        "r": st.integers(0, 5),
        "classes": st.integers(1, 5),
        "seed": st.integers(0, 10**6),
        "eta": st.sampled_from([0.0, 0.3, 300.0]),
        "gamma": st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0]),
        "temperature": st.sampled_from([0.01, 0.07, 1.0]),
        "tile": st.sampled_from(["auto", None, 1, 2, 3, 4, 7]),
        "normalization": st.sampled_from(["paper", "released"]),
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "masked": st.booleans(),
    }
)


@pytest.mark.slow
@given(cases)
@settings(max_examples=150, deadline=None)
def test_generated_cases_agree_with_the_specification_in_value_and_both_gradients(case):
    n, r = case["n"], case["r"]
    generator = torch.Generator().manual_seed(case["seed"])
    z, z_ref = unit(n, 4, seed=case["seed"]).requires_grad_(), unit(r, 4, seed=case["seed"] + 1).requires_grad_()
    labels = torch.randint(0, case["classes"], (n + r,), generator=generator)
    mask = torch.rand(n, n + r, generator=generator) < 0.4 if case["masked"] else None
    options = {k: case[k] for k in ("eta", "gamma", "temperature", "normalization", "reduction")}
    y, y_ref = (None, None) if case["masked"] else (labels[:n], labels[n:])
    options |= {"reference": (z_ref, y_ref) if r else None, "positive": mask}
    weights = torch.rand(n, generator=generator, dtype=torch.float64) if case["reduction"] == "none" else 1.0

    expected = reference_loss(z, y, **options)
    found = asymmetric_focal_contrastive_loss(z, y, **options, tile=case["tile"])

    inputs = (z, z_ref) if r else (z,)
    expected_grads = torch.autograd.grad((expected * weights).sum(), inputs)
    found_grads = torch.autograd.grad((found * weights).sum(), inputs)
    assert_same((found.detach(), *found_grads), (expected.detach(), *expected_grads))


@every_loss
@every_path
def test_the_order_of_the_batch_does_not_matter(loss, tile):
    function, options = LOSSES[loss]
    z, y = BATCHES["random"]()
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(1))
    values, grad = value_and_grad(function, z, y, **options, tile=tile, reduction="none")
    assert_same(
        value_and_grad(function, z[order], y[order], **options, tile=tile, reduction="none"),
        (values[order], grad[order]),
    )


@every_loss
@every_path
@pytest.mark.parametrize("names", [(2, 1, 0), (-5, 0, 5), (2**40, 2**40 + 1, -(2**40))], ids=str)
def test_the_names_of_the_classes_do_not_matter(loss, tile, names):
    function, options = LOSSES[loss]
    z, y = BATCHES["random"]()
    renamed = torch.tensor(names)[y]
    assert_same(value_and_grad(function, z, renamed, **options, tile=tile), value_and_grad(function, z, y, **options))


@every_loss
@every_path
def test_a_common_rotation_turns_the_gradient_and_leaves_the_value(loss, tile):
    function, options = LOSSES[loss]
    z, y = BATCHES["random"]()
    rotation = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))[0]
    value, grad = value_and_grad(function, z, y, **options, tile=tile)
    assert_same(value_and_grad(function, z @ rotation, y, **options, tile=tile), (value, grad @ rotation))


@every_path
def test_the_losses_are_special_cases_of_afcl(tile):
    z, y = BATCHES["random"]()
    afcl = asymmetric_focal_contrastive_loss
    assert_same(
        value_and_grad(asymmetric_contrastive_loss, z, y, eta=0.0, tile=tile),
        value_and_grad(contrastive_loss, z, y, tile=tile),
    )
    assert_same(
        value_and_grad(focal_contrastive_loss, z, y, tile=tile),
        value_and_grad(afcl, z, y, eta=0.0, gamma=1.0, tile=tile),
    )
    assert_same(
        value_and_grad(asymmetric_contrastive_loss, z, y, eta=9.0, tile=tile),
        value_and_grad(afcl, z, y, eta=9.0, gamma=0.0, tile=tile),
    )
    assert_same(
        value_and_grad(contrastive_loss, z, y, tile=tile), value_and_grad(afcl, z, y, eta=0.0, gamma=0.0, tile=tile)
    )


@every_path
def test_the_loss_is_affine_in_eta(tile):
    z, y = BATCHES["random"]()

    def at(eta):
        return torch.cat(
            [
                x.flatten()
                for x in value_and_grad(asymmetric_focal_contrastive_loss, z, y, eta=eta, gamma=2.0, tile=tile)
            ]
        )

    assert_close(at(30.0), at(0.0) + 30.0 * (at(1.0) - at(0.0)), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(at(30.0), at(0.0))


@every_path
@pytest.mark.parametrize("gamma", [0.0, 1.0, 7.0])
def test_a_lonely_anchor_has_a_value_and_a_gradient_of_its_own_if_and_only_if_eta_is_positive(tile, gamma):
    z, y = BATCHES["a lonely anchor"]()
    for eta in (0.0, 1e-3, 300.0):
        z.requires_grad_()
        own = asymmetric_focal_contrastive_loss(z, y, eta=eta, gamma=gamma, reduction="none", tile=tile)[4]
        (grad,) = torch.autograd.grad(own, z)
        assert (own > 0) == (eta > 0)
        assert (grad[4].norm() > 0) == (eta > 0)


@every_loss
@pytest.mark.parametrize("n", [2, 3, 17, 64, 65, 100])
def test_the_tile_never_matters(loss, n):
    function, options = LOSSES[loss]
    z, y = unit(n, 8, seed=n), torch.arange(n) ** 2 % 7
    expected = value_and_grad(function, z, y, **options, tile=None)
    for tile in (1, 2, 3, 7, 16, 31, 64, 99, 100, 1000, "auto"):
        assert_same(value_and_grad(function, z, y, **options, tile=tile), expected)


@every_loss
@every_path
def test_views_are_samples_with_the_label_of_their_image(loss, tile):
    function, options = LOSSES[loss]
    z, y = unit(5, 3, 6), torch.tensor([0, 1, 0, 2, 1])
    values, grad = value_and_grad(function, z, y, **options, tile=tile, reduction="none")
    flat, flat_grad = value_and_grad(
        function, z.reshape(15, 6), y.repeat_interleave(3), **options, tile=tile, reduction="none"
    )
    assert values.shape == (5, 3)
    assert_same((values.flatten(), grad.reshape(15, 6)), (flat, flat_grad))


@every_loss
@every_path
@pytest.mark.parametrize("normalization", ["paper", "released"])
def test_a_reference_set_is_the_rest_of_a_larger_batch(loss, tile, normalization):
    function, options = LOSSES[loss]
    options = {**options, "normalization": normalization, "reduction": "none", "tile": tile}
    z, y = unit(12, 6), torch.arange(12) % 3
    whole = function(z, y, **options)
    part = function(z[:5], y[:5], **options, reference=(z[5:], y[5:]))
    assert_close(part, whole[:5], rtol=1e-10, atol=1e-12)


@every_loss
@pytest.mark.parametrize("tile", [4, 5, 7])
def test_classes_that_share_a_block_find_all_their_positives_in_the_reference(loss, tile):
    function, options = LOSSES[loss]
    z, y = unit(10, 6), torch.arange(10) // 2
    # At this temperature no p exceeds 1/2, so that no row leaves the path that goes by segments.
    options = {**options, "reference": (unit(14, 6, seed=1), torch.arange(14) % 7), "temperature": 1.0}
    expected = value_and_grad(function, z, y, **options, tile=None)
    assert_same(value_and_grad(function, z, y, **options, tile=tile), expected)


@pytest.mark.parametrize("tile", [3, "auto", None])
def test_features_and_reference_of_different_precision_are_computed_in_the_finer_one(tile):
    z, y, z_ref, y_ref = unit(8, 6).float(), torch.arange(8) % 2, unit(4, 6, seed=1), torch.arange(4) % 2
    value = contrastive_loss(z, y, reference=(z_ref, y_ref), tile=tile)
    assert value.dtype == torch.float64
    assert_close(value, contrastive_loss(z.double(), y, reference=(z_ref, y_ref), tile=tile))


@pytest.mark.parametrize("tile", [3, "auto"])
@pytest.mark.parametrize("far", [2**24, -(2**24) - 1, 2**40])
def test_labels_that_single_precision_cannot_tell_apart_are_told_apart(tile, far):
    z, y = unit(8, 6).float(), torch.arange(8) % 2
    assert_close(contrastive_loss(z, far + y, tile=tile), contrastive_loss(z, y, tile=tile))


@every_loss
@every_path
def test_a_reference_may_come_in_views_and_be_empty(loss, tile):
    function, options = LOSSES[loss]
    z, y, z_ref, y_ref = unit(4, 6), torch.tensor([0, 1, 0, 1]), unit(3, 2, 6, seed=9), torch.tensor([0, 1, 2])
    flat = (z_ref.reshape(6, 6), y_ref.repeat_interleave(2))
    assert_close(
        function(z, y, **options, reference=(z_ref, y_ref), tile=tile),
        function(z, y, **options, reference=flat, tile=tile),
    )
    nothing = (z_ref[:0], y_ref[:0])
    assert_close(function(z, y, **options, reference=nothing, tile=tile), function(z, y, **options, tile=tile))


@every_loss
@every_path
def test_a_mask_of_same_labels_is_the_labels(loss, tile):
    function, options = LOSSES[loss]
    z, y = unit(6, 2, 6), torch.tensor([0, 1, 0, 2, 1, 0])
    z_ref, y_ref = unit(3, 6, seed=4), torch.tensor([2, 0, 5])
    mask = y[:, None] == torch.cat([y, y_ref])
    assert_same(
        value_and_grad(function, z, None, **options, positive=mask, reference=(z_ref, None), tile=tile),
        value_and_grad(function, z, y, **options, reference=(z_ref, y_ref), tile=tile),
    )


@every_loss
@every_path
def test_mean_and_sum_are_those_of_the_values_per_anchor(loss, tile):
    function, options = LOSSES[loss]
    z, y = BATCHES["random"]()
    values, grad = value_and_grad(function, z, y, **options, reduction="none", tile=tile)
    assert_same(value_and_grad(function, z, y, **options, reduction="sum", tile=tile), (values.sum(), grad))
    mean = (values.mean(), grad / len(z))
    assert_same(value_and_grad(function, z, y, **options, reduction="mean", tile=tile), mean)


@every_loss
@every_path
@pytest.mark.parametrize("batch", ["one sample", "two samples"])
def test_an_anchor_with_at_most_one_contrast_sample_contributes_nothing(loss, tile, batch):
    function, options = LOSSES[loss]
    z, y = BATCHES[batch]()
    value, grad = value_and_grad(function, z, y, **options, tile=tile)
    assert value == 0
    assert (grad == 0).all()


def test_both_terms_weigh_the_same_for_uninformative_features_at_parity():
    n = 200
    z, y = torch.ones(n, 3, dtype=torch.float64), torch.arange(n) % 2
    pull = contrastive_loss(z, y)
    push = asymmetric_contrastive_loss(z, y, eta=parity_eta(n)) - pull
    assert_close(pull, push, rtol=0.01, atol=0.0)
    assert parity_eta(1) == parity_eta(2) == 0.0
    assert parity_eta(3) == pytest.approx(2 * math.log(2))
    assert parity_eta(128) == pytest.approx(127 * math.log(127))


@every_path
@pytest.mark.parametrize("with_reference", [False, True])
def test_without_gradients_the_value_is_the_same_and_remembers_nothing(tile, with_reference):
    z, y = unit(8, 5).requires_grad_(), torch.arange(8) % 3
    reference = (unit(4, 5, seed=1).requires_grad_(), torch.arange(4) % 2) if with_reference else None
    for reduction in ("mean", "none"):
        options = {"eta": 9.0, "gamma": 2.0, "reference": reference, "reduction": reduction, "tile": tile}
        expected = asymmetric_focal_contrastive_loss(z, y, **options)
        with torch.no_grad():
            found = asymmetric_focal_contrastive_loss(z, y, **options)
        assert expected.requires_grad
        assert not found.requires_grad
        assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)


@every_path
@pytest.mark.parametrize("views", [1, 2])
def test_a_mask_may_concern_a_reference_in_views_without_labels(tile, views):
    z, z_ref = unit(5, 6), unit(3, views, 6, seed=9)
    mask = torch.rand(5, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    flat = torch.cat([mask[:, :5], mask[:, 5:].repeat_interleave(views, 1)], 1)
    options = {"eta": 3.0, "gamma": 1.5, "tile": tile}
    found = asymmetric_focal_contrastive_loss(z, None, positive=mask, reference=(z_ref, None), **options)
    expected = reference_loss(z, positive=flat, reference=(z_ref.reshape(-1, 6), None), eta=3.0, gamma=1.5)
    assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_the_specification_has_the_defaults_of_the_function():
    z, y = unit(6, 3), torch.tensor([0, 1, 0, 2, 1, 0])
    given = {"eta": 0.0, "gamma": 0.0, "temperature": 0.07, "normalization": "paper", "reduction": "mean"}
    assert reference_loss(z, y) == reference_loss(z, y, **given)
    assert asymmetric_focal_contrastive_loss(z, y) == asymmetric_focal_contrastive_loss(z, y, **given)


@every_path
@pytest.mark.parametrize("d", [1, 2])
def test_few_dimensions_are_no_few_samples(tile, d):
    z, y, z_ref = unit(3, d), torch.tensor([0, 1, 0]), 0.3 * unit(3, d, seed=1)
    options = {"eta": 60.0, "gamma": 2.0, "temperature": 0.5}
    assert_close(asymmetric_focal_contrastive_loss(z, y, **options, tile=tile), reference_loss(z, y, **options))
    reference = (z_ref, y)
    ours = asymmetric_focal_contrastive_loss(z[:1], y[:1], **options, reference=reference, tile=tile)
    assert_close(ours, reference_loss(z[:1], y[:1], **options, reference=reference))


@pytest.mark.parametrize("num_negative", [1, 10, 100])
def test_the_push_is_bounded_by_eta_over_the_negatives_times_the_gap_and_the_pull_by_the_range(num_negative):
    """What docs/losses.md says: an anchor beside a negative, with the gap between its two largest similarities."""
    eta, temperature = 300.0, 0.05
    side = torch.tensor([[0.0, 1.0]], dtype=torch.float64).repeat(
        num_negative, 1
    )  # one positive and the other negatives
    z_ref = torch.cat([torch.tensor([[1.0, 0.0]], dtype=torch.float64), side])
    z, labels = z_ref[:1], torch.tensor([1, 0] + [1] * (num_negative - 1))
    options = {"reference": (z_ref, labels), "temperature": temperature, "reduction": "none"}
    zero = torch.tensor([0])
    pull = contrastive_loss(z, zero, **options)
    push = asymmetric_contrastive_loss(z, zero, eta=eta, **options) - pull
    unit_of_push, gap = eta / num_negative, 1.0 / temperature
    assert unit_of_push * (gap - math.log(num_negative)) <= push <= unit_of_push * (gap + math.log(8))
    assert pull <= math.log(num_negative) + 1.0 / temperature + 1e-6


def test_p_is_about_1_over_the_positives_in_a_cluster_and_near_1_beside_a_twin():
    """What docs/losses.md says of gamma, by its factor (1 - p)^gamma in FCL over CL."""
    centre, num = unit(1, 8), 64

    def factor(positives):
        reference = (torch.cat([positives, -centre]), torch.tensor([0] * num + [1]))
        options = {"reference": reference, "temperature": 0.1}
        zero = torch.tensor([0])
        return (
            focal_contrastive_loss(centre, zero, gamma=2.0, **options) / contrastive_loss(centre, zero, **options)
        ).item()

    cluster = centre.repeat(num, 1)
    assert factor(cluster) == pytest.approx((1 - 1 / num) ** 2, abs=1e-6)
    away = torch.linalg.qr(torch.cat([centre, unit(7, 8, seed=1)]).T)[0].T[1:2]  # at a right angle to the anchor
    spread = torch.cat([centre, away.repeat(num - 1, 1)])
    reference = (torch.cat([spread, -centre]), torch.tensor([0] * num + [1]))
    lonely_twin = torch.zeros(1, num + 2, dtype=torch.bool)
    lonely_twin[0, 1] = True
    value = contrastive_loss(centre, None, positive=lonely_twin, reference=(reference[0], None), temperature=0.1)
    assert math.exp(-value.item()) > 0.99
