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
    eta: float,
    gamma: float,
    temperature: float,
    parity: bool,
    released: bool,
) -> Tensor:
    """Loss per anchor, (n,); in the boolean (n, m) mask ``positive``, entries at the anchors themselves are ignored."""
    columns = z if reference is None else torch.cat([z, reference])
    n, m = len(z), len(columns)
    eta = eta * parity_eta(m) if parity else eta
    itself = torch.eye(n, m, dtype=torch.bool, device=z.device)
    s = (z / temperature) @ columns.t()
    k = s.detach().masked_fill(itself, -torch.inf).argmax(1, keepdim=True)
    is_k = torch.zeros_like(itself).scatter_(1, k, True)
    outside = itself | is_k
    s_k = s.gather(1, k)
    lse = torch.logsumexp(s.masked_fill(outside, -torch.inf), 1, keepdim=True)  # of all but the anchor and k
    log_p_k, log_a = logsigmoid(s_k - lse), logsigmoid(lse - s_k)
    log_p = (s - lse + log_a).masked_fill(
        outside, -1.0
    )  # any negative number: masked below, and safe for every formula
    log_not_p = torch.log1p(-torch.exp(log_p))
    log_p, log_not_p = torch.where(is_k, log_p_k, log_p), torch.where(is_k, log_a, log_not_p)

    positive, negative = positive & ~itself, ~positive & ~itself
    pull = (torch.exp(gamma * log_not_p) * log_p).masked_fill(~positive, 0.0).sum(1)
    push = log_not_p.masked_fill(~negative, 0.0).sum(1)
    if released:
        return (0.0 - (pull + eta * push)) / m
    return 0.0 - (pull / positive.sum(1).clamp(min=1) + eta * push / negative.sum(1).clamp(min=1))
