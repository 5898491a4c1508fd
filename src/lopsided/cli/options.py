"""Options that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer


def option(panel: str | None, text: str, *names: str, **more: Any) -> Any:
    """Return an option that is listed in a panel of the help."""
    # Inside Annotated, the first positional argument is an option name, although the typer signature calls it default.
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


def argument(text: str, **more: Any) -> Any:
    """Return an argument, whose help says what it is by default."""
    return typer.Argument(help=text, show_default=False, **more)


def words(*choices: str) -> Any:
    """Return a shell completion with these words."""
    return lambda incomplete: [word for word in choices if word.startswith(incomplete)]


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result: no progress, no notes.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on stdout, and everything else on stderr.")
]
Include = Annotated[
    list[str] | None,
    option(None, 'Use only images whose name matches, for example "*.jpg". Can be repeated.', metavar="PATTERN"),
]
Exclude = Annotated[
    list[str] | None,
    option(None, 'Leave out images whose name matches, for example "*_mask.*". Can be repeated.', metavar="PATTERN"),
]
GroupFrom = Annotated[
    str | None, option(None, "Take groups from names: '{group}_*' for p17_left.jpg.", metavar="PATTERN")
]
PathColumn = Annotated[str | None, option(None, "Table column with the paths of the images; by default path.")]
LabelColumn = Annotated[str | None, option(None, "Table column with the classes of the images; by default label.")]
AllowOutside = Annotated[bool, typer.Option("--allow-outside", help="Allow a table to name files outside its folder.")]
RunFolder = Annotated[Path | None, argument("Folder of a finished run. Default: the newest in runs/.", metavar="RUN")]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1 or mps.")]
RULES = (
    "Decision rule: balanced, plain, tuned, cost:A=10,B=1 (or cost:FILE.csv, a matrix), recall:A=0.95, "
    "precision:A=0.5, alarms:A=100 (of 10,000 images), false-alarms:A=0.05, threshold:A=0.013, "
    "prevalence:A=0.02,B=0.98, sets:0.95 (every class that an image may be of), or abstain:0.02 (ask a person unless "
    "the expected error is below 2 %)."
)
Decide = Annotated[str | None, option(None, f"{RULES} Default: the rule of the model.")]
Prevalence = Annotated[
    str | None,
    option(
        None, "Class shares where the model is used, for example A=0.02,B=0.98. The probabilities are moved to them."
    ),
]
Focus = Annotated[
    str | None,
    option(
        None,
        "The class that matters, which comes first. Default: that of the run, or of the rule, or the rarest.",
        metavar="CLASS",
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Images per batch.")]
Tta = Annotated[
    str | None,
    option(
        None,
        "Test-time augmentation: average the features of mirrored and turned copies: none, flip, flips, "
        "dihedral, or names such as identity,rot180. Default: as the model was fitted.",
        "--tta",
    ),
]
Unfamiliar = Annotated[
    str | None,
    option(
        None,
        "What becomes of images unlike the training images: mark (a column), drop (left out) or first (listed "
        "before the others).",
        autocompletion=words("mark", "drop", "first"),
    ),
]
Level = Annotated[
    float | None,
    option(
        None,
        "The share of images like the training images that may be marked as unfamiliar. Default: 0.01, one in 100.",
    ),
]


@dataclass(frozen=True)
class Applied:
    """How a model is used on images."""

    decide: str | None = None
    prevalence: str | None = None
    level: float | None = None
    tta: str | None = None
    batch_size: int = 64
    device: str = "auto"


_FIELDS: dict[str, Any] = {
    "decide": Decide,
    "prevalence": Prevalence,
    "level": Level,
    "tta": Tta,
    "batch_size": BatchSize,
    "device": Device,
    "include": Include,
    "exclude": Exclude,
    "path_column": PathColumn,
    "label_column": LabelColumn,
    "allow_outside": AllowOutside,
    "group": Annotated[
        str | None,
        option(
            None,
            "Related images: a table column, such as patient, or parent for folders. Splits keep them together, "
            "and intervals and tests count them once.",
        ),
    ],
    "group_from": GroupFrom,
    "skip_unreadable": Annotated[
        bool, typer.Option("--skip-unreadable", help="Skip images that cannot be read, and list them.")
    ],
    "known_classes": Annotated[
        bool,
        typer.Option(
            "--known-classes", help="Leave out images of classes that the model does not have, and count them."
        ),
    ],
}
"""The options of the fields of objects that commands take (see ``grouped``), unless an object has its own."""


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer that has, instead of a parameter with a dataclass as its type, an option per field.

    The annotations of the options are in ``options`` of the dataclass, or shared by all.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        kind = groups[parameter.name]
        own: Mapping[str, Any] = getattr(kind, "options", _FIELDS)
        parameters += [
            parameter.replace(name=field.name, default=field.default, annotation=own[field.name])
            for field in fields(kind)
        ]

    @wraps(command)
    def call(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call
