"""Losses that other packages could add: the example of docs/add-a-loss.md, and a joint one."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lopsided.losses import Objective, Samples, catalogue
from lopsided.losses.catalogue import Loss, Parameter
from lopsided.losses.contrastive import ContrastiveObjective
from lopsided.recipe import losses as recipe_losses

PAGE = Path(__file__).parents[1] / "docs" / "add-a-loss.md"


def blocks(language: str) -> list[str]:
    """The blocks of code of the page, in its order."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def write_package(folder: Path, name: str = "prototypes", code: str | None = None, value: str = "") -> Path:
    """Lay a package with a loss out as an installed one: the module, and its metadata with the entry point."""
    info = folder / f"lopsided_{name}-0.1.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text(blocks("python")[0] if code is None else code, encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lopsided-{name}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[lopsided.losses]\n{name} = {value or f'{name}:LOSS'}\n")
    return folder


def _example() -> Loss:
    module = ModuleType("prototypes_of_the_page")
    sys.modules[module.__name__] = module
    exec(compile(blocks("python")[0], str(PAGE), "exec"), module.__dict__)
    found: Loss = module.__dict__["LOSS"]
    return found


class JointObjective(Objective):
    """Cross-entropy of the logits and CL of the projections, weighed by a learnt number; it rises with the epochs."""

    def __init__(self, counts: Tensor, width: int, *, share: float = 0.5) -> None:
        super().__init__(counts, width)
        self.contrast = ContrastiveObjective(counts, width, temperature=0.5)
        self.share, self.balance = share, nn.Parameter(torch.zeros(()))

    def forward(self, samples: Samples) -> tuple[Tensor, Tensor]:
        y, logits = samples.y, samples.logits
        assert logits is not None
        total, parts = self.contrast(samples)
        by_view = logits.reshape(len(y), -1, logits.shape[-1]).transpose(1, 2)
        values = cross_entropy(by_view, y[:, None].expand(-1, by_view.shape[2]), reduction="none").mean(dim=1)
        values = values / len(samples.whole) * self.balance.exp() * (1 + samples.epoch / samples.epochs)
        return self.share * total + values.sum(), self.share * parts + values.detach()


PROTOTYPES = _example()
JOINT = Loss("joint", "joint", "Joint loss", JointObjective, (Parameter("share", 0.5, "Weight of CL.", least=0),))
EXAMPLES = {"prototypes": PROTOTYPES, "joint": JOINT}


def add_package(monkeypatch: pytest.MonkeyPatch, *losses: Loss, package: str = "lopsided-broken") -> None:
    """Put losses into the catalogue as if the entry points of an installed package named them, until the test ends."""
    added: dict[str, list[Any]] = {}
    for loss in losses:
        point = SimpleNamespace(name=loss.name, value="broken:LOSS", module="broken", load=lambda loss=loss: loss)
        point.dist = SimpleNamespace(name=package)
        added.setdefault(loss.name, []).append(point)
    monkeypatch.setattr(catalogue, "_added", lambda: added)
    find, model = catalogue.find.__wrapped__, recipe_losses.settings_model.__wrapped__  # Without what they remember.
    monkeypatch.setattr(catalogue, "find", find)
    monkeypatch.setattr(recipe_losses, "settings_model", model)


def add_examples(monkeypatch: pytest.MonkeyPatch | None = None) -> Mapping[str, Any]:
    """Put the examples into the catalogue; for good where there is nothing to take them out, as in a child process."""
    for name, loss in EXAMPLES.items():
        if monkeypatch is None:
            catalogue.BUILT_IN[name] = loss
        else:
            monkeypatch.setitem(catalogue.BUILT_IN, name, loss)
    return EXAMPLES
