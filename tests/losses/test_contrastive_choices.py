"""Which samples an anchor is contrasted with: the reference alone, a mask, and samples of unknown label."""

from __future__ import annotations

import pytest
import torch
from batches import BATCHES, LOSSES, PATHS, unit
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from lopsided.losses import (
    AsymmetricContrastiveLoss,
    AsymmetricFocalContrastiveLoss,
    asymmetric_focal_contrastive_loss,
)
from lopsided.losses.reference import reference_loss

needs_fake_cuda = pytest.mark.skipif(
    torch.__version__.startswith("2.8") and torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="torch 2.8 built for CUDA ends the process where there is no device",
)

every_path = pytest.mark.parametrize("tile", PATHS.values(), ids=PATHS)
every_loss = pytest.mark.parametrize("loss", LOSSES)
FORMULAS = [(0.0, 0.0, 0.07), (60.0, 0.5, 0.07), (300.0, 7.0, 0.5), (1.0, 1.0, 0.01), (5.0, 2.0, 3.0)]


def assert_same_with_gradients(one, other, leaves, rtol=1e-9, atol=1e-11):
    assert_close(one, other, rtol=rtol, atol=atol * max(1.0, other.abs().max().item()))
    grads = (torch.autograd.grad(value.sum(), leaves, retain_graph=True) for value in (one, other))
    for found, expected in zip(*grads, strict=True):
        assert_close(found, expected, rtol=rtol, atol=atol * max(1.0, expected.abs().max().item()))


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("normalization", ["paper", "released"])
def test_a_mask_chooses_the_contrast_samples_of_each_anchor(batch, normalization):
    z, y = BATCHES[batch]()
    n, d = z.shape
    z_ref, y_ref = unit(4, d, seed=1).requires_grad_(), torch.tensor([0, 1, 4, 0])
    z.requires_grad_()
    contrast = torch.rand(n, n + 4, generator=torch.Generator().manual_seed(0)) < 0.5
    contrast[0], contrast[-1] = False, torch.arange(n + 4) == n  # no sample, and a single one
    for eta, gamma, temperature in FORMULAS[:: 2 if normalization == "paper" else 3]:
        options = {"eta": eta, "gamma": gamma, "temperature": temperature, "normalization": normalization}
        options |= {"reference": (z_ref, y_ref), "contrast": contrast, "reduction": "none"}
        expected = reference_loss(z, y, **options)
        for tile in (None, 1, 3, 64):  # At these sizes, "auto" is one block like 64, and 5 cuts like 3.
            found = asymmetric_focal_contrastive_loss(z, y, **options, tile=tile)
            assert_same_with_gradients(found, expected, (z, z_ref))
            assert found[0] == found[-1] == 0


@every_loss
@every_path
@pytest.mark.parametrize("normalization", ["paper", "released"])
def test_with_the_reference_alone_no_sample_of_the_batch_is_a_contrast_sample(loss, tile, normalization):
    function, options = LOSSES[loss]
    options = {**options, "normalization": normalization, "reduction": "none"}
    z, z_ref = unit(5, 6).requires_grad_(), unit(6, 6, seed=1).requires_grad_()
    y, y_ref = torch.tensor([0, 1, 0, 2, 9]), torch.arange(6) % 3
    found = function(z, y, **options, reference=(z_ref, y_ref), contrast="reference", tile=tile)
    one_by_one = [function(z[i : i + 1], y[i : i + 1], **options, reference=(z_ref, y_ref)) for i in range(5)]
    assert_same_with_gradients(found, torch.cat(one_by_one), (z, z_ref))
    expected = reference_loss(
        z, y, eta=options.get("eta", 0.0), gamma={"FCL": 1.0, "AFCL": 2.5}.get(loss, 0.0), contrast="reference",
        normalization=normalization, reduction="none", reference=(z_ref, y_ref),
    )  # fmt: skip
    assert_same_with_gradients(found, expected, (z, z_ref))


@every_loss
@every_path
@pytest.mark.parametrize("normalization", ["paper", "released"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_samples_of_unknown_label_might_as_well_not_be_there(loss, tile, normalization, reduction):
    function, options = LOSSES[loss]
    options = {**options, "normalization": normalization, "reduction": reduction, "tile": tile}
    z, z_ref = unit(9, 2, 6).requires_grad_(), unit(5, 6, seed=1).requires_grad_()
    y, y_ref = torch.tensor([0, -1, 0, 2, 1, -1, 3, 1, 0]), torch.tensor([0, -1, 4, -1, 1])
    known, known_ref = y != -1, y_ref != -1
    found = function(z, y, **options, reference=(z_ref, y_ref), ignore_index=-1)
    rest = function(z[known], y[known], **options, reference=(z_ref[known_ref], y_ref[known_ref]))
    if reduction == "none":
        assert (found[~known] == 0).all()
        found = found[known]
    assert_same_with_gradients(found, rest, (z, z_ref))
    with_them = function(z, y, **options, reference=(z_ref, y_ref))
    assert not torch.allclose(rest, with_them[known] if reduction == "none" else with_them)


@every_path
def test_no_label_is_special_unless_it_is_named(tile):
    z = unit(6, 3)
    options = {"eta": 3.0, "gamma": 2.0, "tile": tile}
    minus_one = torch.tensor([0, 1, 0, -1, 1, -1])
    two = torch.tensor([0, 1, 0, 2, 1, 2])
    loss = asymmetric_focal_contrastive_loss
    assert_close(loss(z, minus_one, **options), loss(z, two, **options))
    assert_close(loss(z, minus_one, **options, ignore_index=7), loss(z, two, **options))


@every_path
def test_a_batch_without_a_known_label_has_the_loss_0_and_no_gradient(tile):
    z, y = unit(6, 3).requires_grad_(), torch.full((6,), -1)
    value = asymmetric_focal_contrastive_loss(z, y, eta=3.0, gamma=2.0, ignore_index=-1, tile=tile)
    assert value == 0
    assert (torch.autograd.grad(value, z)[0] == 0).all()


@every_path
@pytest.mark.parametrize("eta_unit", ["absolute", "parity"])
def test_in_a_module_eta_in_parity_counts_the_samples_that_are_left(tile, eta_unit):
    z, y = 3 * unit(8, 2, 5).requires_grad_(), torch.tensor([0, -1, 0, 2, 1, -1, 1, 1])
    loss = AsymmetricFocalContrastiveLoss(0.5, 1.5, eta_unit=eta_unit, ignore_index=-1, tile=tile)
    twin = AsymmetricFocalContrastiveLoss(0.5, 1.5, eta_unit=eta_unit, tile=tile)
    assert_same_with_gradients(loss(z, y), twin(z[y != -1], y[y != -1]), (z,))
    total, values = loss.total_and_values(z, y)
    expected, by_anchor = twin.total_and_values(z[y != -1], y[y != -1])
    assert_same_with_gradients(total, expected, (z,))
    assert_close(values[y != -1], by_anchor)
    mask = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.6
    plain = AsymmetricFocalContrastiveLoss(0.5, 1.5, eta_unit=eta_unit, tile=tile, reduction="none")
    for i in (2, 4):  # Each anchor by itself, with the samples that it may see as its reference.
        alone = plain(z[i, :1], y[i : i + 1], reference=_others(z, y, mask, i))
        assert_close(plain(z, y, contrast=mask)[i, 0], alone[0], rtol=1e-9, atol=1e-11)


def _others(z, y, mask, i):
    seen = [(k, v) for k in range(8) for v in range(2) if mask[i, k] and (k, v) != (i, 0)]
    return torch.stack([z[k, v] for k, v in seen]), torch.stack([y[k] for k, _ in seen])


cases = st.fixed_dictionaries(
    {
        "n": st.integers(1, 8),
        "r": st.integers(0, 4),
        "seed": st.integers(0, 10**6),
        "formula": st.sampled_from(FORMULAS),
        "tile": st.sampled_from(["auto", None, 1, 2, 3, 7]),
        "normalization": st.sampled_from(["paper", "released"]),
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "contrast": st.sampled_from(["all", "reference", 0.2, 0.8]),
        "unknown": st.booleans(),
        "masked": st.booleans(),
    }
)


@pytest.mark.slow
@given(cases)
@settings(max_examples=100, deadline=None)
def test_generated_cases_agree_with_the_specification_in_value_and_all_gradients(case):
    n, r = case["n"], case["r"]
    generator = torch.Generator().manual_seed(case["seed"])
    z, z_ref = unit(n, 4, seed=case["seed"]).requires_grad_(), unit(r, 4, seed=case["seed"] + 1).requires_grad_()
    labels = torch.randint(-1, 3, (n + r,), generator=generator)
    eta, gamma, number = case["formula"]
    temperature = torch.tensor(number, dtype=torch.float64, requires_grad=True)
    contrast = case["contrast"]
    if not isinstance(contrast, str):
        contrast = torch.rand(n, n + r, generator=generator) < contrast
    masked = case["masked"]
    options = {"eta": eta, "gamma": gamma, "temperature": temperature, "contrast": contrast}
    options |= {name: case[name] for name in ("normalization", "reduction")}
    options["positive"] = torch.rand(n, n + r, generator=generator) < 0.4 if masked else None
    options["ignore_index"] = -1 if case["unknown"] and not masked else None
    y, y_ref = (None, None) if masked else (labels[:n], labels[n:])
    weights = torch.rand(n, generator=generator, dtype=torch.float64) if case["reduction"] == "none" else 1.0
    expected = reference_loss(z, y, **options, reference=(z_ref, y_ref)) * weights
    found = asymmetric_focal_contrastive_loss(z, y, **options, reference=(z_ref, y_ref), tile=case["tile"]) * weights
    leaves = (z, z_ref, temperature) if r else (z, temperature)
    assert_same_with_gradients(found, expected, leaves, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("tile", ["auto", 4, None])
def test_a_compiled_loss_leaves_samples_out_in_one_graph(tile):
    torch._dynamo.reset()
    loss = AsymmetricFocalContrastiveLoss(0.5, 2.0, eta_unit="parity", ignore_index=-1, tile=tile)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    z, y = unit(10, 6).float().requires_grad_(), torch.arange(10) % 4 - 1
    reference = (unit(5, 6, seed=1).float(), torch.arange(5) % 3 - 1)
    one, other = (call(z, y, reference=reference, contrast="reference") for call in (loss, compiled))
    assert_close(other, one)
    assert_close(torch.autograd.grad(other, z)[0], torch.autograd.grad(one, z)[0])


@needs_fake_cuda
@pytest.mark.parametrize("tile", ["auto", 3])
def test_on_a_cuda_device_the_host_asks_for_no_number_to_leave_samples_out(monkeypatch, tile):
    monkeypatch.setattr("lopsided.losses._kernel.tiled.free_memory", lambda device: 2**30)
    with FakeTensorMode():
        z, z_ref = (torch.empty(n, 2, 6, device="cuda", requires_grad=True) for n in (9, 4))
        y, y_ref = (torch.empty(n, dtype=torch.long, device="cuda") for n in (9, 4))
        temperature = torch.empty((), device="cuda", requires_grad=True)
        contrast = torch.empty(9, 13, dtype=torch.bool, device="cuda")
        loss = AsymmetricFocalContrastiveLoss(9.0, 7.0, eta_unit="parity", ignore_index=-1, tile=tile)
        arguments = {"reference": (z_ref, y_ref), "contrast": contrast, "temperature": temperature}
        value = loss(z, y, **arguments)
        _, values = loss.total_and_values(z, y, **arguments)
    assert (value.shape, values.shape, value.device.type) == ((), (9, 2), "cuda")


BAD = [
    (
        {"y": torch.arange(6), "positive": torch.ones(6, 6, dtype=torch.bool)},
        "y and positive cannot be used together, because positive replaces the labels. Pass y=None.",
    ),
    (
        {"positive": torch.ones(6, 8, dtype=torch.bool), "reference": (unit(2, 3), torch.arange(2))},
        "y_ref and positive cannot be used together, because positive replaces the labels. "
        "Pass reference=(z_ref, None).",
    ),
    (
        {"positive": torch.ones(6, 6, dtype=torch.bool), "ignore_index": -1},
        "ignore_index needs labels, got a positive mask. Leave samples out with contrast.",
    ),
    (
        {"y": torch.arange(6), "ignore_index": "?"},
        "ignore_index must be None or the label of samples to leave out, got str. Pass an int.",
    ),
    (
        {"y": torch.arange(6), "ignore_index": True},
        "ignore_index must be None or the label of samples to leave out, got bool. Pass an int.",
    ),
    (
        {"y": torch.arange(6), "contrast": "queue"},
        "contrast must be 'all', 'reference' or a boolean mask, got 'queue'.",
    ),
    (
        {"y": torch.arange(6), "contrast": None},
        "contrast must be 'all', 'reference' or a boolean mask, got None.",
    ),
    (
        {"y": torch.arange(6), "contrast": "reference"},
        "contrast='reference' needs a reference, got None. Pass reference=(z_ref, y_ref).",
    ),
    (
        {"y": torch.arange(6), "contrast": torch.ones(6, 6)},
        "contrast must be a boolean tensor, got torch.float32. Compare it with 0 to make a mask.",
    ),
    (
        {"y": torch.arange(6), "contrast": torch.ones(6, 5, dtype=torch.bool)},
        "contrast must have shape (6, 6), samples by contrast samples, got (6, 5).",
    ),
]


@pytest.mark.parametrize(("bad", "sentence"), BAD, ids=[sentence[:50] for _, sentence in BAD])
def test_bad_choices_are_refused_in_one_sentence(bad, sentence):
    arguments = {"y": None} | bad
    with pytest.raises((TypeError, ValueError)) as caught:
        asymmetric_focal_contrastive_loss(unit(6, 3), arguments.pop("y"), **arguments)
    assert str(caught.value) == sentence


def test_a_module_shows_and_checks_the_label_that_it_ignores():
    assert repr(AsymmetricContrastiveLoss(ignore_index=-1)).endswith("tile='auto', ignore_index=-1)")
    with pytest.raises(TypeError, match="ignore_index must be None or the label"):
        AsymmetricContrastiveLoss(ignore_index=0.5)
