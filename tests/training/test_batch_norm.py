"""Batch norm over several ranks equals batch norm over all their rows in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from lopsided.ranks import Ranks
from lopsided.training.batch_norm import BatchStatistics
from training.ranks import in_threads

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d(3), (3,)),
    "1d over time": (nn.BatchNorm1d(3), (3, 4)),
    "2d": (nn.BatchNorm2d(3, eps=1e-3, momentum=0.3), (3, 2, 2)),
    "3d": (nn.BatchNorm3d(3), (3, 1, 2, 2)),
    "cumulative": (nn.BatchNorm2d(3, momentum=None), (3, 2, 2)),
    "without weights": (nn.BatchNorm2d(3, affine=False), (3, 2, 2)),
    "without running statistics": (nn.BatchNorm2d(3, track_running_stats=False), (3, 2, 2)),
    "timm": (BatchNormAct2d(3), (3, 2, 2)),
}


def make(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    layer, shape = copy.deepcopy(LAYERS[name])
    for parameter in layer.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5, generator=torch.Generator().manual_seed(parameter.numel()))
    return nn.Sequential(layer).double(), shape


def pass_through(module: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(grad)
    return {
        "y": y.detach(),
        "x": x.grad,
        **{f"grad of {name}": p.grad for name, p in module.named_parameters()},
        **{name: buffer.clone() for name, buffer in module.named_buffers()},
    }


def of_rank(ranks: Ranks, name: str, sizes: list[int], x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    module, _ = make(name)
    statistics = BatchStatistics(module, ranks, synchronised=True)
    start, size = sum(sizes[: ranks.rank]), sizes[ranks.rank]
    own, arriving = x[start : start + size], grad[start : start + size]
    if not size:
        statistics.ghost, own, arriving = True, torch.full_like(x[:1], 7.0), torch.zeros_like(grad[:1])
    with statistics.over_ranks():
        found = pass_through(module, own, arriving)
    assert type(module[0]) is type(LAYERS[name][0])
    assert "forward" not in vars(module[0])
    if not size:
        assert not found["x"].any()
        found |= {"x": found["x"][:0], "y": found["y"][:0]}
    return found


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=10, deadline=None)
@given(sizes=st.lists(st.integers(0, 4), min_size=2, max_size=3).filter(lambda s: sum(s) > 1), seed=st.integers(0, 99))
def test_the_rows_of_all_ranks_are_normalised_together(name: str, sizes: list[int], seed: int) -> None:
    module, shape = make(name)
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(sum(sizes), *shape, dtype=torch.float64, generator=generator) for _ in range(2))
    x += 100.0  # A mean far from zero, where a sum of squares would lose digits.
    expected = pass_through(module, x, grad)
    found = in_threads(len(sizes), of_rank, name, sizes, x, grad)
    for key, value in expected.items():
        if key in ("x", "y"):
            together = torch.cat([rank[key] for rank in found])
        else:
            together = sum(rank[key] for rank in found) if key.startswith("grad") else found[0][key]
            for rank in found if not key.startswith("grad") else []:
                assert torch.equal(rank[key], found[0][key])
        torch.testing.assert_close(together, value, rtol=1e-9, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")


def in_half(ranks: Ranks, x: Tensor) -> dict[str, Any]:
    module = nn.Sequential(nn.BatchNorm2d(3))
    with BatchStatistics(module, ranks, synchronised=True).over_ranks():
        y = module(x[ranks.rank :: 2])
    y.float().sum().backward()
    return {"y": y.detach(), "mean": module[0].running_mean, "grad": module[0].bias.grad}


def test_half_precision_is_normalised_in_float32() -> None:
    x = (torch.randn(8, 3, 4, 4) + 30).bfloat16()
    module = nn.BatchNorm2d(3)
    expected = module(x.float())
    for rank, found in enumerate(in_threads(2, in_half, x)):
        assert found["y"].dtype == torch.bfloat16
        torch.testing.assert_close(found["y"].float(), expected[rank::2].detach(), rtol=0.01, atol=0.01)
        torch.testing.assert_close(found["mean"], module.running_mean)
        assert found["grad"].dtype == torch.float32


def apart(ranks: Ranks, x: Tensor) -> dict[str, Tensor]:
    module = nn.Sequential(nn.BatchNorm1d(2)).double()
    statistics = BatchStatistics(module, ranks, synchronised=False)
    with statistics.over_ranks():
        y = module(x[3 * ranks.rank : 3 * ranks.rank + 3])
    assert not statistics.exchanged
    statistics.average()
    return {"y": y.detach(), **module[0].state_dict()}


def test_ranks_with_their_own_statistics_average_the_running_ones() -> None:
    x = torch.randn(6, 2, dtype=torch.float64)
    layers = [nn.BatchNorm1d(2).double() for _ in range(2)]
    outputs = [layer(x[3 * i : 3 * i + 3]).detach() for i, layer in enumerate(layers)]
    for rank, found in enumerate(in_threads(2, apart, x)):
        torch.testing.assert_close(found["y"], outputs[rank])
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(found[name], (getattr(layers[0], name) + getattr(layers[1], name)) / 2)
        assert found["num_batches_tracked"] == 1


def unevenly(ranks: Ranks, batches: list[list[Tensor]]) -> list[dict[str, Tensor]]:
    """Two epochs. In each of them, a rank uses only its own batches."""
    module = nn.Sequential(nn.BatchNorm1d(2)).double()
    statistics = BatchStatistics(module, ranks, synchronised=False)
    found = []
    for _ in range(2):
        with statistics.over_ranks():
            for x in batches[ranks.rank]:
                module(x)
        statistics.average()
        found.append({name: value.clone() for name, value in module[0].state_dict().items()})
    return found


def test_a_rank_counts_by_the_batches_it_saw_and_an_absent_one_not_at_all() -> None:
    x = torch.randn(3, 4, 2, dtype=torch.float64) + 5.0
    batches = [[x[0], x[1]], [], [x[2]]]
    mean, var = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    found = in_threads(3, unevenly, batches)
    for epoch in range(2):
        means, variances = [], []
        for index, own in ((0, batches[0]), (2, batches[2])):
            layer = nn.BatchNorm1d(2).double()
            layer.running_mean, layer.running_var = mean.clone(), var.clone()
            for rows in own:
                layer(rows)
            means.append(layer.running_mean * len(batches[index]))
            variances.append(layer.running_var * len(batches[index]))
        mean, var = sum(means) / 3, sum(variances) / 3
        for rank in found:
            torch.testing.assert_close(rank[epoch]["running_mean"], mean)
            torch.testing.assert_close(rank[epoch]["running_var"], var)
            assert rank[epoch]["num_batches_tracked"] == 2 * (epoch + 1)


def test_an_epoch_without_batches_leaves_the_running_statistics() -> None:
    for rank in in_threads(2, unevenly, [[], []]):
        assert rank[1]["running_mean"].tolist() == [0.0, 0.0]
        assert rank[1]["running_var"].tolist() == [1.0, 1.0]


def test_running_statistics_are_kept_where_they_are_to_be() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), BatchNormAct2d(2))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    statistics = BatchStatistics(module, Ranks(), synchronised=True)
    x = torch.randn(5, 2)
    with statistics.kept():
        kept = module[0](x)
        module[1](x[:, :, None, None])
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(module[0](x), kept)
    assert not torch.equal(module[0].running_mean, before["0.running_mean"])
