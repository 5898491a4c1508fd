"""Focal and asymmetric loss against the printed equations, torch's own losses, torchvision and mpmath."""

import copy
import io
import math
import re
from functools import partial

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from lopsided.losses.classification import AsymmetricLoss, FocalLoss, asymmetric_loss, focal_loss

quick = settings(max_examples=40, deadline=None)
GAMMAS = [0.0, 0.3, 0.5, 1.0, 2.0, 7.0]
EXTREMES = [-1e4, -500.0, -104.0, -88.0, -30.0, -17.0, -3.0, -1e-3, 0.0, 0.5, 4.0, 16.5, 30.0, 87.0, 104.0, 1e4]


def random(*shape, seed=0, scale=2.0, dtype=torch.float64):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def labels(high, *shape, seed=1):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def printed_focal(x, y, gamma):
    """Eq. (8) for one logit."""
    p = sigmoid(x)
    return -y * (1 - p) ** gamma * math.log(p) - (1 - y) * p**gamma * math.log(1 - p)


def printed_asymmetric(row, target, gamma_positive, gamma_negative, margin):
    """Eqs. (9), (10), (12)-(14) for the labels of one sample."""
    total = 0.0
    for x, y in zip(row, target, strict=True):
        p = sigmoid(x)
        shifted = max(p - margin, 0)
        positive = (1 - p) ** gamma_positive * math.log(p)
        negative = shifted**gamma_negative * math.log(1 - shifted)
        total += -y * positive - (1 - y) * negative
    return total


def printed_multiclass(row, target, gamma):
    total = sum(math.exp(x) for x in row)
    p = math.exp(row[target]) / total
    return -((1 - p) ** gamma) * math.log(p)


def exact_term(x, gamma):
    """-(1 - p)^gamma log p in mpmath, p the sigmoid of x."""
    return (1 / (1 + mpmath.exp(x))) ** gamma * mpmath.log(1 + mpmath.exp(-x))


def exact_shifted_term(x, gamma, margin):
    """-q^gamma log(1 - q) in mpmath, q = max(p - margin, 0)."""
    p, rest = 1 / (1 + mpmath.exp(-x)), 1 / (1 + mpmath.exp(x))
    if p <= margin:
        return mpmath.mpf(0)
    # p - m in mpmath has 60 digits, so a difference of 1e-17 still has 43.
    return -((p - margin) ** gamma) * mpmath.log(rest + margin)


def assert_exact(value, gradient, x, gamma, term):
    """Float32 value and gradient against mpmath, up to the rounding of the exponent and to what underflows."""
    with mpmath.workdps(60):
        at = mpmath.mpf(x)
        expected, slope = term(at), mpmath.diff(term, at)
    rtol = 1e-6 + 2.5e-7 * (1 + gamma) * min(abs(x), 200.0)
    assert value == pytest.approx(float(expected), rel=rtol, abs=1e-37)
    assert gradient == pytest.approx(float(slope), rel=rtol, abs=1e-30)


class TestFocalLoss:
    @pytest.mark.parametrize("gamma", GAMMAS)
    def test_binary_loss_is_the_printed_sum(self, gamma):
        x, y = random(50), labels(2, 50)
        expected = [printed_focal(a, b, gamma) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
        torch.testing.assert_close(focal_loss(x, y, gamma=gamma, reduction="none").tolist(), expected)

    @pytest.mark.parametrize("gamma", GAMMAS)
    @pytest.mark.parametrize("classes", [2, 3, 10])
    def test_multiclass_loss_is_the_printed_sum_over_the_true_class(self, gamma, classes):
        x, y = random(50, classes), labels(classes, 50)
        expected = [printed_multiclass(a, b, gamma) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
        torch.testing.assert_close(focal_loss(x, y, gamma=gamma, reduction="none").tolist(), expected)

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("weighted", [False, True])
    def test_gamma_zero_is_cross_entropy(self, reduction, weighted):
        x, y = random(40, 5), labels(5, 40)
        weight = torch.tensor([0.1, 3.0, 1.0, 0.0, 2.0], dtype=torch.float64) if weighted else None
        ours = focal_loss(x, y, gamma=0.0, weight=weight, reduction=reduction)
        torch.testing.assert_close(ours, functional.cross_entropy(x, y, weight, reduction=reduction))

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_gamma_zero_is_binary_cross_entropy(self, reduction):
        x, y = random(40), labels(2, 40)
        ours = focal_loss(x, y, gamma=0.0, reduction=reduction)
        expected = functional.binary_cross_entropy_with_logits(x, y.double(), reduction=reduction)
        torch.testing.assert_close(ours, expected)

    @pytest.mark.parametrize("gamma", GAMMAS)
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_one_logit_and_two_logits_for_two_classes_agree_with_weights(self, gamma, reduction):
        x, y = random(40), labels(2, 40)
        weight = torch.tensor([0.2, 1.5], dtype=torch.float64)
        two = torch.stack([torch.zeros_like(x), x], dim=1)
        options = {"gamma": gamma, "weight": weight, "reduction": reduction}
        torch.testing.assert_close(focal_loss(x, y, **options), focal_loss(two, y, **options))

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_class_weights_multiply_the_term_and_not_the_probability(self, reduction):
        x, y = random(30, 4), labels(4, 30)
        weight = torch.tensor([5.0, 0.25, 1.0, 2.0], dtype=torch.float64)
        terms = weight[y] * focal_loss(x, y, reduction="none")
        expected = terms.sum() / (weight[y].sum() if reduction == "mean" else 1)
        torch.testing.assert_close(focal_loss(x, y, weight=weight, reduction=reduction), expected)

    @pytest.mark.parametrize("gamma", [0.0, 1.0, 2.0])
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_it_is_the_focal_loss_of_torchvision_without_alpha(self, gamma, reduction):
        ops = pytest.importorskip("torchvision.ops")
        x, y = random(30), labels(2, 30)
        theirs = ops.sigmoid_focal_loss(x, y.double(), alpha=-1, gamma=gamma, reduction=reduction)
        torch.testing.assert_close(focal_loss(x, y, gamma=gamma, reduction=reduction), theirs)

    def test_alpha_of_torchvision_is_a_pair_of_class_weights(self):
        ops = pytest.importorskip("torchvision.ops")
        x, y = random(30), labels(2, 30)
        theirs = ops.sigmoid_focal_loss(x, y.double(), alpha=0.25, gamma=2.0, reduction="sum")
        ours = focal_loss(x, y, gamma=2.0, weight=torch.tensor([0.75, 0.25]), reduction="sum")
        torch.testing.assert_close(ours, theirs)

    @quick
    @given(st.integers(0, 1000), st.floats(-50, 50), st.sampled_from(GAMMAS))
    def test_a_common_shift_of_the_logits_and_a_renaming_of_classes_change_nothing(self, seed, shift, gamma):
        x, y = random(6, 4, seed=seed), labels(4, 6, seed=seed)
        loss = focal_loss(x, y, gamma=gamma, reduction="none")
        torch.testing.assert_close(focal_loss(x + shift, y, gamma=gamma, reduction="none"), loss, rtol=1e-9, atol=1e-12)
        order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
        renamed = focal_loss(x[:, order], order.argsort()[y], gamma=gamma, reduction="none")
        torch.testing.assert_close(renamed, loss)

    @quick
    @given(st.floats(-1e4, 1e4, width=32), st.floats(0, 10), st.floats(0, 10), st.integers(0, 1))
    def test_a_larger_gamma_never_costs_more(self, x, gamma, more, y):
        logit, target = torch.tensor([x]), torch.tensor([y])
        loss = focal_loss(logit, target, gamma=gamma)
        assert 0 <= focal_loss(logit, target, gamma=gamma + more) <= loss * (1 + 1e-6)
        assert loss <= focal_loss(logit, target, gamma=0.0) * (1 + 1e-6)

    @pytest.mark.parametrize("gamma", [*GAMMAS, 10.0])
    def test_float32_value_and_gradient_are_exact_at_extreme_logits(self, gamma):
        for x in EXTREMES:
            logit = torch.tensor([x], requires_grad=True)
            loss = focal_loss(logit, torch.tensor([1]), gamma=gamma)
            (gradient,) = torch.autograd.grad(loss, logit)
            at = logit.item()
            assert_exact(loss.item(), gradient.item(), at, gamma, lambda t: exact_term(t, gamma))

    @pytest.mark.parametrize("gamma", [*GAMMAS, 10.0])
    def test_float32_multiclass_loss_is_exact_where_the_probability_rounds_to_one(self, gamma):
        for x in EXTREMES:
            logits = torch.tensor([[0.0, x, -3.0]], requires_grad=True)
            loss = focal_loss(logits, torch.tensor([1]), gamma=gamma)
            (gradient,) = torch.autograd.grad(loss, logits)
            assert gradient.isfinite().all()
            assert gradient.sum().item() == pytest.approx(0, abs=1e-5)

            def term(t):
                return exact_term(t - mpmath.log(1 + mpmath.exp(-3)), gamma)

            assert_exact(loss.item(), gradient[0, 1].item(), logits[0, 1].item(), gamma, term)

    @pytest.mark.parametrize("shape", [(12,), (12, 1), (12, 2), (12, 5)])
    @pytest.mark.parametrize("gamma", GAMMAS)
    def test_gradients_are_right_to_the_second_order(self, shape, gamma):
        x = random(*shape).requires_grad_()
        y = labels(shape[1] if len(shape) > 1 and shape[1] > 1 else 2, 12)
        weight = torch.rand(int(y.max()) + 1 if len(shape) == 1 else max(shape[1], 2), dtype=torch.float64) + 0.1
        for reduction in ("mean", "none"):

            def loss(logits, reduction=reduction):
                return focal_loss(logits, y, gamma=gamma, weight=weight, reduction=reduction)

            assert torch.autograd.gradcheck(loss, x)
        assert torch.autograd.gradgradcheck(loss, x)

    def test_a_class_ruled_out_by_minus_infinity_has_no_effect(self):
        x, y = random(5, 3), labels(3, 5)
        ruled_out = torch.cat([x, torch.full((5, 1), -torch.inf, dtype=x.dtype)], dim=1).requires_grad_()
        loss = focal_loss(ruled_out, y)
        torch.testing.assert_close(loss, focal_loss(x, y))
        (gradient,) = torch.autograd.grad(loss, ruled_out)
        assert gradient.isfinite().all()

    @pytest.mark.parametrize("shape", [(6,), (6, 1)])
    @pytest.mark.parametrize("target_shape", [(6,), (6, 1)])
    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
    def test_binary_shapes_and_target_types_mean_the_same(self, shape, target_shape, dtype):
        x, y = random(6), torch.tensor([0, 1, 1, 0, 1, 0])
        ours = focal_loss(x.reshape(shape), y.reshape(target_shape).to(dtype), reduction="none")
        assert ours.shape == (6,)
        assert torch.equal(ours, focal_loss(x, y, reduction="none"))


class TestAsymmetricLoss:
    @pytest.mark.parametrize("gammas", [(0.0, 0.0), (0.0, 4.0), (1.0, 0.5), (2.0, 2.0)])
    @pytest.mark.parametrize("margin", [0.0, 0.05, 0.4, 1.0])
    def test_the_loss_of_a_sample_is_the_printed_sum_over_labels(self, gammas, margin):
        x, y = random(30, 7), labels(2, 30, 7)
        expected = [printed_asymmetric(a, b, *gammas, margin) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
        options = {"gamma_positive": gammas[0], "gamma_negative": gammas[1], "margin": margin}
        torch.testing.assert_close(asymmetric_loss(x, y, **options, reduction="none").tolist(), expected)
        total = sum(expected)
        torch.testing.assert_close(asymmetric_loss(x, y, **options, reduction="sum").item(), total)
        torch.testing.assert_close(asymmetric_loss(x, y, **options).item(), total / 30)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_three_zeros_are_binary_cross_entropy(self, dtype):
        x, y = random(30, 7, dtype=dtype), labels(2, 30, 7)
        ours = asymmetric_loss(x, y, gamma_positive=0.0, gamma_negative=0.0, margin=0.0, reduction="none")
        theirs = functional.binary_cross_entropy_with_logits(x, y.to(dtype), reduction="none").sum(1)
        torch.testing.assert_close(ours, theirs)

    @pytest.mark.parametrize("gamma", GAMMAS)
    def test_equal_exponents_without_margin_are_the_focal_loss_of_every_label(self, gamma):
        x, y = random(30, 7), labels(2, 30, 7)
        ours = asymmetric_loss(x, y, gamma_positive=gamma, gamma_negative=gamma, margin=0.0, reduction="sum")
        torch.testing.assert_close(ours, focal_loss(x.flatten(), y.flatten(), gamma=gamma, reduction="sum"))

    @quick
    @given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=8), st.sampled_from([0.0, 0.5, 4.0]))
    def test_margin_one_silences_the_negatives(self, row, gamma):
        x = torch.tensor([row], requires_grad=True)
        loss = asymmetric_loss(x, torch.zeros_like(x), gamma_negative=gamma, margin=1.0)
        (gradient,) = torch.autograd.grad(loss, x)
        assert loss == 0
        assert not gradient.any()

    @pytest.mark.parametrize("gamma", [0.0, 0.5, 4.0])
    def test_a_negative_at_the_margin_itself_is_silent(self, gamma):
        x = torch.zeros(1, 1, requires_grad=True)
        loss = asymmetric_loss(x, torch.zeros_like(x), gamma_negative=gamma, margin=0.5)
        (gradient,) = torch.autograd.grad(loss, x)
        assert loss == 0
        assert gradient == 0

    @quick
    @given(st.floats(-1e4, 1e4, width=32), st.floats(0, 1), st.floats(0, 1), st.floats(0, 8))
    def test_a_larger_margin_never_costs_more(self, x, margin, other, gamma):
        small, large = sorted((margin, other))
        logit, target = torch.tensor([[x]], dtype=torch.float64), torch.tensor([[0]])
        loss = asymmetric_loss(logit, target, gamma_negative=gamma, margin=small)
        assert 0 <= asymmetric_loss(logit, target, gamma_negative=gamma, margin=large) <= loss * (1 + 1e-9) + 1e-300

    @quick
    @given(st.floats(-1e4, 1e4, width=32), st.floats(0, 1), st.floats(0, 10), st.integers(0, 1))
    def test_value_and_gradient_are_finite_for_all_finite_logits(self, x, margin, gamma, y):
        logit = torch.tensor([[x]], requires_grad=True)
        options = {"gamma_positive": gamma, "gamma_negative": gamma, "margin": margin}
        loss = asymmetric_loss(logit, torch.tensor([[y]]), **options)
        (gradient,) = torch.autograd.grad(loss, logit)
        assert loss.isfinite()
        assert gradient.isfinite().all()

    @pytest.mark.parametrize("gamma", GAMMAS)
    @pytest.mark.parametrize("margin", [1e-50, 1e-20, 1e-6, 0.05, 0.5, 0.9])
    def test_float32_negatives_are_exact_at_extreme_logits(self, gamma, margin):
        edge = math.log(margin) - math.log1p(-margin)
        for x in [*EXTREMES, edge - 0.01, edge + 1e-3, edge + 0.01, edge + 0.5]:
            if x == edge:  # the kink has no derivative
                continue
            logit = torch.tensor([[x]], requires_grad=True)
            loss = asymmetric_loss(logit, torch.tensor([[0]]), gamma_negative=gamma, margin=margin)
            (gradient,) = torch.autograd.grad(loss, logit)
            at = logit.item()
            with mpmath.workdps(60):
                exact_margin = mpmath.mpf(margin)
                expected = exact_shifted_term(mpmath.mpf(at), gamma, exact_margin)
                slope = mpmath.diff(lambda t, m=exact_margin: exact_shifted_term(t, gamma, m), mpmath.mpf(at))
                rounded_exponent = gamma * abs(float(mpmath.log(expected))) if expected else 0.0
            # Next to the edge the logit's own rounding moves p - margin by its share of the distance to the edge.
            rtol = 1e-6 + 2.5e-7 * (1 + gamma) * (min(abs(at), 200.0) + abs(edge) / min(abs(at - edge), 1.0))
            rtol += 1.2e-7 * min(rounded_exponent, 200.0)
            assert loss.item() == pytest.approx(float(expected), rel=rtol, abs=1e-37)
            assert gradient.item() == pytest.approx(float(slope), rel=rtol, abs=1e-30)

    @pytest.mark.parametrize("gammas", [(0.0, 0.0), (0.3, 0.5), (1.0, 4.0)])
    @pytest.mark.parametrize("margin", [0.0, 0.05, 1.0])
    def test_gradients_are_right_to_the_second_order(self, gammas, margin):
        x, y = random(6, 4).requires_grad_(), labels(2, 6, 4)

        def loss(logits):
            options = {"gamma_positive": gammas[0], "gamma_negative": gammas[1], "margin": margin}
            return asymmetric_loss(logits, y, **options, reduction="none")

        assert torch.autograd.gradcheck(loss, x)
        assert torch.autograd.gradgradcheck(loss, x)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
    def test_target_types_mean_the_same(self, dtype):
        x, y = random(6, 4), labels(2, 6, 4)
        assert torch.equal(asymmetric_loss(x, y.to(dtype)), asymmetric_loss(x, y))


LOSSES = {
    "focal binary": (FocalLoss(), (9,), labels(2, 9)),
    "focal multi-class": (FocalLoss(gamma=0.5, weight=torch.tensor([1.0, 2.0, 0.5])), (9, 3), labels(3, 9)),
    "asymmetric": (AsymmetricLoss(gamma_positive=1.0), (9, 3), labels(2, 9, 3)),
    "asymmetric without margin": (AsymmetricLoss(margin=0.0), (9, 3), labels(2, 9, 3)),
}


@pytest.fixture(params=LOSSES, ids=lambda name: name.replace(" ", "-"))
def case(request):
    return LOSSES[request.param]


class TestEveryLoss:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("autocast", [False, True])
    def test_half_precision_is_computed_in_float32(self, case, dtype, autocast):
        loss, shape, y = case
        x = (20 * random(*shape)).to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            value = loss(x, y)
        exact = x.detach().float().requires_grad_()
        expected = loss(exact, y)
        assert value.dtype == torch.float32
        assert torch.equal(value, expected)
        value.backward()
        expected.backward()
        assert x.grad.dtype == dtype
        assert torch.equal(x.grad, exact.grad.to(dtype))

    def test_float64_stays_float64(self, case):
        loss, shape, y = case
        assert loss(random(*shape), y).dtype == torch.float64

    def test_nan_in_gives_nan_out(self, case):
        loss, shape, y = case
        for place in range(math.prod(shape)):
            x = random(*shape)
            x.view(-1)[place] = torch.nan
            assert loss(x, y).isnan()

    def test_a_confident_right_answer_costs_nothing_and_a_wrong_one_is_finite(self, case):
        loss, shape, y = case
        right = torch.where(y.bool(), 1e4, -1e4) if y.shape == shape else 1e4 * functional.one_hot(y, 3)
        for sign in (1, -1):
            x = (sign * right).float().requires_grad_()
            value = loss(x, y)
            value.backward()
            assert value.isfinite()
            assert x.grad.isfinite().all()
            assert (value == 0) == (sign == 1)

    def test_permuting_the_batch_permutes_the_terms(self, case):
        loss, shape, y = case
        loss = copy.deepcopy(loss)
        loss.reduction = "none"
        x, order = random(*shape), torch.arange(8, -1, -1)
        torch.testing.assert_close(loss(x[order], y[order]), loss(x, y)[order])

    def test_the_module_survives_copying_and_its_state_is_its_weight(self, case):
        loss, shape, y = case
        file = io.BytesIO()
        torch.save(loss.state_dict(), file)
        file.seek(0)
        twin = copy.deepcopy(loss)
        twin.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(twin(random(*shape), y), loss(random(*shape), y))

    @pytest.mark.slow
    def test_it_compiles_into_one_graph(self, case):
        loss, shape, y = case
        x = random(*shape)
        compiled = torch.compile(loss, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, y), loss(x, y))

    @pytest.mark.slow
    def test_it_compiles_with_other_numbers_after_the_first(self):
        x, y = random(6, 3), labels(2, 6, 3)

        def loss(gamma, margin):
            shifted = asymmetric_loss(x, y, gamma_positive=gamma, gamma_negative=gamma, margin=margin)
            return shifted + focal_loss(x, y[:, 0], gamma=gamma)

        compiled = torch.compile(loss, backend="eager", fullgraph=True)
        for gamma, margin in [(0.0, 0.0), (1.0, 0.1), (2.5, 0.2), (3.0, 0.3)]:
            torch.testing.assert_close(compiled(gamma, margin), loss(gamma, margin))


def test_functions_and_modules_have_the_same_settings_by_default():
    x, y, several = random(8, 3), labels(3, 8), labels(2, 8, 3)
    focal = focal_loss(x, y, gamma=2.0, reduction="mean")
    assert focal_loss(x, y) == FocalLoss()(x, y) == focal
    options = {"gamma_positive": 0.0, "gamma_negative": 4.0, "margin": 0.05, "reduction": "mean"}
    asymmetric = asymmetric_loss(x, several, **options)
    assert asymmetric_loss(x, several) == AsymmetricLoss()(x, several) == asymmetric


def test_modules_pass_on_every_argument():
    x, y = random(8, 3), labels(3, 8)
    weight = torch.tensor([1.0, 2.0, 0.5])
    expected = focal_loss(x, y, gamma=1.5, weight=weight, reduction="sum")
    assert torch.equal(FocalLoss(1.5, weight, "sum")(x, y), expected)
    y = labels(2, 8, 3)
    options = {"gamma_positive": 0.5, "gamma_negative": 3.0, "margin": 0.2, "reduction": "sum"}
    assert torch.equal(AsymmetricLoss(**options)(x, y), asymmetric_loss(x, y, **options))
    assert repr(FocalLoss(weight=weight)) == "FocalLoss(gamma=2.0, weighted=True, reduction='mean')"
    text = "AsymmetricLoss(gamma_positive=0.0, gamma_negative=4.0, margin=0.05, reduction='mean')"
    assert repr(AsymmetricLoss()) == text


def test_the_weight_of_a_module_moves_with_it():
    loss = FocalLoss(weight=torch.ones(3)).double()
    assert loss.weight.dtype == torch.float64
    assert list(loss.state_dict()) == ["weight"]


X1, X3 = torch.zeros(4), torch.zeros(4, 3)
Y = torch.tensor([0, 1, 1, 0])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: focal_loss([0.0], Y),
            TypeError,
            "logits must be a torch tensor, got list. Convert with torch.as_tensor.",
        ),
        (
            lambda: focal_loss(Y, Y),
            TypeError,
            "logits must be floating point, got torch.int64. Pass the raw outputs of the model.",
        ),
        (
            lambda: focal_loss(torch.zeros(4, 3, 2), Y),
            ValueError,
            "logits must have shape (n,) or (n, 1) for two classes, or (n, K), got (4, 3, 2). "
            "Move the classes last and flatten all other dimensions into n.",
        ),
        (
            lambda: focal_loss(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)),
            ValueError,
            "logits must hold at least one sample and label, got shape (0, 3). Skip empty batches.",
        ),
        (
            lambda: focal_loss(X1, Y[:3]),
            ValueError,
            "target must be a tensor of shape (4,) or (4, 1) for logits (4,), got (3,). Give one 0 or 1 per sample.",
        ),
        (
            lambda: focal_loss(X1, [0, 1, 1, 0]),
            ValueError,
            "target must be a tensor of shape (4,) or (4, 1) for logits (4,), got list. Give one 0 or 1 per sample.",
        ),
        (
            lambda: focal_loss(X1, torch.tensor([0.0, 0.5, 0.25, 1.0])),
            ValueError,
            "target must hold 0s and 1s only, got 0.5. Soft labels are not supported.",
        ),
        (
            lambda: focal_loss(X1, torch.full((4,), torch.nan)),
            ValueError,
            "target must hold 0s and 1s only, got nan. Soft labels are not supported.",
        ),
        (
            lambda: focal_loss(X3, torch.zeros(4, 3)),
            ValueError,
            "target must be a tensor of shape (4,) for logits (4, 3), got (4, 3). "
            "Give one class index per sample; for several labels per sample use asymmetric_loss.",
        ),
        (
            lambda: focal_loss(X3, Y.float()),
            TypeError,
            "target must hold integers for logits (4, 3), got torch.float32. "
            "Give the index of the true class, for example with target.long().",
        ),
        (
            lambda: focal_loss(X3, Y.bool()),
            TypeError,
            "target must hold integers for logits (4, 3), got torch.bool. "
            "Give the index of the true class, for example with target.long().",
        ),
        (
            lambda: focal_loss(X3, torch.tensor([0, 1, 3, 0])),
            ValueError,
            "target must hold class indices from 0 to 2, got 3. "
            "Drop samples without a class and number the classes from 0.",
        ),
        (
            lambda: focal_loss(X3[:1], torch.tensor([3])),
            ValueError,
            "target must hold class indices from 0 to 2, got 3. "
            "Drop samples without a class and number the classes from 0.",
        ),
        (
            lambda: focal_loss(X3, torch.tensor([0, -100, 3, 0])),
            ValueError,
            "target must hold class indices from 0 to 2, got -100. "
            "Drop samples without a class and number the classes from 0.",
        ),
        (
            lambda: focal_loss(X3, Y, weight=[1.0, 1.0, 1.0]),
            TypeError,
            "weight must be a floating-point tensor, got list. Convert it with weight.float().",
        ),
        (
            lambda: focal_loss(X1, Y, weight=torch.ones(1)),
            ValueError,
            "weight must have shape (2,), got (1,). Give one weight per class, class 0 first.",
        ),
        (
            lambda: focal_loss(X3, Y, weight=torch.tensor([1.0, -1.0, 1.0])),
            ValueError,
            "weight must be >= 0 and finite, got -1.0. Use 0 to ignore a class.",
        ),
        (
            lambda: focal_loss(X3, Y, weight=torch.tensor([0.0, 0.0, 1.0])),
            ValueError,
            "weight must be positive for some class of the batch when reduction='mean', got 0 for every sample. "
            "Skip such a batch, or use reduction='sum'.",
        ),
        (
            lambda: FocalLoss(gamma=-1.0),
            ValueError,
            "gamma must be a finite number >= 0, got -1.0. Use 0 for plain cross-entropy.",
        ),
        (
            lambda: focal_loss(X1, Y, gamma=torch.nan),
            ValueError,
            "gamma must be a finite number >= 0, got nan. Use 0 for plain cross-entropy.",
        ),
        (
            lambda: FocalLoss(gamma="2"),
            ValueError,
            "gamma must be a finite number >= 0, got '2'. Use 0 for plain cross-entropy.",
        ),
        (
            lambda: FocalLoss(reduction="average"),
            ValueError,
            "reduction must be one of 'mean', 'sum', 'none', got 'average'.",
        ),
        (
            lambda: asymmetric_loss(X1, Y),
            ValueError,
            "logits must have shape (n, K), got (4,). Give a row per sample and a column per label.",
        ),
        (
            lambda: asymmetric_loss(X3, Y),
            ValueError,
            "target must be a tensor of the shape of logits (4, 3), got (4,). "
            "Give a 0 or a 1 for every label of every sample.",
        ),
        (
            lambda: asymmetric_loss(X3[:0], X3[:0]),
            ValueError,
            "logits must hold at least one sample and label, got shape (0, 3). Skip empty batches.",
        ),
        (
            lambda: asymmetric_loss(X3, X3 + 2),
            ValueError,
            "target must hold 0s and 1s only, got 2.0. Soft labels are not supported.",
        ),
        (
            lambda: AsymmetricLoss(gamma_negative=-4.0),
            ValueError,
            "gamma_negative must be a finite number >= 0, got -4.0. Use 0 for plain cross-entropy.",
        ),
        (
            lambda: AsymmetricLoss(gamma_positive=math.inf),
            ValueError,
            "gamma_positive must be a finite number >= 0, got inf. Use 0 for plain cross-entropy.",
        ),
        (
            lambda: AsymmetricLoss(margin=1.5),
            ValueError,
            "margin must be a number from 0 to 1, got 1.5. Use 0 for no shift.",
        ),
    ],
)
def test_each_bad_argument_has_its_sentence(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


FOCAL = (partial(focal_loss, X3, Y), FocalLoss)
ASYMMETRIC = (partial(asymmetric_loss, X3, torch.zeros(4, 3)), AsymmetricLoss)
BOTH = (*FOCAL, *ASYMMETRIC)


@pytest.mark.parametrize(
    ("calls", "bad", "text"),
    [
        (BOTH, {"reduction": "average"}, "reduction must be one of 'mean', 'sum', 'none', got 'average'."),
        (FOCAL, {"gamma": -1.0}, "gamma must be a finite number >= 0, got -1.0."),
        (FOCAL, {"gamma": True}, "gamma must be a finite number >= 0, got True."),
        (ASYMMETRIC, {"gamma_positive": -1.0}, "gamma_positive must be a finite number >= 0, got -1.0."),
        (ASYMMETRIC, {"gamma_negative": math.inf}, "gamma_negative must be a finite number >= 0, got inf."),
        (ASYMMETRIC, {"margin": -0.1}, "margin must be a number from 0 to 1, got -0.1."),
        (ASYMMETRIC, {"margin": True}, "margin must be a number from 0 to 1, got True."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_functions_and_modules_refuse_the_same_settings(calls, bad, text):
    for call in calls:
        with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
            call(**bad)
