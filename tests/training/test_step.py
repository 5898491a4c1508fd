"""The gradients of a batch are the same however many ranks and chunks compute them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lopsided.data.augment import Augment
from lopsided.data.samplers import BatchSampler
from lopsided.encoders import build_encoder
from lopsided.heads import ProjectionHead
from lopsided.losses import asymmetric_focal_contrastive_loss
from lopsided.recipe import EncoderTraining
from lopsided.training.batch_norm import BatchStatistics
from lopsided.training.distributed import Ranks
from lopsided.training.inputs import MemoryInputs, Part
from lopsided.training.loop import Stage
from lopsided.training.objectives import ClassificationObjective, ContrastiveObjective
from lopsided.training.queue import FeatureQueue
from lopsided.training.shares import cut
from lopsided.training.step import Step
from training.ranks import together

LABELS = np.array([0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 1, 0])
"""Rows 4 to 8 hold no image of class 1, and a rank of three may have class 0 alone."""
DEVICE = torch.device("cpu")
Gradients = dict[str, Tensor]


def images() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (len(LABELS), 1, 16, 16), generator=generator, dtype=torch.uint8)


def make_stage(encoder: str = "test_resnet", loss: str = "afcl", views: int = 1, **settings: Any) -> Stage:
    """A stage in double precision, as ``run`` builds it in single precision."""
    training = EncoderTraining(loss=loss, views=views, **settings)
    network, width = build_encoder(encoder, channels=1, image_size=16, seed=1)
    torch.manual_seed(2)
    contrastive = loss not in ("ce", "weighted-ce", "focal")
    head: nn.Module = ProjectionHead(width, 8, 6) if contrastive else nn.Linear(width, 3)
    module = nn.Sequential(network, head).double()
    augment = Augment(rotation=20.0, horizontal_flip=True)

    def transform(x: Tensor, generator: torch.Generator, start: int, total: int) -> Tensor:
        x = x.repeat_interleave(views, dim=0)
        return augment(x, generator, start=start * views, total=total * views).double()

    def output(x: Tensor) -> Tensor:
        out: Tensor = module(x)
        return out.view(-1, views, out.shape[1]) if views > 1 else out

    objective = ContrastiveObjective(training) if contrastive else ClassificationObjective(training, np.bincount(LABELS))
    return Stage(
        name="encoder", section="encoder_training", module=module, settings=training,
        part=Part(MemoryInputs(images()), LABELS), sampler=BatchSampler(LABELS, 13, seed=0),
        transform=transform, output=output, objective=objective.double(), contrastive=contrastive, views=views,
    )  # fmt: skip


def step_of(stage: Stage, ranks: Ranks, queue: FeatureQueue | None = None) -> Step:
    statistics = BatchStatistics(stage.module, ranks, synchronised=stage.settings.batch_norm == "sync")
    return Step(stage, ranks=ranks, device=DEVICE, seed=3, statistics=statistics, queue=queue)


def filled_queue() -> FeatureQueue:
    queue = FeatureQueue(9, balanced=True)
    generator = torch.Generator().manual_seed(6)
    queue.push(torch.randn(9, 6, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2] * 3))
    return queue


def gradients(
    ranks: Ranks, rows: list[int], queued: bool = False, chunk_size: int | None = None, **settings: Any
) -> tuple[float, Gradients, Gradients]:
    """Loss, gradients, and whatever else a step changes: running statistics and the queue."""
    stage = make_stage(**settings)
    queue = filled_queue() if queued else None
    step = step_of(stage, ranks, queue)
    batch = cut(np.array(rows), ranks.size, chunk_size=chunk_size)
    mine = batch.rows[batch.positions(ranks.rank)]
    inputs = stage.part.inputs.batch(mine if len(mine) else batch.rows[:1])
    stage.module.train()
    with step.statistics.over_ranks():
        found = step.gradients(batch, inputs, "encoder", 0, 0)
    left = {name: value.clone() for name, value in stage.module.named_buffers()} | (queue.tensors() if queue else {})
    return float(found.loss), {n: p.grad for n, p in stage.module.named_parameters() if p.grad is not None}, left


ALL = list(range(len(LABELS)))
CASES: dict[str, dict[str, Any]] = {
    "cl": {"loss": "cl"},
    "fcl": {"loss": "fcl"},
    "acl": {"loss": "acl", "eta": 0.4},
    "afcl": {"loss": "afcl", "eta": 300.0, "eta_unit": "absolute", "gamma": 2.5},
    "released": {"loss": "afcl", "normalization": "released"},
    "views": {"loss": "afcl", "views": 2},
    "reference": {"loss": "afcl", "queued": True},
    "reference and views": {"loss": "acl", "queued": True, "views": 3},
    "without batch norm": {"loss": "afcl", "encoder": "mlp-16"},
    "attention": {"loss": "cl", "encoder": "test_vit"},
    "no minority": {"loss": "afcl", "rows": [0, 1, 2, 4, 5, 6, 8, 9]},
    "minority on one rank": {"loss": "afcl", "rows": [3, 0, 1, 2, 4, 5]},
    "a rank without a share": {"loss": "afcl", "rows": [3, 11]},
    "a rank without a share and views": {"loss": "fcl", "rows": [3, 7], "views": 2, "queued": True},
    "attention without a share": {"loss": "afcl", "encoder": "test_vit", "rows": [3, 11]},
    "chunks": {"loss": "afcl", "chunk_size": 4, "encoder": "mlp-16"},
    "chunks and batch norm": {"loss": "afcl", "chunk_size": 4},
    "chunks without a share": {"loss": "afcl", "chunk_size": 2, "views": 2, "queued": True},
    "ce": {"loss": "ce"},
    "weighted-ce": {"loss": "weighted-ce"},
    "focal": {"loss": "focal", "rows": [3, 7]},
}


def all_cases(ranks: Ranks) -> dict[str, tuple[float, Gradients, Gradients]]:
    return {name: gradients(ranks, **{"rows": ALL, **case}) for name, case in CASES.items()}


@pytest.fixture(scope="module", params=[2, 3])
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = together(request.param, tmp_path_factory.mktemp("ranks"), all_cases)
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return all_cases(Ranks())


@pytest.mark.parametrize("name", CASES)
def test_several_ranks_have_the_loss_and_gradients_of_one(
    name: str, several: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    loss, grads, left = alone[name]
    assert grads
    for rank in several:
        assert rank[name][0] == pytest.approx(loss, rel=1e-10, abs=1e-10)
        for expected, found in ((grads, rank[name][1]), (left, rank[name][2])):
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}")
