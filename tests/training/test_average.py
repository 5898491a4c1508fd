"""Averaged weights, against means of the weights that training passed through."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lopsided.data.inputs import MemoryInputs, Part
from lopsided.data.samplers import BatchSampler
from lopsided.facts.log import Reporter
from lopsided.losses import catalogue
from lopsided.recipe import EncoderTraining
from lopsided.training.checkpoint import Checkpoint
from lopsided.training.loop import Loop, Stage

NUM = 14
LABELS = np.arange(NUM) % 2
X = torch.randn(NUM, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3 + 1


def make_loop(**settings: object) -> Loop:
    """Batch norm after a linear layer, in batches of 5, 5 and 4."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    training = EncoderTraining(loss="ce", batch_size=5, epochs=4, **settings)
    objective = catalogue.find("ce").load()(torch.tensor([7, 7]), 0)
    stage = Stage(
        name="encoder", section="encoder_training", module=module, settings=training,
        part=Part(MemoryInputs(X), LABELS), sampler=BatchSampler(LABELS, 5, seed=0),
        transform=lambda x, *_: x, output=module, objective=objective, average=training.ema,
    )  # fmt: skip
    return Loop(stage, device=torch.device("cpu"), seed=0, num_classes=2, minority=1, reporter=Reporter())


def state(loop: Loop) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in loop.stage.module.state_dict().items()}


def test_the_equal_average_is_the_mean_of_epochs_with_statistics_of_its_own() -> None:
    loop = make_loop(swa_from=0.5, lr=0.1)
    passed, rates = [], []
    for epoch in range(4):
        rates.append(loop.epoch(epoch, Checkpoint(None))["lr"])
        passed.append(state(loop))
        with loop.averaged(epoch):
            inside = state(loop)
        assert all(torch.equal(value, state(loop)[name]) for name, value in passed[-1].items())
        if epoch < 2:
            assert all(torch.equal(value, inside[name]) for name, value in passed[-1].items())
    mean = {name: (passed[2][name] + passed[3][name]) / 2 for name in passed[3] if "running" not in name}
    for name, _ in loop.stage.module.named_parameters():
        torch.testing.assert_close(inside[name], mean[name], rtol=1e-12, atol=1e-12)
    # The statistics of the mean weights, batch by batch, each batch with the same weight.
    loop.stage.sampler.set_epoch(3)
    before = [X[torch.from_numpy(rows)] @ mean["0.weight"].T + mean["0.bias"] for rows in loop.stage.sampler]
    for name, expected in (
        ("1.running_mean", sum(x.mean(0) for x in before) / 3),
        ("1.running_var", sum(x.var(0) for x in before) / 3),
    ):
        torch.testing.assert_close(inside[name], expected, rtol=1e-10, atol=1e-10)
    assert loop.stage.module[1].momentum == 0.1
    assert rates[2] == rates[3] == pytest.approx(0.1 * 0.5)  # The cosine is at its middle when the average begins.
    loop.keep_average(3)
    assert all(torch.equal(value, state(loop)[name]) for name, value in inside.items())


def test_the_moving_average_takes_the_running_statistics_along() -> None:
    loop = make_loop(ema=0.9, lr=0.1, optimizer="sgd")
    expected = state(loop)
    steps: list[dict[str, Tensor]] = []
    loop.optimizer.register_step_post_hook(lambda *_: steps.append(state(loop)))
    for epoch in range(2):
        loop.epoch(epoch, Checkpoint(None))
    assert len(steps) == 6
    for step, now in enumerate(steps):
        decay = min(0.9, (1 + step) / (10 + step))
        expected = {n: decay * v + (1 - decay) * now[n] if v.is_floating_point() else v for n, v in expected.items()}
    with loop.averaged(1):
        inside = state(loop)
    for name, value in expected.items():
        if value.is_floating_point():
            torch.testing.assert_close(inside[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, k=name: f"{k}: {m}")
    kept = loop.tensors()
    again = make_loop(ema=0.9, lr=0.1, optimizer="sgd")
    again.restore(kept)
    with again.averaged(1):
        assert all(torch.equal(value, inside[name]) for name, value in state(again).items())
