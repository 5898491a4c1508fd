"""The fast paths give the same output and gradients as torch's convolution."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import nn
from torch.nn.functional import conv2d
from torch.testing import assert_close

from lopsided.models.small_maps import (
    SmallMapConv2d,
    lay_out_weights,
    point_conv2d,
    small_map_conv2d,
    use_fast_paths,
)

# Rows and columns are planned separately, so the cases vary one property at a time instead of all combinations.
# Sizes: from one position, which only one tap covers, to more columns than rows, which shows swapped axes.
# Kernels: inside the map, wider than the map, of one column (padding differs by axis), and of one tap.
CASES = [
    (size, kernel, (1, 1), (1, 1)) for size in [(1, 1), (1, 2), (2, 1), (2, 2), (3, 5)] for kernel in [(3, 3), (5, 5)]
]
CASES += [((3, 5), (3, 1), (1, 1), (1, 1)), ((3, 5), (1, 1), (1, 1), (1, 1))]
# Strides skip positions: on maps with odd and even sides, and one stride that differs by axis.
CASES += [(size, (3, 3), stride, (1, 1)) for size in [(2, 2), (3, 5)] for stride in [(2, 2), (2, 1)]]
# Dilations split a row of taps into single taps: by axis, with and without a stride, and for a kernel of one tap.
CASES += [((3, 5), (3, 3), (1, 1), dilation) for dilation in [(2, 2), (2, 1), (1, 2)]]
CASES += [((2, 2), (3, 3), (1, 1), (2, 2)), ((3, 5), (3, 3), (2, 1), (2, 2)), ((3, 5), (1, 1), (2, 2), (2, 2))]


@pytest.mark.parametrize(("size", "kernel", "stride", "dilation"), CASES, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels-last"])
def test_the_matrix_product_is_the_convolution(size, kernel, stride, dilation, layout):
    padding = tuple(d * (k // 2) for k, d in zip(kernel, dilation, strict=True))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, *size, dtype=torch.float64, generator=generator).to(memory_format=layout).requires_grad_()
    weight = torch.randn(5, 4, *kernel, dtype=torch.float64, generator=generator).to(memory_format=layout)
    bias = torch.randn(5, dtype=torch.float64, generator=generator).requires_grad_()
    inputs = (x, weight.requires_grad_(), bias)
    expected = conv2d(*inputs, stride, padding, dilation)
    found = small_map_conv2d(*inputs, stride, padding, dilation)
    outer = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    assert_close(found, expected)
    assert_close(torch.autograd.grad(found, inputs, outer), torch.autograd.grad(expected, inputs, outer))


def test_a_window_that_lies_in_the_padding_alone_gives_the_bias():
    x, weight, bias = torch.randn(2, 3, 2, 2), torch.randn(4, 3, 3, 3), torch.randn(4)
    found = small_map_conv2d(x, weight, bias, (1, 1), (3, 3))
    assert torch.equal(found[:, :, 0, 0], bias.expand(2, 4))
    assert_close(found, conv2d(x, weight, bias, (1, 1), (3, 3)))


def fast_and_stock(name, **options):
    torch.manual_seed(0)
    stock = timm.create_model(name, num_classes=0, **options)
    fast = copy.deepcopy(stock)
    assert use_fast_paths(fast) > 0
    return fast, stock


@pytest.mark.slow
@pytest.mark.parametrize("image_size", [28, 32, 33, 64])
@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_gives_the_same_output_and_gradients_with_and_without_fast_paths(image_size, training):
    fast, stock = fast_and_stock("resnet18", in_chans=1)
    x = torch.randn(6, 1, image_size, image_size, generator=torch.Generator().manual_seed(1))
    found = []
    for model in (fast.to(memory_format=torch.channels_last), stock):
        model.train(training)
        features = model(x.to(memory_format=torch.channels_last) if model is fast else x)
        features.square().mean().backward()
        found.append((features.detach(), {name: p.grad for name, p in model.named_parameters()}))
    assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    for name, grad in found[1][1].items():
        assert (found[0][1][name] - grad).norm() <= 1e-5 * grad.norm().clamp(min=1.0), name


def test_the_state_dict_is_unchanged_and_the_switch_goes_both_ways():
    fast, stock = fast_and_stock("resnet10t", in_chans=3)
    assert {k: v.shape for k, v in fast.state_dict().items()} == {k: v.shape for k, v in stock.state_dict().items()}
    stock.load_state_dict(fast.state_dict())
    assert use_fast_paths(fast, enabled=False) > 0
    assert not any(isinstance(m, SmallMapConv2d) for m in fast.modules())


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 1, padding=1),
    ],
    ids=["groups", "reflect", "same", "padded 1x1"],
)
def test_what_the_fast_path_does_not_know_goes_the_stock_way(conv, monkeypatch):
    def forbidden(*_):
        raise AssertionError("the fast path was taken")

    monkeypatch.setattr("lopsided.models.small_maps.small_map_conv2d", forbidden)
    monkeypatch.setattr("lopsided.models.small_maps.point_conv2d", forbidden)
    stock = copy.deepcopy(conv)
    use_fast_paths(conv)
    x = torch.randn(2, 4, 2, 2)
    assert torch.equal(conv(x), stock(x))


def test_small_maps_do_take_the_fast_path_and_large_ones_do_not(monkeypatch):
    calls = []

    def noted(x, *rest):
        calls.append(tuple(x.shape[2:]))
        return small_map_conv2d(x, *rest)

    monkeypatch.setattr("lopsided.models.small_maps.small_map_conv2d", noted)
    conv = nn.Conv2d(4, 4, 3, padding=1)
    use_fast_paths(conv)
    for size in (1, 2, 4, 7):
        conv(torch.randn(2, 4, size, size))
    assert calls == [(1, 1), (2, 2)]


@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels-last"])
def test_one_product_is_a_convolution_with_one_tap(stride, layout):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((3, 4, 5, 6), (7, 4, 1, 1), (7,))
    )
    inputs = tuple(tensor.requires_grad_() for tensor in (x.to(memory_format=layout), weight, bias))
    expected, found = conv2d(*inputs, stride), point_conv2d(*inputs, stride)
    outer = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    assert_close(found, expected)
    assert_close(torch.autograd.grad(found, inputs, outer), torch.autograd.grad(expected, inputs, outer))


def test_a_gradient_of_a_gradient_is_that_of_the_convolution():
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((2, 3, 2, 2), (2, 3, 3, 3), (2,))
    )
    assert torch.autograd.gradgradcheck(
        lambda *inputs: small_map_conv2d(*inputs, (1, 1), (1, 1)).square(), (x, weight, bias)
    )


def test_only_what_is_asked_for_gets_a_gradient():
    x, weight = torch.randn(2, 3, 2, 2), torch.randn(4, 3, 3, 3, requires_grad=True)
    small_map_conv2d(x, weight, None, (1, 1), (1, 1)).sum().backward()
    assert x.grad is None
    assert weight.grad is not None


def test_laying_out_weights_changes_their_order_in_memory_and_nothing_else():
    fast, stock = fast_and_stock("resnet18", in_chans=1)
    fast.train()
    assert lay_out_weights(fast, torch.zeros(1, 1, 28, 28)) == 8  # all 3x3 ones of layer3 and layer4
    assert fast.training
    assert fast.layer4[1].conv2.weight.permute(2, 3, 1, 0).is_contiguous()
    assert fast.layer1[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)
    for (name, expected), found in zip(stock.state_dict().items(), fast.state_dict().values(), strict=True):
        assert torch.equal(found, expected), name
    x = torch.randn(4, 1, 28, 28)
    assert_close(fast.eval()(x), stock.eval()(x), rtol=1e-5, atol=1e-5)


def test_under_autocast_a_fast_path_computes_in_the_type_of_autocast():
    conv = nn.Conv2d(4, 4, 3, padding=1)
    stock = copy.deepcopy(conv)
    use_fast_paths(conv)
    x = torch.randn(2, 4, 2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = conv(x), stock(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("channels", [1, 4, 12])
def test_a_wrong_number_of_channels_is_refused_as_by_the_library(channels):
    conv = nn.Conv2d(8, 4, 3, padding=1)
    use_fast_paths(conv)
    with pytest.raises(RuntimeError, match="8 channels"):
        conv(torch.randn(2, channels, 2, 2))


def test_laying_out_weights_leaves_frozen_parts_frozen():
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3))
    use_fast_paths(model)
    model.train()
    model[1].eval()
    lay_out_weights(model, torch.zeros(1, 2, 2, 2))
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
