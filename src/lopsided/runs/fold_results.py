"""The results of a run with folds, computed from its finished folds alone.

- ``predictions.csv`` and ``metrics.json`` hold the out-of-fold predictions of all images as the split ``test``.
- Calibration and rule of each fold are fitted to the scores of the other folds (``evaluation.folds``). Those of the
  model are fitted to the scores of all folds.
- ``model.safetensors`` is the model of all images, or the ensemble of the models of the folds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lopsided import files
from lopsided.data.prepare import split_rule, split_source, training_source
from lopsided.data.sources import Source
from lopsided.data.splits import Leaks, Splits
from lopsided.errors import RunError
from lopsided.evaluation.calibration import Calibration, HeldBack, at_prevalence, bias_between, prior_of
from lopsided.evaluation.decision import PROBABILITY, Decision, resolve
from lopsided.evaluation.doubt import measured_words
from lopsided.evaluation.folds import (
    figures_by_rule,
    mean_evaluation,
    settle_crossed,
    settle_scores,
    unmeasured_classes,
)
from lopsided.evaluation.metrics import evaluate
from lopsided.evaluation.typicality import Bank
from lopsided.facts import Fact, cautions, merge_folds, notes
from lopsided.facts.log import Log
from lopsided.recipe.rules import parse_rule
from lopsided.recipe.views import AUTO
from lopsided.runs import results
from lopsided.runs.folder import PREDICTIONS, Run, read_metrics
from lopsided.runs.results import write_label_check

if TYPE_CHECKING:
    from lopsided.models.model import Model, ModelCard
    from lopsided.runs.folds import FoldPlan
    from lopsided.runs.plan import Cell

Codes = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
RANKS_NOTE = "AUROC and average precision are means over the folds: scores of different models do not rank together."


@dataclass(frozen=True, eq=False)
class _Scored:
    """The scores of all images in one repeat, moved to one prior."""

    held: HeldBack
    folds: Codes
    features: npt.NDArray[np.float32] | None


class FoldResults:
    """Computes the results of a run from its finished folds."""

    def __init__(
        self,
        plan: FoldPlan,
        source: Source,
        held_out: Source | None,
        numbers: list[Codes],
        prior: tuple[float, ...],
        log: Log,
        num_ranks: int,
    ) -> None:
        self.plan, self.folder, self.recipe = plan, plan.folder, plan.recipe
        self.source, self.held_out = source, held_out
        self.numbers, self.prior, self.log, self.num_ranks = numbers, prior, log, num_ranks
        self.classes = source.classes
        self.digests = source.images.digest(np.arange(len(source)))
        more = source.more
        self.trained_digests = self.digests + ([] if more is None else more.images.digest(np.arange(len(more))))
        self.rule, self.kind = self.recipe.decision.rule, self.recipe.decision.calibration
        self.seconds = 0.0

    def write(self) -> None:
        """Write the model, the predictions, the features and, last, the metrics."""
        from lopsided.inference.scorer import Predictions
        from lopsided.training.fit import fingerprint

        repeats, settled = self._settled()
        change, decision = settle_scores(self.rule, self.kind, self.classes, self.prior, repeats[0].held)
        model, card = self._model(change, decision)
        leaks = self._leaks()
        whole = [] if self.plan.whole is None else self._run(self.plan.whole).facts()
        merged = merge_folds([run.facts() for run in self._folds()], whole)
        for fact in [*merged, *self._notes(model, card), *self._cautions(leaks)]:
            if fact not in self.log.facts:  # A note of the first fold may have been logged when it was trained.
                self.log.fact(fact)
        p, decided = settled[0]
        source = self.source
        test = Predictions(source.names, p, source.labels, decided, source.groups, repeats[0].features)
        for fact in self._by_source(model, repeats[0], p):
            self.log.fact(fact)
        further = self._held_out(model, card)
        baseline, below = self._baseline(decided)
        for fact in below:
            self.log.fact(fact)
        evaluations: dict[str, dict[str, Any] | None] = {
            "val": None,
            "test": self._evaluated(repeats, settled, decision),
            "held_out": None if further is None else results.figures_of(further, card, self.recipe.seed),
        }
        from lopsided.inference.familiar import save_bank
        from lopsided.models.model import save_model

        card = save_model(self.folder, model, save_bank(self.folder, self._familiar(model, card), card))
        parts = {"test": test, "held_out": further}
        results.write_tables(self.folder, parts, self.classes, repeats[0].folds)
        mean = np.mean([each for each, _ in settled], axis=0)
        wrong, checked = write_label_check(self.folder, self.source, mean, repeats[0].features)
        for fact in checked:
            self.log.fact(fact)
        joined, splits = training_source(self.source, Splits.of_all(len(self.source)))
        counts, none = self.source.counts(), dict.fromkeys(self.classes, 0)
        results.write_metrics(
            self.folder,
            self.recipe,
            self.source,
            counts={"train": joined.counts(), "val": none, "test": counts},
            card=card,
            evaluations=evaluations,
            leaks=leaks,
            baseline=baseline,
            cautions=self.log.cautions,
            num_ranks=self.num_ranks,
            fingerprint=fingerprint(joined, splits, self.trained_digests),
            seconds=self.seconds,
            folds={**self._facts(model, repeats, settled), "wrong_labels": wrong.to_dict()},
        )
        self.log.event("end", seconds=self.seconds)

    def balanced_accuracy(self) -> float:
        """Return the balanced accuracy of all images, the mean over the repeats, as ``write`` states it."""
        _, settled = self._settled()
        labels = self.source.labels
        measured = [label for label in range(len(self.classes)) if label not in self._unmeasured()]
        recalls = [np.mean(decided[labels == label] == label) for _, decided in settled for label in measured]
        return float(np.mean(recalls))

    def _settled(self) -> tuple[list[_Scored], list[tuple[Floats, Codes]]]:
        """Return the scores of each repeat, and its calibrated probabilities and decisions."""
        repeats = [self._scores(repeat) for repeat in range(len(self.numbers))]
        return repeats, [
            settle_crossed(self.rule, self.kind, self.classes, self.prior, each.held, each.folds) for each in repeats
        ]

    def _scores(self, repeat: int) -> _Scored:
        """Read the scores of the folds of one repeat, and move them to the prior of all images."""
        folds = self.recipe.data.folds or 0
        p = np.full((len(self.source), len(self.classes)), np.nan)
        features: dict[int, npt.NDArray[np.float32]] = {}
        numbers = np.full(len(self.source), -1)
        for fold, cell in enumerate(self.plan.folds[repeat * folds :][:folds], start=1 + repeat * folds):
            splits = split_source(cell.recipe, self.source)
            run = self._open(cell, splits)
            rows = [row for row in run.predictions() if row["split"] == "test"]
            if [row["name"] for row in rows] != [self.source.names[i] for i in splits.test]:
                raise RunError(f"{run.folder / PREDICTIONS} does not fit its fold. {_again(run)}")
            try:
                found = np.array([[float(row[f"{PROBABILITY}{name}"]) for name in self.classes] for row in rows])
            except (KeyError, ValueError, TypeError) as error:
                text = f"{run.folder / PREDICTIONS} is not a valid table of predictions ({files.reason(error)})."
                raise RunError(f"{text} {_again(run)}") from None
            p[splits.test] = at_prevalence(found, (run.metrics or {})["decision"]["prior"], self.prior)
            numbers[splits.test] = fold
            if self.recipe.spec.shares_features and "test" in run.features():  # Other folds have other encoders.
                features[fold] = run.features()["test"]
        held = HeldBack(p, self.source.labels, self.source.groups, "out-of-fold")
        joined = None
        if len(features) == folds:
            width = next(iter(features.values())).shape[1]
            joined = np.empty((len(self.source), width), dtype=np.float32)
            for fold, part in features.items():
                joined[numbers == fold] = part
        return _Scored(held, numbers, joined)

    def _baseline(self, decided: Codes) -> tuple[dict[str, Any] | None, list[Fact]]:
        """Compare the model with the recipe ``quick`` on the same folds. Also return a caution if it is worse."""
        from lopsided.models.machine import pick_device
        from lopsided.training.baseline import Answers, classify_by_quick, compare_answers, figures_of, is_quick

        lacks = min(self.source.counts().values()) < 2  # A fold would have one class.
        if not self.recipe.compare_quick or is_quick(self.recipe) or lacks:
            return None, []
        found: list[tuple[Codes, Answers]] = []
        begin = perf_counter()
        for cell in self.plan.folds[: self.recipe.data.folds]:
            splits = split_source(cell.recipe, self.source)
            own, splits = training_source(self.source, splits)
            alone = Splits(splits.train, splits.val[:0], splits.test)
            of = cell.recipe, own, alone, self.trained_digests, pick_device(self.recipe.device), self.log
            by_quick = classify_by_quick(*of, told=False)
            if (answers := by_quick.get("test")) is None:
                return None, []
            carried = prior_of(np.bincount(own.labels[splits.train], minlength=len(self.classes)))
            moved = at_prevalence(answers.probabilities, carried, self.prior)
            found.append((splits.test[answers.rows], replace(answers, probabilities=moved)))
        self.log.fact(notes.quick_compared(perf_counter() - begin, "folds"))
        rows = np.concatenate([tested for tested, _ in found])
        groups = None if self.source.groups is None else self.source.groups[rows]
        folds = np.repeat(np.arange(len(found)), [len(tested) for tested, _ in found])
        scores = HeldBack(np.concatenate([each.probabilities for _, each in found]), self.source.labels[rows], groups)
        # Calibrated and decided as the folds of this run are, so that the two differ in nothing else.
        p, predicted = settle_crossed(self.rule, self.kind, self.classes, self.prior, scores, folds)
        joined = Answers(rows, self.source.labels[rows], p, predicted)
        compared = compare_answers(joined.labels, decided[rows], joined.predicted, len(self.classes), groups)
        figures = figures_of(joined, compared, self.classes, groups, self.recipe.seed)
        below = compared.cautions("out-of-fold", "quick")
        return {"recipe": "quick", "splits": {"test": figures}}, below

    def _open(self, cell: Cell, splits: Splits) -> Run:
        """Open the finished run of a fold. Raise if it saw other images, labels or folds than this run."""
        from lopsided.training.fit import fingerprint

        run = self._run(cell)
        source, splits = training_source(self.source, splits)
        if run.metrics is None or run.metrics.get("fingerprint") != fingerprint(source, splits, self.trained_digests):
            what = f"The images, labels or groups have changed since {run.folder} was trained"
            raise RunError(f"{what}. Restore them, or start a new run in another folder.")
        self.seconds += float(run.metrics["seconds"])
        return run

    def _model(self, change: Calibration, decision: Decision) -> tuple[Model, ModelCard]:
        """Return the model of all images, or the ensemble of the folds of the first repeat, calibrated."""
        from lopsided.models.machine import pick_device
        from lopsided.models.model import average, average_classifiers, load_model
        from lopsided.training.decide import recalibrate

        device, fast = pick_device(self.recipe.device), self.recipe.fast
        if self.plan.whole is None:
            cells = self.plan.folds[: self.recipe.data.folds]
            loaded = [load_model(self.folder / cell.path, device, fast=fast) for cell in cells]
            moves = [bias_between(card.prior, self.prior).tolist() for _, card in loaded]
            model, card = (average if self.recipe.spec.trains_encoder else average_classifiers)(loaded, moves)
            card = card.model_copy(update={"prior": tuple(self.prior)})  # Where the moves brought each model.
        else:
            self._open(self.plan.whole, split_source(self.plan.whole.recipe, self.source))
            model, card = load_model(self.folder / self.plan.whole.path, device, fast=fast)
        num = 0 if self.kind == "none" else len(self.source)
        return model, recalibrate(model, card, self.prior, change, decision, num)

    def _by_source(self, model: Model, scored: _Scored, p: Floats) -> list[Fact]:
        """Return what models do on a source that they were not trained on, if the recipe names a column of sources."""
        from lopsided.runs.origins import leave_out_sources

        if self.recipe.data.origin is None or scored.features is None:
            return []
        whole = [] if self.plan.whole is None else self._run(self.plan.whole).facts()
        strength = next((fact.values["strength"] for fact in whole if "strength" in fact.values), None)
        importance = None if model.layout is None else model.layout.whole.importance()
        found = evaluate(
            self.source.labels, p, resolve("balanced", self.classes, self.prior).decide(p), classes=self.classes,
            bootstrap=100, folds=scored.folds,
        )  # fmt: skip
        by_folds = {metric: found.figures[metric].value for metric in ("auroc", "uwa")}
        return leave_out_sources(self.recipe, self.source, scored.features, self.prior, importance, strength, by_folds)

    def _familiar(self, model: Model, card: ModelCard) -> Bank | None:
        """Return the images that the model knows: those of the model of all images, whose encoder it has."""
        from lopsided.data.inputs import Part, inputs_of
        from lopsided.inference.familiar import known_images, load_bank
        from lopsided.inference.scorer import Scorer

        if self.plan.whole is not None:
            return load_bank(self.folder / self.plan.whole.path, card)
        if self.recipe.spec.trains_encoder:
            self.log.fact(notes.no_typicality("no image is new to all encoders of the ensemble"))
            return None
        every, _ = training_source(self.source, Splits.of_all(len(self.source)))
        inputs = inputs_of(every.images, card.image_size, card.channels)
        part = Part(inputs, every.labels, every.groups, tuple(self.trained_digests))
        bank = known_images(Scorer(model, card), part, None, self.recipe.seed)
        if bank is not None:
            self.log.fact(notes.typicality(len(bank.scores), bank.is_guessed, bank.num_groups))
        return bank

    def _held_out(self, model: Model, card: ModelCard) -> Any:
        from lopsided.inference.scorer import Predictions, Scorer

        source = self.held_out
        if source is None:
            return None
        p = Scorer(model, card, cached="begun", batch_size=256).images(source.images)
        return Predictions(source.names, p, source.labels, card.decision.decide(p), source.groups)

    def _evaluated(
        self, repeats: Sequence[_Scored], settled: Sequence[tuple[Floats, Codes]], decision: Decision
    ) -> dict[str, Any]:
        """Return the figures of all images, as means over the repeats."""
        rows = np.flatnonzero(~np.isin(self.source.labels, self._unmeasured()))
        labels, seed, costs = self.source.labels[rows], self.recipe.seed, decision.costs or None
        groups = None if self.source.groups is None else self.source.groups[rows]
        found, rules = [], []
        for part, (p, decided) in zip(repeats, settled, strict=True):
            folds, ours = part.folds[rows], (labels, p[rows], decided[rows])
            own = evaluate(*ours, classes=self.classes, seed=seed, groups=groups, folds=folds, costs=costs)
            found.append(own.to_dict())
            rules.append(figures_by_rule(("plain", "balanced"), self.classes, self.prior, p[rows], labels))
        mean = mean_evaluation(found)
        mean["notes"] = [*mean["notes"], RANKS_NOTE]
        if parse_rule(self.rule).fitted:
            mean["notes"].append(results.FITTED_NOTE)
        shown = HeldBack(settled[0][0][rows], labels, groups)
        mean["notes"] += measured_words(decision, shown, self.classes, fitted_to=True, seed=seed)
        if len(settled) > 1:
            text = f"The metrics are means over {len(settled)} repeats. Predictions and confusion are of the first one."
            mean["notes"] = [*mean["notes"], text]
        names = [name for name in rules[0] if all(name in each for each in rules)]
        return {**mean, "rules": {name: _mean_rule([each[name] for each in rules]) for name in names}}

    def _unmeasured(self) -> list[int]:
        """Return the classes of one image, which is tested by a model that knows no image of the class."""
        found: list[int] = unmeasured_classes(np.array(list(self.source.counts().values()))).tolist()
        return found

    def _facts(
        self, model: Model, repeats: Sequence[_Scored], settled: Sequence[tuple[Floats, Codes]]
    ) -> dict[str, Any]:
        """Return what ``metrics.json`` says about the folds."""
        per_fold = []
        for repeat, (part, (_, decided)) in enumerate(zip(repeats, settled, strict=True), start=1):
            for fold in np.unique(part.folds):
                rows = part.folds == fold
                truth = self.source.labels[rows]
                counts = np.bincount(truth, minlength=len(self.classes))
                hits = np.bincount(truth[decided[rows] == truth], minlength=len(self.classes))
                recall = [int(h) / int(n) if n else None for h, n in zip(hits, counts, strict=True)]
                known = [value for value in recall if value is not None]
                per_fold.append(
                    {
                        "fold": int(fold),
                        "repeat": repeat,
                        "images": int(rows.sum()),
                        "uwa": sum(known) / len(known),
                        "recall": recall,
                    }
                )
        return {
            "folds": self.recipe.data.folds,
            "repeats": self.recipe.data.repeats,
            "by": split_rule(self.recipe, self.source),
            "final": self.recipe.final_model,
            "members": model.members if self.recipe.final_model == "ensemble" else 1,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "per_fold": per_fold,
        }

    def _notes(self, model: Model, card: ModelCard) -> Iterator[Fact]:
        from lopsided.training.decide import decision_note

        yield notes.model(
            (self.recipe.data.folds or 1) if self.recipe.final_model == "ensemble" else 1,
            card.members,
            sum(parameter.numel() for parameter in model.parameters()),
            sum(value.numel() * value.element_size() for value in model.state_dict().values()) / 1e6,
        )
        if self.recipe.encoder.views == AUTO:
            chosen = [tuple((run.metrics or {})["views"]) for run in self._folds()]
            other = sum(views != card.views for views in chosen)
            if other:
                yield notes.other_views(other, len(chosen))
        yield decision_note(card.decision, card.classes)
        if card.calibrated_on:
            yield notes.calibrated(card.calibrated_on, "out-of-fold", card.temperature, card.bias)

    def _folds(self) -> list[Run]:
        """Return the finished runs of the folds of all repeats."""
        return [self._run(cell) for cell in self.plan.folds]

    def _run(self, cell: Cell) -> Run:
        return Run(self.folder / cell.path, cell.recipe, read_metrics(self.folder / cell.path))

    def _leaks(self) -> Leaks:
        """Return groups and byte-identical images that are in two folds of the first repeat."""
        numbers, names = self.numbers[0] + 1, self.source.names
        seen: dict[str, int] = {}
        duplicates = []
        for row, digest in enumerate(self.digests):
            other = seen.setdefault(digest, row)
            if numbers[other] != numbers[row]:
                duplicates.append((names[other], f"fold {numbers[other]}", names[row], f"fold {numbers[row]}"))
        crossing: tuple[str, ...] = ()
        if self.source.groups is not None:
            pairs = np.unique(np.stack([self.source.groups, numbers.astype(np.str_)]), axis=1)
            groups, counts = np.unique(pairs[0], return_counts=True)
            crossing = tuple(groups[counts > 1].tolist())
        return Leaks(crossing, tuple(duplicates))

    def _cautions(self, leaks: Leaks) -> Iterator[Fact]:
        from lopsided.training.cautions import FEW_TEST, few_classes, leak_cautions

        counts = {name: number for name, number in self.source.counts().items() if number}
        few = few_classes(counts, FEW_TEST)  # A class without any image has no interval to check.
        if few:
            yield cautions.few_images(few, FEW_TEST)
        if alone := self._unmeasured():
            yield cautions.unmeasured_classes([self.classes[label] for label in alone])
        yield from leak_cautions(leaks, "fold")


def _again(run: Run) -> str:
    return f"Remove the folder {run.folder} and continue the run with --resume."


def _mean_rule(rules: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    recalls = zip(*(rule["recall"] for rule in rules), strict=True)
    return {
        "uwa": sum(rule["uwa"] for rule in rules) / len(rules),
        "recall": [None if None in column else sum(column) / len(column) for column in recalls],
    }
