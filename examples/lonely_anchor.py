"""The losses at work on a batch of 11 to 1: what the lonely sample gets from CL and from AFCL.

Run as ``python examples/lonely_anchor.py``. Prints a table and writes ``docs/figures/lonely_anchor.svg``.
"""

from __future__ import annotations

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


def own_terms(loss: str) -> tuple[Tensor, Tensor]:
    """Each anchor's own value, and the length of the gradient that this value sends to the anchor."""
    z, y = batch()
    z.requires_grad_()
    unit = normalize(z)
    if loss == "CL":
        values = contrastive_loss(unit, y, reduction="none")
    else:
        values = asymmetric_focal_contrastive_loss(unit, y, eta=ETA, gamma=GAMMA, reduction="none")
    grads = [torch.autograd.grad(value, z, retain_graph=True)[0][i].norm() for i, value in enumerate(values)]
    return values.detach(), torch.stack(grads)


def main() -> None:
    """Print the table and draw the picture."""
    z, y = batch()
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

    mpl.rcParams["svg.hashsalt"] = "lopsided"
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), sharex=True, sharey=True)
    colours = [MINORITY if label else MAJORITY for label in y.tolist()]
    for axis, (name, (_, grads)) in zip(axes, found.items(), strict=True):
        axis.add_patch(plt.Circle((0, 0), 1, fill=False, color="0.8"))
        axis.scatter(
            *z.t().round(decimals=3),
            s=(25 + 60 * grads.sqrt()).round(),
            c=colours,
            edgecolors="black",
            linewidths=0.5,
            zorder=2,
        )
        axis.set_title(f"{name}: the minority anchor's own gradient is {grads[-1]:.2f}", fontsize=10)
        axis.set_aspect("equal")
        axis.set_xlim(-0.1, 1.35)
        axis.set_ylim(-1.2, 1.2)
        axis.axis("off")
    figure.suptitle(
        "Area grows with the root of an anchor's own gradient length. Orange: the one minority sample", fontsize=10
    )
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, metadata={"Date": None}, bbox_inches="tight")
    console.print(f"Picture: {FIGURE.relative_to(FIGURE.parents[2])}")


if __name__ == "__main__":
    main()
