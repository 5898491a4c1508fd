"""The catalogue of losses: the single list for recipes, the command, the estimator, records, reports and tests.

An entry holds the name of a loss, its inputs, its parameters and the location of its code. Reading the catalogue does
not need torch; ``Loss.load`` imports the code. An installed package can add an entry through an entry point of the
group ``lopsided.losses``. The name of the entry point is the name of the loss, and its object is a ``Loss``.
"""

from __future__ import annotations

import difflib
import importlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lopsided.losses.objective import Objective

Kind = Literal["contrastive", "classification", "joint"]
Value = float | int | bool | str

GROUP = "lopsided.losses"
"""The group of entry points through which other packages add losses."""

MAX_PARITY_ETA = 20.0
"""A larger eta in units of parity is probably meant as absolute: the paper's 60 to 300 are 0.1 to 0.5 at batch 128."""

_NEEDS: dict[str, frozenset[str]] = {
    "contrastive": frozenset({"projections"}),
    "classification": frozenset({"logits"}),
    "joint": frozenset({"projections", "logits"}),
}


_RESERVED = {
    "name",
    "entry",
    "parameters",
    "label",
    "words",
    "switched",
    "model_dump",
    "copy",
    "json",
    "dict",
    "schema",
}
"""Names that a loss's table in a recipe uses itself."""


class CatalogueError(ValueError):
    """Raised for a loss that is not in the catalogue, and for an invalid entry of another package."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a loss. Its type is the type of ``default``: float, int, bool or str.

    A number must be >= ``least``, > ``above`` and <= ``most``, where these are given. A string must be one of
    ``choices``.
    """

    name: str
    default: Value
    description: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loss:
    """An entry of the catalogue.

    ``objective`` is the loss's :class:`~lopsided.losses.objective.Objective`, as a class or as "module:Class".
    ``complete`` is an optional function that fills in missing parameters from the given ones. ``check`` is an optional
    function that returns a sentence if parameters contradict each other, otherwise None. ``pushes`` names the parameter
    that, if it is above 0, lets an anchor without a positive in its batch learn.

    ``reweighs`` is an optional function of the class counts and the parameters. The trained probabilities carry the
    class shares of the batches times the factors that it returns. Without it, they carry the shares of the batches.
    ``carries`` is for a loss that changes the shares in another way: an optional function of the shares of the batches,
    the class counts and the parameters that returns the shares that the probabilities carry.

    ``head`` is the classifier that returns the logits: "linear", or "cosine" for logits that are cosines times the
    loss's parameter ``scale``. ``views`` is the least number of views of an image that the loss needs. ``classes`` is
    the number of classes if the loss is for that number only.

    ``soft_labels`` says that the loss may be used with mixed images: lambda times the loss for one label plus 1 -
    lambda times the loss for another label. ``class_weights`` says that the parts of the loss may be multiplied by
    weights of the classes (see :meth:`~lopsided.losses.objective.Objective.apart`), and that the loss has no weights of
    its own. ``defers`` names the parameter that is the share of the epochs after which a loss weights classes itself.
    """

    name: str
    kind: Kind
    title: str
    objective: str | type[Objective]
    parameters: tuple[Parameter, ...] = ()
    short: str = ""
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    check: Callable[[Mapping[str, Any]], str | None] | None = None
    pushes: str | None = None
    reweighs: Callable[[Sequence[int], Mapping[str, Any]], Sequence[float]] | None = None
    carries: Callable[[Sequence[float], Sequence[int], Mapping[str, Any]], Sequence[float]] | None = None
    head: Literal["linear", "cosine"] = "linear"
    views: int = 1
    classes: int | None = None
    soft_labels: bool = False
    class_weights: bool = False
    defers: str | None = None

    @property
    def needs(self) -> frozenset[str]:
        """The inputs of the loss: "projections", "logits", or both."""
        return _NEEDS[self.kind]

    @property
    def label(self) -> str:
        """The short name for tables and figures."""
        return self.short or self.name.upper()

    def defaults(self) -> dict[str, Value]:
        """Return the default of every parameter, by name."""
        return {parameter.name: parameter.default for parameter in self.parameters}

    def load(self) -> type[Objective]:
        """Import the class of the loss and return it."""
        if not isinstance(self.objective, str):
            return self.objective
        module, _, name = self.objective.partition(":")
        try:
            found: type[Objective] = getattr(importlib.import_module(module), name)
        except Exception as error:  # Another package may raise anything while it is imported.
            text = f"The class of the loss {self.name}, {self.objective}, cannot be imported ({_told(error)})."
            raise CatalogueError(text) from error
        return found

    def describe(self, values: Mapping[str, Any]) -> str:
        """Return the label of the loss with the parameters that differ from their defaults.

        >>> find("afcl").describe({"eta": 300.0, "eta_unit": "absolute", "gamma": 2.0})
        'AFCL(eta=300, eta_unit=absolute)'
        """
        changed = [
            f"{name}={values[name]:g}" if isinstance(default, float) else f"{name}={values[name]}"
            for name, default in self.defaults().items()
            if values.get(name, default) != default
        ]
        return f"{self.label}({', '.join(changed)})" if changed else self.label


_TEMPERATURE = Parameter("temperature", 0.07, "Divides the similarities.", least=1e-6, most=1e6)
_NORMALIZATION = Parameter(
    "normalization",
    "paper",
    "Divisors of the sums: as in the paper's formula, or as in the authors' released code.",
    choices=("paper", "released"),
)
_ETA = Parameter(
    "eta", 0.5, "Weight of the term of the negatives. The default is 0.5 in parity, 300 in absolute.", least=0
)
_ETA_UNIT = Parameter(
    "eta_unit",
    "parity",
    "absolute: the paper's eta. parity: in units of (n-1) log(n-1), which makes both terms equal in a batch of n.",
    choices=("absolute", "parity"),
)


def _gamma(default: float, text: str) -> Parameter:
    return Parameter("gamma", default, text, least=0)


def _paper_eta(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"eta": 300.0, **values} if values.get("eta_unit") == "absolute" else values


def _check_eta(values: Mapping[str, Any]) -> str | None:
    if values["eta_unit"] == "parity" and values["eta"] > MAX_PARITY_ETA:
        return (
            f"eta is {values['eta']:g} in units of parity, but at most {MAX_PARITY_ETA:g} is plausible. "
            "For the paper's scale, set eta_unit=absolute."
        )
    return None


def _inverse(counts: Sequence[int], _: Mapping[str, Any]) -> list[float]:
    """Return weights in inverse proportion to the counts, as class-weighted losses use them."""
    return [1 / max(count, 1) for count in counts]


def _effective(counts: Sequence[int], values: Mapping[str, Any]) -> list[float]:
    """Return the weights by the effective number of samples, (1 - beta) / (1 - beta^n)."""
    beta = values["beta"]
    if beta == 1:
        return _inverse(counts, values)
    log_beta = math.log(beta) if beta > 0 else -math.inf
    return [(1 - beta) / -math.expm1(max(count, 1) * log_beta) for count in counts]


def _deferred(counts: Sequence[int], values: Mapping[str, Any]) -> list[float]:
    """Return the weights of the last epochs, or equal weights if they never start."""
    return _effective(counts, values) if values["defer"] < 1 else [1.0] * len(counts)


def _smoothed(shares: Sequence[float], counts: Sequence[int], values: Mapping[str, Any]) -> list[float]:
    """Return the mean of the smoothed labels: class c keeps 1 - e_c of its share and gives e_c to the others."""
    numbers = [max(count, 1) for count in counts]
    low, high = min(numbers), max(numbers)
    head, tail = values["smooth_head"], values["smooth_tail"]
    position = [(n - low) / (high - low) if high > low else 1.0 for n in numbers]
    gives = [
        share * (tail + (head - tail) * math.sin(math.pi / 2 * x)) for share, x in zip(shares, position, strict=True)
    ]
    others = len(counts) - 1
    # A class without images gets a part of the smoothed labels, but no rule should decide for it.
    mean = [share - give + (sum(gives) - give) / others for share, give in zip(shares, gives, strict=True)]
    return [value if share > 0 else 0.0 for value, share in zip(mean, shares, strict=True)]


def _focused(shares: Sequence[float], counts: Sequence[int], values: Mapping[str, Any]) -> list[float]:
    """Return the probabilities with the least mean focal loss of images that say nothing about their class.

    They are less extreme than the shares: sure answers count less. The sum over classes of s_c (1 - p_c)^gamma
    (-log p_c) is least where s_c h(p_c) is the same for all classes, with h(p) = (1 - p)^gamma / p - gamma
    (1 - p)^(gamma - 1) log p, which falls. For two classes p grows with the posterior, so p divided by this prior
    crosses 1 where the posterior crosses the share.
    """
    gamma = float(values["gamma"])

    def slope(p: float) -> float:
        focus = math.pow(1 - p, gamma)
        return focus / p - (gamma * focus / (1 - p) * math.log(p) if gamma else 0.0)

    def bisect(is_low: Callable[[float], bool], low: float, high: float) -> float:
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if is_low(middle) else (low, middle)
        return (low + high) / 2

    def probability(share: float, level: float) -> float:
        return bisect(lambda p: share * slope(p) > level, 0.0, 1.0) if share > 0 else 0.0

    def is_loose(log_level: float) -> bool:
        return sum(probability(share, math.exp(log_level)) for share in shares) > 1

    if sum(share > 0 for share in shares) < 2:
        return list(shares)
    level = math.exp(bisect(is_loose, -40.0, 40.0))
    return [probability(share, level) for share in shares]


def _check_smoothing(values: Mapping[str, Any]) -> str | None:
    if values["smooth_tail"] > values["smooth_head"]:
        head, tail = (f"{values[name]:g}" for name in ("smooth_head", "smooth_tail"))
        return f"smooth_tail is {tail}, but smooth_head is only {head}. Frequent classes get smoother labels."
    return None


_BETA = Parameter(
    "beta",
    0.9999,
    "Weights by the effective number of samples. 0: equal weights; 1: in inverse proportion to the counts.",
    least=0,
    most=1,
)
_SCALE = Parameter("scale", 30.0, "Multiplies the cosines of the classifier.", above=0, most=1e6)

_CONTRASTIVE = "lopsided.losses.contrastive:ContrastiveObjective"
_FOCUS = "Focusing exponent of the term of the positives."

_BUILT_IN = (
    Loss(
        "cl",
        "contrastive",
        "Supervised contrastive loss",
        _CONTRASTIVE,
        (_TEMPERATURE, _NORMALIZATION),
        class_weights=True,
    ),
    Loss(
        "fcl",
        "contrastive",
        "Focal contrastive loss",
        _CONTRASTIVE,
        (_gamma(1.0, _FOCUS), _TEMPERATURE, _NORMALIZATION),
        class_weights=True,
    ),
    Loss(
        "acl",
        "contrastive",
        "Asymmetric contrastive loss",
        _CONTRASTIVE,
        (_ETA, _ETA_UNIT, _TEMPERATURE, _NORMALIZATION),
        complete=_paper_eta,
        check=_check_eta,
        pushes="eta",
        class_weights=True,
    ),
    Loss(
        "afcl",
        "contrastive",
        "Asymmetric focal contrastive loss",
        _CONTRASTIVE,
        (_ETA, _ETA_UNIT, _gamma(2.0, _FOCUS), _TEMPERATURE, _NORMALIZATION),
        complete=_paper_eta,
        check=_check_eta,
        pushes="eta",
        class_weights=True,
    ),
    Loss(
        "averaged-cl",
        "contrastive",
        "Class-averaged contrastive loss",
        "lopsided.losses.bcl:AveragedObjective",
        (_TEMPERATURE,),
        short="averaged CL",
        class_weights=True,
    ),
    Loss(
        "ce",
        "classification",
        "Cross-entropy",
        "lopsided.losses.classification:CrossEntropyObjective",
        soft_labels=True,
        class_weights=True,
    ),
    Loss(
        "weighted-ce",
        "classification",
        "Class-weighted cross-entropy",
        "lopsided.losses.classification:WeightedCrossEntropyObjective",
        short="weighted CE",
        reweighs=_inverse,
        soft_labels=True,
    ),
    Loss(
        "focal",
        "classification",
        "Focal loss",
        "lopsided.losses.classification:FocalObjective",
        (_gamma(2.0, "Focusing exponent."),),
        short="focal",
        carries=_focused,
        soft_labels=True,
        class_weights=True,
    ),
    Loss(
        "logit-adjusted",
        "classification",
        "Logit-adjusted cross-entropy (balanced softmax)",
        "lopsided.losses.logit_adjusted:LogitAdjustedObjective",
        (
            Parameter(
                "tau", 1.0, "Weight of the logarithms of the class shares. 1 is balanced softmax.", least=0, most=10
            ),
        ),
        short="logit-adjusted",
        # Adjustment adds tau log n to the logits in training, and the model predicts without it.
        reweighs=lambda counts, values: [max(count, 1) ** -values["tau"] for count in counts],
        soft_labels=True,
    ),
    Loss(
        "class-balanced",
        "classification",
        "Class-balanced cross-entropy (effective number of samples)",
        "lopsided.losses.class_balanced:ClassBalancedObjective",
        (_BETA,),
        short="class-balanced",
        reweighs=_effective,
        soft_labels=True,
    ),
    Loss(
        "label-aware-smoothing",
        "classification",
        "Cross-entropy with label-aware smoothing",
        "lopsided.losses.label_aware:LabelAwareSmoothingObjective",
        (
            Parameter("smooth_head", 0.3, "Smoothing of the most frequent class.", least=0, most=0.999),
            Parameter("smooth_tail", 0.0, "Smoothing of the rarest class.", least=0, most=0.999),
        ),
        short="LAS",
        check=_check_smoothing,
        carries=_smoothed,
        soft_labels=True,
        class_weights=True,
    ),
    Loss(
        "ldam",
        "classification",
        "LDAM with deferred re-weighting",
        "lopsided.losses.ldam:LDAMObjective",
        (
            Parameter("max_margin", 0.5, "Margin of the rarest class, between cosines.", least=0, most=1),
            _SCALE,
            _BETA,
            Parameter("defer", 0.8, "Share of the epochs before samples are weighted. 1: never.", least=0, most=1),
        ),
        reweighs=_deferred,
        head="cosine",
        soft_labels=True,
        defers="defer",
    ),
    Loss(
        "bcl",
        "joint",
        "Balanced contrastive learning with logit-adjusted cross-entropy",
        "lopsided.losses.bcl:BCLObjective",
        (
            Parameter("ce_weight", 1.0, "Weight of the logit-adjusted cross-entropy.", least=0),
            Parameter("contrast_weight", 0.35, "Weight of the balanced contrastive loss.", least=0),
            _TEMPERATURE,
            _SCALE,
        ),
        pushes="contrast_weight",
        reweighs=_inverse,
        head="cosine",
    ),
    Loss(
        "supmin",
        "contrastive",
        "Supervised minority",
        "lopsided.losses.supmin:SupMinObjective",
        (_TEMPERATURE,),
        short="SupMin",
        views=2,
        classes=2,
    ),
    Loss(
        "supproto",
        "contrastive",
        "Supervised prototypes",
        "lopsided.losses.supproto:SupProtoObjective",
        (
            Parameter("margin", 1.0, "How much nearer to its own prototype a feature must be.", least=0, most=2),
            _TEMPERATURE,
        ),
        short="SupProto",
        views=2,
        classes=2,
    ),
)
BUILT_IN = {loss.name: loss for loss in _BUILT_IN}


@cache
def _added() -> dict[str, list[EntryPoint]]:
    """Return the entry points of other packages by name, without importing them."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


def names() -> list[str]:
    """Return the names of all losses: first those of this package, then those of other packages."""
    return [*BUILT_IN, *sorted(_added().keys() - BUILT_IN.keys())]


def problems() -> list[str]:
    """Return a sentence for each loss of another package that cannot be used."""
    found = [
        f"The loss {name!r} of {_package(point)} is ignored, because lopsided has a loss of this name. Rename it there."
        for name in BUILT_IN
        for point in _added().get(name, ())
    ]
    for name in names():
        try:
            find(name)
        except CatalogueError as error:
            found.append(str(error))
    return found


def _package(point: EntryPoint) -> str:
    return f"the module {point.module}" if point.dist is None else f"the package {point.dist.name}"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


@contextmanager
def running(loss: Loss, what: str) -> Iterator[None]:
    """Run code of a loss. If the loss is of another package, an error becomes a ``CatalogueError`` that names both.

    ``what`` names the part that runs, such as "its function complete".
    """
    try:
        yield
    except (CatalogueError, MemoryError):
        raise
    except Exception as error:
        if loss.name in BUILT_IN or loss.name not in _added():
            raise
        whose = f"The loss {loss.name!r} of {_package(_added()[loss.name][0])}"
        do = "Correct that package, or choose another loss."
        raise CatalogueError(f"{whose} failed in {what} ({_told(error)}). {do}") from error


@cache
def find(name: str) -> Loss:
    """Return the entry of a loss. If another package adds the loss, import that package only."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name not in _added():
        near = difflib.get_close_matches(name[:100], names(), n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        shown = repr(name) if len(name) <= 80 else f"{name[:60]!r}..."
        raise CatalogueError(f"There is no loss {shown}; the losses are {', '.join(names())}.{hint}")
    point, *others = _added()[name]
    if others:
        packages = " and ".join(map(_package, (point, *others)))
        raise CatalogueError(f"{packages[:1].upper()}{packages[1:]} add a loss {name!r}. Uninstall all but one.")
    where = f"The loss {name!r} from {point.value}"
    try:
        loss = point.load()
    except Exception as error:  # Other packages may raise anything; the user gets one sentence.
        raise CatalogueError(f"{where} cannot be imported ({_told(error)}).") from error
    try:
        problem = _problem(loss, name)
    except Exception as error:  # A field of the entry has an unexpected type.
        problem = f"has an entry that cannot be read ({_told(error)})"
    if problem:
        raise CatalogueError(f"{where} {problem}.")
    assert isinstance(loss, Loss)
    return loss


def _problem(loss: object, name: str) -> str:
    """Return why an object of another package cannot be an entry, or "" if it can."""
    if not isinstance(loss, Loss):
        return f"must be a lopsided.losses.catalogue.Loss, got {type(loss).__name__}"
    if loss.name != name:
        return f"has another name in its entry, {loss.name!r}"
    if loss.kind not in _NEEDS:
        return f"has the unknown kind {loss.kind!r}; the kinds are {', '.join(_NEEDS)}"
    names = [getattr(parameter, "name", None) for parameter in loss.parameters]
    found = [_parameter_problem(parameter) for parameter in loss.parameters]
    found += [f"has two parameters with the name {name!r}" for name in names if names.count(name) > 1]
    for field in ("pushes", "defers"):
        named = getattr(loss, field)
        if named is not None and named not in names:
            found.append(f"names {named!r} in {field}, which is not one of its parameters")
    if loss.soft_labels and loss.kind != "classification":
        found.append(f"has soft_labels, which a loss of the kind {loss.kind!r} cannot take")
    found += [_head_problem(loss, names), _limits_problem(loss)]
    return next(filter(None, found), "")


def _head_problem(loss: Loss, names: Sequence[str | None]) -> str:
    if loss.head not in ("linear", "cosine"):
        return f"has the unknown head {loss.head!r}; the heads are linear, cosine"
    if loss.head == "cosine" and ("logits" not in loss.needs or "scale" not in names):
        return "has a cosine head, but no logits and parameter scale"
    return ""


def _limits_problem(loss: Loss) -> str:
    if type(loss.views) is not int or loss.views < 1:
        return f"needs {loss.views!r} views; give a number >= 1"
    if loss.classes is not None and (type(loss.classes) is not int or loss.classes < 2):
        return f"has classes={loss.classes!r}; give a number >= 2 or None"
    return ""


def _parameter_problem(parameter: object) -> str:
    if not isinstance(parameter, Parameter):
        return f"has a parameter that is not a lopsided.losses.catalogue.Parameter: {parameter!r:.80}"
    name, default, choices = parameter.name, parameter.default, parameter.choices
    if not name.isidentifier() or name.startswith("_") or name in _RESERVED:
        return f"has a parameter with the invalid name {name!r}"
    if not isinstance(default, float | int | bool | str):
        return f"has a parameter {name} whose default is not a number, string or boolean"
    if choices and default not in choices:
        return f"has a parameter {name} whose default {default!r} is not one of {', '.join(map(str, choices))}"
    limits = {">=": parameter.least, ">": parameter.above, "<=": parameter.most}
    broken = ""
    if isinstance(default, str | bool):
        broken = "is not a number, but has a range" if any(limit is not None for limit in limits.values()) else ""
    elif not math.isfinite(default):
        broken = "is not finite"
    else:
        holds = {">=": operator.ge, ">": operator.gt, "<=": operator.le}
        signs = [sign for sign, limit in limits.items() if limit is not None and not holds[sign](default, limit)]
        broken = f"must be {signs[0]} {limits[signs[0]]:g}" if signs else ""
    return f"has a parameter {name} whose default {default!r} {broken}" if broken else ""


def losses(kinds: Iterable[str] = tuple(_NEEDS)) -> list[Loss]:
    """Return the entries of these kinds. Invalid entries of other packages are skipped."""
    found = []
    for name in names():
        try:
            found.append(find(name))
        except CatalogueError:
            continue
    return [loss for loss in found if loss.kind in set(kinds)]
