"""What ranks tell each other, and what becomes of the others when one of them fails."""

from __future__ import annotations

import json
import os
import re
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lopsided import distributed
from lopsided.distributed import LostRankError, joined
from lopsided.errors import InputError, RunError, SaidError
from lopsided.ranks import Ranks
from training.ranks import Gone, each, together


def talk(ranks: Ranks) -> dict[str, Any]:
    """Use every verb once."""
    own = torch.full((ranks.rank, 2), float(ranks.rank), dtype=torch.float64)
    tensors = [
        torch.full((3, 2), ranks.rank + 1.0).t(),
        torch.tensor(0.5, dtype=torch.float64),
        torch.tensor([ranks.rank]),
        torch.full((5,), 1.0),
    ]
    distributed._BUCKET = 7  # So that there are several exchanges of one kind.
    ranks.sum_(tensors)
    weights = ranks.spread(
        lambda: {"a": torch.arange(6).view(2, 3).t(), "b": torch.tensor(True), "c": torch.zeros(0, 4)}
    )
    ranks.check_same("recipe", "this")
    return {
        "gathered": ranks.gather(own, range(ranks.size)),
        "none": ranks.gather(torch.zeros(0, 3), [0] * ranks.size),
        "sums": tensors,
        "told": ranks.told(lambda: {"rank": ranks.rank, "list": [1.5, None]}),
        "weights": weights,
    }


@pytest.mark.slow
def test_ranks_sum_gather_and_tell(tmp_path: Path) -> None:
    for found in together(3, tmp_path, talk):
        assert found["gathered"].tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
        assert found["gathered"].dtype == torch.float64
        assert found["none"].shape == (0, 3)
        assert [tensor.tolist() for tensor in found["sums"]] == [[[6.0] * 3] * 2, 1.5, [3], [3.0] * 5]
        assert found["told"] == {"rank": 0, "list": [1.5, None]}
        assert found["weights"]["a"].tolist() == [[0, 3], [1, 4], [2, 5]]
        assert found["weights"]["b"].item() is True
        assert found["weights"]["c"].shape == (0, 4)


def test_one_rank_alone_says_the_same_without_a_word() -> None:
    rows = torch.rand(3, 2)
    ranks = Ranks()
    ranks.check_same("recipe", "this")
    assert ranks.gather(rows, [3]) is rows
    assert ranks.told(lambda: 5) == 5
    assert ranks.spread(lambda: {"a": rows})["a"] is rows
    with joined() as found:
        assert found.size == 1
        assert found.first


def differ(ranks: Ranks) -> None:
    ranks.check_same("recipe", "this" if ranks.rank < 2 else "that")
    ranks.told(lambda: 0)


@pytest.mark.slow
def test_ranks_that_differ_are_named(tmp_path: Path) -> None:
    found = each(3, tmp_path, differ)
    assert str(found[2]) == "All ranks must have the same recipe, but rank 2 and rank 0 differ."
    assert type(found[2]) is RunError


def fail_on(ranks: Ranks, failing: list[int], kind: str) -> float:
    if ranks.rank in failing:
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "all":  # However long the first one takes to say it, and without a rest for the others afterwards.
            distributed._PATIENCE = timedelta(minutes=2)
            distributed.sleep = lambda seconds: None
        raise InputError(f"eta must be >= 0, got -3.0 of {kind}.")
    total = torch.ones(())
    ranks.sum_([total])
    return float(total)


@pytest.mark.slow
def test_the_rank_that_fails_says_why_and_the_others_end_without_a_word(tmp_path: Path) -> None:
    found = each(3, tmp_path, fail_on, [1], "its own")
    assert isinstance(found[1], InputError)
    assert str(found[1]) == "eta must be >= 0, got -3.0 of its own."
    for other in (found[0], found[2]):
        assert type(other) is SaidError
        assert str(other).startswith("The connection to another rank failed (")


@pytest.mark.slow
def test_what_all_ranks_have_to_say_is_said_by_the_first(tmp_path: Path) -> None:
    found = each(3, tmp_path, fail_on, [0, 1, 2], "all")
    assert [type(error) for error in found] == [InputError, SaidError, SaidError]


@pytest.mark.slow
def test_a_rank_that_was_killed_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    found = each(2, tmp_path, fail_on, [1], "killed")
    assert isinstance(found[1], Gone)
    assert found[1].code == -signal.SIGKILL
    assert type(found[0]) is LostRankError
    wrong = r"The connection to another rank failed \([A-Z][^()]+\)\. "
    cause = r"The rank that ended first prints the cause, unless it was killed\. "
    do = r"Continue with the same command and --resume\."
    assert re.fullmatch(wrong + cause + do, str(found[0]))


@pytest.mark.slow
def test_that_a_rank_is_gone_is_said_by_one_of_those_that_are_left(tmp_path: Path) -> None:
    found = each(3, tmp_path, fail_on, [0], "killed")
    assert isinstance(found[0], Gone)
    assert {type(error) for error in found[1:]} == {LostRankError, SaidError}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "[/a/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4567. This may",
            "closed by peer [127.0.0.1]:4567",
        ),
        ("[enforce fail at pair.cc:9] timed out.", "timed out"),
        ("Application timeout caused pair closure\nmore", "Application timeout caused pair closure"),
        ("", "RuntimeError"),
    ],
)
def test_a_broken_exchange_is_told_in_one_sentence_and_its_cause_is_kept(text: str, reason: str) -> None:
    cause = RuntimeError(text)
    with pytest.raises(LostRankError) as raised, distributed._exchange():
        raise cause
    assert f"{reason}). The rank" in str(raised.value)
    assert ".cc" not in str(raised.value)
    assert raised.value.__cause__ is cause


class Store:
    """Notes what is asked of it, and refuses to wait."""

    def __init__(self, *, gone: bool = False) -> None:
        self.counts: dict[str, int] = {}
        self.gone = gone

    def check(self, keys: list[str]) -> bool:
        if self.gone:
            raise RuntimeError("Broken pipe")
        return all(key in self.counts for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]


def group_of(rank: int, store: Any, device: str = "cpu") -> Any:
    group = distributed._Group.__new__(distributed._Group)
    group.rank, group.size, group._store, group._device = rank, 2, store, torch.device(device)
    return group


def test_a_lost_rank_is_spoken_of_at_once_and_by_one() -> None:
    store = Store()
    said = [group_of(rank, store).speaks(LostRankError(f"lost, seen by {rank}")) for rank in (2, 1, 3)]
    assert said == [True, False, False]
    assert group_of(1, Store(gone=True)).speaks(LostRankError("lost"))


class Elsewhere(TorchFunctionMode):
    """Moves tensors to CUDA and back in name only: they are marked with where they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and torch.device(args[1]).type == "cuda":
            there = args[0].clone()
            there.there = True
            return there
        return func(*args, **(kwargs or {}))


def test_a_group_of_nccl_alone_exchanges_what_lies_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(tensor: Any) -> None:
        assert tensor.there
        tensor *= 2

    def all_gather(parts: list[Any], tensor: Any) -> None:
        assert tensor.there
        for part in parts:
            part.copy_(tensor)

    monkeypatch.setattr(distributed.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(distributed.dist, "all_gather", all_gather)
    group, tensors = group_of(0, None, "cuda"), [torch.ones(2), torch.ones((), dtype=torch.int64)]
    with Elsewhere():
        group.sum_(tensors)
        found = group.gather(torch.tensor([[1.0], [2.0]]), [2, 1])
    assert [tensor.tolist() for tensor in tensors] == [[2.0, 2.0], 2]
    assert found.tolist() == [[1.0], [2.0], [1.0]]


def fail_in_telling(ranks: Ranks) -> None:
    def make() -> int:
        raise RunError("the disk must have room, got none.")

    ranks.told(make)


@pytest.mark.slow
def test_what_fails_on_the_first_rank_fails_on_all(tmp_path: Path) -> None:
    found = each(2, tmp_path, fail_in_telling)
    assert [type(error) for error in found] == [RunError, SaidError]
    assert [str(error) for error in found] == ["the disk must have room, got none."] * 2


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "two"}, r"WORLD_SIZE must be the number of ranks, got 'two'\. Start with torchrun\."),
        (
            {"WORLD_SIZE": "2"},
            r"The ranks cannot connect: .*RANK expected, but not set\. Start .* torchrun\.",
        ),
    ],
)
def test_ranks_that_cannot_find_each_other_are_told_how(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message), joined():
        pass


def test_the_pages_say_how_far_ranks_lie_apart_as_the_record_does() -> None:
    root = Path(__file__).parents[1]
    record = json.loads((root / "benchmarks" / "records" / "ranks.json").read_text("utf-8"))
    page = (root / "docs" / "scaling.md").read_text("utf-8")
    two, again = record["two ranks"], record["again"]
    losses = two["relative_difference_of_loss"]
    largest = max((key for key in losses if key.startswith("encoder")), key=lambda key: losses[key])
    assert set(again["relative_difference_of_loss"].values()) == {0.0}
    assert f"| loss of epoch 1, relative difference | 0 | {losses['encoder 1']:.5f} |" in page
    assert f"| loss of epoch 4 | 0 | {losses['encoder 4']:.4f} |" in page
    shown = f"{largest.removeprefix('encoder ')}, the largest of the encoder | 0 | {losses[largest]:.3f} |"
    assert f"| loss of epoch {shown}" in page
    assert f"| 0 | {two['largest_difference_of_a_probability']:.2f} |" in page
    assert f"of {two['test_images']} test images | 0 | {two['predictions_that_differ']} |" in page
    one, other = (f"{record['uwa'][name]:.3f}" for name in ("one process", "two ranks"))
    assert f"| balanced accuracy ({one} for one process) | {one} | {other} |" in page
