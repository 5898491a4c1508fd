"""Losses of a batch that two ranks share: value and gradients of one process, to the last digits of float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import unit
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from lopsided.losses import (
    AsymmetricFocalContrastiveLoss,
    ContrastiveLoss,
    DistributedLoss,
    FocalLoss,
    contrastive_loss,
    gather_reference,
)
from training.ranks import each, together

SIZES = {"even": (6, 6), "uneven": (9, 3), "empty": (12, 0)}
X, Y = unit(12, 5), torch.tensor([0, 1, 0, 2, 1, 0, -1, 3, 0, 1, 2, -1])
QUEUE = (unit(7, 4, seed=3), torch.arange(7) % 3)


class Model(nn.Module):
    """Features of one or two views, and a temperature."""

    def __init__(self, views: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.views, self.layer = views, nn.Linear(5, 4 * views)
        self.log = nn.Parameter(torch.tensor(-1.0))
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.sin(3 * self.layer(x))
        return z.unflatten(1, (2, 4)) if self.views == 2 else z, self.log.exp()


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "unknown": {"ignore_index": -1},
    "released": {"normalization": "released", "ignore_index": -1},
}


def criterion(kind: str) -> AsymmetricFocalContrastiveLoss:
    return AsymmetricFocalContrastiveLoss(0.5, 1.5, eta_unit="parity", **KINDS[kind])


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def whole(kind: str, views: int, queue: bool) -> list[Tensor]:
    """Loss and gradients of one process."""
    model = Model(views)
    z, temperature = model(X)
    loss = criterion(kind)(z, Y, temperature=temperature, reference=QUEUE if queue else None)
    loss.backward()
    return [loss.detach(), *gradients(model)]


CASES = [(kind, views, queue) for kind in KINDS for views, queue in ((1, False), (2, True))]


def share(sizes: tuple[int, int]) -> slice:
    before = sum(sizes[: dist.get_rank()])
    return slice(before, before + sizes[dist.get_rank()])


def shared(_: Any) -> dict[tuple[str, Any], list[Tensor]]:
    """The same on a rank, with torch's DistributedDataParallel, for all shares and cases."""
    found = {}
    for name, sizes in SIZES.items():
        for case in CASES:
            kind, views, queue = case
            model = DistributedDataParallel(Model(views))
            z, temperature = model(X[share(sizes)])
            loss = DistributedLoss(criterion(kind))(
                z, Y[share(sizes)], temperature=temperature, reference=QUEUE if queue else None
            )
            loss.backward()
            found[name, case] = [loss.detach(), *gradients(model)]
    return found


@pytest.mark.slow
def test_loss_and_gradients_of_two_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    ranks = together(2, tmp_path, shared)
    assert ranks[0].keys() == {(name, case) for name in SIZES for case in CASES}
    for case in CASES:
        expected = whole(*case)
        for found in ranks:
            for name in SIZES:
                for one, other in zip(found[name, case], expected, strict=True):
                    assert_close(one, other, rtol=1e-12, atol=1e-14)


def by_hand(_: Any) -> dict[str, list[Tensor]]:
    """Gradients that a loop sums itself, parts by ``gather_reference``, and a plain gather."""
    found = {}
    for name, sizes in (("even", (6, 6)), ("uneven", (9, 3))):
        own = share(sizes)

        def run(make: Callable[[Tensor, Tensor], Tensor], total: bool, own: slice = own) -> list[Tensor]:
            model = Model()
            z, _ = model(X[own])
            z = nn.functional.normalize(z, dim=1)
            loss = make(z, Y[own])
            loss.backward()
            grads, value = gradients(model), loss.detach().clone()
            for tensor in (*grads, value):
                dist.all_reduce(tensor)
                if not total:
                    tensor.div_(2)
            return [value, *grads]

        def part(z: Tensor, y: Tensor) -> Tensor:
            gathered = gather_reference(z, y)
            return gathered.weight * contrastive_loss(z, y, reference=gathered.reference)

        def known_part(z: Tensor, y: Tensor) -> Tensor:
            gathered = gather_reference(z, y, ignore_index=-1)
            return gathered.weight * contrastive_loss(z, y, reference=gathered.reference, ignore_index=-1)

        def plain(z: Tensor, y: Tensor, sizes: tuple[int, int] = sizes) -> Tensor:
            parts = [torch.zeros(size, 4, dtype=torch.float64) for size in sizes]
            if len(set(sizes)) == 1:
                dist.all_gather(parts, z.detach())
            else:
                parts = [gather_reference(z, y).everyone[0][: sizes[0]], gather_reference(z, y).everyone[0][sizes[0] :]]
            other = 1 - dist.get_rank()
            return contrastive_loss(z, y, reference=(parts[other], torch.split(Y, sizes)[other]))

        found[f"{name}, summed"] = run(DistributedLoss(ContrastiveLoss(), gradients="sum"), True)
        found[f"{name}, part"] = run(part, False)
        found[f"{name}, known"] = run(known_part, False)
        found[f"{name}, plain"] = run(plain, False)
        z = unit(12, 2, 4)[own].requires_grad_()
        everyone = gather_reference(z, Y[own]).everyone
        found[f"{name}, everyone"] = [*everyone]
        assert not everyone[0].requires_grad
    return found


@pytest.mark.slow
def test_parts_and_sums_are_exact_where_a_plain_gather_has_a_wrong_gradient(tmp_path: Path) -> None:
    def one(**options: Any) -> list[Tensor]:
        model = Model()
        loss = contrastive_loss(nn.functional.normalize(model(X)[0], dim=1), Y, **options)
        loss.backward()
        return [loss.detach(), *gradients(model)]

    for found in together(2, tmp_path, by_hand):
        for name in ("even", "uneven"):
            value, *grads = found[f"{name}, summed"]
            for got, right in zip([value / 2, *grads], one(), strict=True):  # Each rank has the whole loss.
                assert_close(got, right, rtol=1e-12, atol=1e-14)
            for got, right in zip(found[f"{name}, part"], one(), strict=True):
                assert_close(got, right, rtol=1e-12, atol=1e-14)
            for got, right in zip(found[f"{name}, known"], one(ignore_index=-1), strict=True):
                assert_close(got, right, rtol=1e-12, atol=1e-14)
            value, *grads = found[f"{name}, plain"]
            off = max(float((got - right).norm() / right.norm()) for got, right in zip(grads, one()[1:], strict=True))
            assert off > 0.1  # The pages say that it is wrong.
            assert bool(torch.isclose(value, one()[0], rtol=1e-12)) == (name == "even")
            assert torch.equal(found[f"{name}, everyone"][0], unit(12, 2, 4))
            assert torch.equal(found[f"{name}, everyone"][1], Y)


def unlike(_: Any) -> None:
    gather_reference(unit(4, 3 + dist.get_rank()), torch.arange(4))


def half(_: Any) -> tuple[Tensor, Tensor]:
    own = slice(0, 5) if dist.get_rank() == 0 else slice(5, 12)
    z = X[own].to(torch.bfloat16).requires_grad_()
    loss = DistributedLoss(ContrastiveLoss())(z, Y[own])
    loss.backward()
    assert z.grad is not None
    return loss.detach(), z.grad / 2


@pytest.mark.slow
def test_half_precision_is_exchanged_in_single_precision_and_unlike_features_are_refused(tmp_path: Path) -> None:
    z = X.to(torch.bfloat16).requires_grad_()
    expected = ContrastiveLoss()(z, Y)
    expected.backward()
    (loss, first), (again, second) = together(2, tmp_path / "half", half)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, again)
    assert_close(loss, expected.detach(), rtol=1e-6, atol=0.0)
    assert z.grad is not None
    assert_close(torch.cat([first, second]), z.grad, rtol=0.01, atol=1e-3)
    text = (
        "All ranks must pass features of the same shape, and all or none of them labels: "
        "rank 0 has 1 views of 3 numbers, with labels; rank 1 has 1 views of 4 numbers, with labels."
    )
    assert {str(error) for error in each(2, tmp_path / "unlike", unlike)} == {text}


@pytest.mark.parametrize("gradients", ["mean", "sum"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_single_process_has_the_loss_itself(kind: str, gradients: Any) -> None:
    z, loss = unit(12, 2, 4).requires_grad_(), criterion(kind)
    expected = loss(z, Y, temperature=0.3, reference=QUEUE)
    found = DistributedLoss(loss, gradients=gradients)(z, Y, temperature=0.3, reference=QUEUE)
    assert_close(found, expected, rtol=1e-12, atol=0.0)
    assert_close(*(torch.autograd.grad(value, z)[0] for value in (found, expected)), rtol=1e-12, atol=1e-14)
    gathered = gather_reference(z, Y)
    assert (gathered.reference, gathered.weight) == (None, 1.0)
    assert torch.equal(gathered.everyone[0], z.detach())


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: DistributedLoss(FocalLoss()),  # type: ignore[arg-type]
            "loss must be a contrastive loss of this package, got FocalLoss. Build on gather_reference.",
        ),
        (
            lambda: DistributedLoss(ContrastiveLoss(reduction="none")),
            "The reduction of the loss must be 'mean' or 'sum', got 'none'.",
        ),
        (
            lambda: DistributedLoss(ContrastiveLoss(), gradients="max"),  # type: ignore[arg-type]
            "gradients must be one of 'mean', 'sum', got 'max'.",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_in_one_sentence(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        make()
    assert str(caught.value) == sentence


def test_a_shared_loss_shows_and_holds_its_loss() -> None:
    loss = DistributedLoss(ContrastiveLoss(nn.Parameter(torch.tensor(0.1))))
    assert len(list(loss.parameters())) == 1
    assert repr(loss).startswith("DistributedLoss(\n  gradients='mean'\n  (loss): ContrastiveLoss(")
