from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lopsided.models.small_maps import lay_out_weights, use_fast_paths
from lopsided.recipe import Recipe
from lopsided.training.optimizers import make_optimizer

CPU = torch.device("cpu")


def laid_out(model: nn.Sequential) -> nn.Sequential:
    """Return a copy with the same numbers but other layouts: one weight channels-last, one with its taps outermost."""
    model = copy.deepcopy(model)
    model[0].weight.data = model[0].weight.data.contiguous(memory_format=torch.channels_last)
    model[1].weight.data = model[1].weight.data.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
    return model


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_the_update_does_not_depend_on_how_weights_lie_in_memory(name: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).double()
    other = laid_out(plain)
    stock = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    options = {"momentum": 0.9} if name == "sgd" else {}
    reference = stock(plain.parameters(), lr=0.1, weight_decay=0.01, **options)
    changes = {"optimizer": name, "lr": 0.1, "weight_decay": 0.01}
    settings = Recipe().override(**{f"encoder_training.{k}": v for k, v in changes.items()}).encoder_training
    optimizer = make_optimizer(other, settings, CPU)
    x = torch.randn(5, 2, 9, 9, dtype=torch.float64)
    for _ in range(4):
        for model, method in ((plain, reference), (other, optimizer)):
            method.zero_grad()
            model(x).square().sum().backward()
            method.step()
    for (key, expected), found in zip(plain.named_parameters(), other.parameters(), strict=True):
        assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=key)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_torch_gets_every_weight_in_the_order_of_its_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    kernel = torch._fused_adam_ if name == "adam" else torch._fused_adamw_

    def noted(*tensors: list[torch.Tensor], **options: object) -> object:
        seen.extend(tensor.is_contiguous() for group in tensors[:4] for tensor in group)
        return kernel(*tensors, **options)

    monkeypatch.setattr(torch, kernel.__name__, noted)
    model = laid_out(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)))
    settings = Recipe().override(**{"encoder_training.optimizer": name}).encoder_training
    optimizer = make_optimizer(model, settings, CPU)
    for _ in range(2):
        seen.clear()  # The first step, which makes the moments, is torch's own.
        model(torch.randn(5, 2, 9, 9)).sum().backward()
        optimizer.step()
    assert len(seen) == 4 * 6
    assert all(seen)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_taps_that_never_meet_the_map_change_as_in_the_stock_optimizer(name: str, weight_decay: float) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Conv2d(3, 4, 3, padding=1)).double()
    other = copy.deepcopy(plain)
    use_fast_paths(other)
    x = torch.randn(5, 2, 2, 2, dtype=torch.float64)
    assert lay_out_weights(other, x[:1]) == 2
    stock = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    reference = stock(plain.parameters(), lr=0.1, weight_decay=weight_decay)
    changes = {"optimizer": name, "lr": 0.1, "weight_decay": weight_decay}
    settings = Recipe().override(**{f"encoder_training.{k}": v for k, v in changes.items()}).encoder_training
    optimizer = make_optimizer(other, settings, CPU)
    for _ in range(4):
        for model, method in ((plain, reference), (other, optimizer)):
            method.zero_grad()
            model(x).square().sum().backward()
            method.step()
    for (key, expected), found in zip(plain.named_parameters(), other.parameters(), strict=True):
        assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=key)
    states = zip(reference.state.values(), optimizer.state.values(), strict=True)
    for expected, found in states:
        assert_close(found["exp_avg_sq"], expected["exp_avg_sq"], rtol=1e-9, atol=1e-14)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: list[torch.Tensor]) -> None:
    for x in inputs:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(("into", "out"), [(1, 3), (3, 1), (1, 1)])
def test_weights_with_one_channel_are_updated_as_all_others(into: int, out: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(into, out, 3, padding=1)).double()
    other = copy.deepcopy(plain)
    use_fast_paths(other)
    inputs = [torch.randn(5, into, 2, 2, dtype=torch.float64) for _ in range(3)]
    assert lay_out_weights(other, inputs[0][:1]) == 1
    steps(plain, torch.optim.Adam(plain.parameters(), lr=0.1), inputs)
    settings = Recipe().override(**{"encoder_training.lr": 0.1}).encoder_training
    steps(other, make_optimizer(other, settings, CPU), inputs)
    assert_close(other[0].weight, plain[0].weight, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 8, 1), (8, 1)], ids=str)
def test_a_tap_that_a_larger_map_brings_in_is_updated_from_then_on(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1)).double()
    other = copy.deepcopy(plain)
    use_fast_paths(other)
    lay_out_weights(other, torch.zeros(1, 2, 1, 1, dtype=torch.float64))
    inputs = [torch.randn(5, 2, size, size, dtype=torch.float64) for size in sizes]
    steps(plain, torch.optim.Adam(plain.parameters(), lr=0.1), inputs)
    settings = Recipe().override(**{"encoder_training.lr": 0.1}).encoder_training
    steps(other, make_optimizer(other, settings, CPU), inputs)
    assert_close(other[0].weight, plain[0].weight, rtol=1e-9, atol=1e-12)


def test_moments_in_another_order_than_the_weight_are_no_reason_for_another_update() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1)).double()
    other = copy.deepcopy(plain)
    use_fast_paths(other)
    x = torch.randn(5, 2, 1, 1, dtype=torch.float64)
    lay_out_weights(other, x[:1])
    reference = torch.optim.Adam(plain.parameters(), lr=0.1, fused=True)
    settings = Recipe().override(**{"encoder_training.lr": 0.1}).encoder_training
    optimizer = make_optimizer(other, settings, CPU)
    steps(plain, reference, [x])
    steps(other, optimizer, [x])
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))  # The loaded moments are contiguous.
    steps(plain, reference, [x, x])
    steps(other, optimizer, [x, x])
    assert_close(other[0].weight, plain[0].weight, rtol=1e-9, atol=1e-12)


def test_an_optimizer_that_is_no_longer_used_frees_its_state_at_once() -> None:
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(model, Recipe().encoder_training, CPU)
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
