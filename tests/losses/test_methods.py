"""The losses of the field against the formulas of their papers, and the laws that all of them keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain_methods as plain
import pytest
import torch
import torch.distributed as dist
from batches import unit
from torch import Tensor, nn
from torch.testing import assert_close

from lopsided.losses import (
    BalancedContrastiveLoss,
    BalancedSoftmaxLoss,
    ClassBalancedLoss,
    CosineClassifier,
    LabelAwareSmoothingLoss,
    LDAMLoss,
    LogitAdjustedLoss,
    Samples,
    SupervisedMinorityLoss,
    SupervisedPrototypesLoss,
    balanced_contrastive_loss,
    balanced_softmax_loss,
    class_balanced_loss,
    class_balanced_weights,
    contrastive_loss,
    gather_reference,
    label_aware_smoothing,
    label_aware_smoothing_loss,
    ldam_loss,
    ldam_margins,
    logit_adjusted_loss,
    opposite_prototypes,
    supervised_minority_loss,
    supervised_prototypes_loss,
)
from lopsided.losses.ldam import LDAMObjective
from training.ranks import together

COUNTS = [500, 40, 7]
TARGET = torch.tensor([0, 1, 2, 0, 0, 1, 2])
LOGITS = 3 * torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
COSINES = torch.cos(LOGITS)
Y = torch.tensor([0, 0, 1, 0, 0, 1])
Z, C = unit(6, 2, 5), unit(2, 5, seed=9)
PROTOTYPES = unit(4, 5, seed=8)
Y4 = torch.tensor([0, 0, 2, 0, 1, 2])  # class 3 is absent


# Values of the classification losses.


@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0, 2.0])
def test_logit_adjustment_is_the_formula_of_its_paper(tau: float) -> None:
    found = logit_adjusted_loss(LOGITS, TARGET, COUNTS, tau=tau, reduction="none")
    assert found.tolist() == pytest.approx(plain.logit_adjusted(LOGITS, TARGET, COUNTS, tau), rel=1e-12)


def test_balanced_softmax_is_the_formula_of_its_paper_and_logit_adjustment_at_tau_1() -> None:
    found = balanced_softmax_loss(LOGITS, TARGET, COUNTS, reduction="none")
    assert found.tolist() == pytest.approx(plain.balanced_softmax(LOGITS, TARGET, COUNTS), rel=1e-12)
    assert_close(found, logit_adjusted_loss(LOGITS, TARGET, COUNTS, tau=1.0, reduction="none"))


@pytest.mark.parametrize("beta", [0.9, 0.999, 0.9999])
def test_the_class_balanced_loss_is_the_formula_of_its_paper(beta: float) -> None:
    found = class_balanced_loss(LOGITS, TARGET, COUNTS, beta=beta, reduction="none")
    assert found.tolist() == pytest.approx(plain.class_balanced(LOGITS, TARGET, COUNTS, beta), rel=1e-9)
    mean = class_balanced_loss(LOGITS, TARGET, COUNTS, beta=beta)
    assert float(mean) == pytest.approx(float(found.sum()) / 7, rel=1e-12)


def test_class_balanced_weights_range_from_equal_to_inverse_counts() -> None:
    assert class_balanced_weights(COUNTS, 0.0).tolist() == [1, 1, 1]
    inverse = torch.tensor([1 / 500, 1 / 40, 1 / 7], dtype=torch.float64)
    expected = 3 * inverse / inverse.sum()
    assert_close(class_balanced_weights(COUNTS, 1.0), expected)
    assert_close(class_balanced_weights(COUNTS, 1 - 1e-12), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("head", "tail"), [(0.3, 0.0), (0.4, 0.1), (0.0, 0.0)])
def test_label_aware_smoothing_is_the_formula_of_its_paper(head: float, tail: float) -> None:
    found = label_aware_smoothing_loss(
        LOGITS, TARGET, COUNTS, smooth_head=head, smooth_tail=tail, reduction="none"
    )  # fmt: skip
    assert found.tolist() == pytest.approx(plain.label_aware(LOGITS, TARGET, COUNTS, head, tail), rel=1e-12)


def test_label_aware_smoothing_gives_the_head_to_all_classes_of_equal_counts() -> None:
    assert label_aware_smoothing([20, 20], 0.3, 0.1).tolist() == pytest.approx([0.3, 0.3])


@pytest.mark.parametrize(("margin", "scale"), [(0.5, 30.0), (0.2, 5.0), (0.0, 1.0)])
def test_ldam_is_the_formula_of_its_paper(margin: float, scale: float) -> None:
    found = ldam_loss(COSINES, TARGET, COUNTS, max_margin=margin, scale=scale, reduction="none")
    expected = plain.ldam(COSINES, TARGET, COUNTS, margin, scale)
    assert found.tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    weight = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    weights = weight[TARGET].tolist()
    mean = ldam_loss(COSINES, TARGET, COUNTS, max_margin=margin, scale=scale, weight=weight)
    by_hand = sum(w * value for w, value in zip(weights, expected, strict=True)) / sum(weights)
    assert float(mean) == pytest.approx(by_hand, rel=1e-10)


def test_ldam_margins_fall_with_the_fourth_root_of_the_count() -> None:
    assert ldam_margins([1600, 100, 1]).tolist() == pytest.approx([0.5 / 40**0.5, 0.5 / 10**0.5, 0.5])


def test_a_cosine_classifier_ignores_the_length_of_features_and_weights() -> None:
    layer = CosineClassifier(5, 3)
    x = torch.randn(4, 5)
    before = layer(x)
    with torch.no_grad():
        layer.weight.mul_(7.0)
    assert_close(layer(0.1 * x), before)
    assert float(before.detach().abs().max()) <= 1


def test_ldam_defers_its_weights_and_always_ends_with_them() -> None:
    counts = torch.tensor(COUNTS)
    objective = LDAMObjective(counts, 4).double()
    early, late = (
        objective(Samples(TARGET, TARGET, logits=30 * COSINES, epoch=epoch, epochs=200)) for epoch in (159, 160)
    )
    unweighted = ldam_loss(COSINES, TARGET, counts, reduction="none")
    assert_close(early, unweighted / 7, rtol=1e-6, atol=1e-9)
    weighted = ldam_loss(COSINES, TARGET, counts, weight=class_balanced_weights(counts))
    assert_close(late.sum(), weighted, rtol=1e-6, atol=1e-9)
    only = objective(Samples(TARGET, TARGET, logits=30 * COSINES, epoch=0, epochs=1))
    assert_close(only, late)
    never = LDAMObjective(counts, 4, defer=1.0).double()
    assert_close(never(Samples(TARGET, TARGET, logits=30 * COSINES, epoch=199, epochs=200)), early)


# Values and gradients of the contrastive losses.

PAIRWISE: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "bcl": (
        lambda z, **options: balanced_contrastive_loss(z, Y4, PROTOTYPES, temperature=0.3, **options),
        lambda z: plain.balanced_contrastive(z, Y4, PROTOTYPES, 0.3),
    ),
    "supmin": (
        lambda z, **options: supervised_minority_loss(z, Y, temperature=0.3, **options),
        lambda z: plain.supervised_minority(z, Y, 1, 0.3),
    ),
    "supmin, minority 0": (
        lambda z, **options: supervised_minority_loss(z, Y, minority=0, temperature=0.07, **options),
        lambda z: plain.supervised_minority(z, Y, 0, 0.07),
    ),
    "supproto": (
        lambda z, **options: supervised_prototypes_loss(z, Y, C, temperature=0.3, **options),
        lambda z: plain.supervised_prototypes(z, Y, C, 1.0, 0.3),
    ),
    "supproto, no margin": (
        lambda z, **options: supervised_prototypes_loss(z, Y, C, margin=0.0, temperature=0.07, **options),
        lambda z: plain.supervised_prototypes(z, Y, C, 0.0, 0.07),
    ),
}
over_pairwise = pytest.mark.parametrize("name", PAIRWISE)


@over_pairwise
@pytest.mark.parametrize("tile", ["auto", 1, 5, 64])
@pytest.mark.parametrize("views", [2, 3])
def test_value_and_gradient_are_those_of_the_formula(name: str, tile: Any, views: int) -> None:
    loss, formula = PAIRWISE[name]
    z = unit(6, views, 5, seed=views).requires_grad_()
    expected = formula(z)
    assert_close(loss(z, reduction="none", tile=tile), expected)
    assert_close(loss(z, reduction="sum", tile=tile), expected.sum())
    weights = torch.linspace(0.5, 2.0, 6 * views, dtype=torch.float64).reshape(6, views)
    wanted = torch.autograd.grad((weights * expected).sum(), z, retain_graph=True)[0]
    assert_close(torch.autograd.grad((weights * loss(z, reduction="none", tile=tile)).sum(), z)[0], wanted)
    wanted = torch.autograd.grad(expected.mean(), z)[0]
    assert_close(torch.autograd.grad(loss(z, tile=tile), z)[0], wanted)


def test_bcl_works_without_views_and_moves_its_prototypes() -> None:
    z, c = unit(6, 5).requires_grad_(), PROTOTYPES.clone().requires_grad_()
    expected = plain.balanced_contrastive(z, Y4, c, 0.2).mean()
    found = balanced_contrastive_loss(z, Y4, c, temperature=0.2)
    assert_close(found, expected)
    assert_close(torch.autograd.grad(found, (z, c)), torch.autograd.grad(expected, (z, c)))


def test_bcl_has_room_for_more_classes_than_a_batch_holds() -> None:
    prototypes = unit(1000, 5, seed=4)
    z, y = unit(6, 5).requires_grad_(), torch.tensor([3, 3, 999, 17, 500, 0])
    found = balanced_contrastive_loss(z, y, prototypes)
    found.backward()
    assert_close(found, plain.balanced_contrastive(z, y, prototypes, 0.07).mean())
    assert z.grad is not None
    assert z.grad.norm() > 0  # A sample that is alone in its class has its prototype as a positive.


def test_prototypes_are_trained_on_features_of_inference_mode() -> None:
    with torch.inference_mode():
        z, y = unit(6, 5), Y4.clone()
    loss = BalancedContrastiveLoss(4, 5).double()
    for reduction in ("mean", "none"):
        loss.reduction = reduction
        grad = torch.autograd.grad(loss(z, y).sum(), loss.prototypes)[0]
        assert grad.isfinite().all()
        assert grad.norm() > 0


def test_supmin_keeps_the_majority_apart_where_cl_wants_one_point() -> None:
    """At a majority that has collapsed, CL has no gradient on it, and SupMin has."""
    y = torch.tensor([0, 0, 0, 1])
    start = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    z = torch.stack([start, start, start, -start])[:, None].repeat(1, 2, 1)
    z = z + 0.1 * unit(4, 2, 3, seed=2)
    z = nn.functional.normalize(z, dim=-1).requires_grad_()
    at_cl, at_supmin = (
        torch.autograd.grad(loss(z, y, temperature=0.07), z)[0] for loss in (contrastive_loss, supervised_minority_loss)
    )
    pushed = {}
    for name, grad in (("cl", at_cl), ("supmin", at_supmin)):
        moved = nn.functional.normalize(z.detach() - 0.01 * grad, dim=-1)[:3].mean(1)
        pushed[name] = float(torch.pdist(moved).mean() - torch.pdist(z.detach()[:3].mean(1)).mean())
    assert pushed["supmin"] > 0 > pushed["cl"]


@over_pairwise
def test_a_reference_stands_for_samples_that_are_not_anchors(name: str) -> None:
    z = Z.requires_grad_()
    loss = {
        "bcl": lambda z, y, **more: balanced_contrastive_loss(z, y, PROTOTYPES, temperature=0.3, **more),
        "supmin": lambda z, y, **more: supervised_minority_loss(z, y, temperature=0.3, **more),
        "supmin, minority 0": lambda z, y, **more: supervised_minority_loss(z, y, minority=0, **more),
        "supproto": lambda z, y, **more: supervised_prototypes_loss(z, y, C, temperature=0.3, **more),
        "supproto, no margin": lambda z, y, **more: supervised_prototypes_loss(z, y, C, margin=0.0, **more),
    }[name]
    y = Y4 if name == "bcl" else Y
    whole = loss(z, y, reduction="none")
    parts = [
        loss(z[here], y[here], reference=(z[there], y[there]), reduction="none")
        for here, there in ((slice(0, 2), slice(2, 6)), (slice(2, 6), slice(0, 2)))
    ]
    assert_close(torch.cat(parts), whole)
    assert_close(*(torch.autograd.grad(x.sum(), z, retain_graph=True)[0] for x in (torch.cat(parts), whole)))


@over_pairwise
def test_identical_and_opposite_features_have_finite_values_and_gradients(name: str) -> None:
    loss, _ = PAIRWISE[name]
    same = unit(1, 1, 5).expand(6, 2, 5)
    signs = torch.tensor([1.0, 1, -1, 1, -1, -1], dtype=torch.float64)[:, None, None]
    for z in (same, same * signs):
        for dtype in (torch.float64, torch.float32):
            leaf = z.to(dtype).clone().requires_grad_()
            value = loss(leaf)
            assert value.dtype == dtype
            value.backward()
            assert value.isfinite()
            assert leaf.grad is not None
            assert leaf.grad.isfinite().all()


# Every module: precision, compiling, several ranks, text.

LOGIT_MODULES: dict[str, Callable[[], nn.Module]] = {
    "logit-adjusted": lambda: LogitAdjustedLoss(COUNTS),
    "balanced softmax": lambda: BalancedSoftmaxLoss(COUNTS),
    "class-balanced": lambda: ClassBalancedLoss(COUNTS),
    "label-aware smoothing": lambda: LabelAwareSmoothingLoss(COUNTS),
    "ldam": lambda: LDAMLoss(COUNTS, weight=torch.tensor([0.5, 1.0, 2.0])),
}
FEATURE_MODULES: dict[str, Callable[[], nn.Module]] = {
    "bcl": lambda: BalancedContrastiveLoss(4, 5),
    "supmin": SupervisedMinorityLoss,
    "supproto": lambda: SupervisedPrototypesLoss(5),
}
MODULES = {**LOGIT_MODULES, **FEATURE_MODULES}
over_modules = pytest.mark.parametrize("name", MODULES)


def module(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]()


def inputs(name: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    if name in LOGIT_MODULES:
        return (COSINES if name == "ldam" else LOGITS).to(dtype), TARGET
    return (3 * Z.detach()).to(dtype), Y4 if name == "bcl" else Y


@over_modules
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("inside", [False, True])
def test_half_precision_is_computed_in_float32_inside_and_outside_of_autocast(
    name: str, dtype: torch.dtype, inside: bool
) -> None:
    x, y = inputs(name, dtype)
    x.requires_grad_()
    loss = module(name)
    with torch.autocast("cpu", dtype=dtype, enabled=inside):
        value = loss(x, y)
    value.backward()
    wide = x.detach().float().requires_grad_()
    expected = module(name)(wide, y)
    expected.backward()
    assert value.dtype == torch.float32
    assert_close(value, expected, rtol=1e-6, atol=1e-6)
    assert x.grad is not None
    assert wide.grad is not None
    assert_close(x.grad.float(), wide.grad, rtol=0.01, atol=0.01 * float(wide.grad.abs().max()))


@over_modules
@pytest.mark.filterwarnings("ignore")
def test_compiled_it_has_the_same_value_and_gradient_without_a_break(name: str) -> None:
    x, y = inputs(name)
    x.requires_grad_()
    torch._dynamo.reset()
    loss = module(name)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found, expected = compiled(x, y), loss(x, y)
    assert_close(found, expected)
    leaves = [x, *loss.parameters()]
    assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_by_inductor_bcl_has_the_same_value_and_gradient() -> None:
    x, y = inputs("bcl")
    x.requires_grad_()
    torch._dynamo.reset()
    loss = module("bcl")
    found, expected = torch.compile(loss, fullgraph=True)(x, y), loss(x, y)
    assert_close(found, expected)
    assert_close(torch.autograd.grad(found, x), torch.autograd.grad(expected, x))


@over_modules
def test_a_module_is_its_function_and_says_what_it_is(name: str) -> None:
    x, y = inputs(name, torch.float64)
    loss = module(name).double()
    unit_z = nn.functional.normalize(x, dim=-1)
    expected = {
        "logit-adjusted": lambda: logit_adjusted_loss(x, y, COUNTS),
        "balanced softmax": lambda: balanced_softmax_loss(x, y, COUNTS),
        "class-balanced": lambda: class_balanced_loss(x, y, COUNTS),
        "label-aware smoothing": lambda: label_aware_smoothing_loss(x, y, COUNTS),
        "ldam": lambda: ldam_loss(x, y, COUNTS, weight=torch.tensor([0.5, 1.0, 2.0])),
        "bcl": lambda: balanced_contrastive_loss(unit_z, y, nn.functional.normalize(loss.prototypes, dim=-1)),
        "supmin": lambda: supervised_minority_loss(unit_z, y),
        "supproto": lambda: supervised_prototypes_loss(unit_z, y, loss.prototypes),
    }[name]()
    assert_close(loss(x, y), expected, rtol=1e-6, atol=1e-8)
    assert type(loss).__name__ in repr(loss)
    assert "mean" in repr(loss)
    if name in FEATURE_MODULES:
        total, values = loss.total_and_values(x, y)
        assert_close(total / values.numel(), loss(x, y))
        assert_close(values.sum(), total)
        assert not values.requires_grad


def test_the_prototypes_of_supproto_are_opposite_and_part_of_the_state() -> None:
    loss = SupervisedPrototypesLoss(7)
    assert_close(loss.prototypes[0], -loss.prototypes[1])
    assert_close(loss.prototypes.norm(dim=1), torch.ones(2))
    assert not loss.prototypes.requires_grad
    assert "prototypes" in loss.state_dict()
    assert not torch.equal(opposite_prototypes(7), opposite_prototypes(7))


SHARES = (4, 2)


def of_rank(_: Any) -> dict[str, list[Tensor]]:
    """Value and gradients of the pairwise losses from parts that two ranks share unequally."""
    rank = dist.get_rank()
    own = slice(0, SHARES[0]) if rank == 0 else slice(SHARES[0], 6)
    found = {}
    for name in FEATURE_MODULES:
        loss, (x, y) = module(name).double(), inputs(name, torch.float64)
        z = x[own].clone().requires_grad_()
        gathered = gather_reference(z, y[own])
        part = gathered.weight * loss(z, y[own], reference=gathered.reference)
        leaves = [z, *loss.parameters()]
        grads = torch.autograd.grad(part, leaves)
        tensors = [part.detach().clone(), *[grad.clone() for grad in grads[1:]]]
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor.div_(2)
        found[name] = [*tensors, grads[0] / 2]
    return found


@pytest.mark.slow
def test_two_ranks_have_the_loss_and_gradients_of_one_process(tmp_path: Path) -> None:
    ranks = together(2, tmp_path, of_rank)
    for name in FEATURE_MODULES:
        loss, (x, y) = module(name).double(), inputs(name, torch.float64)
        x.requires_grad_()
        value = loss(x, y)
        grads = torch.autograd.grad(value, [x, *loss.parameters()])
        for found in ranks:
            for got, right in zip(found[name][:-1], [value.detach(), *grads[1:]], strict=True):
                assert_close(got, right, rtol=1e-12, atol=1e-14)
        assert_close(torch.cat([found[name][-1] for found in ranks]), grads[0], rtol=1e-12, atol=1e-14)


# Bad input.


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: logit_adjusted_loss(LOGITS, TARGET, COUNTS, tau=-1),
            "tau must be a finite number >= 0, got -1. The paper uses 1; 0 is plain cross-entropy.",
        ),
        (
            lambda: LogitAdjustedLoss(COUNTS, tau=float("nan")),
            "tau must be a finite number >= 0, got nan. The paper uses 1; 0 is plain cross-entropy.",
        ),
        (
            lambda: logit_adjusted_loss(LOGITS, TARGET, [1, 2]),
            "logits must have shape (n, 2), one column for each of the counts, got (7, 3).",
        ),
        (
            lambda: logit_adjusted_loss(LOGITS, TARGET, [5, -1, 2]),
            "counts must be >= 0 and finite, got -1. Count the training images.",
        ),
        (
            lambda: logit_adjusted_loss(LOGITS, TARGET, [5]),
            "counts must hold one number of images for each of at least 2 classes, got torch.int64 of shape (1,).",
        ),
        (
            lambda: class_balanced_loss(LOGITS, TARGET, COUNTS, beta=1.5),
            "beta must be a finite number >= 0 and <= 1, got 1.5. 0 gives equal weights; 1 gives weights in inverse "
            "proportion to the counts.",
        ),
        (
            lambda: label_aware_smoothing(COUNTS, 1.0),
            "smooth_head must be a finite number >= 0 and <= 0.999, got 1.0. The paper uses 0.3 to 0.4.",
        ),
        (
            lambda: label_aware_smoothing(COUNTS, 0.1, 0.2),
            "smooth_tail must be <= smooth_head (0.1), got 0.2. Frequent classes get smoother labels.",
        ),
        (
            lambda: ldam_loss(COSINES, TARGET, COUNTS, max_margin=2),
            "max_margin must be a finite number >= 0 and <= 1, got 2. The paper uses 0.5; 0 is cross-entropy of "
            "cosines.",
        ),
        (
            lambda: ldam_loss(COSINES, TARGET, COUNTS, scale=0),
            "scale must be a finite number > 0, got 0. The paper uses 30.",
        ),
        (
            lambda: LDAMObjective(torch.tensor(COUNTS), 4, defer=1.2),
            "defer must be a finite number >= 0 and <= 1, got 1.2. The paper uses 0.8; 1 never re-weights.",
        ),
        (
            lambda: supervised_minority_loss(unit(6, 5), Y),
            "z must have shape (n, views, d) with at least 2 views for SupMin, got (6, 5). Encode two augmented views "
            "of each sample.",
        ),
        (
            lambda: supervised_prototypes_loss(unit(6, 1, 5), Y, C),
            "z must have shape (n, views, d) with at least 2 views for SupProto, got (6, 1, 5). Encode two augmented "
            "views of each sample.",
        ),
        (
            lambda: supervised_minority_loss(Z, Y4),
            "y must hold the labels 0 and 1, got 2. SupMin is for two classes.",
        ),
        (
            lambda: supervised_prototypes_loss(Z, Y4, C),
            "y must hold the labels 0 and 1, got 2. SupProto is for two classes.",
        ),
        (
            lambda: supervised_minority_loss(Z, Y, minority=2),
            "minority must be the label of the minority, 0 or 1, got 2.",
        ),
        (
            lambda: supervised_minority_loss(Z, Y, reference=(Z, None)),
            "reference must be a pair (z_ref, y_ref) of tensors for SupMin, got tuple.",
        ),
        (
            lambda: supervised_prototypes_loss(Z, Y, C, margin=3),
            "margin must be a finite number >= 0 and <= 2, got 3. The authors use 1; 2 always pulls between opposite "
            "prototypes.",
        ),
        (
            lambda: supervised_prototypes_loss(Z, Y, PROTOTYPES),
            "prototypes must have shape (2, 5), one row per class, got (4, 5).",
        ),
        (
            lambda: balanced_contrastive_loss(Z, Y4, PROTOTYPES, temperature=0),
            "temperature must be > 0 and finite, got 0.0. The authors use 0.07.",
        ),
        (
            lambda: balanced_contrastive_loss(Z, Y4 + 2, PROTOTYPES),
            "y must hold labels from 0 to 3, one per prototype, got 4.",
        ),
        (
            lambda: balanced_contrastive_loss(Z, Y4, PROTOTYPES[:, :3]),
            "prototypes must have shape (K, 5), one row for each class, got (4, 3).",
        ),
        (
            lambda: balanced_contrastive_loss(Z, Y4, PROTOTYPES, tile=None),
            "tile must be 'auto' or an int >= 1 for BCL, got None. It has no dense path.",
        ),
    ],
)
def test_bad_input_is_refused_in_one_or_two_sentences(call: Callable[[], object], text: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert str(caught.value) == text
