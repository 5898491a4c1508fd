"""The subcommand demo."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lopsided.cli.options import Json, Quiet
from lopsided.cli.output import StoppedError, interval, show, show_json, table


def demo(
    out: Annotated[Path, typer.Option(help="Folder to write. Finished runs in it are reused.")] = Path("lopsided-demo"),
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare CE, CL, AFCL and the recipe quick on included images.

    90 % of the images are T-shirts, 10 % are shirts. CE, CL and AFCL train an
    encoder from scratch. The recipe quick uses the embedded encoder.

    The demo takes a few minutes on two cores. After an interruption, the same
    command continues the demo.

    \b
    Examples:
      lopsided demo
      lopsided demo --out /tmp/demo --seed 1
    """
    from lopsided.progress import reporter
    from lopsided.runs.demo import run_demo, summarise

    try:
        with reporter(quiet=quiet) as watcher:
            runs = run_demo(out, seed=seed, reporter=watcher.named)
    except KeyboardInterrupt:
        again = f"lopsided demo --out {shlex.quote(str(out))} --seed {seed}"
        raise StoppedError(f"interrupted. Continue with: {again}") from None
    summary = summarise(runs)
    if as_json:
        show_json({"out": str(out), **summary})
    else:
        show(_demo_words(summary, out))


def _demo_words(summary: Mapping[str, Any], out: Path) -> str:
    majority = summary["majority"]
    counts = summary["counts"]
    train = ", ".join(f"{number} {name}" for name, number in counts["train"].items())
    test = ", ".join(f"{number} {name}" for name, number in counts["test"].items())
    rows = [
        [
            run["loss"] if run["loss"] == "quick" else run["loss"].upper(),
            interval(run["uwa"]),
            interval(run["accuracy"]),
            f"{run['seconds']:.0f} s",
        ]
        for run in summary["runs"]
    ]
    rows.append([f"always {majority['label']}", f"{majority['uwa']:.3f}", f"{majority['accuracy']:.3f}", ""])
    return "\n\n".join(
        [
            f"Trained on {train}; tested on {test}.",
            table(["loss or recipe", "balanced accuracy [95 %]", "accuracy [95 %]", "time"], rows),
            f"Written to {out}: one run folder per row, and summary.json. See the mistakes of quick with "
            f"lopsided report {shlex.quote(str(out / 'quick'))}.",
        ]
    )
