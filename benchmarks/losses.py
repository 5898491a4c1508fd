"""How fast, and in how much memory, is the loss? Forward plus backward, against the floor and four peers.

Run as ``python benchmarks/losses.py`` (minutes), or with ``--sizes 128 4096``, ``--record FILE.json``. Every method
runs in a process of its own for its memory, and all methods take turns in one process for their time, so that a noisy
machine disturbs them alike. Ratios are of the medians over rounds.

lopsided           the mean over anchors: values and gradient from one visit of the blocks
training           what training calls: the sum over anchors, and the loss of each beside it, from one visit too
two visits         the loss of each anchor (reduction="none"), summed afterwards: a second visit for the gradient
floor              the three matrix products that any exact method needs, into memory that is already there
dense autograd     this package's dense path: the same numbers from plain operations, differentiated by autograd
plain autograd     the formula as one would write it on a Sunday, without care for p near 1
released formula   sums divided by n, no shift of the similarities, masks after the logarithm
metric-learning    SupConLoss of pytorch-metric-learning: CL only
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lopsided.losses import AsymmetricFocalContrastiveLoss, asymmetric_focal_contrastive_loss
from measure import in_turns, peak_of

SIZES = (128, 1024, 4096, 8192, 16384, 65536)
SETTINGS = {"CL": (0.0, 0.0), "AFCL(300, 7)": (300.0, 7.0)}
TEMPERATURE, WIDTH = 0.07, 128
# What holds several n x n matrices is not tried where they would fill the memory of a laptop.
LARGEST = {
    "floor": 16384,
    "dense autograd": 8192,
    "plain autograd": 8192,
    "released formula": 8192,
    "metric-learning": 4096,
}


def batch(n: int) -> tuple[Tensor, Tensor]:
    """Random features with labels at 90:10, the minority spread over the batch."""
    torch.manual_seed(0)
    return normalize(torch.randn(n, WIDTH), dim=1).requires_grad_(), (torch.arange(n) % 10 == 0).long()


def floor(n: int) -> Callable[[], object]:
    """The three products."""
    z = batch(n)[0].detach()
    s, g = torch.zeros(n, n), torch.zeros(n, WIDTH)

    def run() -> None:
        torch.mm(z, z.t(), out=s)
        torch.mm(s, z, out=g)
        torch.mm(s.t(), z, out=g)

    return run


def plain(z: Tensor, y: Tensor, eta: float, gamma: float) -> Tensor:
    """Log-softmax, masks, sums."""
    itself = torch.eye(len(z), dtype=torch.bool)
    log_p = torch.log_softmax((z @ z.t() / TEMPERATURE).masked_fill(itself, -torch.inf), 1).masked_fill(itself, 0.0)
    p = log_p.exp()
    positive, negative = (y[:, None] == y) & ~itself, y[:, None] != y
    loss = ((1 - p).pow(gamma) * log_p * positive).sum(1) / positive.sum(1).clamp(min=1)
    if eta:
        push = torch.log1p(-p.masked_fill(~negative, 0.0).clamp(max=1 - 1e-6)).sum(1)
        loss = loss + eta * push / negative.sum(1).clamp(min=1)
    return -loss.mean()


def released(z: Tensor, y: Tensor, eta: float, gamma: float) -> Tensor:
    """The formula of the released code, step by step: both sums over n, exponentials without a shift."""
    n = len(z)
    same = (y[:, None] == y).float()
    others = 1 - torch.eye(n)
    e = torch.exp(z @ z.t() / TEMPERATURE)
    p = e / (e * others).sum(1, keepdim=True)
    pull = ((1 - p) ** gamma * torch.log(p) * same * others).sum(1) / n
    push = (torch.log(1 - p * others) * (1 - same)).sum(1) / n
    return -(pull + eta * push).mean()


def method(name: str, n: int, setting: str) -> Callable[[], object]:
    """A function that does one forward and backward."""
    if name == "floor":
        return floor(n)
    z, y = batch(n)
    eta, gamma = SETTINGS[setting]
    if name == "metric-learning":
        from pytorch_metric_learning.losses import SupConLoss

        peer = SupConLoss(temperature=TEMPERATURE)
        function: Callable[[], Tensor] = lambda: peer(z, y)  # noqa: E731
    elif name in ("plain autograd", "released formula"):
        formula = plain if name == "plain autograd" else released
        function = lambda: formula(z, y, eta, gamma)  # noqa: E731
    elif name == "training":
        loss = AsymmetricFocalContrastiveLoss(eta, gamma, TEMPERATURE, normalize=False)
        function = lambda: loss.total_and_values(z, y)[0] / n  # noqa: E731
    elif name == "two visits":
        loss = AsymmetricFocalContrastiveLoss(eta, gamma, TEMPERATURE, normalize=False, reduction="none")
        function = lambda: loss(z, y).sum() / n  # noqa: E731
    else:
        tile = None if name == "dense autograd" else "auto"
        function = lambda: asymmetric_focal_contrastive_loss(z, y, eta=eta, gamma=gamma, tile=tile)  # noqa: E731

    def run() -> None:
        z.grad = None
        function().backward()

    return run


def methods(n: int, setting: str) -> list[str]:
    """What is tried at this size."""
    names = ["lopsided", "training", "two visits", "floor", "plain autograd", "dense autograd", "released formula"]
    names += ["metric-learning"] if setting == "CL" else []
    return [name for name in names if n <= LARGEST.get(name, n)]


def peak_memory(name: str, n: int, setting: str) -> float:
    """MiB above what stands before the first call, in a process of its own."""
    found = subprocess.run(
        [sys.executable, __file__, "--measure-memory", name, str(n), setting],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(found.stdout)


def measure_memory(name: str, n: int, setting: str) -> None:
    """In the child process: load what is loaded once, then measure one call."""
    method(name, 64, setting)()
    run = method(name, n, setting)
    print(peak_of(run))


def main() -> None:
    """Print a table per setting; write a record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="at least three rounds, then until this time is over"
    )
    parser.add_argument("--record", type=Path)
    parser.add_argument("--measure-memory", nargs=3, metavar=("METHOD", "N", "SETTING"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure_memory:
        name, n, setting = arguments.measure_memory
        return measure_memory(name, int(n), setting)
    rows = []
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, features n x {WIDTH}, labels 90:10")
    print(f"{'loss':14}{'n':>7}  {'method':18}{'median s':>10}{'best s':>10}{'vs floor':>10}{'vs ours':>10}{'MiB':>9}")
    for setting in SETTINGS:
        for n in arguments.sizes:
            runs = {name: method(name, n, setting) for name in methods(n, setting)}
            found = in_turns(runs, arguments.seconds, most=500)
            median = {name: statistics.median(values) for name, values in found.items()}
            for name, values in found.items():
                row = {
                    "loss": setting, "n": n, "method": name, "rounds": len(values), "median_s": median[name],
                    "best_s": min(values), "vs_floor": median[name] / median["floor"] if "floor" in median else None,
                    "vs_lopsided": median[name] / median["lopsided"], "peak_mib": peak_memory(name, n, setting),
                }  # fmt: skip
                rows.append(row)
                print(
                    f"{setting:14}{n:7}  {name:18}{row['median_s']:10.5f}{row['best_s']:10.5f}"
                    f"{row['vs_floor'] or float('nan'):10.2f}{row['vs_lopsided']:10.2f}{row['peak_mib']:9.0f}",
                    flush=True,
                )
    if arguments.record:
        machine = {"torch": torch.__version__, "threads": torch.get_num_threads(), "processor": platform.machine()}
        arguments.record.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1, allow_nan=False) + "\n")
    return None


if __name__ == "__main__":
    main()
