"""What the verbs that train many runs have in common: their options, the engine, and the training itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lopsided.cli.output import StoppedError
from lopsided.errors import DataError, InputError, sentence

if TYPE_CHECKING:
    from rich.console import Console

    from lopsided.recipe import Recipe
    from lopsided.runs.records import Failure
    from lopsided.sweeps.engines import Cell, Engine

CHOICE, PROTOCOL, WORK = "What to train", "Protocol", "How to train it"
PLAIN_WIDTH = 160
"""Columns of output that no terminal limits."""


def option(panel: str, text: str, *names: str, **more: Any) -> Any:
    """Return an option in a panel of the help."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


def words(*choices: str) -> Any:
    """Return a completion with these words."""
    return lambda incomplete: [word for word in choices if word.startswith(incomplete)]


EngineName = Annotated[
    str | None, option(WORK, "local processes, or ray for an existing cluster.", autocompletion=words("local", "ray"))
]
Address = Annotated[str | None, option(WORK, "ray: where the cluster is.")]
Workers = Annotated[
    int | None,
    option(
        WORK,
        "Processes; as many as have cores for their threads unless given. Give fewer where memory is short: with a "
        "ResNet-50 at 128 pixels each needs some gigabytes.",
        min=1,
    ),
]
Threads = Annotated[int | None, option(WORK, "Threads of each process; 1 unless given.", min=1)]
KeepModels = Annotated[bool, option(WORK, "Keep the models of all runs.", "--keep-models")]


def refuse(options: Mapping[str, Any], what: str, other: str) -> None:
    """Refuse options that were given together with another one."""
    for name, value in options.items():
        if value not in (None, False):
            raise InputError(sentence(f"{name} {what}", f"it with {other}", "Leave one of them out."))


def check_data(base: Recipe) -> str:
    """Look for images and weights once, before every cell of a sweep would fail to find them; name the images."""
    from lopsided.data.sources import open_source
    from lopsided.runs.run import settle

    settled = settle(base)
    weights = settled.encoder.weights
    if weights not in ("none", "timm") and not Path(weights).is_file():
        raise InputError(sentence("--weights must be a file of weights", f"{weights}, which does not exist"))
    data = settled.data
    source = open_source(data.source or "", classes=data.classes, group=data.group, allow_outside=data.allow_outside)
    if settled.data.split == "group" and source.groups is None:
        got = f"none for {source.name}"
        raise DataError(sentence("a split by lesion needs the table of lesions", got, "Use --split image."))
    return source.name


def make_engine(name: str, address: str | None, workers: int | None, threads: int | None) -> Engine:
    """Return the engine of this name."""
    if name == "local":
        from lopsided.sweeps.engines import LocalEngine

        refuse({"--address": address}, "is for --engine ray", "--engine local")
        return LocalEngine(workers, threads or 1)
    if name == "ray":
        from lopsided.sweeps.ray_engine import RayEngine

        refuse({"--workers": workers}, "is for --engine local", "--engine ray")
        return RayEngine(address or "auto", threads=threads or 1)
    raise InputError(sentence("--engine must be one of local, ray", repr(name)))


def train(
    cells: Sequence[Recipe | Cell],
    out: Path,
    engine: Engine,
    *,
    about: Mapping[str, Any],
    keep_models: bool,
    quiet: bool,
) -> list[Failure]:
    """Train the cells that are not yet done in a folder; return what failed."""
    from lopsided.sweeps.sweep import run_sweep
    from lopsided.sweeps.view import sweep_view

    try:
        with sweep_view(quiet=quiet) as view:
            return run_sweep(cells, out, engine=engine, view=view, keep_models=keep_models, about=about).failed
    except KeyboardInterrupt:
        raise StoppedError(f"interrupted. Start the same command again to go on in {out}.") from None


def wide_console() -> Console:
    """Return standard output for tables: as wide as the terminal, and wide where there is none."""
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def failed_dict(failed: Sequence[Failure]) -> list[dict[str, str]]:
    """Return failed cells for JSON."""
    return [{"cell": failure.cell, "name": failure.name, "error": failure.error} for failure in failed]
