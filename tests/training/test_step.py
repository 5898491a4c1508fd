"""The gradients of a batch do not depend on the number of ranks and chunks that compute them."""

from __future__ import annotations

import copy
import functools
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lopsided.data.augment import Augment
from lopsided.data.inputs import MemoryInputs, Part
from lopsided.data.samplers import BatchSampler
from lopsided.facts.log import Reporter
from lopsided.losses import FeatureQueue, asymmetric_focal_contrastive_loss
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import ProjectionHead
from lopsided.models.small_maps import use_fast_paths
from lopsided.ranks import Ranks
from lopsided.recipe import EncoderTraining
from lopsided.seeds import derive_seed
from lopsided.training.batch_norm import BatchStatistics
from lopsided.training.batches import cut
from lopsided.training.checkpoint import Checkpoint
from lopsided.training.loop import Loop, Stage
from lopsided.training.step import Precision, Step
from training.ranks import together

LABELS = np.array([0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 1, 0])
"""Rows 4 to 8 hold no image of class 1, and with three ranks a rank may have only class 0."""
DEVICE = torch.device("cpu")
Gradients = dict[str, Tensor]


def images() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (len(LABELS), 1, 16, 16), generator=generator, dtype=torch.uint8)


@functools.cache
def encoder_of(name: str) -> tuple[nn.Module, int]:
    return build_encoder(name, channels=1, image_size=16, seed=1)


def make_stage(
    encoder: str = "test_resnet", loss: str = "afcl", views: int = 1, rotation: float = 20.0, **settings: Any
) -> Stage:
    """The stage that ``run`` builds, but in double precision."""
    fields = {name: settings.pop(name) for name in list(settings) if name not in EncoderTraining.model_fields}
    training = EncoderTraining(loss={"name": loss, **fields}, views=views, **settings)
    network, width = copy.deepcopy(encoder_of(encoder))
    torch.manual_seed(2)
    projected = 6 if "projections" in training.loss.entry.needs else 0
    head: nn.Module = ProjectionHead(width, 8, projected) if projected else nn.Linear(width, 3)
    module = nn.Sequential(network, head).double()
    augment = Augment(rotation=rotation, horizontal_flip=True)

    def transform(x: Tensor, generator: torch.Generator, start: int, total: int) -> Tensor:
        x = x.repeat_interleave(views, dim=0)
        return augment(x, generator, start=start * views, total=total * views).double()

    def output(x: Tensor) -> Tensor:
        out: Tensor = module(x)
        return out.view(-1, views, out.shape[1]) if views > 1 else out

    counts = torch.from_numpy(np.bincount(LABELS))
    objective = training.loss.entry.load()(counts, projected, **training.loss.parameters)
    return Stage(
        name="encoder", section="encoder_training", module=module, settings=training,
        part=Part(MemoryInputs(images()), LABELS), sampler=BatchSampler(LABELS, 13, seed=0),
        transform=transform, output=output, objective=objective.double(), projected=projected, views=views,
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
    """Everything that a step changes: loss, gradients, running statistics and the queue."""
    stage = make_stage(**settings)
    queue = filled_queue() if queued else None
    step = step_of(stage, ranks, queue)
    batch = cut(np.array(rows), ranks.size, chunk_size=chunk_size)
    mine = batch.rows[batch.positions(ranks.rank)]
    inputs = stage.part.inputs.batch(mine if len(mine) else batch.rows[:1])
    stage.module.train()
    with step.statistics.over_ranks():
        found = step.gradients(batch, inputs, 0, 0)
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


@pytest.mark.slow
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


def whole_trainings(ranks: Ranks, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Two epochs of batches of 5, 5 and 3 in double precision."""
    stage = make_stage(rotation=0.0, **settings)  # Rotated pixels are float32, which would add rounding.
    stage.sampler = BatchSampler(LABELS, 5, seed=0)
    loop = Loop(stage, device=DEVICE, seed=3, num_classes=3, minority=2, reporter=Reporter(), ranks=ranks)
    facts = [loop.epoch(index, Checkpoint(None)) for index in range(2)]
    figures = {f"{name}{i}": torch.tensor(facts[i][name]) for i in range(2) for name in ("loss", "minority_loss_share")}
    return {**loop.tensors(), **figures}


TRAININGS: list[dict[str, Any]] = [
    {"encoder": "mlp-16", "loss": "afcl", "queue": 20, "queue_balanced": True, "views": 2},
    {"encoder": "mlp-16", "loss": "afcl", "chunk_size": 2, "optimizer": "sgd", "weight_decay": 0.01},
    {"encoder": "test_resnet", "loss": "weighted-ce"},
]


def all_trainings(ranks: Ranks) -> list[dict[str, Tensor]]:
    return [whole_trainings(ranks, settings) for settings in TRAININGS]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_epochs_on_several_ranks_end_with_the_weights_and_figures_of_one(size: int, tmp_path: Path) -> None:
    expected = all_trainings(Ranks())
    for rank in together(size, tmp_path, all_trainings):
        for found, wanted in zip(rank, expected, strict=True):
            assert found.keys() == wanted.keys()
            for key, value in wanted.items():
                # Six steps of a network with batch norm amplify rounding by a factor of a million.
                torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-8, msg=lambda m, k=key: f"{k}: {m}")


def plain_gradients(stage: Stage, x: Tensor, y: Tensor, **options: Any) -> tuple[float, Gradients]:
    """The plain implementation."""
    loss_of = stage.settings.loss
    stage.module.train()
    z = nn.functional.normalize(stage.output(x), dim=-1)
    loss = asymmetric_focal_contrastive_loss(
        z, y, eta=loss_of.eta, gamma=loss_of.gamma, temperature=loss_of.temperature, **options
    )
    loss.backward()
    return loss.item(), {name: p.grad for name, p in stage.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("queued", [False, True])
def test_a_step_has_the_gradients_of_the_loss_as_anyone_would_write_it(chunk_size: int | None, queued: bool) -> None:
    settings = {"encoder": "mlp-16", "views": 2, "eta": 120.0, "eta_unit": "absolute", "gamma": 2.0}
    stage, queue = make_stage(**settings), filled_queue()
    generator = torch.Generator().manual_seed(derive_seed(3, "augment", "encoder", 0, 0))
    x = stage.transform(images(), generator, 0, len(LABELS))
    past = queue.reference()
    assert past is not None
    reference = (nn.functional.normalize(past[0], dim=1), past[1]) if queued else None
    expected = plain_gradients(stage, x, torch.from_numpy(LABELS), reference=reference)
    loss, grads, left = gradients(Ranks(), ALL, queued, chunk_size, **settings)
    assert loss == pytest.approx(expected[0], rel=1e-12)
    for name, value in expected[1].items():
        torch.testing.assert_close(grads[name], value, rtol=1e-10, atol=1e-12)
    if queued:  # 26 features were pushed in order. The queue keeps 9: up to three of each class.
        assert sorted(left["queue.labels"].tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_batch_norm_takes_each_chunk_for_a_batch_and_counts_it_once() -> None:
    stage = make_stage("test_resnet", "afcl")
    plain = make_stage("test_resnet", "afcl")
    rows = cut(np.arange(13), chunk_size=4)
    seen: list[Tensor] = []
    stage.module[0].register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    step_of(stage, Ranks()).gradients(rows, images(), 0, 0)
    num = len(rows.chunks)
    assert num == len(seen) // 2 == 4
    generator = torch.Generator().manual_seed(derive_seed(3, "augment", "encoder", 0, 0))
    x = plain.transform(images(), generator, 0, 13)
    plain.module.train()
    for chunk, (share,) in enumerate(rows.chunks):
        expected = plain.module[0](x[share])  # moves the running statistics of ``plain``
        torch.testing.assert_close(seen[chunk], expected.detach(), rtol=1e-10, atol=1e-10)
        assert torch.equal(seen[chunk], seen[num + chunk])
    for (name, found), wanted in zip(stage.module.named_buffers(), plain.module.buffers(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10, msg=lambda m, k=name: f"{k}: {m}")


def test_both_passes_of_a_chunk_drop_the_same() -> None:
    stage = make_stage("mlp-16")
    stage.module[0].append(nn.Dropout(0.5))
    seen: list[Tensor] = []
    stage.module.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    stage.module.train()
    step_of(stage, Ranks()).gradients(cut(np.arange(13), chunk_size=5), images(), 0, 0)
    assert len(seen) == 6
    for first, second in zip(seen[:3], seen[3:], strict=True):
        assert torch.equal(first, second)


class Held:
    """Counts the bytes that graphs keep for the backward pass."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> tuple[Tensor, Any]:
        size = tensor.numel() * tensor.element_size()
        self.now += size
        self.most = max(self.most, self.now)
        return tensor, weakref.finalize(token := _Token(), self._free, size) and token

    def _free(self, size: int) -> None:
        self.now -= size

    def unpack(self, packed: tuple[Tensor, Any]) -> Tensor:
        return packed[0]


class _Token:
    """Lives as long as the tensor that the graph keeps."""


def held_by(num: int, chunk_size: int | None) -> int:
    stage, held = make_stage("test_resnet"), Held()
    rows = np.arange(num) % len(LABELS)
    step = step_of(stage, Ranks())
    stage.module.train()
    with torch.autograd.graph.saved_tensors_hooks(held.pack, held.unpack):
        step.gradients(cut(rows, chunk_size=chunk_size), images()[torch.from_numpy(rows)], 0, 0)
    assert held.now == 0
    return held.most


def test_a_large_batch_in_chunks_holds_what_a_chunk_holds_and_its_features() -> None:
    chunk, whole = held_by(8, None), held_by(64, None)
    features = 64 * 6 * 8  # Numbers of eight bytes. The loss keeps a few copies of them.
    assert whole > 3 * chunk  # Both also hold the weights.
    assert held_by(64, 8) <= chunk + 6 * features


def single_precision(**settings: Any) -> Stage:
    stage = make_stage(**settings)
    # As in a run. Also, torch's bf16 gradient of a strided convolution over a 1x1 map is uninitialised memory.
    use_fast_paths(stage.module)
    double = stage.transform
    stage.transform = lambda *arguments: double(*arguments).float()
    for module in (stage.module, stage.objective):
        module.float().train()
    return stage


def in_half(ranks: Ranks, precision: str, **settings: Any) -> tuple[float, Tensor]:
    """Return the loss and all gradients of one step."""
    stage = single_precision(**settings)
    statistics = BatchStatistics(stage.module, ranks, synchronised=True)
    step = Step(
        stage, ranks=ranks, device=DEVICE, seed=3, statistics=statistics, precision=Precision(precision, DEVICE)
    )
    optimizer = torch.optim.SGD(stage.module.parameters(), lr=0.0)
    if step.precision.scaler is not None:
        step.precision.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    types: set[torch.dtype] = set()
    stage.objective.register_forward_hook(
        lambda module, inputs, output: types.update(x.dtype for x in (inputs[0].projections, *output))
    )
    stage.module[0].register_forward_hook(lambda module, inputs, output: types.add(output.dtype))
    batch = cut(np.arange(13), ranks.size, chunk_size=7)
    with statistics.over_ranks():
        found = step.gradients(batch, images()[batch.positions(ranks.rank)], 0, 0)
    step.precision.step(optimizer)
    assert types == {torch.float32, step.precision.dtype}
    grads = [p.grad for p in stage.module.parameters() if p.grad is not None]
    assert all(grad.dtype == torch.float32 for grad in grads)
    return float(found.loss), torch.cat([grad.flatten() for grad in grads])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_of_less_precision_point_the_same_way_and_losses_are_float32(precision: str, tmp_path: Path) -> None:
    for encoder in ("mlp-16", "test_resnet"):
        loss, full = in_half(Ranks(), "float32", encoder=encoder)
        alone = in_half(Ranks(), precision, encoder=encoder)
        ranks = together(2, tmp_path / encoder, functools.partial(in_half, precision=precision, encoder=encoder))
        for found in (alone, *ranks):
            assert found[0] == pytest.approx(loss, rel=0.05)
            assert found[0] != loss
            assert nn.functional.cosine_similarity(found[1], full, dim=0) > 0.9
            assert found[1].norm() == pytest.approx(full.norm().item(), rel=0.2)


def test_a_step_that_overflows_is_left_out_and_its_scale_is_kept_in_the_checkpoint() -> None:
    stage = single_precision(encoder="mlp-16")
    loop = Loop(
        stage, device=DEVICE, seed=3, num_classes=3, minority=2, reporter=Reporter(), precision="fp16"
    )  # fmt: skip
    before = [parameter.detach().clone() for parameter in stage.module.parameters()]
    assert loop.precision.scaler is not None
    loop.precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    loop.epoch(0, Checkpoint(None))
    assert all(torch.equal(old, new) for old, new in zip(before, stage.module.parameters(), strict=True))
    kept = loop.tensors()
    assert kept["scaler.scale"] == 2.0**59
    again = Loop(stage, device=DEVICE, seed=3, num_classes=3, minority=2, reporter=Reporter(), precision="fp16")
    again.restore(kept)
    assert again.tensors()["scaler.scale"] == 2.0**59
    again.precision.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    again.epoch(1, Checkpoint(None))
    assert not all(torch.equal(old, new) for old, new in zip(before, stage.module.parameters(), strict=True))
