"""Fair peers: other classifiers on the features of ``quick``, with the same inner folds and the same rule.

    python studies/peers.py run DATA [--minutes 7] [--resnet50 FILE.safetensors]    # DATA: isic, few, tops
    python studies/peers.py table                # every method on every setting
    python studies/peers.py short                # the best peer beside the recipes
    python studies/peers.py scratch              # training from scratch with as many images, and in as many minutes

The images, repeats and folds are those of ``studies/study.py``. ``quick``, ``thorough`` and ``few`` are trained as
``lopsided fit`` trains them. Every peer gets the features of ``quick``, standardised and weighed alike, and each
parameter (C, the penalty, the shrinkage, the number of neighbours) is chosen by the same inner folds and score, the
class-weighted log loss of the rows outside the fold. Where a peer gives no probabilities, a class-weighted Platt
scaling of the same scores comes before that, and decides. So none loses by a bad default or by its decision rule, but
for ``as by hand``, which shows what these are worth, and the two ensembles, which have no parameter that is chosen.

quick, as registered    the recipe as it was registered: logistic regressions alone
quick, 550 images  T-shirts only: without the 150 validation images of the methods in studies/from_scratch.py
weighted CE from scratch, in the time of quick    the ResNet-18 of studies/from_scratch.py on all training images of
                   ``quick``, with as many epochs as take its processor seconds in studies/records/costs.jsonl
class weights      logistic regression, classes weighted by inverse frequency; scikit-learn: three lines
... as by hand     the same with C = 1 on standardised features that are not weighed
SMOTE              logistic regression after SMOTE
EasyEnsemble, balanced forest    of imbalanced-learn, 10 x 50 stumps and 500 trees; they train on balanced parts, so
                   that they decide by their own probabilities, and have no parameter that is chosen
linear SVM, ridge  classes weighted; parameter chosen
shrunk LDA         linear discriminant, equal priors; shrinkage chosen
neighbours, nearest mean    by the distances of the weighed features
colours alone      the block ``pixels`` alone, logistic regression as in ``quick``
16 x 16 pixels     grey or coloured values of the image at 16 x 16, logistic regression as in ``quick``
ResNet-50          frozen, with a file of ImageNet weights, logistic regression as in ``quick``

Metrics come from the answers in studies/answers/peers.csv.gz: balanced accuracy over all images of a repeat, AUROC and
recall at 90 % specificity within each fold, then the mean. Differences are paired by repeat and fold; ``[...]`` is the
cluster bootstrap over images or lesions, the other interval Student's, on skin lesions corrected for overlapping
training images.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

import answers
import shared
import study
from answers import Answers
from lopsided.data.images import ArrayImages
from lopsided.data.inputs import StreamedInputs
from lopsided.data.sources import Source
from lopsided.evaluation.intervals import mean_interval
from lopsided.evaluation.resampled import fold_overlap
from lopsided.inference.scorer import Scorer
from lopsided.recipe import named_recipe
from lopsided.runs.fitting import usual_recipe
from lopsided.seeds import derive_seed
from lopsided.training.fit import fit
from lopsided.training.regression import FEW, REPEATS, fit_regression, inner_folds, rarest, standardisation
from shared import Floats

ANSWERS = answers.FOLDER / "peers.csv.gz"
FEWER = "quick, 550 images"
TIMED = "weighted CE from scratch, in the time of quick"
EPOCHS = {"tops": 11, "isic": 3, "few": 3}
"""Epochs of ``TIMED``, rounded up: without the start of 6 seconds, 20 epochs take 29 and 175, ``quick`` 15 and 22."""
RECIPES = ("quick", "thorough", "few", FEWER)
IMAGES = {"isic": (92, 890, 600), "few": (10, 890, 600), "tops": (None, 700, 28)}
"""Training images of the rare class (of T-shirts in ``study.RARE_TOPS``) and of the other one, and the longer side."""
STRENGTHS = tuple(10.0 ** np.arange(-5.0, 1.01, 1.0))
SPECIFICITY = 0.9


@dataclass(frozen=True, eq=False)
class Rows:
    """Training rows and test rows of one fold, and how much each column weighs."""

    x: Floats
    labels: Floats
    groups: Floats | None
    tested: Floats
    importance: Floats | None
    seed: int
    turned: tuple[Floats, Floats] = field(init=False)
    """Training and test rows, standardised, weighed and turned to the axes that the training rows span.

    A rotation changes no distance and no penalty of squares."""

    def __post_init__(self) -> None:
        mean, scale = standardisation(self.x.astype(np.float64))
        if self.importance is not None:
            scale = scale / self.importance
        train, test = (self.x - mean) / scale, (self.tested - mean) / scale
        values, vectors = np.linalg.eigh(train @ train.T)
        kept = values > 1e-9 * values[-1]
        axes = train.T @ (vectors[:, kept] / np.sqrt(values[kept]))
        object.__setattr__(self, "turned", (train @ axes, test @ axes))

    def folds(self) -> list[tuple[Floats, Floats]]:
        """Return the inner folds of the recipe ``quick``."""
        fewest = rarest(self.labels, self.groups)
        seeds = [derive_seed(self.seed, "folds", again) for again in range(REPEATS if fewest < FEW else 1)]
        return [pair for seed in seeds for pair in inner_folds(self.labels, self.groups, min(5, fewest), seed)]


Scores = tuple[Floats, Floats]
"""Scores of the test rows, and the classes that they are decided for."""
Fitted = Callable[[Floats], Floats]
"""A fitted classifier: the scores of rows."""
Methods = dict[str, dict[int, list[Answers]]]
"""Answers by method and repeat, one item for each fold."""


def chosen(rows: Rows, fit_one: Callable[[Floats, Floats, float], Fitted], grid: Iterable[float]) -> Scores:
    """Choose a parameter and the Platt scaling by the inner folds, fit again on all rows, and score the test rows."""
    from sklearn.linear_model import LogisticRegression

    train, test = rows.turned
    folds = rows.folds()
    best: tuple[float, float, Any] | None = None
    for value in grid:
        parts = [(fit_one(train[own], rows.labels[own], value)(train[rest]), rows.labels[rest]) for own, rest in folds]
        scores, labels = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        scale = max(float(np.std(scores)), 1e-12)
        platt = LogisticRegression(C=1e4, class_weight="balanced").fit(scores[:, None] / scale, labels)
        odds = platt.decision_function(scores[:, None] / scale) * np.where(labels == 1, 1, -1)
        loss = float(np.mean([np.logaddexp(0, -odds[labels == label]).mean() for label in (0, 1)]))
        if best is None or loss < best[0]:
            best = loss, value, (platt, scale)
    assert best is not None
    platt, scale = best[2]
    scores = platt.decision_function(fit_one(train, rows.labels, best[1])(test)[:, None] / scale)
    return scores, (scores > 0).astype(np.int64)


def by_regression(rows: Rows, weighted: bool = False) -> Scores:
    """Return the scores of the regression of ``quick``, whose logits lose the class shares unless it is weighted."""
    fitted = fit_regression(
        rows.x, rows.labels, 2, groups=rows.groups, seed=rows.seed, importance=rows.importance, weighted=weighted
    )
    logits = rows.tested @ fitted.weight.T + fitted.bias
    if not weighted:
        logits = logits - np.log(np.bincount(rows.labels) / len(rows.labels))
    scores = logits[:, 1] - logits[:, 0]
    return scores, (scores > 0).astype(np.int64)


def by_hand(rows: Rows) -> Scores:
    """Return the scores of three lines of scikit-learn without thinking."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=1000))
    scores = model.fit(rows.x, rows.labels).decision_function(rows.tested)
    return scores, (scores > 0).astype(np.int64)


def by_smote(rows: Rows) -> Scores:
    """Return the scores of a regression on rows to which SMOTE adds rare ones."""
    from imblearn.over_sampling import SMOTE
    from sklearn.linear_model import LogisticRegression

    def one(x: Floats, y: Floats, value: float) -> Fitted:
        near = min(5, int(np.bincount(y).min()) - 1)
        more = SMOTE(random_state=rows.seed, k_neighbors=near).fit_resample(x, y) if near > 0 else (x, y)
        model = LogisticRegression(C=value, max_iter=300, tol=1e-3).fit(*more)
        return lambda z: np.asarray(model.decision_function(z))

    return chosen(rows, one, STRENGTHS[:-1])


def by_ensemble(rows: Rows, name: str) -> Scores:
    """Return the scores of ensembles on balanced parts, which decide by themselves."""
    from imblearn.ensemble import BalancedRandomForestClassifier, EasyEnsembleClassifier

    if name == "EasyEnsemble":
        model: Any = EasyEnsembleClassifier(random_state=rows.seed)
    else:
        model = BalancedRandomForestClassifier(
            500, random_state=rows.seed, sampling_strategy="all", replacement=True, bootstrap=False
        )
    shares = np.clip(model.fit(rows.x, rows.labels).predict_proba(rows.tested), 1e-6, 1)
    scores = np.log(shares[:, 1] / shares[:, 0])
    return scores, (scores > 0).astype(np.int64)


def by_svm(rows: Rows) -> Scores:
    """Return the scores of a linear support vector machine."""
    from sklearn.svm import SVC

    train, test = rows.turned
    both = np.concatenate([train, test])
    kernel = both @ train.T / np.trace(train @ train.T) * len(train)
    index = np.arange(len(both), dtype=np.float64)[:, None]

    def one(own: Floats, y: Floats, value: float) -> Fitted:
        places = own[:, 0].astype(int)
        model = SVC(C=value, kernel="precomputed", class_weight="balanced").fit(kernel[np.ix_(places, places)], y)
        return lambda z: np.asarray(model.decision_function(kernel[np.ix_(z[:, 0].astype(int), places)]))

    by_place = Rows.__new__(Rows)
    for name in ("labels", "groups", "seed"):
        object.__setattr__(by_place, name, getattr(rows, name))
    object.__setattr__(by_place, "turned", (index[: len(train)], index[len(train) :]))
    return chosen(by_place, one, 10.0 ** np.arange(-4.0, 1.01, 1.0))


def by_ridge(rows: Rows) -> Scores:
    """Return the scores of a regression on +1 and -1 with squared loss, classes weighted."""

    def one(x: Floats, y: Floats, value: float) -> Fitted:
        weight = (len(y) / (2 * np.bincount(y)))[y]
        target = 2.0 * y - 1
        mean, centre = np.average(x, axis=0, weights=weight), np.average(target, weights=weight)
        own = (x - mean) * np.sqrt(weight)[:, None]
        penalty = value * (own**2).sum() / len(y)
        dual = np.linalg.solve(own @ own.T + penalty * np.eye(len(y)), np.sqrt(weight) * (target - centre))
        w = own.T @ dual
        return lambda z: (z - mean) @ w + centre

    return chosen(rows, one, 10.0 ** np.arange(-2.0, 3.01, 1.0))


def by_lda(rows: Rows) -> Scores:
    """Return the scores of a linear discriminant with a shrunk covariance."""

    def one(x: Floats, y: Floats, value: float) -> Fitted:
        means = np.stack([x[y == label].mean(0) for label in (0, 1)])
        own = (x - means[y]) / np.sqrt(len(y))
        level = value * (own**2).sum() / x.shape[1] / (1 - value)
        # The inverse of a multiple of 1 plus a sum of few products, by Woodbury.
        gap = means[1] - means[0]
        w = (gap - own.T @ np.linalg.solve(own @ own.T + level * np.eye(len(y)), own @ gap)) / level
        return lambda z: (z - means.mean(0)) @ w

    return chosen(rows, one, (0.01, 0.03, 0.1, 0.3, 0.6, 0.9, 0.99))


def by_neighbours(rows: Rows) -> Scores:
    """Return how many of the nearest rows are of each class, as a share of those that there are."""

    def one(x: Floats, y: Floats, value: float) -> Fitted:
        prior = np.bincount(y)[1] / len(y)

        def score(z: Floats) -> Floats:
            apart = (z**2).sum(1)[:, None] - 2 * z @ x.T + (x**2).sum(1)
            near = np.argpartition(apart, min(int(value), len(y)) - 1, axis=1)[:, : int(value)]
            rare = y[near].sum(1)
            return np.log((rare + prior) / (value - rare + 1 - prior))

        return score

    return chosen(rows, one, (1, 3, 5, 9, 15, 25, 45))


def by_mean(rows: Rows) -> Scores:
    """Return how much nearer the mean of class 1 is."""

    def one(x: Floats, y: Floats, value: float) -> Fitted:
        means = np.stack([x[y == label].mean(0) for label in (0, 1)])
        return lambda z: ((z - means[0]) ** 2).sum(1) - ((z - means[1]) ** 2).sum(1)

    return chosen(rows, one, (0.0,))


PEERS: dict[str, Callable[[Rows], Scores]] = {
    "class weights": lambda rows: by_regression(rows, weighted=True),
    "class weights, as by hand": by_hand,
    "ridge": by_ridge,
    "shrunk LDA": by_lda,
    "neighbours": by_neighbours,
    "nearest mean": by_mean,
    "linear SVM": by_svm,
    "balanced forest": lambda rows: by_ensemble(rows, "balanced forest"),
    "EasyEnsemble": lambda rows: by_ensemble(rows, "EasyEnsemble"),
    "SMOTE": by_smote,
}
"""What is trained on the features of ``quick``."""
OWN = ("colours alone", "16 x 16 pixels", "ResNet-50")
"""Methods with features of their own."""
METHODS = (*RECIPES, *PEERS, *OWN, TIMED)
BESIDE = ("quick", FEWER, TIMED)
"""What ``scratch`` compares."""


class Images:
    """The images of a data set, with the features of ``quick`` and of the methods that have their own."""

    def __init__(self, data: str, resnet50: str | None = None) -> None:
        self.source = study.open_data("isic" if data == "few" else data)
        self.labels = self.source.labels
        size = len(self.source)
        self.groups = np.arange(size).astype(str) if self.source.groups is None else self.source.groups
        self.rows = np.arange(size)
        self._resnet50, self._known = resnet50, {}

    def features(self, kind: str) -> tuple[Floats, Floats | None]:
        """Return features of all images and how much each weighs."""
        if kind not in self._known:
            self._known[kind] = self._compute(kind)
        return self._known[kind]

    def _compute(self, kind: str) -> tuple[Floats, Floats | None]:
        if kind == "quick":
            return recipe_features(self.source, "quick")
        if kind == "ResNet-50":
            assert self._resnet50 is not None
            return shared.features_of(self.source, *shared.frozen_model("resnet50", self._resnet50, 224)), None
        side = 16 if kind.startswith("16") else 224
        places = np.arange(len(self.source))
        batches = StreamedInputs(self.source.images, side, 3, 1).batches(np.array_split(places, len(places) // 64 + 1))
        if side == 16:
            return np.concatenate([np.asarray(batch).reshape(len(batch), -1) for _, batch in batches]), None
        return np.concatenate([study.Pixels()(batch / 255).numpy() for _, batch in batches]), None


def recipe_features(source: Source, name: str) -> tuple[Floats, Floats | None]:
    """Return the features that a recipe classifies, and how much its regression weighs each."""
    recipe = named_recipe(name)
    assert recipe.encoder.weights is not None
    model, card = shared.frozen_model(
        recipe.encoder.name, recipe.encoder.weights, recipe.data.image_size, scaling=recipe.encoder.scaling
    )
    scorer = Scorer(model, card)
    digests = source.images.digest(np.arange(len(source)))
    features = scorer.features(StreamedInputs(source.images, card.image_size, 3, 1), digests)
    x = np.asarray(scorer.engine.scale(features))
    return x, shared.importance(recipe.encoder.name, x.shape[1])


def by_recipe(name: str, source: Source, train: Floats, rest: Floats, seed: int, **more: object) -> Scores:
    """Return the scores and decisions of a recipe, as ``lopsided fit`` trains it, with ``more`` changed fields."""
    fields = {"seed": seed, "data.test": 0.0, "threads": 1, "compare_quick": False}
    recipe = named_recipe(name).override(**fields, **more)
    found = fit(recipe, source.subset(train), held_out=source.subset(rest)).held_out
    assert found is not None
    odds = np.log(np.clip(found.probabilities, 1e-12, 1))
    return odds[:, 1] - odds[:, 0], found.y_pred


def timed_fields(data: str) -> dict[str, object]:
    """Return the changes of ``from-scratch`` for ``TIMED``."""
    fields = {"method": "end-to-end", "encoder_training.loss": "weighted-ce", "data.val": 0.0}
    size = None if data == "tops" else 64
    return {**fields, "encoder_training.epochs": EPOCHS[data], "data.image_size": size}


def fewer(labels: Floats, cell: str, seed: int) -> Floats:
    """Return the rows of a draw of the tops that a method from scratch trains on, without its validation images."""
    from lopsided.data.images import ArrayImages
    from lopsided.data.scenarios import draw, parse_scenario
    from lopsided.data.splits import split

    drawn = draw(labels, shared.TOPS, parse_scenario(f"{cell},total=1000"), seed)
    blank = ArrayImages(np.zeros((len(drawn), 1, 1, 1), dtype=np.uint8))
    source = Source("tops", blank, labels[drawn], shared.TOPS, tuple(map(str, range(len(drawn)))))
    return drawn[split(source, how="stratified", val=0.15, test=0.3, seed=seed).train]


def run_cell(data: str, cell: str, seed: int, method: str, images: Images) -> Iterator[Answers]:
    """Yield the answers of a method in each fold of a repeat."""
    folds, grouped = study.pairs(data, cell, seed, images)  # type: ignore[arg-type]
    for fold, (train, rest) in enumerate(folds):
        labels = images.labels[train].astype(np.int64)
        if method in RECIPES:
            own = fewer(images.labels, cell, seed) if method == FEWER else train
            scores, decided = by_recipe(method.partition(",")[0], images.source, own, rest, seed)
        elif method == TIMED:
            scores, decided = by_recipe("from-scratch", images.source, train, rest, seed, **timed_fields(data))
        else:
            x, weights = images.features(method if method in OWN else "quick")
            rows = Rows(x[train], labels, images.groups[train] if grouped else None, x[rest], weights, seed)
            with threadpool_limits(1):
                scores, decided = PEERS.get(method, by_regression)(rows)
        names = [images.source.names[row] for row in rest]
        groups = list(images.groups[rest]) if grouped else None
        yield Answers(data, cell, seed, fold, method, names, images.labels[rest], decided, scores, groups)


def metrics(folds: Sequence[Answers]) -> dict[str, float]:
    """Return the metrics of the folds of one repeat, in percent."""
    areas, recalls = [], []
    for one in folds:
        rare, others = one.scores[one.labels == 1], one.scores[one.labels == 0]
        areas.append(100 * shared.rank_auroc(one.scores, one.labels == 1))
        recalls.append(100 * float((rare > np.quantile(others, SPECIFICITY)).mean()))
    return {
        "uwa": answers.balanced_accuracy(folds),
        "auroc": float(np.mean(areas)),
        "recall": float(np.mean(recalls)),
    }


def gathered(found: Iterable[Answers]) -> dict[Any, Methods]:
    """Return answers by setting, method and repeat."""
    tables: dict[Any, Methods] = {}
    for one in found:
        methods = tables.setdefault((one.data, one.cell), {})
        methods.setdefault(one.method, {}).setdefault(one.repeat, []).append(one)
    return tables


def table(found: Iterable[Answers]) -> str:
    """Return a row for each setting and method, the highest balanced accuracy first."""
    rows = []
    for key, methods in sorted(gathered(found).items(), key=study.place):
        runs = {name: {seed: metrics(folds) for seed, folds in repeats.items()} for name, repeats in methods.items()}
        for name in sorted(runs, key=lambda one: -np.mean([line["uwa"] for line in runs[one].values()])):
            own, base = runs[name], runs["quick"]
            cells = [shared.shown(mean_interval([line["uwa"] for line in own.values()]))]
            share = None if key[0] == "tops" else 0.25
            cells += ["", ""] if name == "quick" else differences(methods, name, "quick", share)
            cells += [shared.mean_of(own, "auroc"), shared.minus(own, base, "auroc"), shared.mean_of(own, "recall")]
            rows.append((*key, name, len(own), *cells))
    head = "data | setting | method | repeats | balanced accuracy | minus quick [other images]"
    return shared.table(
        f"{head} | minus quick, other training images too | AUROC | minus quick | recall at 90 % specificity", rows
    )


def differences(methods: Methods, name: str, base: str, share: float | None) -> list[str]:
    """Return the difference of two methods with two kinds of intervals, over the repeats and folds that both have.

    The first is the cluster bootstrap of the test images. The second is Student's over folds and repeats, corrected for
    overlapping training images (Nadeau and Bengio) with ``share`` test images per training image, unless it is None.
    """
    sides = [{(seed, one.fold): one for seed, folds in methods[side].items() for one in folds} for side in (name, base)]
    pairs = [(sides[0][key], sides[1][key]) for key in sorted(sides[0].keys() & sides[1].keys())]
    whole = answers.bootstrap([one for one, _ in pairs], [other for _, other in pairs], rounds=500)
    shown = f"{whole.value:+.1f} [{whole.low:+.1f}, {whole.high:+.1f}]"
    if len(pairs) < 2:
        return [shown, ""]
    gains = [answers.balanced_accuracy([one]) - answers.balanced_accuracy([other]) for one, other in pairs]
    overlap = 0.0 if share is None else fold_overlap([share] * len(pairs), [1.0] * len(pairs))
    return [shown, shared.shown(mean_interval(gains, overlap=overlap), sign=True)]


def taken(data: str, cell: str) -> str:
    """Return the recipe that ``lopsided fit`` takes by itself in a setting."""
    rare, others, side = IMAGES[data]
    counts = (rare, others) if rare else (study.RARE_TOPS[cell], others - study.RARE_TOPS[cell])
    return usual_recipe(counts, ArrayImages(np.zeros((sum(counts), 1, side, 1), dtype=np.uint8)))[0]


def short(found: Iterable[Answers]) -> str:
    """Return a row for each setting, over the repeats that all have: recipes, best peer, class weights by hand.

    ``fit`` is the recipe that it takes by itself.
    """
    rows = []
    for (data, cell), methods in sorted(gathered(found).items(), key=study.place):
        own = [repeats.keys() for name, repeats in methods.items() if name in PEERS or name == "quick"]
        common = set.intersection(*map(set, own))
        means = {
            name: float(np.mean([metrics(repeats[seed])["uwa"] for seed in common]))
            for name, repeats in methods.items()
            if common and common <= repeats.keys()
        }
        if not any(name in PEERS for name in means):
            continue
        peers = {name: value for name, value in means.items() if name in PEERS}
        best = max(peers, key=lambda name: peers[name])
        what = {"few": f"skin lesions, {cell}", "isic": "skin lesions, 92 rare"}
        what["tops"] = f"T-shirts at {cell}, {study.RARE_TOPS.get(cell)} rare"
        recipes = [f"{means[name]:.1f}" if name in means else "" for name in RECIPES[:2]]
        usual = taken(data, cell)
        recipes.insert(0, f"{means[usual]:.1f} ({usual})" if usual in means else "")
        by = [f"{means[name]:.1f}" if name in means else "" for name in ("class weights", "class weights, as by hand")]
        rows.append((what[data], len(common), *recipes, f"{peers[best]:.1f} ({best})", *by))
    head = "images | repeats | `fit` | quick | thorough | best peer, chosen afterwards"
    return shared.table(f"{head} | class weights | class weights, C = 1", rows)


def scratch(found: Iterable[Answers]) -> str:
    """Return a row for each setting: ``quick`` and training from scratch, with as many images or in as many minutes."""
    import from_scratch

    lines = [line for line in from_scratch.read(from_scratch.RECORD) if line["compared_as"] == from_scratch.BASE]
    records = shared.nested(
        ({"uwa": from_scratch.figures(line)["balanced"], **line} for line in lines), "scenario", "seed"
    )
    rows = []
    for (data, cell), methods in sorted(gathered(found).items(), key=study.place):
        runs = {name: {seed: metrics(folds) for seed, folds in methods.get(name, {}).items()} for name in BESIDE}
        runs["record"] = records.get(cell, {}) if data == "tops" else {}
        cells = [
            cell_ for pair in (("record", FEWER), (TIMED, "quick")) for cell_ in beside(*(runs[one] for one in pair))
        ]
        if any(cells):
            rows.append((data, cell, *cells))
    head = "data | setting | repeats | quick, 550 images | from scratch, 550 images | difference"
    return shared.table(f"{head} | repeats | quick | from scratch, time of quick | difference", rows)


def beside(runs: shared.Runs, base: shared.Runs) -> list[str]:
    """Return the number of repeats that both have, the means of the base and of the other, and the difference."""
    both = runs.keys() & base.keys()
    if not both:
        return [""] * 4
    own, other = ({seed: side[seed] for seed in sorted(both)} for side in (runs, base))
    return [str(len(both)), shared.mean_of(other, "uwa"), shared.mean_of(own, "uwa"), shared.minus(own, other, "uwa")]


def main() -> None:
    """Compute the missing answers, or print a table."""
    parser = shared.parser(__doc__)
    parser.add_argument("what", choices=["run", "table", "short", "scratch"])
    parser.add_argument("data", choices=["isic", "few", "tops"], nargs="?")
    parser.add_argument("--methods", help="separated by semicolons; default: all")
    parser.add_argument("--only", help="one setting, such as 98:2")
    parser.add_argument("--seeds", help="such as 0-5")
    parser.add_argument("--resnet50", help="a file of ImageNet weights")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing later than this")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what != "run":
        print({"table": table, "short": short, "scratch": scratch}[given.what](answers.read(ANSWERS)))
        return
    begin, images = time.monotonic(), Images(given.data, given.resnet50)
    known = {(one.data, one.cell, one.repeat, one.method) for one in answers.read(ANSWERS)}
    cells = {"tops": study.SCENARIOS[1:], "few": ("10 rare",)}.get(given.data) or study.cells_of(given.data)
    methods = given.methods.split(";") if given.methods else [m for m in METHODS if m != "ResNet-50" or given.resnet50]
    methods = [method for method in methods if method != FEWER or given.data == "tops"]
    for seed in shared.seeds_of(given.seeds or ("0-5" if given.data == "tops" else "0-2")):
        for cell, method in ((c, m) for c in cells if given.only in (None, c) for m in methods):
            if (given.data, cell, seed, method) in known or time.monotonic() - begin > 60 * given.minutes:
                continue
            start = time.process_time()
            found = list(run_cell(given.data, cell, seed, method, images))
            for one in found:
                answers.add(ANSWERS, one)
            seconds = time.process_time() - start
            print(f"{given.data} {cell} {seed} {method}: {metrics(found)} {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
