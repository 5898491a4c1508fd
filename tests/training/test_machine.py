from __future__ import annotations

import pytest
import torch

from lopsided.errors import InputError
from lopsided.training.machine import pick_device, seeded, threads


def test_auto_is_a_device_that_is_there() -> None:
    device = pick_device("auto")
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["cuda:99", "xpu", "meta"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(
        InputError, match=rf"device must be one that this machine has, cpu.*, got '{name}'\. Use \"auto\""
    ):
        pick_device(name)


def test_a_device_that_does_not_exist_is_refused_with_examples() -> None:
    with pytest.raises(InputError, match=r"device must be \"auto\", \"cpu\", .*, got 'gpu'\."):
        pick_device("gpu")


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
