"""The dense path: the same numbers as the tiled kernel from plain torch operations on an n x m matrix.

Autograd differentiates it as often as one likes, so that this is the path for second derivatives; it costs the memory
that the tiled kernel saves. As there, the largest entry of each row is taken out, since it alone can have p > 1/2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lopsided.losses._kernel.formulas import parity_eta


def dense_values(
    z: Tensor,
    reference: Tensor | None,
    positive: Tensor,
    contrast: Tensor | None,
    anchors: Tensor | None,
    eta: float,
    gamma: float,
    temperature: float | Tensor,
    parity: bool,
    released: bool,
) -> Tensor:
    """Loss per anchor, (n,); in the boolean (n, m) mask ``positive``, entries at the anchors themselves are ignored.

    ``contrast``, (n, m) or (1, m), is False for samples that are left out. ``anchors``, (n,), is False for rows whose
    loss is 0.
    """
    columns = z if reference is None else torch.cat([z, reference])
    n, m = len(z), len(columns)
    itself = torch.eye(n, m, dtype=torch.bool, device=z.device)
    left_out, counts = itself, None
    if contrast is not None:
        left_out = itself | ~contrast
        num_contrast = (~left_out).sum(1)
        counts = num_contrast >= 2 if anchors is None else (num_contrast >= 2) & anchors
        # A row that does not count keeps all columns, so that its numbers stay finite.
        left_out = (left_out & counts[:, None]) | itself
    s = (z / temperature) @ columns.t()
    k = s.detach().masked_fill(left_out, -torch.inf).argmax(1, keepdim=True)
    is_k = torch.arange(m, device=z.device) == k  # A scatter would write in place, which vmap does not allow.
    outside = left_out | is_k
    s_k = s.gather(1, k)
    lse = torch.logsumexp(s.masked_fill(outside, -torch.inf), 1, keepdim=True)  # of all contrast samples but k
    log_p_k, log_a = logsigmoid(s_k - lse), logsigmoid(lse - s_k)
    log_p = (s - lse + log_a).masked_fill(
        outside, -1.0
    )  # any negative number: masked below, and safe for every formula
    log_not_p = torch.log1p(-torch.exp(log_p))
    log_p, log_not_p = torch.where(is_k, log_p_k, log_p), torch.where(is_k, log_a, log_not_p)

    positive, negative = positive & ~left_out, ~positive & ~left_out
    pull = (torch.exp(gamma * log_not_p) * log_p).masked_fill(~positive, 0.0).sum(1)
    push = log_not_p.masked_fill(~negative, 0.0).sum(1)
    size = (~left_out).sum(1)  # of the contrast samples without the anchor
    weight: float | Tensor = eta
    if parity:
        weight = eta * parity_eta(m) if counts is None else eta * torch.special.xlogy(size.to(z.dtype), size)
    if released:
        values = 0.0 - (pull + weight * push) / (size + 1)
    else:
        values = 0.0 - (pull / positive.sum(1).clamp(min=1) + weight * push / negative.sum(1).clamp(min=1))
    return values if counts is None else torch.where(counts, values, 0.0)
