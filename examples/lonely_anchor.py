"""The losses at work on a batch of 11 to 1: what moves the lonely sample under CL and under AFCL.

Run as ``python examples/lonely_anchor.py``. Prints a table and writes ``docs/figures/lonely_anchor.svg``.
"""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib as mpl
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import normalize

from lopsided.losses import asymmetric_focal_contrastive_loss, contrastive_loss

mpl.use("agg")
import matplotlib.pyplot as plt

FIGURE = Path(__file__).parent.parent / "docs" / "figures" / "lonely_anchor.svg"
ETA, GAMMA = 300.0, 7.0
"""The paper's values at a batch of 128. Eta weighs the push away from other classes, and gamma turns attention to
anchors that are far from their own class.
"""
MAJORITY, MINORITY = "#0072B2", "#D55E00"


def batch() -> tuple[Tensor, Tensor]:
    """Eleven samples of one class spread over the circle's right side, and one of another class at their edge."""
    angles = torch.cat([torch.linspace(-70.0, 60.0, 11), torch.tensor([72.0])]).deg2rad()
    z = torch.stack([angles.cos(), angles.sin()], 1)
    return z, torch.tensor([0] * 11 + [1])


def values_of(loss: str, z: Tensor, y: Tensor) -> Tensor:
    """Each anchor's own value."""
    unit = normalize(z)
    if loss == "CL":
        return contrastive_loss(unit, y, reduction="none")
    return asymmetric_focal_contrastive_loss(unit, y, eta=ETA, gamma=GAMMA, reduction="none")


def own_terms(loss: str) -> tuple[Tensor, Tensor]:
    """Each anchor's own value, and the length of the gradient that this value sends to the anchor."""
    z, y = batch()
    values = values_of(loss, z.requires_grad_(), y)
    grads = [torch.autograd.grad(value, z, retain_graph=True)[0][i].norm() for i, value in enumerate(values)]
    return values.detach(), torch.stack(grads)


def forces(loss: str) -> tuple[float, float]:
    """How strongly a step moves the minority sample away from the others, by its own term and by their terms."""
    z, y = batch()
    values = values_of(loss, z.requires_grad_(), y)
    own, others = (torch.autograd.grad(part, z, retain_graph=True)[0][-1] for part in (values[-1], values[:-1].sum()))
    away = torch.stack([-z[-1, 1], z[-1, 0]]).detach()
    return -float(own @ away), -float(others @ away)


def draw(path: Path) -> None:
    """Draw what moves the lonely sample under CL and under AFCL."""
    z, y = batch()
    mpl.rcParams["svg.hashsalt"] = "lopsided"
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 4.6), sharex=True, sharey=True)
    colours = [MINORITY if label else MAJORITY for label in y.tolist()]
    away, place = torch.stack([-z[-1, 1], z[-1, 0]]), z[-1]
    for axis, name in zip(axes, ("CL", "AFCL"), strict=True):
        axis.add_patch(plt.Circle((0, 0), 1, fill=False, color="0.85"))
        axis.scatter(*z.t().round(decimals=3), s=70, c=colours, edgecolors="black", linewidths=0.5, zorder=3)
        for force, colour, aside in zip(forces(name), (MINORITY, MAJORITY), (0.14, 0.0), strict=True):
            if abs(force) > 1e-6:
                begin = place * (1 + aside)
                end = begin + away * math.copysign(0.12 + 0.1 * math.log10(1 + abs(force)), force) * 1.6
                arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 2.2, "mutation_scale": 16, "shrinkA": 6}
                axis.annotate("", end.tolist(), begin.tolist(), arrowprops=arrow)
        own, others = forces(name)
        told = "none" if abs(own) < 1e-6 else f"{abs(own):.0f}, {'away' if own > 0 else 'towards them'}"
        axis.text(-0.9, 0.25, f"its own term: {told}", color=MINORITY, fontsize=11)
        axis.text(-0.9, 0.02, f"terms of the others: {others:.3g}, away", color=MAJORITY, fontsize=11)
        axis.set_title(name if name == "CL" else f"{name}, eta {ETA:g}, gamma {GAMMA:g}", fontsize=13)
        axis.set_aspect("equal")
        axis.set_xlim(-1.1, 1.25)
        axis.set_ylim(-1.1, 1.35)
        axis.axis("off")
    figure.suptitle("What moves the one orange image of a batch of 11 to 1 in a training step", fontsize=12)
    figure.text(
        0.5, 0.02, "The lengths of the arrows grow with the logarithm of the numbers.", ha="center", color="0.4"
    )
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    """Print the table and draw the picture."""
    _, y = batch()
    found = {name: own_terms(name) for name in ("CL", "AFCL")}
    table = Table(title=f"A batch of 11 to 1: each anchor under CL and under AFCL({ETA:g}, {GAMMA:g})")
    for heading in ("anchor", "class", "CL value", "CL gradient", "AFCL value", "AFCL gradient"):
        table.add_column(heading, justify="right")
    for i, label in enumerate(y.tolist()):
        cells = [f"{x[i]:.3f}" for name in found for x in found[name]]
        table.add_row(str(i), ("majority", "minority")[label], *cells, style="bold" if label else None)
    console = Console(width=100)
    console.print(table)
    console.print("Under CL the lonely anchor has neither value nor gradient of its own; under AFCL it has both.")
    for name in found:
        own, others = forces(name)
        console.print(f"{name} moves it away by {own:.1f} by its own term and by {others:.1f} by those of the others.")

    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    draw(FIGURE)
    console.print(f"Picture: {FIGURE.relative_to(FIGURE.parents[2])}")


if __name__ == "__main__":
    main()
