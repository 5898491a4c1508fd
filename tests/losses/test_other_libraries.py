"""The code of docs/other-libraries.md runs, and the wrapper for pytorch-metric-learning has its pairs."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from lopsided import losses
from lopsided.losses import AsymmetricFocalContrastiveLoss, ContrastiveLoss, MetricLearningLoss

PAGE = Path(__file__).parents[2] / "docs" / "other-libraries.md"
CODE = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), flags=re.DOTALL)


def run(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Other libraries warn of what they import.
        torch.manual_seed(0)
        exec(CODE[place], names)
    return names


def test_the_alias_is_the_loss_that_other_libraries_call_so() -> None:
    assert losses.SupConLoss is ContrastiveLoss
    assert "SupConLoss" in dir(losses)


def test_the_code_for_pytorch_metric_learning_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run(0, tmp_path, monkeypatch)
    assert names["loss"] > 0
    assert names["z"].grad.abs().sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("place", [1, 2], ids=["accelerate", "transformers"])
def test_the_code_for_hugging_face_trains(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run(place, tmp_path, monkeypatch)
    value = names["loss"].item() if place == 1 else names["result"].training_loss
    assert 0 < value < 100


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(12, 8), torch.arange(12) % 3


def test_without_a_miner_it_is_the_loss_itself() -> None:
    z, y = batch()
    loss = AsymmetricFocalContrastiveLoss(eta=0.5, gamma=2.0, eta_unit="parity")
    assert_close(MetricLearningLoss(loss)(z, y), loss(z, y), rtol=0, atol=0)
    assert_close(MetricLearningLoss(loss)(z, y, ref_emb=z, ref_labels=y), loss(z, y), rtol=0, atol=0)


def test_a_memory_and_a_miner_give_the_values_of_the_library() -> None:
    from pytorch_metric_learning.losses import CrossBatchMemory, SupConLoss
    from pytorch_metric_learning.miners import BatchEasyHardMiner

    z, y = batch()
    ours, theirs = MetricLearningLoss(ContrastiveLoss(0.1)), SupConLoss(temperature=0.1)
    memories = [CrossBatchMemory(each, embedding_size=8, memory_size=30) for each in (ours, theirs)]
    for part in (z, z.flip(0), z * 2 + 1):
        values = [memory(part, y) for memory in memories]
        assert_close(*values)
    pairs = BatchEasyHardMiner(pos_strategy="all", neg_strategy="hard")(z, y)
    assert_close(ours(z, y, pairs), theirs(z, y, pairs))
    assert not torch.isclose(ours(z, y, pairs), ours(z, y))
    assert_close(
        ours(z, y, pairs, torch.cat([z, z + 1]), torch.cat([y, y])),
        theirs(z, y, pairs, torch.cat([z, z + 1]), torch.cat([y, y])),
    )


def test_what_the_wrapper_cannot_take_is_refused_in_a_sentence() -> None:
    z, y = batch()
    for other in (torch.nn.CrossEntropyLoss(), "cl"):
        with pytest.raises(TypeError, match="takes a contrastive loss"):
            MetricLearningLoss(other)  # type: ignore[arg-type]
    criterion = MetricLearningLoss(ContrastiveLoss(0.1))
    with pytest.raises(ValueError, match="Pass ref_labels"):
        criterion(z, y, ref_emb=z + 1)
    assert repr(criterion).startswith("MetricLearningLoss(")


def test_triplets_choose_the_samples_of_their_anchors() -> None:
    z, y = batch()
    loss = MetricLearningLoss(ContrastiveLoss(0.1, reduction="none"))
    anchors, positives, negatives = torch.tensor([0, 1]), torch.tensor([3, 4]), torch.tensor([1, 2])
    values = loss(z, y, (anchors, positives, negatives))
    assert values[2:].tolist() == [0.0] * 10
    expected = ContrastiveLoss(0.1, reduction="none")(z[[0, 3, 1]], y[[0, 3, 1]])[0]
    assert_close(values[0], expected)
