"""Shared by the commands that train many runs: options, the engine and the training."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from lopsided.cli.options import option, words
from lopsided.cli.output import StoppedError
from lopsided.errors import DataError, InputError, sentence

if TYPE_CHECKING:
    from rich.console import Console

    from lopsided.data.sources import Source
    from lopsided.recipe import Recipe
    from lopsided.runs.engines import Engine
    from lopsided.runs.find import Elsewhere
    from lopsided.runs.plan import Cell
    from lopsided.runs.records import Failure

CHOICE, PROTOCOL, WORK = "What to train", "Protocol", "How to train it"
PLAIN_WIDTH = 160
"""The width of the output, in columns, if it is not a terminal."""


def complete_tracker(incomplete: str) -> list[str]:
    """Return the trackers whose name starts with a text, for the shell."""
    from lopsided.trackers.tracker import TRACKERS

    return [name for name in TRACKERS.names() if name.startswith(incomplete)]


EngineName = Annotated[
    str | None,
    option(
        WORK,
        "local for processes on this machine, or ray for an existing cluster, if need be with its address: "
        "ray:10.0.0.5:6379.",
        autocompletion=words("local", "ray"),
    ),
]
Cluster = Annotated[
    str | None,
    option(
        None,
        "local for this machine, or ray for an existing cluster, if need be with its address: ray:10.0.0.5:6379.",
        "--engine",
        autocompletion=words("local", "ray"),
    ),
]
Workers = Annotated[
    int | None,
    option(
        WORK,
        "Number of processes; by default as many as the cores allow. Use fewer if memory is short: a ResNet-50 at "
        "128 pixels needs several gigabytes per process.",
        min=1,
    ),
]
Threads = Annotated[int | None, option(WORK, "Threads of each process; 1 by default.", min=1)]
Track = Annotated[
    list[str] | None,
    option(
        WORK,
        "Log the run to another program: tensorboard, mlflow, wandb, or one of these with a colon and a folder. "
        "Can be repeated. Trackers that a recipe file names are not used.",
        "--track",
        envvar="LOPSIDED_TRACK",
        show_envvar=True,
        metavar="TRACKER",
        autocompletion=complete_tracker,
    ),
]
KeepModels = Annotated[bool, option(WORK, "Keep the models of all runs.", "--keep-models")]


def refuse(options: Mapping[str, Any], what: str, other: str) -> None:
    """Raise an error if one of the options is given together with the option ``other``."""
    for name, value in options.items():
        if value not in (None, False):
            raise InputError(f"{name} {what} and cannot be used with {other}. Remove one of the two options.")


@dataclass(frozen=True)
class Workplace:
    """Where, and by how many processes, runs are trained."""

    options: ClassVar[Mapping[str, Any]] = {
        "engine": EngineName,
        "workers": Workers,
        "threads": Threads,
        "keep_models": KeepModels,
        "track": Track,
    }

    engine: str | None = None
    workers: int | None = None

    def make(self) -> Engine:
        """Return the engine."""
        return make_engine(self.engine, self.workers, None)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Keep one connection to a cluster for all engines inside the block, because each connection takes seconds."""
        with ExitStack() as closing:
            name, address = _engine(self.engine)
            if name == "ray":
                from lopsided.runs.engines.ray_engine import connect

                connect(address, closing)
            yield


@dataclass(frozen=True)
class Work(Workplace):
    """The options of a command that trains many runs."""

    threads: int | None = None
    keep_models: bool = False
    track: Sequence[str] | None = None

    def make(self) -> Engine:
        """Return the engine."""
        return make_engine(self.engine, self.workers, self.threads)


def open_data(base: Recipe) -> Source:
    """Check images and weights once, before every cell of a sweep fails on them. Return the source."""
    from lopsided.data.prepare import Sources
    from lopsided.runs.run import settle

    settled = settle(base)
    for path in settled.encoder.spec.files:
        if not Path(path).is_file():
            raise InputError(f"The file of weights {path} does not exist. Correct encoder.weights.")
    source = Sources().drawn(settled.override(**{"data.scenario": None, "data.held_out": False}), more=True)
    source.check_present()
    if settled.data.split == "group" and source.groups is None:
        raise DataError(
            f"{source.name} has no table of lesions, so it cannot be split by lesion. Use --split-by image."
        )
    return source


def _engine(text: str | None) -> tuple[str, str]:
    """Return the name of an engine, and the address of its cluster.

    >>> _engine(None), _engine("ray"), _engine("ray:10.0.0.5:6379"), _engine("ray://head:10001")
    (('local', 'auto'), ('ray', 'auto'), ('ray', '10.0.0.5:6379'), ('ray', 'ray://head:10001'))
    """
    name, _, address = (text or "local").partition(":")
    if name not in ("local", "ray") or (name == "local" and address):
        raise InputError(sentence("--engine must be local, ray or ray:ADDRESS", repr(text)))
    return name, f"ray:{address}" if address.startswith("//") else address or "auto"


def make_engine(engine: str | None, workers: int | None, threads: int | None) -> Engine:
    """Return the engine of a text such as local or ray:ADDRESS."""
    name, address = _engine(engine)
    if name == "local":
        from lopsided.runs.engines.local import LocalEngine

        return LocalEngine(workers, threads or 1)
    from lopsided.runs.engines.ray_engine import RayEngine

    refuse({"--workers": workers}, "is for --engine local", "--engine ray")
    return RayEngine(address, threads=threads or 1)


def cluster_mapper(engine: str | None, run: Path, *, keep: bool = False) -> Elsewhere | None:
    """Return what scores packs on a cluster with the model of a run, or None for this machine.

    ``keep`` returns features as well.
    """
    name, address = _engine(engine)
    if name == "local":
        return None
    from lopsided.runs.engines.ray_map import RayMap

    return RayMap(address, run, keep=keep).mapping


def train(
    cells: Sequence[Recipe | Cell],
    out: Path,
    work: Work,
    *,
    about: Mapping[str, Any],
    quiet: bool,
) -> list[Failure]:
    """Train the cells that are not yet finished in a folder. Return the failed cells."""
    from lopsided.runs.sweep import run_sweep
    from lopsided.runs.view import sweep_view

    engine = work.make()
    try:
        with sweep_view(quiet=quiet) as view:
            return run_sweep(cells, out, engine=engine, view=view, keep_models=work.keep_models, about=about).failed
    except KeyboardInterrupt:
        raise StoppedError(f"interrupted. Run the same command again to continue in {out}.") from None


def wide_console() -> Console:
    """Return a console on standard output, as wide as the terminal, or ``PLAIN_WIDTH`` columns without one."""
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def failed_dict(failed: Sequence[Failure]) -> list[dict[str, str]]:
    """Return failed cells for JSON."""
    return [{"cell": failure.cell, "name": failure.name, "error": failure.error} for failure in failed]
