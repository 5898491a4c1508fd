"""Decision rules as text: how a recipe, the command and the estimator name them.

    plain                          the most probable class
    balanced                       the class whose probability grew most over its share in training
    prevalence:rare=0.02,other=0.98    the most probable class where the classes have these shares
    cost:rare=10,other=1           the class with the least expected cost; the numbers are the costs of missing a class
    cost:[[0, 1], [10, 0]]         the same with a matrix: one row per true class, one column per decided class
    cost:{"rare": {"other": 10}, "other": {"rare": 1}}    the same matrix with names: true class, then decided class
    recall:rare=0.95               this class, where its probability reaches a threshold that finds 95 % of it
    precision:rare=0.5             the same, with a threshold from which on half of the images are of this class
    alarms:rare=100                the same, with a threshold that at most 100 of 10,000 images reach
    false-alarms:rare=0.05         the same, with a threshold that at most 5 % of the images of other classes reach
    threshold:rare=0.013           the same, with this threshold
    tuned                          a weight per class and a temperature, fitted to held-back images
    sets:0.95                      every class that the image may be of, so that each class is in its set with 95 %
    abstain:0.02                   the most probable class where its expected error is below 2 %, otherwise "ask"

Below its threshold, such a rule decides for the best other class by ``balanced``. ``alarms:100`` means the rarest
class. The values of prevalence and cost can also be a JSON object, for class names that contain a comma or an equals
sign.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lopsided.errors import InputError

PER = 10_000
"""The number of images of which a rule ``alarms`` states how many may be called the class."""


@dataclass(frozen=True)
class Kind:
    """What all rules of one name have in common."""

    example: str
    fitted: bool = False
    """Whether the rule is fitted to held-back images."""
    sign: str = ""
    """For a rule with a threshold for one class: what may stand between the class and its number. A shell would open a
    file at < or >, so that = alone means the same, and is what a rule shows.
    """
    most: float = 1.0
    """The number is above 0 and below this."""
    level: str = ""
    """For a rule with one number alone: what it is."""
    by_others: bool = False
    """Whether the threshold is fitted to images of the other classes, so that it needs none of the class."""


KINDS = {
    "plain": Kind("plain"),
    "balanced": Kind("balanced"),
    "prevalence": Kind("prevalence:rare=0.02,other=0.98"),
    "cost": Kind("cost:rare=10,other=1"),
    "recall": Kind("recall:rare=0.95", fitted=True, sign=">="),
    "precision": Kind("precision:rare=0.5", fitted=True, sign=">="),
    "alarms": Kind("alarms:rare=100", fitted=True, sign="<=", most=PER),
    "false-alarms": Kind("false-alarms:rare=0.05", fitted=True, sign="<=", by_others=True),
    "threshold": Kind("threshold:rare=0.013", sign="="),
    "tuned": Kind("tuned", fitted=True),
    "sets": Kind("sets:0.95", fitted=True, level="a level"),
    "abstain": Kind("abstain:0.02", level="an expected error"),
}
"""The kinds of rules by name."""
_SHARES = {"false-alarms": "share of false alarms"}
_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Rule:
    """A parsed rule. The classes that it names are checked when it meets the classes of a model."""

    kind: str
    values: Mapping[str, float] = field(default_factory=dict)
    """The shares of ``prevalence``, or the costs of missing a class."""
    matrix: tuple[tuple[float, ...], ...] = ()
    """The costs as a matrix: one row per true class, one column per decided class."""
    table: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The costs as a matrix with names: true class, then decided class."""
    target: str = ""
    bound: float = 0.0
    """The class of a rule with a threshold, empty for the rarest class, and the number beside it; or a level alone."""

    def __str__(self) -> str:
        if self.bound:
            sign = KINDS[self.kind].sign
            short = sign if self.target.endswith(("<", ">")) else "="
            return f"{self.kind}:{self.target}{short if self.target else ''}{_written(self.bound)}"
        if self.table:
            return f"cost:{json.dumps(self.table, ensure_ascii=False)}"
        if self.matrix:
            return f"cost:{json.dumps([list(row) for row in self.matrix])}"
        if not self.values:
            return self.kind
        if any(set(name) & set(',="{[') or name != name.strip() for name in self.values):
            return f"{self.kind}:{json.dumps(dict(self.values), ensure_ascii=False)}"
        return f"{self.kind}:" + ",".join(f"{name}={_written(value)}" for name, value in self.values.items())

    @property
    def fitted(self) -> bool:
        """Whether the rule must be fitted to held-back images."""
        return KINDS[self.kind].fitted

    @property
    def by_others(self) -> bool:
        """Whether a threshold is fitted to images of the other classes."""
        return KINDS[self.kind].by_others

    @property
    def has_threshold(self) -> bool:
        """Whether the rule decides for one class from a threshold on."""
        return bool(KINDS[self.kind].sign)


def parse_rule(text: str) -> Rule:
    """Parse the text of a rule. Raise an InputError of one or two sentences if the text is not a rule.

    >>> parse_rule("recall:df=0.95"), str(parse_rule("cost:df=10, mel=1"))
    (Rule(kind='recall', values={}, matrix=(), table={}, target='df', bound=0.95), 'cost:df=10,mel=1')
    """
    name, colon, rest = text.strip().partition(":")
    if name not in KINDS:
        raise InputError(f"There is no decision rule {_shown(text)}; the rules are {', '.join(KINDS)}.")
    if name in ("plain", "balanced", "tuned"):
        if colon:
            raise InputError(f"The decision rule {name} takes no values, got {_shown(text)}. Write {name} alone.")
        return Rule(name)
    if not rest.strip():
        raise InputError(f"The decision rule {name} needs values. Example: {KINDS[name].example}.")
    if KINDS[name].sign or KINDS[name].level:
        return (_with_threshold if KINDS[name].sign else _with_level)(name, text, rest)
    if rest.lstrip().startswith(("{", "[")):
        try:
            found = json.loads(rest, object_pairs_hook=_pairs)
        except (ValueError, RecursionError):
            text = f"The values of the decision rule {name} are not valid JSON with one value per class"
            text = f"{text}, got {_shown(rest)}."
            raise InputError(text) from None
        if name == "cost" and isinstance(found, list):
            return Rule("cost", matrix=_matrix(found))
        if name == "cost" and isinstance(found, dict) and any(isinstance(row, dict) for row in found.values()):
            return Rule("cost", table=_table(found))
        pairs = list(found.items()) if isinstance(found, dict) else []
    else:
        pairs = [(key.strip(), value) for key, _, value in (part.rpartition("=") for part in rest.split(","))]
    values = _values(name, rest, pairs)
    total = math.fsum(values.values())
    if name == "prevalence" and abs(total - 1) > _SUM_TOLERANCE:
        raise InputError(f"The shares of a prevalence must add up to 1, got {total:g}. Give one share per class.")
    return Rule(name, values)


def _with_threshold(name: str, text: str, rest: str) -> Rule:
    kind = KINDS[name]
    target, sign, written = rest.rpartition("=")
    target = target.removesuffix(kind.sign[:-1])
    bound = _number(written)
    is_rarest = name == "alarms" and not sign
    if bound is None or not 0 < bound < kind.most or not (target.strip() or is_rarest):
        what = f"a number of images of {PER:,}" if name == "alarms" else f"a {_SHARES.get(name, name)} between 0 and 1"
        raise InputError(f"A rule {name} must name a class and {what}, got {_shown(text)}. Example: {kind.example}.")
    return Rule(name, target=_unquoted(target.strip()), bound=bound)


def _unquoted(name: str) -> str:
    """Return a name without the quotes that a user may put around it because of a comma."""
    return name[1:-1] if len(name) > 2 and name[0] == name[-1] and name[0] in "\"'" else name


def _with_level(name: str, text: str, rest: str) -> Rule:
    kind, level = KINDS[name], _number(rest.strip())
    if level is None or not 0 < level < 1:
        must = f"The decision rule {name} needs {kind.level} between 0 and 1"
        raise InputError(f"{must}, got {_shown(text)}. Example: {kind.example}.")
    return Rule(name, bound=level)


def _values(name: str, rest: str, pairs: Sequence[tuple[str, object]]) -> dict[str, float]:
    values: dict[str, float] = {}
    for key, value in pairs:
        number = _number(value)
        if not key or key in values or number is None or not 0 <= number < math.inf:
            what = "share" if name == "prevalence" else "cost"
            raise InputError(
                f"The decision rule {name} needs one {what} >= 0 per class, "
                f"got {_shown(rest)}. Example: {KINDS[name].example}. "
                f'Names with a comma need quotes: {name}:{{"a, b": 10, "c": 1}}.'
            )
        values[key] = number
    if not any(values.values()):
        raise InputError(f"The decision rule {name} needs a value above 0. Example: {KINDS[name].example}.")
    return values


def _matrix(rows: list[object]) -> tuple[tuple[float, ...], ...]:
    found: list[tuple[float, ...]] = []
    for row in rows:
        numbers = [_number(value) for value in row] if isinstance(row, list) else []
        if len(numbers) != len(rows) or any(number is None or not math.isfinite(number) for number in numbers):
            raise InputError("A matrix of costs must be square and hold finite numbers: one row per true class.")
        found.append(tuple(number for number in numbers if number is not None))
    for i, row in enumerate(found):
        if min(row) < 0 or row[i] != 0:
            raise InputError(
                f"Row {i + 1} of the matrix of costs must be >= 0 with 0 on the diagonal, got {list(row)}. "
                "A correct decision costs nothing."
            )
    if len(found) < 2 or not any(map(any, found)):
        raise InputError("A matrix of costs must have at least two classes and one cost above 0.")
    return tuple(found)


def _table(rows: dict[str, object]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for true, row in rows.items():
        numbers = {name: _number(value) for name, value in row.items()} if isinstance(row, dict) else {"": None}
        if any(number is None or not 0 <= number < math.inf for number in numbers.values()):
            raise InputError(f"The costs of {_shown(true)} must be numbers >= 0, one per decided class.")
        if numbers.get(true, 0) != 0:
            raise InputError(f"The cost of deciding {_shown(true)} correctly must be 0, got {numbers[true]:g}.")
        found[true] = {name: number for name, number in numbers.items() if number is not None}
    if not any(any(row.values()) for row in found.values()):
        raise InputError("A matrix of costs must have at least one cost above 0.")
    return found


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        per_cent = isinstance(value, str) and value.rstrip().endswith("%")
        number = float(str(value).rstrip().removesuffix("%")) / 100 if per_cent else float(value)
    except (ValueError, OverflowError):
        return None
    return None if math.isnan(number) else number


def _written(number: float) -> str:
    """Return a number as text that gives the same number again, as short as possible."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object. Raise a ValueError if a key is repeated."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is repeated")
    return dict(pairs)


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:60]!r}..."


_MAX_BYTES = 10_000_000
"""Maximum bytes of a matrix of costs."""


def read_rule(text: str | None) -> str | None:
    """Return the text of a rule, with the file of ``cost:FILE.csv`` replaced by the costs in it."""
    if text is None or not text.startswith("cost:"):
        return text
    path = Path(text.removeprefix("cost:").strip())
    if path.suffix.lower() != ".csv":
        if "=" not in text and not path.name.startswith(("[", "{")) and path.suffix and path.is_file():
            raise InputError(f"A file of costs must be a table that ends in .csv, got {path}. Rename or convert it.")
        return text
    must = "Its first row names the decided classes, and each further row starts with a true class."
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = file.read(_MAX_BYTES).splitlines()
        sign = max(",;\t", key=(lines or [""])[0].count)  # Spreadsheets of many countries write semicolons.
        rows = [row for row in csv.reader(lines, delimiter=sign) if any(row)]
        (_, *names), *body = rows
        decided = [name.strip() for name in names]
        costs = {true.strip(): dict(zip(decided, map(float, row), strict=True)) for true, *row in body}
    except OSError as error:
        raise InputError(f"The matrix of costs {path} cannot be read ({error.strerror}).") from None
    except (ValueError, csv.Error):
        raise InputError(f"{path} is not a matrix of costs. {must}") from None
    return f"cost:{json.dumps(costs, ensure_ascii=False)}"
