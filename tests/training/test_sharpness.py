"""Steps of SAM, by hand on a quadratic, and what its second pass leaves alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lopsided.data.inputs import MemoryInputs, Part
from lopsided.data.samplers import BatchSampler
from lopsided.facts.log import Reporter
from lopsided.losses.objective import Objective, Samples
from lopsided.ranks import Ranks
from lopsided.recipe import EncoderTraining
from lopsided.training.batches import cut
from lopsided.training.checkpoint import Checkpoint
from lopsided.training.loop import Loop, Stage
from lopsided.training.step import Sharpness, climb
from training.test_step import DEVICE, filled_queue, images, make_stage, single_precision, step_of

CURVATURE = torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64)
START = torch.tensor([0.5, -1.0, 0.25], dtype=torch.float64)


class Quadratic(Objective):
    """The sum of a_i w_i^2 / 2, where output i is w_i."""

    def forward(self, samples: Samples) -> Tensor:
        assert samples.logits is not None
        return 0.5 * CURVATURE[samples.y] * samples.logits[:, 0] ** 2


def quadratic(**settings: Any) -> Loop:
    """One step per epoch on the rows of the identity, so that the outputs are the weights."""
    module = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        module.weight.copy_(START[None])
    labels = np.arange(3)
    training = EncoderTraining(loss="ce", batch_size=3, schedule="constant", **settings)
    stage = Stage(
        name="encoder", section="encoder_training", module=module, settings=training,
        part=Part(MemoryInputs(torch.eye(3, dtype=torch.float64)), labels), sampler=BatchSampler(labels, 3, seed=0),
        transform=lambda x, *_: x, output=module, objective=Quadratic(torch.ones(3), 0),
    )  # fmt: skip
    return Loop(stage, device=DEVICE, seed=0, num_classes=3, minority=2, reporter=Reporter())


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_a_step_is_that_of_the_paper_on_a_quadratic(optimizer: str) -> None:
    rho, lr = 0.3, 0.05
    loop = quadratic(sam_rho=rho, lr=lr, optimizer=optimizer)
    loss = loop.epoch(0, Checkpoint(None))["loss"]
    g = [float(a * w) for a, w in zip(CURVATURE, START, strict=True)]
    norm = sum(v * v for v in g) ** 0.5
    climbed = [float(a * (w + rho * v / norm)) for a, w, v in zip(CURVATURE, START, g, strict=True)]
    # The first step of SGD with momentum is the gradient; that of Adam is its sign.
    moves = climbed if optimizer == "sgd" else [v / (abs(v) + 1e-8) for v in climbed]
    expected = [float(w) - lr * move for w, move in zip(START, moves, strict=True)]
    found = loop.stage.module.state_dict()["weight"][0]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)
    assert loss == pytest.approx(float((CURVATURE * START**2).sum() / 2))  # Before the climb.


def test_the_second_pass_leaves_weights_statistics_and_queue_as_the_first_one_left_them() -> None:
    once, twice = make_stage(), make_stage()
    queues, losses = [filled_queue(), filled_queue()], []
    for stage, queue in zip((once, twice), queues, strict=True):
        stage.module.train()
        step = step_of(stage, Ranks(), queue)
        gradients = step.gradients if stage is once else Sharpness(step, 0.5).gradients
        losses.append(gradients(cut(np.arange(13)), images(), 0, 0).loss)
    assert losses[0] == losses[1]
    for (name, value), other in zip(once.module.state_dict().items(), twice.module.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
    assert all(torch.equal(queues[0].tensors()[name], value) for name, value in queues[1].tensors().items())
    grads = [[p.grad for p in stage.module.parameters() if p.grad is not None] for stage in (once, twice)]
    assert not all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_both_passes_drop_the_same_and_see_the_same_images(chunk_size: int | None) -> None:
    stage = make_stage("mlp-16", "ce")
    stage.module[0].append(nn.Dropout(0.5))
    dropped: list[Tensor] = []
    seen: list[Tensor] = []
    stage.module[0].register_forward_hook(lambda module, inputs, output: dropped.append(output == 0))
    stage.module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    stage.module.train()
    Sharpness(step_of(stage, Ranks()), 1e-12).gradients(cut(np.arange(13), chunk_size=chunk_size), images(), 0, 0)
    half = len(seen) // 2
    for first, second in zip(seen[:half], seen[half:], strict=True):
        assert torch.equal(first, second)
    for first, second in zip(dropped[:half], dropped[half:], strict=True):
        assert torch.equal(first, second)
        assert first.any()


def test_weights_climb_to_the_radius_and_stay_if_there_is_no_direction() -> None:
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))]
    for weight, grad in zip(weights, ([3.0, 0.0], [4.0]), strict=False):
        weight.grad = torch.tensor(grad)
    climb(weights[:2], 0.5, Ranks())
    assert torch.cat([w.detach() for w in weights]).tolist() == pytest.approx([1.3, 1.0, 1.4, 1.0])
    for grad in (0.0, float("inf"), float("nan")):
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.full((2,), grad)
        climb([weight], 0.5, Ranks())
        assert weight.tolist() == [1.0, 1.0]


def test_the_climb_does_not_depend_on_the_scale_of_float16_and_an_overflow_skips_the_step() -> None:
    for scale, moves in ((64.0, True), (2.0**60, False)):
        stage = single_precision(encoder="mlp-16", loss="ce", sam_rho=0.1)
        loop = Loop(stage, device=DEVICE, seed=3, num_classes=3, minority=2, reporter=Reporter(), precision="fp16")
        loop.precision.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        before = [weight.detach().clone() for weight in stage.module.parameters()]
        loop.epoch(0, Checkpoint(None))
        after = list(stage.module.parameters())
        assert all(weight.isfinite().all() for weight in after)
        assert moves != all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
