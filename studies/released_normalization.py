"""How far is the released loss from the printed one? Who pulls and who pushes, per class, in a batch of 128.

Run as ``python studies/released_normalization.py``. Prints a table and writes
``studies/records/released_normalization.json``. Features are random on the sphere, so that only the weights differ.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import normalize

import shared
from lopsided.losses import asymmetric_focal_contrastive_loss

RECORD = shared.RECORDS / "released_normalization.json"
BATCH, WIDTH, BATCHES = 128, 128, 20
LOSSES = {"CL": (0.0, 0.0), "ACL(300)": (300.0, 0.0), "AFCL(300, 7)": (300.0, 7.0)}


def measure(minority: int, eta: float, gamma: float) -> dict[str, float]:
    """The minority's share of the loss under both normalizations, and the angle between their gradients."""
    y = (torch.arange(BATCH) < minority).long()
    shares: dict[str, list[float]] = {"paper": [], "released": []}
    cosines = []
    for seed in range(BATCHES):
        z = normalize(torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed)), dim=1).requires_grad_()
        grads = []
        for name, found in shares.items():
            values = asymmetric_focal_contrastive_loss(
                z,
                y,
                eta=eta,
                gamma=gamma,
                normalization=name,  # type: ignore[arg-type]
                reduction="none",
            )
            found.append((values[y == 1].sum() / values.sum()).item())
            grads.append(torch.autograd.grad(values.sum(), z)[0].flatten())
        cosines.append(torch.cosine_similarity(*grads, dim=0).item())
    mean = {name: sum(values) / BATCHES for name, values in shares.items()}
    return mean | {"cosine of the gradients": sum(cosines) / BATCHES}


def main() -> None:
    """Print the table and write the record."""
    rows = []
    table = Table(title=f"The minority's share of the loss, batch {BATCH}, {BATCHES} random batches")
    for heading in ("minority in batch", "loss", "paper", "released", "cosine of the gradients"):
        table.add_column(heading, justify="right")
    for minority in (64, 26, 13, 6, 3):
        for name, (eta, gamma) in LOSSES.items():
            found = measure(minority, eta, gamma)
            rows.append({"minority": minority, "batch": BATCH, "loss": name, **found})
            cells = (f"{found['paper']:.3f}", f"{found['released']:.3f}", f"{found['cosine of the gradients']:.3f}")
            table.add_row(f"{minority} of {BATCH}", name, *cells)
    Console(width=100).print(table)
    shared.write_json(RECORD, rows)


if __name__ == "__main__":
    main()
