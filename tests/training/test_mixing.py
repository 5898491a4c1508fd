"""Mixtures of images: by hand, for every rank and chunk, and the loss of two labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lopsided.errors import InputError
from lopsided.losses import catalogue
from lopsided.losses.objective import Samples
from lopsided.ranks import Ranks
from lopsided.seeds import derive_seed
from lopsided.training.batch_norm import BatchStatistics
from lopsided.training.batches import Mixer, cut, cut_box, loaded_positions
from lopsided.training.loop import Stage
from lopsided.training.step import Step
from training.ranks import in_threads
from training.test_step import DEVICE, LABELS, images, make_stage

SOFT = [entry.name for entry in catalogue.losses() if entry.soft_labels]


def stages(number: int, loss: str) -> list[Stage]:
    """Equal stages. They are made before ranks start: ranks that are threads share torch's global generator."""
    return [make_stage("mlp-16", loss) for _ in range(number)]


def mixed_step(
    ranks: Ranks, mixer: Mixer, chunk_size: int | None, made: list[Stage]
) -> tuple[Tensor, list[Tensor], Any]:
    """The loss of a step, the inputs of the encoder by position, and the gradients."""
    stage = made[ranks.rank]
    statistics = BatchStatistics(stage.module, ranks, synchronised=True)
    step = Step(stage, ranks=ranks, device=DEVICE, seed=3, statistics=statistics, mixer=mixer)
    batch = cut(np.arange(13), ranks.size, chunk_size=chunk_size)
    seen: list[Tensor] = []
    stage.module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    stage.module.train()
    found = step.gradients(batch, images()[loaded_positions(batch, ranks.rank)], 0, 4)
    pairs = zip(batch.shares(ranks.rank), seen, strict=False)  # A rank without rows encodes a placeholder.
    by_position = {p: x[p - share.start] for share, x in pairs for p in range(share.start, share.stop)}
    assert len(found.parts) == len(found.labels) == 2 * len(by_position)
    return found.loss, by_position, {name: p.grad for name, p in stage.module.named_parameters()}


@pytest.mark.parametrize("loss", SOFT)
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0)])
def test_a_step_has_the_loss_of_two_labels_and_mixed_images(loss: str, mixup: float, cutmix: float) -> None:
    mixer = Mixer(mixup, cutmix, 3)
    mix = mixer.draw((13, 1, 16, 16), "encoder", 0, 4)
    assert 0 < mix.share < 1
    found, seen, grads = mixed_step(Ranks(), mixer, None, stages(1, loss))
    stage = make_stage("mlp-16", loss)
    generator = torch.Generator().manual_seed(derive_seed(3, "augment", "encoder", 0, 4))
    plain = stage.transform(images(), generator, 0, 13)
    x = plain.clone()
    for i in range(13):
        for row in range(16):
            for column in range(16):
                own, other = plain[i, 0, row, column], plain[12 - i, 0, row, column]
                if mix.box is None:
                    x[i, 0, row, column] = mix.share * own + (1 - mix.share) * other
                elif mix.box[0].start <= row < mix.box[0].stop and mix.box[1].start <= column < mix.box[1].stop:
                    x[i, 0, row, column] = other
    torch.testing.assert_close(torch.stack([seen[i] for i in range(13)]), x, rtol=1e-12, atol=1e-12)
    if mix.box is not None:
        area = (mix.box[0].stop - mix.box[0].start) * (mix.box[1].stop - mix.box[1].start)
        assert mix.share == pytest.approx(1 - area / 256)
    logits, y = stage.output(x), torch.from_numpy(LABELS)
    expected = sum(
        share * stage.objective(Samples(labels, labels, logits=logits, epoch=0, epochs=30)).sum()
        for share, labels in ((mix.share, y), (1 - mix.share, y.flip(0)))
    )
    expected.backward()
    assert float(found) == pytest.approx(float(expected.detach()), rel=1e-10)
    for name, weight in stage.module.named_parameters():
        torch.testing.assert_close(grads[name], weight.grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(("size", "chunk_size"), [(1, 4), (2, None), (3, 5), (3, 2)])
def test_ranks_and_chunks_mix_the_images_of_one_process(size: int, chunk_size: int | None) -> None:
    for mixer in (Mixer(0.4, 0.0, 3), Mixer(0.0, 1.0, 3)):
        loss, seen, grads = mixed_step(Ranks(), mixer, None, stages(1, "weighted-ce"))
        found = in_threads(size, mixed_step, mixer, chunk_size, stages(size, "weighted-ce"))
        assert sorted(position for rank in found for position in rank[1]) == list(range(13))
        for rank in found:
            torch.testing.assert_close(rank[0], loss, rtol=1e-10, atol=1e-12)
            for position, image in rank[1].items():
                assert torch.equal(image, seen[position])
            for name, value in grads.items():
                torch.testing.assert_close(rank[2][name], value, rtol=1e-8, atol=1e-12)


def test_a_rank_loads_each_partner_once() -> None:
    batch = cut(np.arange(10), 3)
    assert [loaded_positions(batch, rank).tolist() for rank in range(3)] == [
        [0, 1, 2, 3, 6, 7, 8, 9],
        [4, 5, 6, 3],
        [7, 8, 9, 0, 1, 2],
    ]
    assert loaded_positions(cut(np.arange(10)), 0).tolist() == list(range(10))


def test_shares_are_drawn_by_name_from_the_beta_distribution_and_both_kinds_take_turns() -> None:
    both = [Mixer(0.3, 1.0, 7).draw((8, 3, 32, 32), "encoder", 0, step) for step in range(400)]
    assert both == [Mixer(0.3, 1.0, 7).draw((8, 3, 32, 32), "encoder", 0, step) for step in range(400)]
    assert 0.4 < np.mean([mix.box is None for mix in both]) < 0.6
    shares = [Mixer(0.3, 0.0, 7).draw((8, 3, 32, 32), "encoder", 1, step).share for step in range(2000)]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.03)
    assert np.var(shares) == pytest.approx(1 / (4 * (2 * 0.3 + 1)), abs=0.01)  # That of Beta(0.3, 0.3).
    for alpha in (1e-300, 1e-9, 100.0):
        assert all(0 <= Mixer(alpha, 0.0, 7).draw((2, 5), step).share <= 1 for step in range(20))


def test_a_box_is_clipped_to_the_image_and_may_be_empty_or_all_of_it() -> None:
    assert cut_box(1.0, (3, 3), (8, 8)).share == 1.0
    assert cut_box(0.0, (4, 4), (8, 8)).share == 0.0
    corner = cut_box(0.0, (0, 0), (8, 8))
    assert corner.share == 0.75
    x = torch.zeros(1, 1, 8, 8)
    assert corner(x, x + 1).sum() == 16
    assert x.sum() == 0


@pytest.mark.slow
def test_vectors_can_be_mixed_but_have_no_boxes() -> None:
    from lopsided import LopsidedClassifier

    y = np.repeat([0, 1], [30, 12])
    x = np.random.default_rng(0).normal(size=(42, 5)) + 3 * y[:, None]
    settings = {
        "encoder_training.loss": "ce",
        "encoder.name": "mlp-16",
        "encoder_training.epochs": 20,
        "encoder_training.lr": 0.02,
    }
    mixed = {**settings, "encoder_training.batch_size": 8, "encoder_training.mixup": 0.5}
    model = LopsidedClassifier(recipe="from-scratch", settings=mixed, random_state=0).fit(x, y)
    assert (model.predict(x) == y).mean() > 0.9
    with pytest.raises(InputError) as caught:
        LopsidedClassifier(recipe="from-scratch", settings={**settings, "encoder_training.cutmix": 0.5}).fit(x, y)
    assert str(caught.value) == (
        "encoder_training.cutmix must be 0 for vectors, which have no boxes, got 0.5. Use encoder_training.mixup."
    )
