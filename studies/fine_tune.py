"""How good is a fine-tuned encoder, against frozen features on the same images?

    python studies/fine_tune.py isic                     # melanoma against dermatofibroma, $LOPSIDED_DATA
    python studies/fine_tune.py isic --methods "logit-adjusted;CL;AFCL"
    python studies/fine_tune.py tops                     # Fashion-MNIST tops at 98:2 and 90:10
    python studies/fine_tune.py tune                     # the candidates, on other seeds
    python studies/fine_tune.py summary                  # the tables of the records, without computing anything
    python studies/fine_tune.py seven-choose --folder RUNS   # settings, on training images of the fold below
    python studies/fine_tune.py seven --folder RUN       # seven classes of HAM10000, the first registered fold; resumes
    python studies/fine_tune.py seven --folder RUN2 --fold 1    # the second fold
    python studies/fine_tune.py seven-table              # the first fold, beside quick and thorough
    python studies/fine_tune.py seven-folds              # both folds together
    python studies/fine_tune.py seven-choices            # what seven-choose has compared
    python studies/fine_tune.py seven-course             # the epochs of the second run

``tops`` trains on 700 of 1,000 images that the scenario draws, and evaluates on held-out images that the run has not
drawn, with the same number per class. ``isic`` trains on four of five folds by lesion and evaluates on the fifth one;
the folds are those of ``StratifiedGroupKFold`` with the seed of the line. ``tune`` compares settings of the fine-tuning
on seeds from 100 on, which no other line uses: one fold of ``isic``, and draws of the tops, of which it evaluates every
fourth held-out image.

``seven`` is one fold at a time, because two hours of two cores for all five are 48 minutes of a core for each. The
settings of each run (``SEVEN``) were set before it. The first had the default blocks and views, also mirrored top and
bottom, six epochs, a loss for lopsided classes and nothing to calibrate on. The second was registered when the outcome
of the first was known (studies/registration.md). The means of the logarithms of their probabilities with those of the
recipes were named before, too, those with ``quick`` for the second run alone. Answers are in
studies/answers/fine_tune.csv.gz, those of the recipes in registered.csv.gz, and minutes and course of the second run in
studies/records/fine_tune_seven.jsonl, with ``seven-choose``.

Each line of the record is one run. A line that exists is not computed again, and ``--minutes`` stops after a run that
ends later than this. ``uwa`` is that of the rule ``balanced``, and ``hits`` are the right decisions per class. One
thread computes a run, and ``minutes`` are those of the processor. All methods of a run share the activations of the
frozen blocks, and the time of these counts for each of them. The lines of ``quick`` and ``thorough`` are of the recipes
before they had stages; "minus quick now" takes the answers of studies/peers.py to the same images.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

import answers
import peers
import registered
import shared
from answers import Answers
from lopsided.data.prepare import Sources
from lopsided.data.sources import Source, open_source
from lopsided.evaluation.calibration import HeldBack, fit_calibration
from lopsided.evaluation.intervals import mean_interval
from lopsided.inference.scorer import Predictions
from lopsided.recipe import Recipe, named_recipe
from lopsided.training.fit import Fitted, fit
from lopsided.training.methods.fine_tune import Activations
from shared import Floats

RECORD = shared.RECORDS / "fine_tune.jsonl"
SCENARIOS = ("98:2", "90:10")
FOLDS = 5
CONTRASTIVE = {"encoder_training.batch_size": 16, "encoder_training.views": 2, "encoder_training.sampler": "balanced"}
"""Two views of each image, the same number of views per step, and no batch without a rare image."""
FROZEN = ("quick", "thorough", "quick without pixels")
METHODS: dict[str, dict[str, Any]] = {
    "quick": {},
    "thorough": {},
    "quick without pixels": {"encoder.name": named_recipe("fine-tune").encoder.name},
    "fine-tune": {},
    "logit-adjusted": {"encoder_training.loss": "logit-adjusted"},
    "CL": {"encoder_training.loss": "cl", **CONTRASTIVE},
    "AFCL": {"encoder_training.loss": "afcl", **CONTRASTIVE},
    "alone": {"fine_tune.blend": 0.0},
    "lr 1e-4": {"encoder_training.lr": 1e-4},
    "lr 1e-3": {"encoder_training.lr": 1e-3},
    "300 steps": {"fine_tune.steps": 300},
    "no crop, no colour": {"augment.crop": None, "augment.colour": None},
    "not scaled": {"encoder.scaling": "none"},
    "3 blocks": {"fine_tune.blocks": 3},
}
"""Changes of the recipe ``fine-tune`` by name, or of the recipe whose name ``FROZEN`` begins with."""
FIRST: dict[str, Any] = {
    "encoder_training.loss": "logit-adjusted",
    "fine_tune.steps": 1500,
    "fine_tune.blend": 0.0,
    "augment.vertical_flip": True,
    "encoder.views": "flips",
    "regression.strength": 0.01,
}
"""Changes of ``fine-tune`` in the first run on the seven classes. The regression is the first classifier only."""
SEVEN_RECORD = shared.RECORDS / "fine_tune_seven.jsonl"
SEVEN_ANSWERS = answers.FOLDER / "fine_tune.csv.gz"
LONGER: dict[str, Any] = {
    "data.image_size": 160,
    "data.val": 0.1,
    "augment.rotation": 180.0,
    "augment.crop": 0.6,
    "augment.vertical_flip": True,
    "encoder.scaling": "none",
    "encoder_training.loss": "logit-adjusted",
    "encoder_training.lr": 5e-4,
    "encoder_training.weight_decay": 0.05,
    "encoder_training.epochs": 4,
    "fine_tune.blocks": 12,
    "fine_tune.views": 6,
    "fine_tune.steps": None,
    "fine_tune.layer_decay": 0.9,
    "fine_tune.average": 0.998,
    "fine_tune.blend": 0.0,
    "regression.strength": 0.01,
}
"""Changes of ``fine-tune`` for many images: twelve of 16 blocks of smaller images, stronger views, and lesions that
calibrate. Four epochs compare settings."""
CANDIDATES: dict[str, dict[str, Any]] = {
    "frozen, final layer": {"encoder.name": named_recipe("fine-tune").encoder.name},
    "frozen, with stages and colours": {},
    "twelve blocks trained, final layer": {},
}
"""Changes of ``LONGER`` that ``seven-choose`` compares, and of ``quick`` at the same size."""
SEVEN: dict[str, dict[str, Any]] = {
    "fine-tune": FIRST,
    "fine-tune, second run": {
        **LONGER,
        "data.image_size": 192,
        "augment.crop": 0.5,
        "augment.colour": 0.3,
        "encoder.views": "flip",
        "encoder_training.epochs": 8,
        "fine_tune.views": 10,
        "selection.metric": "last",
    },
}
"""Changes of ``fine-tune`` in each run of ``seven``."""
LOSSES = ("logit-adjusted", "CL", "AFCL")
"""Methods with another loss. They are no candidates. BCL has a cosine classifier, which cannot be fine-tuned."""


def recipe_of(method: str, changes: dict[str, Any]) -> Recipe:
    """Return the recipe of a method with further changes."""
    base = named_recipe(method.split(maxsplit=1)[0] if method in FROZEN else "fine-tune")
    return base.override(**METHODS[method]).override(**{"threads": 1, "compare_quick": False, **changes})


def judged(found: Predictions) -> dict[str, Any]:
    """Return UWA by the rule of the model and the AUROC, in percent, and the number of right decisions per class."""
    uwa = balanced_accuracy_score(found.y_true, found.y_pred)
    auroc = roc_auc_score(found.y_true, found.probabilities[:, 1])
    hits = [int((found.y_pred[found.y_true == label] == label).sum()) for label in (0, 1)]
    return {"uwa": round(100 * uwa, 2), "auroc": round(100 * auroc, 2), "hits": hits}


class Shared:
    """Activations of one run at a time, computed once for all methods with the same views and frozen blocks."""

    def __init__(self) -> None:
        self._run: object = None
        self._augment: object = None
        self._found: dict[tuple[Any, ...], tuple[Any, float]] = {}
        self.seconds = 0.0
        """Seconds that the activations of the last method took, if another method computed them."""

    @contextmanager
    def of(self, run: object) -> Iterator[None]:
        """Share the activations of a run inside the block."""
        if run != self._run:
            self._run, self._found = run, {}
        self.seconds = 0.0
        compute = Activations.compute

        def once(own: Activations, inputs: Any, count: Any, **more: Any) -> Any:
            key = (own.cut.shape, len(inputs), more.get("views", 1), str(self._augment))
            if key in self._found:
                self.seconds += self._found[key][1]
            else:
                begin = time.process_time()
                made = compute(own, inputs, count, **more)
                self._found[key] = made, time.process_time() - begin
            return self._found[key][0]

        Activations.compute = once  # type: ignore[method-assign]
        try:
            yield
        finally:
            Activations.compute = compute  # type: ignore[method-assign]

    def augmented(self, recipe: Recipe) -> None:
        """Take the activations of this recipe's views."""
        self._augment = recipe.augment
        self.seconds = 0.0

    def timed(self, recipe: Recipe, source: Source, held_out: Source) -> dict[str, Any]:
        """Fit a recipe on a source and return the figures of the held-out images."""
        self.augmented(recipe)
        begin = time.process_time()
        fitted = fit(recipe, source, held_out=held_out)
        minutes = (time.process_time() - begin + self.seconds) / 60
        assert fitted.held_out is not None
        sizes = {"train": len(fitted.splits.train), "images": len(held_out)}
        return {**sizes, **judged(fitted.held_out), "minutes": round(minutes, 2)}


SHARED = Shared()


def tops(method: str, scenario: str, seed: int, part: int = 1) -> dict[str, Any]:
    """Run a method on one draw of the tops, and evaluate every image whose number ``part`` divides."""
    recipe = recipe_of(method, shared.tops_fields(scenario, seed))
    source, held_out = Sources().open(recipe)
    assert held_out is not None
    return SHARED.timed(recipe, source, held_out.subset(np.arange(0, len(held_out), part)))


def isic(method: str, fold: int, seed: int) -> dict[str, Any]:
    """Run a method on four of five folds by lesion and evaluate it on the remaining fold."""
    source = open_source("isic2018", classes=shared.LESIONS)
    assert source.groups is not None
    train, rest = shared.folds_by_lesion(source.labels, source.groups, seed)[fold]
    recipe = recipe_of(method, {"seed": seed, "data.test": 0.0})
    return SHARED.timed(recipe, source.subset(train), source.subset(rest))


def seven(name: str, fold: int, folder: Path) -> None:
    """Fine-tune on a fold of the registered task ``lesions``, and keep the answers to its images."""
    if any((one.method, one.fold) == (name, fold) for one in answers.read(SEVEN_ANSWERS)):
        raise SystemExit(f'"{name}" has answers, and is run once.')
    task = registered.lesions()
    cell, repeat, fold, train, rest = task.pairs[fold]
    source, tested = task.source.subset(train), task.source.subset(rest)
    fields = {**SEVEN[name], "seed": repeat, "data.test": 0.0, "threads": 1, "compare_quick": False}
    begin = time.process_time()
    folder.mkdir(parents=True, exist_ok=True)
    fitted = fit(named_recipe("fine-tune").override(**fields), source, folder, held_out=tested, resume=True)
    found = fitted.held_out
    assert found is not None
    assert tested.groups is not None
    odds = np.log(np.clip(found.probabilities, 1e-12, 1))
    names, groups = list(tested.names), list(tested.groups)
    one = Answers("lesions", cell, repeat, fold, name, names, tested.labels, found.y_pred, odds, groups)
    answers.add(SEVEN_ANSWERS, one)
    minutes = round((time.process_time() - begin) / 60, 1)  # Since the run was resumed, if it was.
    line = {"method": name, "fold": fold, "train": len(train), "minutes": minutes, "epochs": curve(fitted)}
    shared.add(SEVEN_RECORD, line)


def seven_choose(name: str, folder: Path) -> dict[str, Any]:
    """Train a candidate on four of five parts, by lesion, of the training images of the first fold, and judge it by the
    fifth one. No image of the fold itself is used."""
    task = registered.lesions()
    source = task.source.subset(task.pairs[0][3])
    assert source.groups is not None
    train, rest = shared.folds_by_lesion(source.labels, source.groups, 100)[0]
    fields = {"seed": 100, "data.test": 0.0, "threads": 1, "compare_quick": False}
    recipe = named_recipe("fine-tune").override(**LONGER)
    if name.startswith("frozen"):
        recipe = named_recipe("quick").override(**{"data.image_size": recipe.data.image_size})
    recipe = recipe.override(**CANDIDATES[name]).override(**fields)
    begin = time.process_time()
    SHARED.augmented(recipe)
    fitted = fit(recipe, source.subset(train), folder / name, held_out=source.subset(rest), resume=True)
    found = fitted.held_out
    assert found is not None
    assert found.y_true is not None
    minutes = (time.process_time() - begin + SHARED.seconds) / 60
    own = {
        "uwa": 100 * balanced_accuracy_score(found.y_true, found.y_pred),
        "auroc": 100 * roc_auc_score(found.y_true, found.probabilities, multi_class="ovr"),
        "minutes": minutes,
    }
    sizes = {"train": len(train), "images": len(rest)}
    return {**sizes, **{key: round(own[key], 2) for key in own}, "epochs": curve(fitted)}


def curve(fitted: Fitted) -> list[dict[str, float]]:
    """Return the training loss of each epoch, and what the lesions say that calibrate."""
    names = ("loss", "val_log_loss", "val_uwa")
    return [{name: round(float(row[name]), 4) for name in names if name in row} for row in fitted.history]


def halved(one: Answers, shares: Floats) -> float:
    """Return the balanced accuracy if one half of the lesions calibrates the other half, mean of five divisions.

    It says how much of a difference is the decision: a temperature and a bias per class are fitted as ``fit`` does.
    """
    assert one.groups is not None
    odds = np.exp(one.scores - one.scores.max(axis=1, keepdims=True))
    held = HeldBack(odds / odds.sum(axis=1, keepdims=True), one.labels, np.array(one.groups))
    places, values = np.unique(one.groups, return_inverse=True)[1], []
    for seed in range(5):
        side = (np.random.default_rng(seed).random(places.max() + 1) < 0.5)[places]
        decided = np.zeros_like(one.labels)
        for own in (side, ~side):
            calibrated = fit_calibration(held.rows(np.flatnonzero(own)), shares)(held.probabilities[~own])
            decided[~own] = (calibrated / shares).argmax(axis=1)
        values.append(answers.balanced_accuracy([replace(one, decided=decided)]))
    return statistics.mean(values)


def seven_table(*folds: int) -> str:
    """Return a row for each method that has these folds, and for the means of fine-tuning with the two recipes.

    Shares of the classes are those of the images of the other folds, which the fold was trained on.
    """
    found = [one for one in answers.read(registered.ANSWERS) if one.data == "lesions"]
    labels = {one.fold: one.labels for one in found if one.method == "quick"}
    shares = {
        fold: np.bincount(np.concatenate([own for other, own in labels.items() if other != fold])) for fold in folds
    }
    prior = {fold: counts / counts.sum() for fold, counts in shares.items()}
    frozen = {
        name: {one.fold: one for one in found if one.method == name and one.fold in folds}
        for name in ("quick", "thorough")
    }
    methods = dict(frozen)
    for tuned in answers.read(SEVEN_ANSWERS):
        if tuned.fold not in folds:
            continue
        methods.setdefault(tuned.method, {})[tuned.fold] = tuned
        for name, others in frozen.items():
            other = others[tuned.fold]
            place = {image: row for row, image in enumerate(other.images)}
            scores = (tuned.scores + other.scores[[place[image] for image in tuned.images]]) / 2
            decided = (scores - np.log(prior[tuned.fold])).argmax(axis=1)
            both = replace(tuned, decided=decided, scores=scores)
            methods.setdefault(f"{tuned.method}, and {name}", {})[tuned.fold] = both
    rows = []
    for name, one in methods.items():
        if len(one) < len(folds):
            continue
        parts = [one[fold] for fold in folds]
        own, figures = answers.bootstrap(parts, rounds=500), [registered.metrics(part) for part in parts]
        cells_ = [f"{own.value:.1f} [{own.low:.1f}, {own.high:.1f}]"]
        for base in frozen:
            gain = answers.bootstrap(parts, [methods[base][fold] for fold in folds], rounds=500)
            cells_.append("" if name == base else f"{gain.value:+.1f} [{gain.low:+.1f}, {gain.high:+.1f}]")
        cells_ += [f"{statistics.mean(each[key] for each in figures):.1f}" for key in ("auroc", "accuracy")]
        half = statistics.mean(halved(part, prior[part.fold]) for part in parts)
        rows.append((name, *cells_, f"{half:.1f}"))
    bases = "".join(f" | minus {base} [other images]" for base in frozen)
    head = f"method | balanced accuracy [other images]{bases} | AUROC | accuracy | calibrated on half of the lesions"
    return shared.table(head, rows)


def seven_choices() -> str:
    """Return a row for each candidate of ``seven-choose``."""
    found = {line["candidate"]: line for line in shared.read(SEVEN_RECORD) if "candidate" in line}
    names = ("uwa", "auroc", "minutes")
    rows = [(name, *(f"{found[name][key]:.1f}" for key in names)) for name in CANDIDATES]
    return shared.table("model | balanced accuracy | AUROC | minutes of a core", rows)


def seven_course() -> str:
    """Return a row for each epoch of the second run."""
    epochs = next(line["epochs"] for line in shared.read(SEVEN_RECORD) if "method" in line)
    rows = [
        (number, f"{row['loss']:.2f}", f"{row['val_log_loss']:.2f}", f"{100 * row['val_uwa']:.1f}")
        for number, row in enumerate(epochs, start=1)
    ]
    return shared.table("epoch | training loss | log loss, held out | balanced accuracy, held out", rows)


SEVEN_TABLES = {
    "seven-table": partial(seven_table, 0),
    "seven-folds": partial(seven_table, 0, 1),
    "seven-choices": seven_choices,
    "seven-course": seven_course,
}
"""The tables of the seven classes. They compute nothing anew."""


def cells(what: str, methods: list[str], number: int) -> list[dict[str, Any]]:
    """Return the lines to compute, all methods of a seed before the next seed."""
    first = 100 if what == "tune" else 0
    runs = [{"data": "isic", "scenario": f"fold {fold + 1}", "seed": first} for fold in range(number)]
    if what == "tune":
        runs = runs[:1]
    elif what == "tops":
        runs = []
    if what != "isic":
        runs += [
            {"data": "tops", "scenario": scenario, "seed": seed}
            for seed in range(first, first + number)
            for scenario in SCENARIOS
        ]
    return [{**run, "method": method} for run in runs for method in methods]


def today() -> dict[tuple[str, tuple[str, int]], dict[str, float]]:
    """Return the balanced accuracy of ``quick`` as it is, on the images of each run."""
    found = {}
    for one in answers.read(peers.ANSWERS):
        if one.method == "quick" and (one.data == "tops" or (one.data == "isic" and one.repeat == 0)):
            setting, run = (f"tops {one.cell}", one.cell) if one.data == "tops" else ("isic", f"fold {one.fold + 1}")
            found[setting, (run, one.repeat)] = {"uwa": answers.balanced_accuracy([one])}
    return found


def summary(path: Path) -> str:
    """Return the means of the methods with 95 % intervals over the runs, and of the difference to the default."""
    tables, quick = [], today()
    for is_tuning in (False, True):
        lines = [line for line in shared.read(path) if (line["seed"] >= 100) == is_tuning]
        for line in lines:
            line["setting"] = line["data"] if line["data"] == "isic" else f"{line['data']} {line['scenario']}"
        rows = []
        for setting, methods in sorted(shared.nested(lines, "setting", "method", ("scenario", "seed")).items()):
            for method, runs in sorted(methods.items(), key=lambda item: list(METHODS).index(item[0])):
                cells = [
                    cell
                    for name in ("uwa", "auroc")
                    for cell in (
                        shared.shown(mean_interval([line[name] for line in runs.values()])),
                        shared.minus(runs, methods.get("quick", {}), name),
                    )
                ]
                same = {run: quick[setting, run] for run in runs if (setting, run) in quick and not is_tuning}
                cells.insert(2, shared.minus({run: runs[run] for run in same}, same, "uwa") if same else "")
                minutes = statistics.median(line["minutes"] for line in runs.values())
                rows.append((setting, method, len(runs), *cells, f"{minutes:.1f}"))
        if rows:
            tables.append(
                shared.table(
                    "data | method | runs | balanced accuracy | minus quick then | minus quick now"
                    " | AUROC | minus quick then | minutes",
                    rows,
                )
            )
    return "\n\n".join(tables)


def main() -> None:
    """Compute the missing lines of the record and print its summary."""
    parser = shared.parser(__doc__)
    parser.add_argument("what", choices=["tops", "isic", "tune", "summary", "seven", "seven-choose", *SEVEN_TABLES])
    parser.add_argument("--number", type=int, default=None, help="seeds, or folds of isic")
    parser.add_argument("--methods", default=None, help="names of METHODS, separated by semicolons")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--fold", type=int, default=0, help="with seven: 0 is the first fold")
    parser.add_argument("--folder", type=Path, help="with seven and seven-choose: where the runs are kept")
    arguments = parser.parse_args()
    if arguments.what == "seven":
        seven(arguments.methods or list(SEVEN)[-1], arguments.fold, arguments.folder)
        return
    if arguments.what in SEVEN_TABLES:
        print(SEVEN_TABLES[arguments.what]())
        return
    if arguments.what == "seven-choose":
        names = arguments.methods.split(";") if arguments.methods else list(CANDIDATES)
        wanted = [{"candidate": name} for name in names]
        with SHARED.of("seven"):
            shared.compute_missing(SEVEN_RECORD, wanted, lambda cell: seven_choose(cell["candidate"], arguments.folder))
        return
    usual = ["quick", "quick without pixels", "fine-tune"]
    if arguments.what == "tune":
        usual = [method for method in METHODS if method not in LOSSES and method not in FROZEN[1:]]
    methods = arguments.methods.split(";") if arguments.methods else usual
    number = arguments.number or {"tops": 3, "isic": FOLDS, "tune": 1, "summary": 0}[arguments.what]
    end = time.perf_counter() + 60 * arguments.minutes
    part = 4 if arguments.what == "tune" else 1

    def compute(cell: dict[str, Any]) -> dict[str, Any]:
        with SHARED.of((cell["data"], cell["scenario"], cell["seed"])):
            if cell["data"] == "isic":
                return isic(cell["method"], int(cell["scenario"].split()[1]) - 1, cell["seed"])
            return tops(cell["method"], cell["scenario"], cell["seed"], part)

    wanted = cells(arguments.what, methods, number) if number else []
    shared.compute_missing(arguments.record, takewhile(lambda _: time.perf_counter() < end, wanted), compute)
    print(summary(arguments.record))


if __name__ == "__main__":
    main()
