"""The code of docs/lightning.md runs, and trains as a plain loop does."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "lightning.md"
CODE = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), flags=re.DOTALL))


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    pytest.importorskip("lightning", reason="lightning is not installed")
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning warns of few workers and of its own dependencies.
        torch.manual_seed(0)
        exec(CODE, found)
    return found


def test_the_page_needs_lightning_torch_and_the_losses_alone() -> None:
    imported = re.findall(r"^(?:from|import) ([\w.]+)", CODE, flags=re.MULTILINE)
    assert {name.partition(".")[0] for name in imported} == {"lightning", "torch", "lopsided"}
    assert {name for name in imported if name.startswith("lopsided")} == {"lopsided.losses"}


@pytest.mark.slow
def test_both_stages_train_as_a_plain_loop_does(names: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x, y = torch.rand(48, 1, 8, 8), torch.arange(48) % 5 % 2
    torch.testing.assert_close(names["x"], x, rtol=0, atol=0)
    first = names["Contrastive"]()
    losses = names["AsymmetricFocalContrastiveLoss"](eta=0.5, gamma=2.0, eta_unit="parity")
    optimizer = torch.optim.SGD([*first.encoder.parameters(), *first.projection.parameters()], lr=0.1)
    for _ in range(2):
        for rows in (slice(0, 24), slice(24, 48)):
            optimizer.zero_grad()
            losses(first.projection(first.encoder(x[rows])), y[rows]).backward()
            optimizer.step()
    for key, value in first.state_dict().items():
        torch.testing.assert_close(names["first"].state_dict()[key], value, rtol=0, atol=0)

    second = names["Classifier"](first.encoder, torch.bincount(y))
    weight, bias = (p.detach().clone().requires_grad_() for p in second.head.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = names["L"].Trainer(max_epochs=2, accelerator="cpu", devices=1, **names["quiet"])
        trainer.fit(second, names["loader"])
    assert not second.encoder.training
    prior = torch.bincount(y) / len(y)
    for _ in range(2):
        for rows in (slice(0, 24), slice(24, 48)):
            logits = first.encoder(x[rows]).detach() @ weight.T + bias
            loss = torch.nn.functional.cross_entropy(logits + prior.log(), y[rows])
            with torch.no_grad():
                for p, grad in zip((weight, bias), torch.autograd.grad(loss, (weight, bias)), strict=True):
                    p.sub_(0.1 * grad)
    torch.testing.assert_close(second.head.weight, weight)
    torch.testing.assert_close(second.head.bias, bias)
    pairs = zip(second.encoder.parameters(), names["first"].encoder.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)  # The second stage did not change the encoder.
