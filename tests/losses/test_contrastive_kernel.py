"""The tiled kernel inside torch: autograd, compilation, memory; and the modules."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re
import subprocess
import sys

import pytest
import torch
from batches import BATCHES, LOSSES, PATHS, unit
from pytorch_metric_learning.distances import DotProductSimilarity
from pytorch_metric_learning.losses import SupConLoss
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from lopsided.losses import (
    AsymmetricContrastiveLoss,
    AsymmetricFocalContrastiveLoss,
    ContrastiveLoss,
    FocalContrastiveLoss,
    asymmetric_focal_contrastive_loss,
    contrastive_loss,
    parity_eta,
)
from lopsided.losses._kernel.plan import free_memory, rows_per_block, sorted_plan
from lopsided.losses._kernel.tiled import sweep
from lopsided.losses.reference import reference_loss

needs_fake_cuda = pytest.mark.skipif(
    torch.__version__.startswith("2.8") and torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="torch 2.8 built for CUDA ends the process where there is no device",
)

every_path = pytest.mark.parametrize("tile", PATHS.values(), ids=PATHS)


# At this size, "auto" is one block like 64, and 5 cuts like 3.
@pytest.mark.parametrize("tile", [None, 1, 3, 64])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("temperature", [0.02, 0.5])
@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck_in_float64_with_a_reference(tile, reduction, temperature, masked):
    z, z_ref = unit(7, 3).requires_grad_(), unit(4, 3, seed=1).requires_grad_()
    y, y_ref = torch.tensor([0, 1, 0, 2, 1, 0, 3]), torch.tensor([0, 1, 4, 2])
    mask = torch.rand(7, 11, generator=torch.Generator().manual_seed(0)) < 0.5 if masked else None

    if masked:
        y = y_ref = None

    def loss(z, z_ref):
        return asymmetric_focal_contrastive_loss(
            z, y, reference=(z_ref, y_ref), positive=mask, eta=3.0, gamma=1.7, temperature=temperature,
            reduction=reduction, tile=tile,
        )  # fmt: skip

    assert torch.autograd.gradcheck(loss, (z, z_ref), atol=1e-5)


def test_the_dense_path_has_a_right_second_derivative():
    z, y = unit(6, 3).requires_grad_(), torch.tensor([0, 1, 0, 2, 1, 0])

    def loss(z):
        return asymmetric_focal_contrastive_loss(z, y, eta=3.0, gamma=1.7, temperature=0.5, tile=None)

    assert torch.autograd.gradgradcheck(loss, (z,))


@pytest.mark.parametrize("tile", [2, "auto"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_of_the_tiled_path_is_a_clear_error(tile, reduction):
    z, y = unit(6, 3).requires_grad_(), torch.tensor([0, 1, 0, 2, 1, 0])
    loss = contrastive_loss(z, y, tile=tile, reduction=reduction)
    (grad,) = torch.autograd.grad(loss.sum(), z, create_graph=True)
    assert_close(grad.detach(), torch.autograd.grad(contrastive_loss(z, y, tile=None, reduction=reduction).sum(), z)[0])
    sentence = "A second derivative needs the dense path, got the tiled one. Pass tile=None to differentiate twice."
    with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)}$"):
        torch.autograd.grad(grad.square().sum(), z)


@every_path
def test_only_what_requires_grad_gets_one(tile):
    z, z_ref = unit(7, 3), unit(4, 3, seed=1).requires_grad_()
    y, y_ref = torch.tensor([0, 1, 0, 2, 1, 0, 3]), torch.tensor([0, 1, 4, 2])
    of_reference = torch.autograd.grad(contrastive_loss(z, y, reference=(z_ref, y_ref), tile=tile), z_ref)[0]
    z.requires_grad_()
    both = torch.autograd.grad(contrastive_loss(z, y, reference=(z_ref, y_ref), tile=tile), (z, z_ref))
    alone = torch.autograd.grad(contrastive_loss(z, y, reference=(z_ref.detach(), y_ref), tile=tile), z)[0]
    assert_close(both[1], of_reference)
    assert_close(both[0], alone)
    assert not contrastive_loss(z.detach(), y, tile=tile).requires_grad


@every_path
def test_neither_inputs_nor_gradients_are_modified(tile):
    z, y = unit(9, 4).requires_grad_(), torch.arange(9) % 2
    before = z.detach().clone()
    loss = asymmetric_focal_contrastive_loss(z, y, eta=2.0, gamma=2.0, tile=tile)
    (first,) = torch.autograd.grad(loss, z, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, z)
    assert torch.equal(z.detach(), before)
    assert torch.equal(first, kept)
    assert torch.equal(first, second)


@pytest.fixture
def fresh_compiler():
    """What one test compiled does not count against another's limit of recompilations."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Encoder(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.loss = loss

    def forward(self, x, y):
        return self.loss(self.layer(x), y)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("tile", ["auto", 4, None])
def test_a_compiled_model_that_uses_the_loss_trains_the_same_in_one_graph(reduction, tile):
    torch.manual_seed(0)
    x, y = torch.randn(10, 8), torch.arange(10) % 3
    model = Encoder(AsymmetricFocalContrastiveLoss(eta=5.0, gamma=2.0, reduction=reduction, tile=tile))
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    losses = [m(x, y) for m in (model, compiled)]
    for loss in losses:
        loss.sum().backward()
    assert_close(*losses)
    assert_close(model.layer.weight.grad, compiled.layer.weight.grad)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("eta_unit", ["absolute", "parity"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_compiled_loss_follows_the_batch_size(eta_unit, reduction):
    loss = AsymmetricFocalContrastiveLoss(eta=0.5, gamma=2.0, eta_unit=eta_unit, reduction=reduction)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for n in (10, 7, 300, 12, 33, 5, 9, 21, 64, 65, 18):
        z, y = unit(n, 6).float(), torch.arange(n) % 3
        assert_close(compiled(z, y), loss(z, y))


@pytest.mark.slow
def test_the_operation_keeps_torchs_rules_for_every_layout_it_meets():
    options = (3.0, 2.0, 0.5, False, False, 4)
    y, y_ref, learnt = torch.arange(9) % 3, torch.arange(5) % 4, torch.tensor(0.3, dtype=torch.float64)
    chosen = torch.rand(9, 14, generator=torch.Generator().manual_seed(1)) < 0.7
    for z in (unit(9, 6), unit(6, 9).t()):
        for tile_options in (options, (*options[:5], 64)):
            for mask in (None, torch.rand(9, 14, generator=torch.Generator().manual_seed(0)) < 0.5):
                labels = (None, None) if mask is not None else (y, y_ref)
                for own in ((None, None, None), (learnt, chosen, y != 1)):
                    inputs = (z, unit(5, 6, seed=1), own[0], *labels, mask, *own[1:], None)
                    arguments = (*inputs, *tile_options, True, True, True)
                    passed = torch.library.opcheck(torch.ops.lopsided.sweep.default, arguments)
                    assert set(passed.values()) == {"SUCCESS"}
    for wanted in ((True, False, False), (False, True, False)):
        arguments = (unit(9, 6), unit(5, 6, seed=1), None, y, y_ref, None, None, None, None, *options, *wanted)
        assert set(torch.library.opcheck(torch.ops.lopsided.sweep.default, arguments).values()) == {"SUCCESS"}


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_of_the_compiled_tiled_path_is_an_error_too(reduction):
    y = torch.tensor([0, 1, 0, 2, 1, 0])
    compiled = torch.compile(lambda z: contrastive_loss(z, y, tile=2, reduction=reduction).sum(), backend="aot_eager")
    z = unit(6, 3).requires_grad_()
    h = z.sin()
    with pytest.raises(RuntimeError, match=r"tile=None|double backward|twice"):  # noqa: PT012  Either step may refuse.
        (grad,) = torch.autograd.grad(compiled(h), h, create_graph=True)
        grad.square().sum().backward()


def test_the_guard_in_a_compiled_graph_names_the_path_that_has_a_second_derivative():
    """Most backends refuse before it is asked, with words of their own."""
    grad = torch.ones(2, requires_grad=True)
    guarded = torch.ops.lopsided.first_derivative(grad, None, None, None, grad.detach())
    assert torch.equal(guarded, grad)
    with pytest.raises(RuntimeError, match="tile=None"):
        guarded.sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_reference_made_in_inference_mode_is_taken(reduction):
    z, y = unit(6, 3).requires_grad_(), torch.tensor([0, 1, 0, 2, 1, 0])
    with torch.inference_mode():
        queue = (unit(4, 3, seed=1).clone(), torch.arange(4) % 2)
    plain = (unit(4, 3, seed=1), torch.arange(4) % 2)
    grads = [
        torch.autograd.grad(contrastive_loss(z, y, reference=reference, reduction=reduction).sum(), z)[0]
        for reference in (queue, plain)
    ]
    assert torch.equal(*grads)


@pytest.mark.parametrize("length", [1e-30, 1e25])
def test_a_module_normalises_features_of_any_length(length):
    z, y = unit(9, 6).float(), torch.arange(9) % 2
    loss = AsymmetricFocalContrastiveLoss(eta=2.0)
    scaled = (z * length).requires_grad_()
    value = loss(scaled, y)
    assert_close(value, loss(z, y))
    (grad,) = torch.autograd.grad(value, scaled)
    z.requires_grad_()
    assert_close(grad * length, torch.autograd.grad(loss(z, y), z)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1e-30, 1.0, 1e25])
def test_a_module_normalises_each_view_and_rows_with_some_zeros(length):
    directions = unit(4, 3, 5).float()
    directions[0, 1] = torch.tensor([0.0, 0.6, 0.0, 0.0, -0.8])
    y, eta = torch.tensor([0, 1, 0, 2]), 4.0
    found = AsymmetricFocalContrastiveLoss(eta=eta)(directions * length, y)
    assert_close(found, asymmetric_focal_contrastive_loss(directions, y, eta=eta), rtol=1e-5, atol=0.0)
    signs = torch.tensor([[1.0], [-1.0], [1.0], [1.0]])  # all that is left of a direction in one dimension
    found = AsymmetricFocalContrastiveLoss(eta=eta)(torch.tensor([[2.0], [-3.0], [0.1], [7.0]]) * length, y)
    assert_close(found, asymmetric_focal_contrastive_loss(signs, y, eta=eta), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("tile", ["auto", 3, None])
def test_cl_equals_the_supcon_loss_of_pytorch_metric_learning_where_every_anchor_has_a_positive(views, tile):
    z, y = unit(10 * views, 6), (torch.arange(10) % 3).repeat_interleave(views)
    peer = SupConLoss(temperature=0.1, distance=DotProductSimilarity(normalize_embeddings=False))
    ours = contrastive_loss(z.reshape(10, views, 6), y[::views], temperature=0.1, tile=tile)
    assert_close(ours, peer(z, y), rtol=1e-6, atol=1e-7)


def test_a_batch_of_one_class_has_a_loss_here_and_none_in_pytorch_metric_learning():
    z, y = unit(8, 6), torch.zeros(8, dtype=torch.int64)
    peer = SupConLoss(temperature=0.1, distance=DotProductSimilarity(normalize_embeddings=False))
    assert peer(z, y) == 0
    logits = (z @ z.T / 0.1).fill_diagonal_(-torch.inf)
    expected = torch.stack([logits[i].logsumexp(0) - logits[i][torch.arange(8) != i].mean() for i in range(8)]).mean()
    assert_close(contrastive_loss(z, y, temperature=0.1), expected, rtol=1e-6, atol=1e-7)


MEASURE = """
import sys, torch
from lopsided.losses import asymmetric_focal_contrastive_loss
torch.set_num_threads(1)
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
for n, tile in ((int(sys.argv[1]), "auto"), (int(sys.argv[2]), None)):
    z = torch.nn.functional.normalize(torch.randn(n, 128), dim=1).requires_grad_()
    y = (torch.arange(n) % 11 == 0).long()
    asymmetric_focal_contrastive_loss(z[:300], y[:300], eta=300.0, gamma=7.0).backward()
    z.grad = None
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from what stands now
    before = status("VmRSS")
    asymmetric_focal_contrastive_loss(z, y, eta=300.0, gamma=7.0, tile=tile).backward()
    print((status("VmHWM") - before) / 1024)
"""


@pytest.mark.slow
def test_memory_stays_far_below_one_matrix_of_all_pairs():
    command = [sys.executable, "-c", MEASURE, "8000", "3000"]
    tiled, dense = map(float, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert tiled < 8_000**2 * 4 / 2**20 / 4
    assert dense > 3_000**2 * 4 / 2**20  # the measurement sees a matrix where there is one


MODULES = {
    "CL": (ContrastiveLoss, {}),
    "FCL": (FocalContrastiveLoss, {}),
    "ACL": (AsymmetricContrastiveLoss, {"eta": 60.0}),
    "AFCL": (AsymmetricFocalContrastiveLoss, {"eta": 60.0, "gamma": 2.5}),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_its_function_on_normalised_features(name):
    module, settings = MODULES[name]
    function, options = LOSSES[name]
    z, y, z_ref, y_ref = 5 * unit(9, 6), torch.arange(9) % 2, 3 * unit(4, 6, seed=2), torch.arange(4) % 3
    expected = function(unit(9, 6), y, **options, temperature=0.2, reference=(unit(4, 6, seed=2), y_ref))
    assert_close(module(**settings, temperature=0.2)(z, y, reference=(z_ref, y_ref)), expected)
    raw = module(**settings, temperature=30.0, normalize=False)(z, y)
    assert_close(raw, function(z, y, **options, temperature=30.0))


@pytest.mark.parametrize(("name", "eta", "gamma"), [("CL", 0, 0), ("FCL", 0, 1), ("ACL", 0, 0), ("AFCL", 0, 0)])
def test_a_module_and_its_function_have_the_same_settings_by_default(name, eta, gamma):
    loss = MODULES[name][0]()
    assert (loss.eta, loss.gamma, loss.temperature) == (eta, gamma, 0.07)
    z, y = unit(9, 6), torch.arange(9) % 2
    assert_close(LOSSES[name][0](z, y), loss(z, y))


@pytest.mark.parametrize("name", MODULES)
def test_a_module_survives_pickling_and_shows_its_settings(name):
    module, settings = MODULES[name]
    loss = module(**settings, temperature=0.25, reduction="sum")
    again = pickle.loads(pickle.dumps(loss))
    z, y = unit(9, 6), torch.arange(9) % 2
    assert torch.equal(again(z, y), loss(z, y))
    assert repr(loss) == (
        f"{module.__name__}(eta={loss.eta}, gamma={loss.gamma}, temperature=0.25, eta_unit='absolute', "
        "normalize=True, normalization='paper', reduction='sum', tile='auto')"
    )


def test_features_without_dimensions_are_all_the_same():
    """A p is 1/3 where three others are equally near: one of them is a positive, two are negatives."""
    y = torch.tensor([0, 1])
    loss = AsymmetricContrastiveLoss(eta=60.0)
    expected = torch.tensor(math.log(3) - 60 * math.log(2 / 3))
    assert_close(loss(torch.zeros(2, 2, 0), y), expected)
    assert_close(loss(torch.zeros(4, 0), y.repeat(2)), expected)


def test_blocks_have_at_most_a_tile_of_rows_and_whole_classes_or_parts_of_one():
    y = torch.tensor([0] * 9 + [1] + [2] * 2 + [3] + [4] * 3 + [5] * 4 + [6, 7])
    y_reference = torch.tensor([0, 2, 2, 5])
    blocks = list(sorted_plan(y, y_reference, 4))
    rows = [(block.start, block.stop) for block in blocks]
    assert rows == [(0, 3), (3, 6), (6, 9), (9, 13), (13, 16), (16, 20), (20, 22)]
    for block in blocks:
        ends = [(segment.start, segment.stop) for segment in block.segments]
        assert [0, *(stop for _, stop in ends)] == [*(start for start, _ in ends), 26]
        for segment in block.segments:
            columns = torch.cat([y, y_reference])[segment.columns]
            same = y[block.start : block.stop, None] == columns
            assert segment.kind == "mixed" or same.all() == same.any() == (segment.kind == "positive")
    mixed = [block.start for block in blocks if any(segment.kind == "mixed" for segment in block.segments)]
    assert mixed == [9, 20]


@pytest.mark.parametrize(
    ("columns", "rows"), [(1, 256), (4096, 256), (6000, 128), (8192, 128), (16384, 64), (10**7, 64)]
)
def test_a_block_has_from_64_to_256_rows_and_about_a_million_entries(columns, rows):
    assert rows_per_block(columns) == rows


@pytest.mark.parametrize(
    ("columns", "itemsize", "free", "rows"),
    [
        (128, 4, 80 * 2**30, 131072),  # far more rows than the batch has: one block
        (4096, 4, 80 * 2**30, 4096),
        (65536, 4, 80 * 2**30, 256),
        (65536, 8, 80 * 2**30, 256),
        (65536, 4, 2**30, 64),  # a quarter of 1 GiB holds 6.7 million entries of ten numbers: 102 rows
        (65536, 8, 2**30, 51),  # and half as many in double precision, too few to round to a multiple of 64
        (10**6, 4, 2**30, 6),
        (10**9, 4, 2**20, 1),
        (65536, 4, 0, 1),
        (65536, 4, None, 64),  # nobody says how much is free
        (1024, 4, None, 4096),
    ],
)
def test_a_block_on_a_device_is_sized_by_its_free_memory(columns, itemsize, free, rows):
    assert rows_per_block(columns, "cuda", itemsize, free) == rows
    assert rows == 1 or free is None or rows * columns * itemsize * 10 <= free / 4


def test_only_a_cuda_device_is_asked_for_its_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert free_memory(torch.device("cuda")) == 1300  # what torch holds and does not use counts as free
    assert free_memory(torch.device("cpu")) is None
    assert free_memory(torch.device("mps")) is None


@needs_fake_cuda
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tile", ["auto", 3])
def test_on_a_cuda_device_the_host_asks_for_no_number(monkeypatch, masked, tile):
    """Fake tensors have a device and a shape and no content: who asks for a number is told that there is none."""
    monkeypatch.setattr("lopsided.losses._kernel.tiled.free_memory", lambda device: 2**30)
    with FakeTensorMode():
        z, z_ref = (torch.empty(n, 2, 6, device="cuda", requires_grad=True) for n in (9, 4))
        y, y_ref = (torch.empty(n, dtype=torch.long, device="cuda") for n in (9, 4))
        positive = torch.empty(9, 13, dtype=torch.bool, device="cuda") if masked else None
        loss = AsymmetricFocalContrastiveLoss(eta=9.0, gamma=7.0, tile=tile)
        given = (None, None) if masked else (y, y_ref)
        total, values = loss.total_and_values(z, given[0], reference=(z_ref, given[1]), positive=positive)
        # Autograd's engine runs no backward without a device, so that the second visit of "none" is called by hand.
        flat, flat_ref = z.detach().reshape(18, 6), z_ref.detach().reshape(8, 6)
        labels = y.repeat_interleave(2), y_ref.repeat_interleave(2)
        rows = 0 if tile == "auto" else tile
        options = (9.0, 7.0, 0.07, False, False, rows, False, True, True)
        again = sweep(flat, flat_ref, None, *labels, None, None, None, values.flatten(), *options)
    assert total.shape == ()
    assert values.shape == (9, 2)
    assert [(grad.shape, grad.device.type) for grad in again[1:3]] == [((18, 6), "cuda"), ((8, 6), "cuda")]


@pytest.fixture
def as_on_a_device(monkeypatch):
    """A CPU is treated as a device of which nothing is asked."""
    monkeypatch.setattr("lopsided.losses._kernel.tiled._answers_at_once", lambda z: False)


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("batch", BATCHES)
def test_the_way_of_a_device_gives_value_and_gradients_of_the_specification(batch):
    z, y = BATCHES[batch]()
    z_ref, y_ref = torch.cat([unit(3, z.shape[1], seed=1), z[:1]]), torch.tensor([0, 1, 4, 0])
    for eta, gamma, temperature in [(0.0, 0.0, 0.07), (60.0, 0.5, 0.07), (300.0, 7.0, 0.5), (1.0, 1.0, 0.01)]:
        options = {"eta": eta, "gamma": gamma, "temperature": temperature}
        for reference in (None, (z_ref, y_ref)):
            inputs = [x.clone().requires_grad_() for x in (z, *(reference or ())[:1])]
            pair = None if reference is None else (inputs[1], y_ref)
            expected = reference_loss(inputs[0], y, **options, reference=pair)
            gradients = torch.autograd.grad(expected, inputs)
            for tile in (1, 3, 64):
                found = asymmetric_focal_contrastive_loss(inputs[0], y, **options, reference=pair, tile=tile)
                assert_close(found, expected, rtol=1e-9, atol=1e-11 * max(1.0, eta))
                for one, other in zip(torch.autograd.grad(found, inputs), gradients, strict=True):
                    assert_close(one, other, rtol=1e-9, atol=1e-11 * max(1.0, other.abs().max().item()))


@pytest.mark.usefixtures("as_on_a_device")
def test_the_way_of_a_device_is_exact_in_single_precision_too():
    z, y = unit(300, 6), torch.arange(300) % 3
    for gamma, temperature in itertools.product((0.0, 2.0, 7.0), (0.07, 1.0)):
        options = {"eta": 300.0, "gamma": gamma, "temperature": temperature}
        exact = asymmetric_focal_contrastive_loss(z, y, **options, tile=None)
        assert_close(asymmetric_focal_contrastive_loss(z.float(), y, **options).double(), exact, rtol=4e-6, atol=0.0)


@every_path
def test_in_units_of_parity_eta_follows_the_number_of_contrast_samples(tile):
    z, y, z_ref, y_ref = unit(6, 2, 5), torch.arange(6) % 2, unit(3, 5, seed=3), torch.arange(3)
    loss = AsymmetricContrastiveLoss(eta=0.5, eta_unit="parity", normalize=False, tile=tile)
    by_hand = AsymmetricContrastiveLoss(eta=0.5 * parity_eta(15), normalize=False, tile=tile)
    assert_close(loss(z, y, reference=(z_ref, y_ref)), by_hand(z, y, reference=(z_ref, y_ref)))
    by_hand = AsymmetricContrastiveLoss(eta=0.5 * parity_eta(6), normalize=False, tile=tile)
    assert_close(loss(z[:, 0], y), by_hand(z[:, 0], y))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own forward mode
@pytest.mark.parametrize("eta_unit", ["absolute", "parity"])
@pytest.mark.parametrize("normalization", ["paper", "released"])
def test_the_transforms_of_torch_func_work_on_the_dense_path(eta_unit, normalization):
    z, y = unit(3, 7, 4), torch.arange(21).reshape(3, 7) % 3
    loss = AsymmetricFocalContrastiveLoss(0.5, 2.0, 0.5, eta_unit=eta_unit, normalization=normalization, tile=None)
    expected = torch.stack([loss(z[i], y[i]) for i in range(3)])
    assert_close(torch.func.vmap(loss)(z, y), expected)
    assert_close(torch.func.vmap(loss, in_dims=(0, None))(z, y[0]), torch.stack([loss(one, y[0]) for one in z]))
    grads = [torch.autograd.grad(loss(one, y[i]), one)[0] for i, one in enumerate(z.clone().requires_grad_().unbind())]
    assert_close(torch.func.vmap(torch.func.grad(loss))(z, y), torch.stack(grads))
    assert_close(torch.func.jacrev(loss)(z[0], y[0]), grads[0])
    assert_close(torch.func.jacfwd(loss)(z[0], y[0]), grads[0])
    hessian = torch.autograd.functional.hessian(lambda one: loss(one, y[0]), z[0])
    assert_close(torch.func.hessian(loss)(z[0], y[0]), hessian)


def test_vmap_runs_over_temperatures_references_and_masks_on_the_dense_path():
    z, y, z_ref, y_ref = unit(3, 7, 4), torch.arange(7) % 3, unit(3, 5, 4, seed=1), torch.arange(5) % 2
    contrast = torch.rand(3, 7, 12, generator=torch.Generator().manual_seed(0)) < 0.7
    temperatures = torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64)

    def loss(z, z_ref, contrast, temperature):
        return asymmetric_focal_contrastive_loss(
            z, y, reference=(z_ref, y_ref), contrast=contrast, temperature=temperature, eta=3.0, gamma=1.5, tile=None
        )

    expected = torch.stack([loss(*one) for one in zip(z, z_ref, contrast, temperatures, strict=True)])
    assert_close(torch.func.vmap(loss)(z, z_ref, contrast, temperatures), expected)


@pytest.mark.parametrize(
    ("module", "options", "sentence"),
    [
        (
            ContrastiveLoss,
            {"eta": 3.0},
            "ContrastiveLoss() got an unexpected keyword argument 'eta'. "
            "Use AsymmetricFocalContrastiveLoss, which has eta and gamma.",
        ),
        (
            FocalContrastiveLoss,
            {"eta": 3.0},
            "FocalContrastiveLoss() got an unexpected keyword argument 'eta'. "
            "Use AsymmetricFocalContrastiveLoss, which has eta and gamma.",
        ),
        (
            AsymmetricContrastiveLoss,
            {"gamma": 3.0},
            "AsymmetricContrastiveLoss() got an unexpected keyword argument 'gamma'. "
            "Use AsymmetricFocalContrastiveLoss, which has eta and gamma.",
        ),
        (ContrastiveLoss, {"tiles": 3}, "ContrastiveLoss() got an unexpected keyword argument 'tiles'."),
    ],
)
def test_a_keyword_that_a_module_does_not_have_is_refused_in_its_own_name(module, options, sentence):
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        module(**options)
