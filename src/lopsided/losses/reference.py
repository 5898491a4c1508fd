"""The specification: the contrastive losses as loops in float64, one line per equation.

Tests compare the other contrastive code of this package with this file. The code is slow, but it is differentiable, so
gradients can be compared as well. Equation numbers refer to Vito & Stefanus, 2022.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reference_loss(
    z: Tensor,
    y: Tensor | None = None,
    *,
    eta: float = 0.0,
    gamma: float = 0.0,
    temperature: float | Tensor = 0.07,
    reference: tuple[Tensor, Tensor | None] | None = None,
    positive: Tensor | None = None,
    contrast: Tensor | str = "all",
    ignore_index: int | None = None,
    normalization: str = "paper",
    reduction: str = "mean",
) -> Tensor:
    """Return the asymmetric focal contrastive loss, Eq. (26), of ``z`` (n, d). Arguments as in the public function."""
    features, y_all = (z, y) if reference is None else (torch.cat([z, reference[0]]), _join(y, reference[1]))
    features, n, m = features.double(), len(z), len(features)
    unknown = [ignore_index is not None and y_all is not None and bool(y_all[k] == ignore_index) for k in range(m)]

    def is_contrast(i: int, k: int) -> bool:
        if k == i or unknown[k]:
            return False
        return bool(contrast[i, k]) if isinstance(contrast, Tensor) else contrast == "all" or k >= n

    losses = []
    for i in range(n):
        s = [features[i] @ features[k] / temperature for k in range(m)]
        A = [k for k in range(m) if is_contrast(i, k)]
        P = [k for k in A if (positive[i, k] if positive is not None else y_all[i] == y_all[k])]  # type: ignore[index]
        N = [k for k in A if k not in P]

        def odds_against(j: int, s: list[Tensor] = s, A: list[int] = A) -> Tensor:  # (1 - p) / p: exact near p = 1
            return sum([torch.exp(s[k] - s[j]) for k in A if k != j], torch.zeros_like(s[j]))

        def log_p(j: int) -> Tensor:  # Eq. (16)
            return -torch.log1p(odds_against(j))

        def log_not_p(j: int) -> Tensor:  # log(1 - p)
            return -torch.log1p(1 / odds_against(j))

        if len(A) < 2 or unknown[i]:  # With one sample, p = 1 for any features, so this anchor gives no gradient.
            P, N = [], []
        zero = features[i].sum() * 0.0 + s[i] * 0.0
        pull = sum([torch.exp(gamma * log_not_p(j)) * log_p(j) for j in P], zero)  # Eq. (25), before its 1 / |P_i|
        push = sum([log_not_p(j) for j in N], zero)  # Eq. (23), before its 1 / |N_i|
        of_P, of_N = (len(P), len(N)) if normalization == "paper" else (len(A) + 1, len(A) + 1)
        losses.append(-(pull / max(of_P, 1) + eta * push / max(of_N, 1)))  # Eq. (26)
    total = torch.stack(losses)
    return {"none": total, "sum": total.sum(), "mean": total.sum() / max(n - sum(unknown[:n]), 1)}[reduction]


def _join(y: Tensor | None, y_ref: Tensor | None) -> Tensor | None:
    return None if y is None or y_ref is None else torch.cat([y, y_ref])
