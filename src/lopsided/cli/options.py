"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lopsided.cli import rules


def option(panel: str | None, text: str, *names: str, **more: Any) -> Any:
    """Return an option that is listed in a panel of the help."""
    # Inside Annotated, the first positional argument is an option name, although the typer signature calls it default.
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


def words(*choices: str) -> Any:
    """Return a shell completion with these words."""
    return lambda incomplete: [word for word in choices if word.startswith(incomplete)]


def include_option(panel: str | None = None) -> Any:
    """Return the option that selects images by name."""
    text = 'Use only images whose name matches, for example "*.jpg". Can be repeated.'
    return option(panel, text, "--include", metavar="PATTERN")


def exclude_option(panel: str | None = None) -> Any:
    """Return the option that leaves out images by name."""
    text = 'Leave out images whose name matches, for example "*_mask.*". Can be repeated.'
    return option(panel, text, "--exclude", metavar="PATTERN")


def group_from_option(panel: str | None = None) -> Any:
    """Return the option that takes groups from the names of images."""
    text = "Take groups from names: '{group}_*' for p17_left.jpg."
    return option(panel, text, "--group-from", metavar="PATTERN")


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result: no progress, no notes.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on stdout, and everything else on stderr.")
]
Include = Annotated[list[str] | None, include_option()]
Exclude = Annotated[list[str] | None, exclude_option()]
GroupFrom = Annotated[str | None, group_from_option()]
PathColumn = Annotated[
    str | None, typer.Option(help="Table column with the paths of the images; by default path.", show_default=False)
]
LabelColumn = Annotated[
    str | None, typer.Option(help="Table column with the classes of the images; by default label.", show_default=False)
]
AllowOutside = Annotated[bool, typer.Option("--allow-outside", help="Allow a table to name files outside its folder.")]
RunFolder = Annotated[
    Path | None,
    typer.Argument(metavar="RUN", help="Folder of a finished run. Default: the newest in runs/.", show_default=False),
]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1 or mps.")]
Decide = Annotated[str | None, typer.Option(help=f"{rules.HELP} Default: the rule of the model.", show_default=False)]
Prevalence = Annotated[
    str | None,
    typer.Option(
        help="Class shares where the model is used, for example A=0.02,B=0.98. The probabilities are moved to them.",
        show_default=False,
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Images per batch.")]
Tta = Annotated[
    str | None,
    typer.Option(
        "--tta",
        help="Test-time augmentation: average the features of views of each image: none, flip, flips, "
        "dihedral, or names such as identity,rot180. Default: the views of the model.",
        show_default=False,
    ),
]
