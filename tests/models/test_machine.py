from __future__ import annotations

import pytest
import torch

from lopsided.errors import InputError
from lopsided.models.encoders import build_encoder
from lopsided.models.machine import compile_encoder, pick_device, seeded, threads
from lopsided.ranks import Ranks


def test_auto_is_a_device_that_is_there() -> None:
    device = pick_device("auto")
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["cuda:99", "xpu", "meta"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(
        InputError, match=rf"device must be available on this machine \(cpu.*\), got '{name}'\. Use \"auto\""
    ):
        pick_device(name)


def test_a_device_that_does_not_exist_is_refused_with_examples() -> None:
    with pytest.raises(InputError, match=r"device must be \"auto\", \"cpu\", .*, got 'gpu'\."):
        pick_device("gpu")


class Third(Ranks):
    """The third of four ranks on one machine."""

    rank = local_rank = 2
    size = local_size = 4


def test_each_rank_of_a_machine_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name in ("auto", "cuda"):
        assert pick_device(name, Third()) == torch.device("cuda:2")
    assert pick_device("cpu", Third()) == torch.device("cpu")
    assert pick_device("auto", Ranks()) == torch.device("cuda")
    must = "4 ranks on one machine must have one CUDA device each, got {}. Start fewer ranks, or set device to cpu."
    with pytest.raises(InputError) as caught:
        pick_device("cuda:1", Third())
    assert str(caught.value) == must.format("'cuda:1'")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(InputError) as caught:
        pick_device("auto", Third())
    assert str(caught.value) == must.format(3)


def test_threads_are_set_for_the_block_alone() -> None:
    before = torch.get_num_threads()
    with threads(before + 1) as number:
        assert number == torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with threads(None) as number:
        assert number == before


def test_a_seeded_block_draws_the_same_and_leaves_the_global_state_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    drawn = []
    for _ in range(2):
        with seeded(torch.device("cpu"), 0, "dropout", "encoder", 3):
            drawn.append(torch.rand(2))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.slow
def test_a_compiled_encoder_has_the_numbers_and_the_state_dict_of_the_plain_one() -> None:
    encoder, _ = build_encoder("mlp-8", channels=1, image_size=4, seed=0)
    x = torch.randn(6, 1, 4, 4)
    expected, names = encoder(x), list(encoder.state_dict())
    compile_encoder(encoder, torch.device("cpu"), 1)
    found = encoder(x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # The compiler was used.
    torch.testing.assert_close(found, expected)
    assert list(encoder.state_dict()) == names


def test_what_cannot_be_compiled_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match="compile must be false with several ranks, got true with 2 ranks"):
        compile_encoder(encoder, torch.device("cpu"), 2)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(InputError, match=r"compile = true needs a C\+\+ compiler on the PATH\. Install g\+\+"):
        compile_encoder(encoder, torch.device("cpu"), 1)
