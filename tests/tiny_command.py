"""Run the command in tests, as a process of its own or in this one."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
SMALL = ["--encoder", "mlp", "epochs=2", "classifier_epochs=2", "batch_size=8", "--device", "cpu"]
"""Flags that make a run of a second or two."""


@dataclass(frozen=True)
class Ended:
    """What became of a command."""

    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """The environment of a subprocess: this source, one thread, no sources from elsewhere."""
    kept = {name: value for name, value in os.environ.items() if name != "LOPSIDED_DATA"}
    return {**kept, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "100", **more}


def start(*arguments: str | Path, cwd: Path | None = None, **more: str) -> subprocess.Popen[str]:
    """Start the command as a process of its own, which an interrupt reaches even where the tests ignore it."""
    return subprocess.Popen(
        [sys.executable, "-m", "lopsided", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environment(**more),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  It takes no lock.
    )


def command(*arguments: str | Path, cwd: Path | None = None, **more: str) -> Ended:
    """Run the command as a process of its own."""
    process = start(*arguments, cwd=cwd, **more)
    out, err = process.communicate(timeout=120)
    return Ended(process.returncode, out, err)


def command_here(*arguments: str | Path, cwd: Path | None = None) -> Ended:
    """Run the command in this process, and the cells of a sweep too, which spares the imports of each process."""
    from lopsided.cli import run
    from lopsided.models.machine import threads
    from lopsided.runs.engines import local
    from tiny_sweep import HereEngine

    with pytest.MonkeyPatch.context() as patch, threads(1):  # As ``command`` has it.
        patch.setattr(local, "LocalEngine", HereEngine)
        patch.setenv("COLUMNS", "100")
        patch.setenv("TERM", "dumb")
        patch.delenv("LOPSIDED_DATA", raising=False)
        if cwd is not None:
            patch.chdir(cwd)
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = run([str(argument) for argument in arguments])
    return Ended(code, out.getvalue(), err.getvalue())


Call = Callable[..., Ended]
"""The fixture ``call``: the command in this process."""


def names_below(folder: Path) -> list[str]:
    """All files below a folder, to see that nothing half-written was left."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
