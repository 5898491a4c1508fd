"""Records of runs that never were, with figures whose answer is known by construction."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from lopsided.paper.protocol import CLASSES, Setting, base_recipe, published
from lopsided.runs.keys import LossTable, family_of
from lopsided.runs.records import Record, Scores
from lopsided.seeds import derive_seed

PAPER = {fashion: base_recipe("eta" if fashion else "isic") for fashion in (True, False)}
FAMILIES = {fashion: (family_of(recipe), recipe.spec.epochs(recipe)) for fashion, recipe in PAPER.items()}
Effect = Callable[[str | None, Setting], float]
"""Points of UWA that a loss has in a scenario, above what every loss has there."""


def figures(recalls: tuple[float, float], share: float, images: int = 300) -> Scores:
    """The figures of a test set of this majority share on which a model has these recalls."""
    return Scores(
        images=images,
        minority=round(images * (1 - share)),
        accuracy=share * recalls[0] + (1 - share) * recalls[1],
        uwa=sum(recalls) / 2,
        recalls=recalls,
        auroc=None,
        majority_vote=share,
        rules=(("plain", sum(recalls) / 2),),
        log_loss=None,
    )


def loss_table(setting: Setting, normalization: str = "paper") -> LossTable:
    """The loss of a setting, as a record has it."""
    return LossTable.read({**setting.table, "temperature": 0.07, "normalization": normalization})


def record(
    scenario: str | None, setting: Setting, seed: int, test: Scores, held_out: Scores | None = None, **more: object
) -> Record:
    """A record of the paper's protocol, but for what ``more`` says, the ``normalization`` of its loss included."""
    fashion = scenario is not None
    loss = loss_table(setting, str(more.get("normalization", "paper")))
    fields: dict[str, object] = {
        "cell": f"{derive_seed(seed, str(scenario), str(setting), repr(sorted(more.items()))):016x}",
        "source": "fashion-mnist-tops" if fashion else "isic2018",
        "scenario": scenario,
        "method": "two-stage",
        "loss": loss,
        "classifier_loss": LossTable("ce"),
        "encoder": "resnet18" if fashion else "resnet50",
        "image_size": 28 if fashion else 128,
        "split": "random",
        "weights": "none",
        "seed": seed,
        "test": test,
        "held_out": held_out,
        "seconds": 20.0,
        "threads": 1,
        "lopsided": "0",
        "torch": "2",
        "data": f"{derive_seed(seed, str(scenario)):016x}",
        "family": FAMILIES[fashion][0],
        "epochs": FAMILIES[fashion][1],
        "classes": CLASSES["eta" if fashion else "isic"],
    }
    fields |= {name: value for name, value in more.items() if name != "normalization"}
    return Record(**fields)  # type: ignore[arg-type]


def make_records(
    table: str,
    effect: Effect = lambda scenario, setting: 0.0,
    *,
    runs: int = 4,
    noise: float = 1.0,
    seed: int = 0,
    scenarios: Iterable[str | None] | None = None,
    settings: Iterable[Setting] | None = None,
    **more: object,
) -> list[Record]:
    """All runs of a table: a level per scenario and seed, the loss's effect, and normal noise, in points of UWA."""
    whole = published(table)
    found = []
    for scenario in whole.scenarios if scenarios is None else scenarios:
        share = 0.9 if scenario is None else float(scenario.partition(":")[0]) / 100
        for setting in whole.settings if settings is None else settings:
            for run in range(runs):
                rng = np.random.default_rng([seed, derive_seed(run, str(scenario), str(setting)) % 2**32])
                level = 70 + np.random.default_rng([seed, run, round(100 * share)]).normal(0, 2)
                uwas = np.clip((level + effect(scenario, setting) + rng.normal(0, noise, 2)) / 100, 0, 1)
                test, held_out = (
                    figures((min(u + 0.1, 1.0), max(u - 0.1, 2 * u - 1)), s)
                    for u, s in zip(uwas, (share, 0.5), strict=True)
                )
                found.append(record(scenario, setting, run, test, None if scenario is None else held_out, **more))
    return found
