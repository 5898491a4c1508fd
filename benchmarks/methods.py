"""How fast, and in how much memory, are the losses of the field? Forward plus backward, against the plain formula.

Run as ``python benchmarks/methods.py`` (minutes), or with ``--sizes 128 1024``, ``--losses bcl supmin``,
``--record FILE.json``. The plain formula is the formula of the paper in the steps of the authors' code: dense matrices
for pairs, torch's ``cross_entropy`` for logits. Both take turns in one process for their time, so that a noisy machine
disturbs them alike. The ratio is the median of the ratios of the rounds. Each runs in a process of its own for its
memory, which is the largest memory of one call above what the process held before it.

n is the number of anchors or of rows of logits. The contrastive losses get n / 2 samples in 2 views of 128 numbers that
already have length 1. The others get n rows of logits for 100 classes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax, normalize

from lopsided.losses import (
    ClassBalancedLoss,
    LabelAwareSmoothingLoss,
    LDAMLoss,
    LogitAdjustedLoss,
    balanced_contrastive_loss,
    class_balanced_weights,
    label_aware_smoothing,
    ldam_margins,
    opposite_prototypes,
    supervised_minority_loss,
    supervised_prototypes_loss,
)
from measure import in_turns, peak_of

SIZES = (128, 1024, 8192)
CLASSES, WIDTH, TEMPERATURE = 100, 128, 0.07
PAIRWISE = ("bcl", "supmin", "supproto")
LOSSES = ("logit-adjusted", "class-balanced", "label-aware-smoothing", "ldam", *PAIRWISE)
COUNTS = torch.linspace(500, 5, CLASSES).long()


def plain_bcl(z: Tensor, y: Tensor, prototypes: Tensor) -> Tensor:
    """Class averaging over a dense matrix, with the prototypes as further columns."""
    n, classes = len(z), len(prototypes)
    flat, labels = torch.cat(z.unbind(1)), y.repeat(2)
    columns, of_columns = torch.cat([flat, prototypes]), torch.cat([labels, torch.arange(classes)])
    others = torch.ones(2 * n, 2 * n + classes)
    others.fill_diagonal_(0)
    mask = (labels[:, None] == of_columns).float() * others
    counts = torch.bincount(of_columns, minlength=classes).float()
    s = flat @ columns.t() / TEMPERATURE
    s = s - s.amax(1, keepdim=True).detach()
    total = (torch.exp(s) * others / (counts[of_columns] - mask)).sum(1, keepdim=True)
    return -((mask * (s - torch.log(total))).sum(1) / mask.sum(1)).mean()


def plain_supmin(z: Tensor, y: Tensor) -> Tensor:
    """SupCon with the mask of the minority and of the views."""
    n = len(z)
    flat = torch.cat(z.unbind(1))
    mask = ((y[:, None] == 1) & (y == 1)).float()
    mask = (mask + torch.eye(n)).clamp(max=1).repeat(2, 2)
    others = 1 - torch.eye(2 * n)
    mask = mask * others
    s = flat @ flat.t() / TEMPERATURE
    s = s - s.amax(1, keepdim=True).detach()
    log_p = s - torch.log((torch.exp(s) * others).sum(1, keepdim=True))
    return -((mask * log_p).sum(1) / mask.sum(1)).mean()


def plain_supproto(z: Tensor, y: Tensor, prototypes: Tensor) -> Tensor:
    """NT-Xent with the own prototype as a further positive while it is not near enough."""
    n = len(z)
    flat, labels = torch.cat(z.unbind(1)), y.repeat(2)
    sims = flat @ torch.cat([flat, prototypes]).t()
    s = sims / TEMPERATURE
    s = s - s.amax(1, keepdim=True).detach()
    others = torch.cat([1 - torch.eye(2 * n), torch.zeros(2 * n, 2)], 1)
    log_p = s - torch.log((torch.exp(s) * others).sum(1, keepdim=True))
    to = sims[:, -2:]
    pulled = to.gather(1, labels[:, None]) <= to.gather(1, 1 - labels[:, None]) + 1.0
    own = torch.zeros(2 * n, 2).scatter(1, labels[:, None], pulled.float())
    mask = torch.cat([torch.eye(n).repeat(2, 2) * others[:, : 2 * n], own], 1)
    return -((mask * log_p).sum(1) / mask.sum(1)).mean()


def plain_ldam(x: Tensor, y: Tensor, margins: Tensor) -> Tensor:
    """The margin of the true class by a one-hot mask."""
    index = torch.zeros_like(x, dtype=torch.bool).scatter_(1, y[:, None], True)
    margin = (margins[None] @ index.float().t()).view(-1, 1)
    return cross_entropy(30.0 * torch.where(index, x - margin, x), y)


def plain_weighted(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """The mean of the weighted cross-entropies."""
    return (weights[y] * cross_entropy(x, y, reduction="none")).mean()


def plain_smoothing(x: Tensor, y: Tensor, smoothing: Tensor) -> Tensor:
    """The smoothed label in two terms."""
    e, logs = smoothing[y], log_softmax(x, dim=-1)
    own = -logs.gather(1, y[:, None]).squeeze(1)
    return ((1 - e) * own - e * logs.mean(-1)).mean()


def functions(name: str, n: int) -> tuple[Tensor, dict[str, Callable[[], Tensor]]]:
    """The input, and the loss of this package and the plain formula as functions without arguments."""
    torch.manual_seed(0)
    if name in PAIRWISE:
        x = normalize(torch.randn(n // 2, 2, WIDTH), dim=-1).requires_grad_()
        y = torch.arange(n // 2) % 37 if name == "bcl" else (torch.arange(n // 2) % 10 == 0).long()
    else:
        x = torch.randn(n, CLASSES).clamp(-1, 1).requires_grad_()
        y = torch.arange(n) % CLASSES
    prototypes = normalize(torch.randn(CLASSES, WIDTH), dim=1)
    loss, plain = _made(name, x, y, prototypes)
    return x, {"lopsided": lambda: loss(x, y), "plain": plain}


def _made(  # noqa: PLR0911
    name: str, x: Tensor, y: Tensor, prototypes: Tensor
) -> tuple[Any, Callable[[], Tensor]]:
    """The loss of this package, and the plain formula with what it computes once before training."""
    if name == "logit-adjusted":
        offsets = (COUNTS / COUNTS.sum()).log()
        return LogitAdjustedLoss(COUNTS), lambda: cross_entropy(x + offsets, y)
    if name == "class-balanced":
        weights = class_balanced_weights(COUNTS).float()
        return ClassBalancedLoss(COUNTS), lambda: plain_weighted(x, y, weights)
    if name == "label-aware-smoothing":
        smoothing = label_aware_smoothing(COUNTS).float() * CLASSES / (CLASSES - 1)
        return LabelAwareSmoothingLoss(COUNTS), lambda: plain_smoothing(x, y, smoothing)
    if name == "ldam":
        margins = ldam_margins(COUNTS).float()
        return LDAMLoss(COUNTS), lambda: plain_ldam(x, y, margins)
    if name == "bcl":
        return partial(balanced_contrastive_loss, prototypes=prototypes), lambda: plain_bcl(x, y, prototypes)
    if name == "supproto":
        two = opposite_prototypes(WIDTH)
        return partial(supervised_prototypes_loss, prototypes=two), lambda: plain_supproto(x, y, two)
    return supervised_minority_loss, lambda: plain_supmin(x, y)


def runs(name: str, n: int) -> dict[str, Callable[[], None]]:
    """One forward and backward pass of each."""
    x, made = functions(name, n)

    def run(function: Callable[[], Tensor]) -> None:
        x.grad = None
        function().backward()

    return {key: partial(run, function) for key, function in made.items()}


def check(name: str) -> None:
    """End the program if the two losses differ: then their times would not compare."""
    ours, plain = (float(function().detach()) for function in functions(name, 256)[1].values())
    if abs(ours - plain) > 1e-4 * abs(plain):
        sys.exit(f"{name}: the loss is {ours}, but the plain formula gives {plain}.")


def peak_memory(name: str, n: int, which: str) -> float:
    """MiB above what stands before the call, in a new process. It is forked from one that has only imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch", "lopsided.losses.contrastive"])
    with context.Pool(1, maxtasksperchild=1) as pool:
        return pool.apply(measure_memory, (name, n, which))


def measure_memory(name: str, n: int, which: str) -> float:
    """In the child process: load what is loaded once, then measure one call."""
    runs(name, 64)[which]()
    return peak_of(runs(name, n)[which])


def main() -> None:
    """Print a table, and write a record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES)
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="at least three rounds, then until this time is over"
    )
    parser.add_argument("--note", default="", help="a remark about the machine for the record")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    rows = []
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'loss':24}{'n':>6}{'ms':>10}{'plain ms':>10}{'ratio':>8}{'MiB':>8}{'plain MiB':>11}")
    for name in arguments.losses:
        check(name)
        for n in arguments.sizes:
            found = in_turns(runs(name, n), arguments.seconds)
            ratio = statistics.median(a / b for a, b in zip(found["lopsided"], found["plain"], strict=True))
            row = {"loss": name, "n": n, "rounds": len(found["plain"]), "ratio": ratio}
            for key, each in found.items():
                row |= {f"{key}_s": statistics.median(each), f"{key}_mib": peak_memory(name, n, key)}
            rows.append(row)
            print(
                f"{name:24}{n:6}{1e3 * row['lopsided_s']:10.3f}{1e3 * row['plain_s']:10.3f}{ratio:8.2f}"
                f"{row['lopsided_mib']:8.1f}{row['plain_mib']:11.1f}",
                flush=True,
            )
            if arguments.record:
                machine = {
                    "torch": torch.__version__, "threads": torch.get_num_threads(), "processor": platform.machine(),
                    "note": arguments.note,
                }  # fmt: skip
                arguments.record.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
