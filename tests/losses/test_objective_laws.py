"""Laws that every loss of the catalogue keeps in training; a loss is tested by being listed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from example_losses import EXAMPLES, add_examples
from lopsided.data.inputs import MemoryInputs, Part
from lopsided.facts.log import Reporter
from lopsided.losses import Objective, Samples, catalogue
from lopsided.losses.catalogue import Loss
from lopsided.models.model import WEIGHTS_NAME
from lopsided.ranks import Ranks
from lopsided.recipe import EncoderTraining
from lopsided.training.batch_norm import BatchStatistics
from lopsided.training.batches import cut
from lopsided.training.fit import fit
from lopsided.training.loop import Stage
from lopsided.training.step import Step
from training.conftest import stripes, tiny
from training.ranks import in_threads

COUNTS = torch.tensor([40, 12, 5])
WIDTH = 6
Y = torch.tensor([0, 0, 1, 0, 2, 1, 0, 1])
LOSSES = [*catalogue.losses(), *EXAMPLES.values()]
over_losses = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)


def counts_of(loss: Loss) -> Tensor:
    """Three classes, or as many as the loss is for."""
    return COUNTS[: loss.classes]


def labels_of(loss: Loss) -> Tensor:
    return Y if loss.classes is None else Y % loss.classes


def build(loss: Loss, counts: Tensor | None = None, **parameters: Any) -> Objective:
    torch.manual_seed(0)
    return loss.load()(counts_of(loss) if counts is None else counts, WIDTH, **{**loss.defaults(), **parameters})


def outputs(loss: Loss, n: int = len(Y), *, views: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    views = max(views, loss.views) if loss.views > 1 else views
    shape = (n, views) if views else (n,)
    widths = {"projections": WIDTH, "logits": len(counts_of(loss))}
    made = {name: torch.randn(*shape, width, generator=generator, dtype=dtype) for name, width in widths.items()}
    return {name: made[name] for name in loss.needs}


def value(objective: Objective, y: Tensor, whole: Tensor | None = None, **given: Any) -> tuple[Tensor, Tensor]:
    found = objective(Samples(y, y if whole is None else whole, **given))
    return found if isinstance(found, tuple) else (found.sum(), found)


@over_losses
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_parts_are_finite_one_a_sample_and_add_up_to_the_total(loss: Loss, scale: float) -> None:
    given = {name: x * scale for name, x in outputs(loss).items()}
    total, parts = value(build(loss).double(), labels_of(loss), **given)
    assert parts.shape == Y.shape
    assert parts.isfinite().all()
    torch.testing.assert_close(parts.sum(), total)


@over_losses
@pytest.mark.parametrize("by_sample", [False, True], ids=["total", "parts"])
def test_a_checkpoint_around_the_loss_changes_neither_value_nor_gradient(loss: Loss, by_sample: bool) -> None:
    objective, y = build(loss).double(), labels_of(loss)
    found = []
    for around in (lambda call, *x: call(*x), partial(checkpoint, use_reentrant=False)):
        given = {name: x.clone().requires_grad_() for name, x in outputs(loss).items()}

        def total(*x: Tensor, names: tuple[str, ...] = tuple(given)) -> Tensor:
            whole, parts = value(objective, y, **dict(zip(names, x, strict=True)))
            return (parts * torch.arange(len(parts))).sum() if by_sample and parts.requires_grad else whole

        result = around(total, *given.values())
        found.append((result, *torch.autograd.grad(result, list(given.values()), allow_unused=True)))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@over_losses
def test_the_order_of_samples_orders_the_parts_and_nothing_else(loss: Loss) -> None:
    objective, given, y = build(loss).double(), outputs(loss), labels_of(loss)
    order = torch.tensor([3, 1, 7, 0, 5, 2, 6, 4])
    _, parts = value(objective, y, **given)
    _, moved = value(objective, y[order], **{name: x[order] for name, x in given.items()})
    torch.testing.assert_close(moved, parts[order])


@over_losses
def test_other_names_for_the_classes_leave_the_loss_as_it_is(loss: Loss) -> None:
    counts, y = counts_of(loss), labels_of(loss)
    num = len(counts)
    names = torch.tensor([2, 0, 1]) if num == 3 else torch.tensor([1, 0])  # class c is called names[c]
    back = names.argsort()
    objective, renamed, given = build(loss).double(), build(loss, counts[back]).double(), outputs(loss)
    by_class = {key: x[back] if x.shape[:1] == (num,) else x for key, x in objective.state_dict().items()}
    renamed.load_state_dict(by_class)
    moved = {name: x[..., back] if name == "logits" else x for name, x in given.items()}
    torch.testing.assert_close(value(renamed, names[y], **moved)[1], value(objective, y, **given)[1])


@over_losses
def test_float32_is_float64_rounded(loss: Loss) -> None:
    given = outputs(loss)
    exact = value(build(loss).double(), labels_of(loss), **given)[1]
    found = value(build(loss).float(), labels_of(loss), **{name: x.float() for name, x in given.items()})[1]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


@over_losses
@pytest.mark.parametrize("views", [0, 2])
def test_gradients_are_the_numerical_derivatives(loss: Loss, views: int) -> None:
    if views and loss.kind == "classification":
        views = 0
    objective, given = build(loss).double(), outputs(loss, views=views)
    if "temperature" in loss.defaults():
        objective = build(loss, temperature=0.5).double()
    names = list(given)
    own = list(objective.parameters())

    def total(*tensors: Tensor) -> Tensor:
        return value(objective, labels_of(loss), **dict(zip(names, tensors, strict=False)))[0]

    leaves = [given[name].requires_grad_() for name in names]
    assert torch.autograd.gradcheck(total, (*leaves, *own), eps=1e-6, atol=1e-5)


@over_losses
def test_a_class_that_is_absent_from_the_batch_or_from_training_does_no_harm(loss: Loss) -> None:
    counts = counts_of(loss).clone()
    counts[-1] = 0
    objective = build(loss, counts).double()
    given = {name: x.requires_grad_() for name, x in outputs(loss).items()}
    y = torch.tensor([0, 0, 1, 0, 0, 1, 0, 1]) % (len(counts) - 1)
    total, parts = value(objective, y, **given)
    total.backward()
    assert parts.isfinite().all()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in given.values())


@over_losses
def test_a_single_sample_has_a_finite_loss_and_gradient(loss: Loss) -> None:
    objective = build(loss).double()
    given = {name: x.requires_grad_() for name, x in outputs(loss, 1).items()}
    total, parts = value(objective, labels_of(loss)[:1], **given)
    total.backward()
    assert parts.shape == (1,)
    assert parts.isfinite().all()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in given.values())


@over_losses
def test_the_shares_of_two_ranks_add_up_to_the_loss_and_the_gradients_of_one(loss: Loss) -> None:
    objective, given, y = build(loss).double(), outputs(loss), labels_of(loss)
    leaves = [*(x.requires_grad_() for x in given.values()), *objective.parameters()]
    total, parts = value(objective, y, epoch=1, epochs=4, **given)
    whole = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    shares = (slice(0, 3), slice(3, 8))
    found = []
    for share, other in (shares, shares[::-1]):
        reference = (given["projections"][other], y[other]) if "projections" in given else None
        own = {name: x[share] for name, x in given.items()}
        found.append(value(objective, y[share], y, reference=reference, epoch=1, epochs=4, **own))
    torch.testing.assert_close(torch.cat([parts for _, parts in found]), parts)
    together = torch.autograd.grad(found[0][0] + found[1][0], leaves, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(together, whole)


class Views(torch.nn.Linear):
    """A linear layer that returns rows (n, views, width), as training does with several views."""

    def __init__(self, width: int, views: int) -> None:
        super().__init__(4, views * width)
        self.views = views

    def forward(self, x: Tensor) -> Tensor:
        rows = super().forward(x)
        return rows if self.views == 1 else rows.unflatten(1, (self.views, -1))


def network_of(loss: Loss) -> tuple[int, Views]:
    """The width of the projections, and a network with the outputs that the loss needs."""
    width = WIDTH if "projections" in loss.needs else 0
    return width, Views(width + (len(counts_of(loss)) if "logits" in loss.needs else 0), loss.views).double()


def step_gradients(
    ranks: Ranks, loss: Loss, inputs: Tensor, start: dict[str, Any], chunk_size: int | None
) -> list[Tensor]:
    """The gradients that a step of training leaves on a rank, of a linear network and of the objective."""
    width, network = network_of(loss)
    objective = build(loss).double()
    network.load_state_dict(start["network"])
    objective.load_state_dict(start["objective"])
    stage = Stage(
        name="encoder", section="encoder_training", module=network, settings=EncoderTraining(epochs=4),
        part=Part(MemoryInputs(inputs), labels_of(loss).numpy()), sampler=None, transform=lambda x, *_: x,
        output=network, objective=objective, projected=width,
    )  # fmt: skip
    statistics = BatchStatistics(network, ranks, synchronised=False)
    step = Step(stage, ranks=ranks, device=torch.device("cpu"), seed=0, statistics=statistics)
    batch = cut(np.arange(len(Y)), ranks.size, chunk_size=chunk_size)
    rows = batch.positions(ranks.rank)
    step.gradients(batch, inputs[torch.from_numpy(rows)], 1, 0)
    return [parameter.grad for parameter in (*network.parameters(), *objective.parameters())]


@over_losses
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_a_step_gives_every_rank_the_gradients_of_the_plain_loss(loss: Loss, size: int, chunk_size: int | None) -> None:
    inputs = torch.randn(len(Y), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (width, network), objective = network_of(loss), build(loss).double()
    start = {"network": network.state_dict(), "objective": objective.state_dict()}
    rows = network(inputs)
    parts = {"projections": rows[..., :width], "logits": rows[..., width:]}
    total, _ = value(objective, labels_of(loss), epoch=1, epochs=4, **{name: parts[name] for name in loss.needs})
    leaves = [*network.parameters(), *objective.parameters()]
    expected = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    for found in in_threads(size, step_gradients, loss, inputs, start, chunk_size):
        torch.testing.assert_close(tuple(found), expected)


class CutOffError(Exception):
    """Ends a run in the middle."""


class Ending(Reporter):
    """Ends a run after so many epochs, once their state was written."""

    def __init__(self, epochs: int) -> None:
        self.left = epochs

    def step(self, loss: float, images: int) -> None:
        if self.left == 0:
            raise CutOffError

    def epoch(self, index: int, facts: Mapping[str, Any]) -> None:
        self.left -= 1


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    return add_examples(monkeypatch)


def trained(name: str, folder: Path, epochs: int | None = None, **changes: Any) -> bytes:
    recipe = tiny(encoder_training__loss=name, encoder_training__epochs=3, **changes)
    fit(
        recipe,
        stripes({"many": 40, "few": 12}),
        folder,
        resume=True,
        reporter=None if epochs is None else Ending(epochs),
    )
    return (folder / WEIGHTS_NAME).read_bytes()


@over_losses
@pytest.mark.usefixtures("examples")
def test_a_run_that_was_interrupted_ends_with_the_bytes_of_one_that_was_not(loss: Loss, tmp_path: Path) -> None:
    changes = {"encoder_training__views": loss.views}
    expected = trained(loss.name, tmp_path / "whole", **changes)
    with pytest.raises(CutOffError):
        trained(loss.name, tmp_path / "run", epochs=1, **changes)
    assert trained(loss.name, tmp_path / "run", **changes) == expected


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.usefixtures("examples")
def test_the_parameters_of_a_loss_are_trained(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Tensor] = []
    kind = EXAMPLES[name].load()
    forward: Callable[..., Any] = kind.forward

    def watched(self: Objective, *arguments: Any, **given: Any) -> Any:
        seen.append(next(self.parameters()).detach().clone())
        return forward(self, *arguments, **given)

    monkeypatch.setattr(kind, "forward", watched)
    trained(name, tmp_path)
    assert not torch.equal(seen[0], seen[-1])


@pytest.mark.parametrize("method", ["two-stage", "end-to-end"])
@pytest.mark.usefixtures("examples")
def test_a_joint_loss_trains_the_same_model_in_chunks_and_whole(method: str, tmp_path: Path) -> None:
    found = []
    for chunk in (None, 5):
        changes = {"encoder_training__chunk_size": chunk, "encoder_training__views": 2, "method": method}
        recipe = tiny(encoder_training__loss="joint", encoder_training__epochs=2, **changes)
        fitted = fit(recipe, stripes({"many": 40, "few": 12}), tmp_path / f"{chunk}")
        assert fitted.test is not None
        found.append(torch.from_numpy(fitted.test.probabilities))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)
