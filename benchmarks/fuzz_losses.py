"""Are the losses finite and right for whatever finite numbers they are given?

    python benchmarks/fuzz_losses.py --minutes 60        tries random cases and writes records/fuzz_losses.json
    python benchmarks/fuzz_losses.py --case 8212         repeats the case of that number and says what it is

A case is made from its number alone: type, shape, views, reference set, mask, layout of memory, labels, temperature,
gamma, eta, features from 1e-30 to 1e30 in length, zero and equal among them, dense path or tile, function or module.
Its value and gradients are compared with the formulas of the paper in float64, written here once more and held against
`lopsided.losses.reference` whenever a case is small.

The tolerance is derived, not chosen. A similarity s = z_i . z_j / temperature of d products is known to e = (d + 8) u
|z_i| |z_j| / temperature, u being half the distance from 1 to the next number of the type. Every term of the value and
of the gradient is a product of powers of p, 1 - p and their logarithms, which changes by at most (2 gamma + 8) (e + 2u)
relative to itself, 2u being the rounding of the exponents; adding m terms costs m u of their sum of sizes. The
tolerance is that, times 2. Where e exceeds 1/20, which is where the type does not know the similarities, any entry can
be the largest of its row, and only the Lipschitz bound of the loss is left, (1 + gamma) times its weights' sum. Half
precision is computed in float32; its gradients are rounded once more at the end. A result that the type cannot hold by
the specification, as a gradient of 1e5 in float16, is counted apart and not judged.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lopsided.evaluation.metrics import evaluate
from lopsided.losses import AsymmetricFocalContrastiveLoss, asymmetric_focal_contrastive_loss, parity_eta
from lopsided.losses.classification import asymmetric_loss, focal_loss
from lopsided.losses.reference import reference_loss

RECORD = Path(__file__).parent / "records" / "fuzz_losses.json"
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODEST = 1 / 20


class WrongError(AssertionError):
    """A case whose result is not what it must be."""


class BeyondError(Exception):
    """A case whose right result the type cannot hold."""


class Found(NamedTuple):
    """What a case says of itself: its kind, its type, and errors as shares of the tolerance and relative."""

    kind: str
    dtype: str
    share_of_tolerance: dict[str, float]
    relative: dict[str, float]
    knowable: bool = True


class Exact(NamedTuple):
    """The specification in float64: values, gradients, and how far either may be off."""

    values: Tensor
    value_tolerance: Tensor
    grad: Tensor
    grad_tolerance: Tensor
    knowable: bool


# Contrastive losses


def log_odds_against(s: Tensor, itself: Tensor) -> Tensor:
    """Log of (1 - p) / p for every entry, each against all others of its row; nothing is subtracted from a total."""
    m = s.shape[1]
    rows = []
    for row, own in zip(s, itself, strict=True):
        others = row.expand(m, m).masked_fill(torch.eye(m, dtype=torch.bool) | own, -torch.inf)
        rows.append(torch.logsumexp(others, 1) - row)
    return torch.stack(rows)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) without a threshold."""
    return torch.logaddexp(x, torch.zeros_like(x))


def specification(
    z: Tensor, positive: Tensor, n: int, eta: float, gamma: float, temperature: float, released: bool, weight: Tensor,
    dtype: torch.dtype, dense: bool,
) -> Exact:  # fmt: skip
    """Eq. (26) for the first n of the rows z, its gradient in all of them by hand, and the tolerance of a type."""
    u, tiny = torch.finfo(dtype).eps / 2, torch.finfo(dtype).tiny
    m, d = z.shape
    itself = torch.eye(n, m, dtype=torch.bool)
    s = z[:n] @ z.t() / temperature
    against = log_odds_against(s, itself)
    log_p, log_a = -softplus(against), -softplus(-against)
    p = log_p.exp()
    positive, negative = positive & ~itself, ~positive & ~itself
    size_p, size_n = (mask.sum(1, keepdim=True).clamp(min=1).double() for mask in (positive, negative))
    w_p, w_n = (1 / m, eta / m) if released else (1 / size_p, eta / size_n)
    focus = (gamma * log_a).exp()
    pull, push = (focus * log_p).masked_fill(~positive, 0.0), log_a.masked_fill(~negative, 0.0)
    terms = -w_p * pull - w_n * push
    values = terms.sum(1)

    # dL_i/ds_ik = (1 - p_k) q_k - sum_{j != k} p_k q_j with q = p dL/dp; (1 - p) q is finite where q is not.
    a_q = torch.where(
        positive,
        -w_p * focus * (gamma * p * -log_p + log_a.exp()),
        torch.where(negative, w_n * p, torch.zeros_like(p)),
    )
    sums = [_other_q(*row) for row in zip(a_q, log_p, log_a, strict=True)]
    others, other_sizes = (torch.stack(part) for part in zip(*sums, strict=True))
    grad_s = (a_q - others).masked_fill(itself, 0.0)
    size = (a_q.abs() + other_sizes).masked_fill(itself, 0.0)

    lengths = z.norm(dim=1)
    e = (d + 8) * u * (lengths[:n, None] * lengths).masked_fill(itself, 0.0).amax(1, keepdim=True) / temperature
    knowable = e < MODEST
    relative = (2 * gamma + 8) * (e + 2 * u) + (m + 16) * u
    floor = 4 * tiny * (1 + eta) * (1 + gamma) * m
    slope = (w_p * positive.sum(1, keepdim=True) + w_n * negative.sum(1, keepdim=True)) * (1 + gamma)
    value_tolerance = torch.where(
        knowable[:, 0],
        relative[:, 0] * terms.abs().sum(1) + 2 * e[:, 0] * size.sum(1),
        2 * e[:, 0] * (1 + gamma + eta) + relative[:, 0].clamp(max=1) * terms.abs().sum(1),
    )
    s_tolerance = torch.where(knowable, relative * size, 2 * size + 2 * slope) + floor
    if (
        dense
    ):  # Autograd adds up what the shares of all but the largest entry get, and what cancels in it leaves its size.
        share = (log_p - log_a.amin(1, keepdim=True)).clamp(max=0).exp()
        s_tolerance = s_tolerance + (m + 16) * u * 2 * a_q.abs().sum(1, keepdim=True) * share
    weighted = grad_s * weight[:, None]
    grad = _through(weighted, z, n, temperature)
    size, s_tolerance = size * weight[:, None].abs(), s_tolerance * weight[:, None].abs()
    grad_tolerance = _through(s_tolerance + (m + d + 16) * u * size, z.abs(), n, temperature)
    grad_tolerance = grad_tolerance + floor * (1 + lengths.max() / temperature)
    return Exact(values, value_tolerance + floor, grad, grad_tolerance, bool(knowable.all()))


def _other_q(a_q: Tensor, log_p: Tensor, log_a: Tensor) -> tuple[Tensor, Tensor]:
    """For each entry k of a row the sum over all others j of p_k q_j, and that of their sizes.

    p_k / (1 - p_j) is at most 1 and is taken from logarithms: both may have vanished.
    """
    terms = (log_p[:, None] - log_a).clamp(max=0).exp().fill_diagonal_(0.0).masked_fill(a_q == 0, 0.0) * a_q
    return terms.sum(1), terms.abs().sum(1)


def _through(grad_s: Tensor, z: Tensor, n: int, temperature: float) -> Tensor:
    grad = grad_s.t() @ z[:n]
    grad[:n] += grad_s @ z
    return grad / temperature


def features(rng: random.Random, generator: torch.Generator, rows: int, d: int) -> tuple[Tensor, str]:
    """Rows of about length 1 of some kind, in float64."""
    kind = rng.choice(
        ["gauss", "gauss", "unit", "tight", "antipodal", "same", "twins", "zeros", "some zero", "orthogonal"]
    )
    z = torch.randn(rows, d, generator=generator, dtype=torch.float64)
    direction = torch.randn(1, d, generator=generator, dtype=torch.float64)
    if kind in ("tight", "antipodal"):
        side = 1.0 if kind == "tight" else 2.0 * (torch.arange(rows) % 2)[:, None] - 1
        z = side * direction + 10.0 ** rng.uniform(-9, -1) * z
    elif kind == "same":
        z = direction.repeat(rows, 1)
    elif kind == "twins":
        z[1::2] = z[::2][: len(z[1::2])]
    elif kind == "orthogonal":
        z = torch.eye(max(rows, d), dtype=torch.float64)[:rows, :d]
    z = z / z.norm(dim=1, keepdim=True).clamp(min=1e-300)
    if kind == "gauss":
        z = z * torch.rand(rows, 1, generator=generator, dtype=torch.float64) * 1.5
    elif kind == "zeros":
        z = torch.zeros_like(z)
    elif kind == "some zero":
        z[torch.rand(rows, generator=generator) < 0.3] = 0.0
    return z, kind


def laid_out(rng: random.Random, z: Tensor) -> tuple[Tensor, str]:
    """The same numbers in another layout of memory; an expanded layout has numbers of its own."""
    if z.ndim == 1:
        wide = torch.stack([z, torch.full_like(z, torch.nan)], 1)
        return (wide[:, 0], "strided") if rng.random() < 0.5 else (z, "plain")
    kind = rng.choice(
        ["plain", "plain", "transposed", "strided", "offset", "expanded rows", "expanded columns", "negated"]
    )
    if kind == "transposed":
        order = list(range(z.ndim))[::-1]
        z = z.permute(order).contiguous().permute(order)
    elif kind == "strided":
        wide = z.new_full((*z.shape[:-1], 2 * z.shape[-1]), torch.nan)
        wide[..., ::2] = z
        z = wide[..., ::2]
    elif kind == "offset":
        wide = z.new_full((z.shape[0] + 3, *z.shape[1:-1], z.shape[-1] + 2), torch.nan)
        wide[3:, ..., 2:] = z
        z = wide[3:, ..., 2:]
    elif kind == "expanded rows":
        z = z[:1].expand(z.shape)
    elif kind == "expanded columns":
        z = z[..., :1].expand(z.shape)
    elif kind == "negated" and z.ndim == 2 and z.dtype in (torch.float32, torch.float64):
        z = torch.complex(torch.zeros_like(z), -z).conj().imag  # a view whose numbers are negated when they are read
    return z, kind


def labels(rng: random.Random, generator: torch.Generator, rows: int) -> tuple[Tensor, str]:
    """Classes in some layout, as some type of whole number."""
    kind = rng.choice(["few", "two", "one", "alone", "lonely", "many", "far"])
    classes = {"few": 4, "two": 2, "many": 1000, "far": 3}.get(kind, 1)
    y = torch.randint(0, classes, (rows,), generator=generator)
    if kind == "alone":
        y = torch.randperm(rows, generator=generator)
    elif kind == "lonely":
        y[rng.randrange(rows)] = 7
    elif kind == "far":
        y = torch.tensor([2**40, 2**40 + 1, -(2**62)])[y]
    if kind in ("few", "two", "one") and rng.random() < 0.4:
        y = y.to(rng.choice([torch.int32, torch.int16, torch.uint8, *([torch.bool] if kind != "few" else [])]))
    return y, kind


def contrastive_case(seed: int) -> tuple[dict[str, Any], Callable[[], Found]]:
    """What the case is, and the means to run it."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    name = rng.choice(list(DTYPES))
    dtype = DTYPES[name]
    compute = torch.promote_types(dtype, torch.float32)
    n = rng.choice([1, 2, 3, rng.randint(1, 9), rng.randint(4, 40), rng.randint(20, 90)])
    d = rng.choice([1, 2, rng.randint(1, 8), rng.randint(3, 40), 128])
    views = rng.choice([0, 0, 0, 1, 2, 3])
    r = rng.choice([0, 0, 1, rng.randint(1, 9), rng.randint(1, 60)])
    r_views = rng.choice([0, 0, 2]) if r else 0
    eta = rng.choice([0.0, 0.0, 1e-8, 0.3, 1.0, 60.0, 300.0, 1e6, 10 ** rng.uniform(-3, 6)])
    gamma = rng.choice([0.0, 0.0, 1.0, 2.0, 7.0, 1e-3, 0.5, rng.uniform(0, 10), 30.0])
    temperature = rng.choice([0.07, 0.07, 0.5, 1.0, 10 ** rng.uniform(-2.3, 1), 10 ** rng.uniform(-5, 5)])
    normalization, reduction = rng.choice(["paper", "released"]), rng.choice(["mean", "sum", "none"])
    tile = rng.choice([None, "auto", "auto", 1, 2, 3, 7, 16, 64])
    module, unit = rng.random() < 0.4, rng.choice(["absolute", "parity"])
    scale = 1.0 if rng.random() < 0.4 else 10.0 ** rng.uniform(-30, 30)
    if not module:  # Products that overflow are in effect infinite, as the documentation says.
        largest = math.sqrt(torch.finfo(compute).max / 1e12 * min(temperature, 1.0) / (1 + eta))
        scale = min(scale, largest) if rng.random() < 0.5 else scale**0.1
    scale = min(max(scale, torch.finfo(dtype).tiny * 1e3), torch.finfo(dtype).max / 1e3)
    m, anchors = n * max(views, 1) + r * max(r_views, 1), n * max(views, 1)
    if m > 150:
        views, r_views = 0, 0
        m, anchors = n + r, n
    shape, r_shape = (n, views, d) if views else (n, d), (r, r_views, d) if r_views else (r, d)
    z, kind = features(rng, generator, m, d)
    uneven = module and rng.random() < 0.3
    if uneven:
        z = z * 10.0 ** (6 * torch.rand(m, 1, generator=generator, dtype=torch.float64) - 3)
    largest = torch.finfo(dtype).max
    z = (z * scale).clamp(-largest, largest).to(dtype)
    z, layout = laid_out(rng, z[:anchors].reshape(shape)), z[anchors:].reshape(r_shape)
    (z, layout), z_ref = z, layout
    y, classes = labels(rng, generator, n)
    y_ref = (
        y[torch.randint(0, n, (r,), generator=generator)]
        if rng.random() < 0.7
        else labels(rng, generator, max(r, 1))[0][:r]
    )
    mask = torch.rand(n, n + r, generator=generator) < rng.choice([0, 0.1, 0.5, 1]) if rng.random() < 0.25 else None
    flush = rng.random() < 0.25
    weight = torch.rand(anchors, generator=generator, dtype=torch.float64) if reduction == "none" else None
    told = {
        "kind": "module" if module else "function", "dtype": name, "shape": shape, "reference": r_shape if r else None,
        "features": kind, "scale": scale, "layout": layout, "labels": classes, "eta": eta, "gamma": gamma,
        "temperature": temperature, "normalization": normalization, "reduction": reduction, "tile": tile,
        "eta_unit": unit if module else "absolute", "flush_denormals": flush,
        "mask": None if mask is None else round(mask.double().mean().item(), 2),
    }  # fmt: skip

    def run() -> Found:
        one = z.detach().requires_grad_()
        two = z_ref.detach().requires_grad_() if r else None
        reference = None if two is None else (two, None if mask is not None else y_ref)
        y_given = None if mask is not None else y
        torch.set_flush_denormal(flush)
        try:
            options: dict[str, Any] = {"normalization": normalization, "reduction": reduction, "tile": tile}
            given = {"reference": reference, "positive": mask}
            if module:
                loss = AsymmetricFocalContrastiveLoss(eta, gamma, temperature, eta_unit=unit, **options)
                value = loss(one, y_given, **given)
            else:
                value = asymmetric_focal_contrastive_loss(
                    one, y_given, eta=eta, gamma=gamma, temperature=temperature, **options, **given
                )
            total = value.sum() if weight is None else (value.flatten().double() * weight).sum()
            grads = torch.autograd.grad(total, [one] if two is None else [one, two])
        finally:
            torch.set_flush_denormal(False)
        return judge_contrastive(told, value.detach(), grads, one.detach(), two, y, y_ref, mask, weight)

    return told, run


def judge_contrastive(
    told: dict[str, Any], value: Tensor, grads: tuple[Tensor, ...], z: Tensor, z_ref: Tensor | None, y: Tensor,
    y_ref: Tensor, mask: Tensor | None, weight: Tensor | None,
) -> Found:  # fmt: skip
    """Compare value and gradients with the specification."""
    dtype = DTYPES[told["dtype"]]
    compute = torch.promote_types(dtype, torch.float32)
    d, n = z.shape[-1], len(z)
    views = z.shape[1] if z.ndim == 3 else 1
    raw = z.reshape(-1, d).double()
    anchors = len(raw)
    times = torch.full((n,), views)
    names = y.long()
    if z_ref is not None:
        raw = torch.cat([raw, z_ref.detach().reshape(-1, d).double()])
        times = torch.cat([times, torch.full((len(z_ref),), z_ref.shape[1] if z_ref.ndim == 3 else 1)])
        names = torch.cat([names, y_ref.long()])
    positive = names[:n, None] == names if mask is None else mask
    positive = positive.repeat_interleave(times[:n], 0).repeat_interleave(times, 1)
    m = len(raw)
    module, temperature, gamma = told["kind"] == "module", told["temperature"], told["gamma"]
    eta = told["eta"] * (parity_eta(m) if told["eta_unit"] == "parity" else 1.0)
    lengths = raw.norm(dim=1, keepdim=True)
    rows = torch.where(lengths > 0, raw / lengths.clamp(min=1e-300), 0.0) if module else raw
    each = {
        "mean": torch.full((anchors,), 1 / anchors, dtype=torch.float64),
        "sum": torch.ones(anchors),
        "none": weight,
    }[told["reduction"]]
    assert each is not None
    each = each.double()
    released = told["normalization"] == "released"
    if m < 3:
        zero = torch.zeros(anchors, dtype=torch.float64)
        exact = Exact(zero, zero, torch.zeros_like(raw), torch.zeros_like(raw), True)
    else:
        exact = specification(
            rows, positive, anchors, eta, gamma, temperature, released, each, compute, told["tile"] is None
        )
        if m <= 6 and exact.knowable:
            check_specification(exact, rows, positive, anchors, eta, gamma, temperature, released, each)
    expected, tolerance = exact.grad, exact.grad_tolerance
    u = torch.finfo(compute).eps / 2
    if module:
        along = (expected * rows).sum(1, keepdim=True) * rows
        size = length(tolerance) + 16 * u * length(expected)
        expected = torch.where(lengths > 0, (expected - along) / lengths.clamp(min=1e-300), 0.0)
        tolerance = torch.where(lengths > 0, 2 * size / lengths.clamp(min=1e-300), 0.0).expand_as(expected)
    half = torch.finfo(dtype)
    if dtype != compute:
        tolerance = tolerance + half.eps * expected.abs() + half.tiny * half.eps
    tolerance = 2 * tolerance + 2 * torch.finfo(compute).tiny
    limit = {"none": exact.values.abs(), "mean": exact.values.abs().sum() / anchors, "sum": exact.values.abs().sum()}
    if (
        limit[told["reduction"]].max() > torch.finfo(compute).max / 4
        or (expected.abs() + tolerance).max() > half.max / 4
    ):
        raise BeyondError
    values, value_tolerance = exact.values, 2 * exact.value_tolerance
    if told["reduction"] != "none":
        value_tolerance = (each * value_tolerance).sum() + 2 * anchors * u * (each * values).abs().sum()
        values = (each * values).sum()
    if not value.isfinite().all():
        raise WrongError(f"the value is {value.flatten()[:5].tolist()}, not {values.flatten()[:5].tolist()}")
    if value.dtype != compute:
        raise WrongError(f"the value is {value.dtype}, not {compute}")
    found = torch.cat([grad.reshape(-1, d) for grad in grads]).double()
    if not found.isfinite().all():
        raise WrongError(f"the gradient has {int((~found.isfinite()).sum())} numbers that are not finite")
    flat = value.flatten().double(), values.flatten(), value_tolerance.flatten()
    return compare(told, *flat, found, expected, tolerance, exact.knowable)


def length(x: Tensor) -> Tensor:
    """The length of each row, whose squares may be less than any number."""
    largest = x.abs().amax(1, keepdim=True).clamp(min=1e-300)
    return (x / largest).norm(dim=1, keepdim=True) * largest


def check_specification(
    exact: Exact, z: Tensor, positive: Tensor, n: int, eta: float, gamma: float, temperature: float, released: bool,
    weight: Tensor,
) -> None:  # fmt: skip
    """Hold the formulas of this file against those of the library's specification."""
    leaf = z.clone().requires_grad_()
    options = {"eta": eta, "gamma": gamma, "temperature": temperature, "positive": positive, "reduction": "none"}
    normalization = "released" if released else "paper"
    values = reference_loss(leaf[:n], reference=(leaf[n:], None), normalization=normalization, **options)
    (grad,) = torch.autograd.grad((values * weight).sum(), leaf)
    if not values.isfinite().all() or not grad.isfinite().all():
        return  # The loops overflow where similarities differ by more than 700; nothing is compared there.
    if ((values - exact.values).abs() > 2 * exact.value_tolerance + 1e-300).any():
        raise WrongError("the two specifications differ in their values")
    if ((grad - exact.grad).abs() > 2 * exact.grad_tolerance + 1e-300).any():
        raise WrongError("the two specifications differ in their gradients")


def compare(
    told: dict[str, Any], value: Tensor, values: Tensor, value_tolerance: Tensor, found: Tensor, expected: Tensor,
    tolerance: Tensor, knowable: bool,
) -> Found:  # fmt: skip
    """Raise for what is outside of its tolerance; say how much of it was used."""
    shares, relative = {}, {}
    for name, one, other, bound in (
        ("value", value, values, value_tolerance),
        ("gradient", found, expected, tolerance),
    ):
        error = (one - other).abs()
        shares[name] = float((error / bound.clamp(min=1e-300)).max()) if error.max() > 0 else 0.0
        if shares[name] > 1:
            at = int((error / bound.clamp(min=1e-300)).argmax())
            got, must, allowed = (x.flatten()[at].item() for x in (one, other, bound.expand_as(error)))
            raise WrongError(f"{name}: {got:.9g} where {must:.9g} is right, off by more than {allowed:.3g}")
        if knowable and bound.norm() < 0.01 * other.norm():
            relative[name] = float(error.norm() / other.norm())
    return Found(told["kind"], told["dtype"], shares, relative, knowable)


# Classification losses


def exact_focal(x: np.ndarray, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    """-(1 - p)^gamma log p and its derivative, p the sigmoid of x, in extended precision."""
    zero = np.longdouble(0)
    cost, log_a = np.logaddexp(zero, -x), -np.logaddexp(zero, x)
    focus, p, a = np.exp(gamma * log_a), np.exp(-cost), np.exp(log_a)
    return focus * cost, -focus * (gamma * p * cost + a)


def exact_shifted(x: np.ndarray, gamma: float, margin: float) -> tuple[np.ndarray, np.ndarray]:
    """-q^gamma log(1 - q) and its derivative, q = max(p - margin, 0)."""
    zero, m = np.longdouble(0), np.longdouble(margin)
    p, a = np.exp(-np.logaddexp(zero, -x)), np.exp(-np.logaddexp(zero, x))
    q = p - m
    above = q > 0
    q = np.where(above, q, np.longdouble(0.5))
    rest = np.where(q < 0.5, np.log1p(-q), np.log(a + m))
    value = -(q**gamma) * rest
    slope = (-gamma * q ** (gamma - 1) * rest + q**gamma / (a + m)) * p * a
    return np.where(above, value, zero), np.where(above, slope, zero)


def classification_case(seed: int) -> tuple[dict[str, Any], Callable[[], Found]]:
    """Focal or asymmetric loss of logits from -1e30 to 1e30."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    name = rng.choice(list(DTYPES))
    dtype = DTYPES[name]
    kind = rng.choice(["focal binary", "focal multi-class", "asymmetric"])
    n, k = rng.choice([1, 2, rng.randint(1, 40)]), rng.choice([2, 3, rng.randint(2, 12), 100])
    gamma = rng.choice([0.0, 0.3, 0.5, 1.0, 2.0, 4.0, rng.uniform(0, 10)])
    gamma_positive = rng.choice([0.0, 1.0, rng.uniform(0, 4)])
    margin = rng.choice([0.0, 0.05, 0.05, 0.4, 1.0, 10 ** rng.uniform(-6, -0.01)])
    reduction = rng.choice(["mean", "sum", "none"])
    scale = rng.choice([1.0, 1.0, 10.0, 100.0, 1e4, 10 ** rng.uniform(-30, 30)])
    shape = (n,) if kind == "focal binary" and rng.random() < 0.5 else (n, 1 if kind == "focal binary" else k)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
    x = x.clamp(-torch.finfo(dtype).max / 4, torch.finfo(dtype).max / 4).to(dtype)
    x[torch.rand(shape, generator=generator) < rng.choice([0, 0, 0.3])] = 0.0
    x, layout = laid_out(rng, x)
    high = 2 if kind != "focal multi-class" else k
    t = torch.randint(0, high, tuple(x.shape) if kind == "asymmetric" else (n,), generator=generator)
    weighted = kind != "asymmetric" and rng.random() < 0.4
    weight = torch.rand(high, generator=generator, dtype=torch.float64) + 0.01 if weighted else None
    told = {
        "kind": kind, "dtype": name, "shape": shape, "layout": layout, "scale": scale, "gamma": gamma,
        "gamma_positive": gamma_positive, "margin": margin, "reduction": reduction, "weighted": weighted,
    }  # fmt: skip

    def run() -> Found:
        leaf = x.detach().requires_grad_()
        if kind == "asymmetric":
            options = {"gamma_positive": gamma_positive, "gamma_negative": gamma, "margin": margin}
            value = asymmetric_loss(leaf, t, reduction=reduction, **options)
        else:
            value = focal_loss(leaf, t, gamma=gamma, weight=weight, reduction=reduction)
        (grad,) = torch.autograd.grad(value.sum(), leaf)
        return judge_classification(told, value.detach(), grad, leaf.detach(), t, weight)

    return told, run


def judge_classification(  # noqa: PLR0912
    told: dict[str, Any], value: Tensor, grad: Tensor, x: Tensor, t: Tensor, weight: Tensor | None
) -> Found:
    """Compare with the printed formulas in extended precision."""
    dtype = x.dtype
    compute = torch.promote_types(dtype, torch.float32)
    u, tiny = torch.finfo(compute).eps / 2, torch.finfo(compute).tiny
    gamma, margin, kind = told["gamma"], told["margin"], told["kind"]
    logits, target = x.resolve_neg().double().numpy().astype(np.longdouble), t.numpy()
    if kind == "asymmetric":
        hit = exact_focal(logits, told["gamma_positive"])
        without, slope = exact_focal(-logits, gamma)
        miss = exact_shifted(logits, gamma, margin) if margin > 0 else (without, -slope)
        values, slopes = (np.where(target == 1, a, b) for a, b in zip(hit, miss, strict=True))
        power, true = np.maximum(gamma, told["gamma_positive"]), logits
        edge = math.log(margin) - math.log1p(-margin) if 0 < margin < 1 else None
    else:
        if kind == "focal binary":
            flat = logits.reshape(-1)
            true = np.where(target == 1, flat, -flat)
            share = None
        else:
            rows = np.arange(len(target))
            others = logits.copy()
            others[rows, target] = -np.inf
            top = others.max(axis=1, keepdims=True)
            total = np.exp(others - top).sum(axis=1, keepdims=True)
            share = np.exp(others - top) / total
            true = logits[rows, target] - (top + np.log(total))[:, 0]
        values, slopes = exact_focal(true, gamma)
        power, edge = gamma, None
    # The exponent of a power of p is known to u |x| (1 + gamma), and p has vanished where |x| is large.
    # Of several logits only differences count, which are known to u |x| however large that is.
    largest = np.abs(logits).reshape(len(t), -1).max(axis=1)
    if kind != "focal multi-class":
        largest = np.minimum(largest, 1e4 if compute == torch.float64 else 300.0)
    largest = largest[:, None] if kind == "asymmetric" else largest
    relative = 16 * u * (1 + power) * (1 + largest)
    if edge is not None:
        gap = np.abs(logits - edge)
        relative = relative + 16 * u * (1 + gamma) * (1 + np.abs(edge)) / np.maximum(gap, 1e-300)
    bound, slope_bound = np.minimum(relative, 1) * np.abs(values), np.minimum(relative, 1) * np.abs(slopes)
    if edge is not None:  # Next to the edge all vanishes: by its own size there, which is below q^gamma.
        near = (np.maximum(gap, 8 * u * (1 + np.abs(edge)))) ** max(gamma, 1e-9)
        bound = np.where(relative > MODEST, near * 4, bound)
        slope_bound = np.where(
            relative > MODEST, 4 * (1 + gamma) * np.maximum(gap, u) ** min(gamma, 0) + 4, slope_bound
        )
    bound, slope_bound = bound + 16 * tiny, slope_bound + 1e4 * tiny * (1 + power)
    size, factor = len(t), 1.0
    if kind != "asymmetric":
        each = np.ones(size) if weight is None else weight.to(compute).double().numpy()[target]
        factor = each / (each.sum() if told["reduction"] == "mean" else 1.0)
        values, slopes, bound, slope_bound = (v * factor for v in (values, slopes, bound, slope_bound))
        if kind == "focal binary":
            slopes = np.where(target == 1, slopes, -slopes).reshape(x.shape)
            slope_bound = slope_bound.reshape(x.shape)
        else:
            assert share is not None
            full, allowed = -slopes[:, None] * share, slope_bound[:, None] * share
            allowed = allowed + np.abs(full) * (16 + x.shape[1]) * u * (1 + largest[:, None]) + tiny
            full[rows, target], allowed[rows, target] = slopes, slope_bound
            slopes, slope_bound = full, allowed
    else:
        values, bound = values.sum(axis=1), bound.sum(axis=1)
        if told["reduction"] == "mean":
            values, bound, slopes, slope_bound = (v / size for v in (values, bound, slopes, slope_bound))
    if told["reduction"] != "none":
        bound = np.atleast_1d(bound.sum() + 2 * size * u * np.abs(values).sum())
        values = np.atleast_1d(values.sum())
    bound, slope_bound = 2 * bound + 4 * u * np.abs(values), 2 * slope_bound + 8 * u * np.abs(slopes)
    if dtype != compute:
        half = torch.finfo(dtype)
        slope_bound = slope_bound + half.eps * np.abs(slopes) + half.tiny * half.eps
    if np.abs(values).max() > torch.finfo(compute).max / 4:
        raise BeyondError
    if not value.isfinite().all() or not grad.isfinite().all():
        raise WrongError("a value or a gradient is not finite")
    exact = [torch.from_numpy(np.asarray(v, dtype=np.float64)) for v in (values, bound, slopes, slope_bound)]
    flat = value.flatten().double(), exact[0].flatten(), exact[1].flatten()
    return compare(told, *flat, grad.double(), exact[2], exact[3], knowable=True)


# Metrics


def metrics_case(seed: int) -> tuple[dict[str, Any], Callable[[], Found]]:
    """Labels and probabilities with ties, zeros and ones, absent classes and groups."""
    rng, draw = random.Random(seed), np.random.default_rng(seed)
    num, classes = (
        rng.choice([1, 2, rng.randint(1, 12), rng.randint(5, 200)]),
        rng.choice([2, 2, 3, rng.randint(2, 12)]),
    )
    kind = rng.choice(["soft", "sharp", "one-hot", "uniform", "rounded", "tiny"])
    y = draw.integers(0, rng.randint(1, classes), num)
    p = draw.dirichlet(np.full(classes, {"soft": 3.0, "sharp": 0.02}.get(kind, 0.5)), num)
    if kind == "one-hot":
        p = np.eye(classes)[draw.integers(0, classes, num)]
    elif kind == "uniform":
        p = np.full((num, classes), 1 / classes)
    elif kind == "rounded":
        p = np.round(p, 1)
        p[:, 0] += 1 - p.sum(axis=1)
        p = np.abs(p)
        p /= p.sum(axis=1, keepdims=True)
    elif kind == "tiny":
        p = np.eye(classes)[draw.integers(0, classes, num)] * (1 - 1e-300 * classes) + 1e-300
    p = p.astype(np.float32) if rng.random() < 0.3 else p
    groups = draw.integers(0, rng.randint(1, num), num) if rng.random() < 0.4 else None
    level = rng.choice([0.5, 0.9, 0.95, 0.999])
    told = {"kind": "metrics", "dtype": str(p.dtype), "images": num, "classes": classes, "probabilities": kind,
            "grouped": groups is not None, "level": level}  # fmt: skip

    def run() -> Found:
        from sklearn import metrics as peer

        result = evaluate(y, p, classes=list(range(classes)), bootstrap=100, level=level, seed=seed, groups=groups)
        guess = p.argmax(axis=1)
        present = np.unique(y)
        theirs = {
            "accuracy": peer.accuracy_score(y, guess),
            "uwa": np.mean([np.mean(guess[y == c] == c) for c in present]),
            "macro_f1": peer.f1_score(y, guess, average="macro", labels=present, zero_division=0),
            "g_mean": np.prod([np.mean(guess[y == c] == c) for c in present]) ** (1 / len(present)),
            "mcc": peer.matthews_corrcoef(y, guess),
        }
        if len(present) > 1:
            areas = [peer.roc_auc_score(y == c, p[:, c]) for c in present]
            theirs |= {"auroc": np.mean(areas)}
        for name, value in theirs.items():
            if abs(result.figures[name].value - value) > 1e-6:
                raise WrongError(f"{name}: {result.figures[name].value} where {value} is right")
        undefined = {"auroc", "average_precision"} if len(present) == 1 else set()
        for name, figure in result.figures.items():
            bottom, top = -1.0 if name == "mcc" else 0.0, math.inf if name == "log_loss" else 1.0
            if math.isnan(figure.value) != (name in undefined):
                raise WrongError(f"{name} is {figure}")
            if name not in undefined and not bottom <= figure.low <= figure.value <= figure.high <= top:
                raise WrongError(f"{name}: {figure.value} in [{figure.low}, {figure.high}]")
            if name not in undefined and not math.isfinite(figure.high):
                raise WrongError(f"{name} is {figure}")
        json.dumps(result.to_dict(), allow_nan=False)
        return Found("metrics", str(p.dtype), {}, {})

    return told, run


def case(seed: int) -> tuple[dict[str, Any], Callable[[], Found]]:
    """The case of a number: eight in ten are contrastive."""
    kind = seed % 10
    return (classification_case if kind == 8 else metrics_case if kind == 9 else contrastive_case)(seed)


def try_cases(first: int, last: int | None, minutes: float) -> dict[str, Any]:
    """Run cases until the last one or until the time is over; failures are told with their numbers."""
    begin, seed = time.monotonic(), first
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    worst: dict[str, dict[str, float]] = {}
    failures: list[dict[str, Any]] = []
    beyond = by_lipschitz = 0
    while (last is None or seed <= last) and time.monotonic() - begin < 60 * minutes:
        told, run = case(seed)
        kinds[told["kind"]] += 1
        counts[told["dtype"]] += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", module="sklearn")
                found = run()
            by_lipschitz += not found.knowable
            for what, errors in (("of the tolerance", found.share_of_tolerance), ("relative", found.relative)):
                for name, error in errors.items():
                    rows = worst.setdefault(f"{found.dtype} {found.kind}", {})
                    rows[f"{name}, {what}"] = max(rows.get(f"{name}, {what}", 0.0), error)
        except BeyondError:
            beyond += 1
        except Exception as error:
            last_line = traceback.extract_tb(error.__traceback__)[-1]
            where = "" if isinstance(error, WrongError) else f" at {Path(last_line.filename).name}:{last_line.lineno}"
            failures.append({"case": seed, "what": f"{type(error).__name__}: {error}{where}", **told})
            print(
                f"case {seed}: {error}{where}\n    {told}\n    python benchmarks/fuzz_losses.py --case {seed}",
                flush=True,
            )
        seed += 1
    return {
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "first_case": first,
        "cases": seed - first,
        "by_kind": dict(sorted(kinds.items())),
        "by_dtype": dict(sorted(counts.items())),
        "beyond_the_type": beyond,
        "by_the_lipschitz_bound_alone": by_lipschitz,
        "worst_errors": {name: {k: float(f"{v:.3g}") for k, v in rows.items()} for name, rows in sorted(worst.items())},
        "failures": failures,
    }


def main() -> None:
    """Try cases, print failures, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long to try (default: %(default)g)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case (default: %(default)s)")
    parser.add_argument("--cases", type=int, help="how many at most")
    parser.add_argument("--case", type=int, help="repeat one case and stop")
    parser.add_argument("--out", type=Path, default=RECORD, help="record (default: records/fuzz_losses.json)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.case is not None:
        told, run = case(options.case)
        print(json.dumps(told, indent=1, default=str))
        print(run())
        return
    last = None if options.cases is None else options.first + options.cases - 1
    found = try_cases(options.first, last, options.minutes)
    record = {
        "command": f"python benchmarks/fuzz_losses.py --minutes {options.minutes:g}",
        "torch": torch.__version__,
        **found,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    print(
        {name: record[name] for name in ("cases", "by_dtype", "beyond_the_type", "minutes")},
        len(record["failures"]),
        "failures",
    )
    if record["failures"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
