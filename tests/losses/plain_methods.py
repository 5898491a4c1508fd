"""The formulas of the papers, written as plainly as possible: loops over samples and pairs in float64.

They share no code with the package. Features are (n, views, d) or (n, d) of length 1; all return one value per anchor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _cross_entropy(row: list[float], y: int) -> float:
    top = max(row)
    return top + math.log(sum(math.exp(value - top) for value in row)) - row[y]


def logit_adjusted(logits: Tensor, y: Tensor, counts: list[int], tau: float) -> list[float]:
    shares = [count / sum(counts) for count in counts]
    return [
        _cross_entropy([f + tau * math.log(p) for f, p in zip(row, shares, strict=True)], int(t))
        for row, t in zip(logits.tolist(), y, strict=True)
    ]


def balanced_softmax(logits: Tensor, y: Tensor, counts: list[int]) -> list[float]:
    found = []
    for row, t in zip(logits.tolist(), y.tolist(), strict=True):
        terms = [n * math.exp(f) for f, n in zip(row, counts, strict=True)]
        found.append(-math.log(terms[t] / sum(terms)))
    return found


def effective_weights(counts: list[int], beta: float) -> list[float]:
    raw = [(1 - beta) / (1 - beta**n) for n in counts]
    return [len(counts) * weight / sum(raw) for weight in raw]


def class_balanced(logits: Tensor, y: Tensor, counts: list[int], beta: float) -> list[float]:
    weights = effective_weights(counts, beta)
    return [weights[t] * _cross_entropy(row, t) for row, t in zip(logits.tolist(), y.tolist(), strict=True)]


def smoothing(counts: list[int], head: float, tail: float) -> list[float]:
    low, high = min(counts), max(counts)
    return [tail + (head - tail) * math.sin(math.pi * (n - low) / (2 * (high - low))) for n in counts]


def label_aware(logits: Tensor, y: Tensor, counts: list[int], head: float, tail: float) -> list[float]:
    e, K = smoothing(counts, head, tail), len(counts)
    found = []
    for row, t in zip(logits.tolist(), y.tolist(), strict=True):
        label = [1 - e[t] if c == t else e[t] / (K - 1) for c in range(K)]
        found.append(sum(q * _cross_entropy(row, c) for c, q in enumerate(label)))
    return found


def ldam(cosines: Tensor, y: Tensor, counts: list[int], max_margin: float, scale: float) -> list[float]:
    margins = [n**-0.25 for n in counts]
    margins = [m * max_margin / max(margins) for m in margins]
    found = []
    for row, t in zip(cosines.tolist(), y.tolist(), strict=True):
        moved = [scale * (x - margins[t]) if c == t else scale * x for c, x in enumerate(row)]
        found.append(_cross_entropy(moved, t))
    return found


def _flat(z: Tensor, y: Tensor) -> tuple[Tensor, list[int], list[int]]:
    """Features (n * views, d), and the label and the sample of each."""
    views = z.shape[1] if z.ndim == 3 else 1
    samples = [i for i in range(len(z)) for _ in range(views)]
    return z.double().reshape(-1, z.shape[-1]), [int(y[i]) for i in samples], samples


def balanced_contrastive(z: Tensor, y: Tensor, prototypes: Tensor, temperature: float) -> Tensor:
    flat, labels, _ = _flat(z, y)
    columns = torch.cat([flat, prototypes.double()])
    classes = [*labels, *range(len(prototypes))]
    values = []
    for i in range(len(flat)):
        s = [flat[i] @ column / temperature for column in columns]
        members = [[k for k, c in enumerate(classes) if c == j and k != i] for j in range(len(prototypes))]
        denominator = sum(sum(torch.exp(s[k]) for k in group) / len(group) for group in members)
        positives = members[labels[i]]
        values.append(-sum(s[j] - torch.log(denominator) for j in positives) / len(positives))
    return torch.stack(values).reshape(z.shape[:-1])


def supervised_minority(z: Tensor, y: Tensor, minority: int, temperature: float) -> Tensor:
    flat, labels, samples = _flat(z, y)
    values = []
    for i in range(len(flat)):
        s = [flat[i] @ other / temperature for other in flat]
        denominator = sum(torch.exp(s[k]) for k in range(len(flat)) if k != i)
        if labels[i] == minority:
            positives = [k for k in range(len(flat)) if k != i and labels[k] == minority]
        else:
            positives = [k for k in range(len(flat)) if k != i and samples[k] == samples[i]]
        values.append(-sum(s[j] - torch.log(denominator) for j in positives) / len(positives))
    return torch.stack(values).reshape(z.shape[:-1])


def supervised_prototypes(z: Tensor, y: Tensor, prototypes: Tensor, margin: float, temperature: float) -> Tensor:
    flat, labels, samples = _flat(z, y)
    c = prototypes.double()
    values = []
    for i in range(len(flat)):
        s = [flat[i] @ other / temperature for other in flat]
        log_sum = torch.log(sum(torch.exp(s[k]) for k in range(len(flat)) if k != i))
        terms = [s[k] - log_sum for k in range(len(flat)) if k != i and samples[k] == samples[i]]
        own, other = flat[i] @ c[labels[i]], flat[i] @ c[1 - labels[i]]
        if own <= other + margin:
            terms.append(own / temperature - log_sum)
        values.append(-sum(terms) / len(terms))
    return torch.stack(values).reshape(z.shape[:-1])
