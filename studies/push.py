"""Why does ACL help at 98:2? The push of ACL from some anchors only, and CL with remedies that have no push.

    python studies/push.py run [--minutes 7] [--methods "CL,ACL"]      # 12 random splits of the tops at 98:2
    python studies/push.py table                                    # each method, and its difference to CL
    python studies/push.py forces                                   # what moves a rare image in training, and whither

All methods train ResNet-18 from scratch as in ``studies/from_scratch.py``: 700 of 1,000 images train and validate, 16
epochs of the contrastive loss and 4 of the classifier, batches of 128. The held-out images are those of the same seed
there, and CL and ACL are the runs of studies/records/methods.jsonl (compared for seed 0: equal to the last digit).

``push, only lonely`` is ACL for anchors without another image of their class in the batch, and CL for all others;
``only rare`` and ``only frequent`` choose by class. ``push alone`` has no pull at all. ``two views`` shows each image
twice, so that no anchor is lonely. ``anchors weighted`` multiplies the loss of an anchor by the inverse share of its
class (``reweight_from=0 reweight_beta=1``). ``balanced batches`` have 64 images of each class. ``batch 512`` has one
or two steps in an epoch instead of five; ``512, equal steps`` has 40 epochs of them. ``CL, classes averaged`` divides
the sum of each class in the softmax by its number of images (balanced contrastive loss without prototypes).

``uwa`` is the balanced accuracy on held-out images by the rule ``balanced``, and differences are paired by seed.
``forces`` are means over the steps of an epoch: how much the gradient moves a rare image away from the mean of the
frequent ones, by the terms of rare anchors and by those of frequent anchors; the unit is the whole movement of frequent
images. Only methods with the batches of CL are in that table.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

import answers
import shared
from lopsided.data.prepare import Sources
from lopsided.evaluation.intervals import mean_interval
from lopsided.losses import AsymmetricContrastiveLoss, ContrastiveLoss, catalogue
from lopsided.losses.catalogue import Loss, Parameter
from lopsided.losses.contrastive import ContrastiveObjective
from lopsided.losses.objective import Samples
from lopsided.recipe import Recipe
from lopsided.training.fit import fit

RECORD = shared.RECORDS / "push.jsonl"
ANSWERS = answers.FOLDER / "push.csv.gz"
BASE = "CL"
SCENARIO = "98:2"
TRAINING = "encoder_training"
BALANCED = {f"{TRAINING}.sampler": "m-per-class", f"{TRAINING}.m_per_class": 64}
LARGE = {f"{TRAINING}.batch_size": 512}
STEPS = {f"{TRAINING}.epochs": 40}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "CL": ("none", {}),
    "ACL": ("all", {}),
    "push, only frequent": ("frequent", {}),
    "push, only rare": ("rare", {}),
    "push, only lonely": ("lonely", {}),
    "CL, two views": ("none", {f"{TRAINING}.views": 2}),
    "ACL, two views": ("all", {f"{TRAINING}.views": 2}),
    "CL, anchors weighted": ("none", {f"{TRAINING}.reweight_from": 0.0, f"{TRAINING}.reweight_beta": 1.0}),
    "CL, balanced batches": ("none", BALANCED),
    "ACL, balanced batches": ("all", BALANCED),
    "CL, classes averaged": ("averaged", {}),
    "push alone": ("alone", {}),
    "CL, batch 512": ("none", LARGE),
    "ACL, batch 512": ("all", LARGE),
    "CL, 512, equal steps": ("none", LARGE | STEPS),
    "ACL, 512, equal steps": ("all", LARGE | STEPS),
}
"""Who pushes, and changes of the recipe."""
VIEWED = ("ACL, two views", "CL, two views")
"""Their difference is a row of its own: without lonely anchors."""
ENOUGH = 6
"""Methods with fewer splits are not in the tables."""
WHO = ("none", "all", "frequent", "rare", "lonely", "alone", "averaged")
FORCES: list[dict[int, list[list[float]]]] = []
"""Of the run that trains: by epoch, the force of rare and of frequent anchors in each step."""


class PushObjective(ContrastiveObjective):
    """CL with the push of ACL from some anchors. ``all`` and ``none`` are ACL and CL, bit by bit."""

    def __init__(self, counts: Tensor, width: int, *, who: str) -> None:
        eta = {"eta": 0.5, "eta_unit": "parity"} if who == "all" else {}
        super().__init__(counts, width, **eta)  # type: ignore[arg-type]
        self.who, self.is_rare = who, counts < counts.max()
        self.pull = ContrastiveLoss(reduction="none")
        self.both = AsymmetricContrastiveLoss(0.5, eta_unit="parity", reduction="none")

    def forward(self, samples: Samples) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the parts of the loss, and note the forces."""
        z, y = samples.projections, samples.y
        assert z is not None
        if z.ndim == 2:
            self._note_forces(z, y, samples.epoch)
        if self.who in ("none", "all"):
            return super().forward(samples)
        return self._values(z, y) / len(samples.whole)

    def apart(self, samples: Samples) -> Tensor:
        """Return the parts with their graph."""
        return super().apart(samples)

    def _values(self, z: Tensor, y: Tensor) -> Tensor:
        if self.who in ("none", "all"):
            return self.both(z, y) if self.who == "all" else self.pull(z, y)
        if self.who == "averaged":
            return averaged(z, y)
        pull, both = self.pull(z, y), self.both(z, y)
        if self.who == "alone":
            return both - pull
        lonely = torch.bincount(y, minlength=len(self.is_rare))[y] == 1
        pushes = {"lonely": lonely, "rare": self.is_rare[y], "frequent": ~self.is_rare[y]}[self.who]
        return torch.where(pushes, both, pull)

    def _note_forces(self, z: Tensor, y: Tensor, epoch: int) -> None:
        rare = self.is_rare[y]
        if not FORCES or not torch.is_grad_enabled() or not 1 < int(rare.sum()) < len(y) - 1:
            return
        unit = torch.nn.functional.normalize(z.detach()).requires_grad_()
        values = self._values(unit, y)
        away = unit.detach()[rare].mean(0) - unit.detach()[~rare].mean(0)
        away = away / away.norm().clamp(min=1e-12)
        moves = [-torch.autograd.grad(values[rows].sum(), unit, retain_graph=True)[0] for rows in (rare, ~rare)]
        # On the sphere: a feature cannot move along itself.
        moves = [move - (move * unit.detach()).sum(1, keepdim=True) * unit.detach() for move in moves]
        scale = float((moves[0] + moves[1])[~rare].norm(dim=1).mean()) + 1e-12
        FORCES[-1].setdefault(epoch, []).append([float((move[rare] @ away).mean()) / scale for move in moves])


def averaged(z: Tensor, y: Tensor, temperature: float = 0.07) -> Tensor:
    """Return CL with each class's part of the softmax divided by its number of images, for each anchor."""
    z = torch.nn.functional.normalize(z)
    alike = (z @ z.T / temperature).masked_fill(torch.eye(len(y), dtype=torch.bool), -torch.inf)
    same = (y[:, None] == y) & ~torch.eye(len(y), dtype=torch.bool)
    number = torch.stack([torch.where(y == label, same.sum(1), (y == label).sum()) for label in y.unique()], 1)
    columns = torch.searchsorted(y.unique(), y)
    weights = number.clamp(min=1).log()[:, columns]
    total = torch.logsumexp(alike - weights, dim=1)
    pulls = torch.where(same, alike.masked_fill(~same, 0.0), 0.0).sum(1) / same.sum(1).clamp(min=1)
    return torch.where(same.any(1), total - pulls, 0.0)


def register() -> None:
    """Add the loss of this study to the catalogue of this process."""
    who = Parameter("who", "all", "Which anchors push.", choices=WHO)
    catalogue.BUILT_IN["push"] = Loss("push", "contrastive", "Push", PushObjective, (who,), class_weights=True)


def recipe_of(method: str, seed: int) -> Recipe:
    """Return the recipe of a method: the base of studies/from_scratch.py with the loss of this study."""
    who, changes = METHODS[method]
    base = Recipe.load(shared.RECORDS.parent / "recipes" / "base.toml")
    fields = {"threads": 1, "compare_quick": False, f"{TRAINING}.loss": "push", f"{TRAINING}.loss.who": who}
    return base.override(**shared.tops_fields(SCENARIO, seed), **fields, **changes)


def run(method: str, seed: int) -> dict[str, Any]:
    """Train a method, write its answers and return its line of the record."""
    FORCES[:] = [{}]
    recipe = recipe_of(method, seed)
    source, held_out = Sources().open(recipe)
    assert held_out is not None
    begin = time.process_time()
    fitted = fit(recipe, source, held_out=held_out)
    found = fitted.held_out
    assert found is not None
    assert found.y_true is not None
    odds = np.log(np.clip(found.probabilities, 1e-30, 1))
    score = odds[:, 1] - odds[:, 0]
    answers.add(
        ANSWERS,
        answers.Answers("tops", SCENARIO, seed, 0, method, found.names, found.y_true, found.y_pred, score),
    )
    figures = {
        "uwa": 100 * float(np.mean([(found.y_pred == c)[found.y_true == c].mean() for c in (0, 1)])),
        "auroc": 100 * shared.rank_auroc(score, found.y_true == 1),
    }
    forces = {str(epoch): np.mean(steps, axis=0).round(4).tolist() for epoch, steps in sorted(FORCES[0].items())}
    seconds = round(time.process_time() - begin, 1)
    return {**{name: round(value, 3) for name, value in figures.items()}, "forces": forces, "seconds": seconds}


def beside(methods: Any, per_image: dict[str, dict[int, answers.Answers]], method: str, base: str) -> list[str]:
    """Return the difference to another method by seed and by a bootstrap of the images, and that of the AUROC."""
    if method == base:
        return [""] * 3
    both = sorted(per_image[method].keys() & per_image[base].keys())
    found = answers.bootstrap(*([per_image[name][seed] for seed in both] for name in (method, base)))
    same = f"[{found.low:+.1f}, {found.high:+.1f}]"
    gains = [shared.minus(methods[method], methods[base], name) for name in ("uwa", "auroc")]
    return [gains[0], same, gains[1]]


def table(lines: list[dict[str, Any]]) -> str:
    """Return a row for each method, with its difference to CL by seed and by a bootstrap of the images."""
    methods = shared.nested(lines, "method", "seed")
    per_image: dict[str, dict[int, answers.Answers]] = {}
    for one in answers.read(ANSWERS):
        per_image.setdefault(one.method, {})[one.repeat] = one
    rows = []
    for method in (name for name in METHODS if len(methods.get(name, ())) >= ENOUGH):
        runs = methods[method]
        own = shared.shown(mean_interval([run["uwa"] for run in runs.values()])) if len(runs) > 1 else ""
        gains = beside(methods, per_image, method, BASE)
        rows.append((method, len(runs), own, *gains[:2], shared.mean_of(runs, "auroc"), gains[2]))
    if all(len(methods.get(name, ())) >= ENOUGH for name in VIEWED):
        both = methods[VIEWED[0]].keys() & methods[VIEWED[1]].keys()
        gains = beside(methods, per_image, *VIEWED)
        rows.append((" less ".join(VIEWED), len(both), "", *gains[:2], "", gains[2]))
    head = "method | runs | balanced accuracy | minus CL | minus CL, other images | AUROC | minus CL"
    return shared.table(head, rows)


def forces_table(lines: list[dict[str, Any]]) -> str:
    """Return the forces on rare images in the first epochs and later."""
    methods = shared.nested(lines, "method", "seed")
    rows = []
    for method in (name for name in METHODS if len(methods.get(name, ())) >= ENOUGH and not METHODS[name][1]):
        cells = []
        for first, last in ((0, 2), (4, 16)):
            pairs = [
                pair
                for run in methods[method].values()
                for epoch, pair in run["forces"].items()
                if first <= int(epoch) < last
            ]
            cells += [f"{value:+.2f}" for value in np.mean(pairs, axis=0)] if pairs else ["", ""]
        rows.append((method, *cells))
    names = [f"by {who} anchors, epochs {when}" for when in ("1-2", "5-16") for who in ("rare", "frequent")]
    return shared.table(f"method | {' | '.join(names)}", rows)


def main() -> None:
    """Compute the missing lines, all methods of a seed before the next seed, or print a table."""
    parser = shared.parser(__doc__)
    parser.add_argument("what", choices=["run", "table", "forces"])
    parser.add_argument("--methods", help="separated by semicolons; default: all")
    parser.add_argument("--seeds", default="0-11")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run later than this")
    given = parser.parse_args()
    if given.what != "run":
        print((table if given.what == "table" else forces_table)(shared.read(RECORD)))
        return
    register()
    begin = time.monotonic()
    methods = given.methods.split(";") if given.methods else list(METHODS)
    known = {(line["method"], line["seed"]) for line in shared.read(RECORD)}
    for method, seed in ((method, seed) for seed in shared.seeds_of(given.seeds) for method in methods):
        if (method, seed) not in known and time.monotonic() - begin < 60 * given.minutes:
            shared.add(RECORD, {"method": method, "seed": seed, **run(method, seed)})


if __name__ == "__main__":
    main()
