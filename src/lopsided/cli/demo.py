"""The subcommand demo."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lopsided.cli.options import Json, Quiet
from lopsided.cli.output import StoppedError, interval, rule_words, show, show_json, table
from lopsided.errors import RunError


def demo(
    out: Annotated[Path, typer.Option(help="Folder to write. Finished runs in it are reused.")] = Path("lopsided-demo"),
    losses: Annotated[
        bool, typer.Option("--losses", help="Compare CE, CL and AFCL from scratch with the recipe quick, in minutes.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Find cracked eggs: train, look at the mistakes, and predict new images.

    The included pictures are 240 eggs, of which 24 are cracked. The demo runs
    fit, report and predict on them and prints these commands. It takes less
    than a minute on two cores and needs no network.

    With --losses, it compares CE, CL and AFCL from scratch with the recipe
    quick on included pictures of clothes: 90 % T-shirts, 10 % shirts.

    After an interruption, the same command continues the demo.

    \b
    Examples:
      lopsided demo
      lopsided demo --out /tmp/demo --seed 1
      lopsided demo --losses
    """
    flags = " --losses" if losses else ""
    try:
        if losses:
            _compare_losses(out, seed=seed, quiet=quiet, as_json=as_json)
        else:
            _find_eggs(out, seed=seed, quiet=quiet, as_json=as_json)
    except KeyboardInterrupt:
        again = f"lopsided demo{flags} --out {shlex.quote(str(out))} --seed {seed}"
        raise StoppedError(f"interrupted. Continue with: {again}") from None


def _find_eggs(out: Path, *, seed: int, quiet: bool, as_json: bool) -> None:
    from lopsided.api import fit
    from lopsided.data.eggs import unpack_eggs
    from lopsided.evaluation.decision import Decision
    from lopsided.runs.metrics import headlines

    eggs, new = unpack_eggs(out)
    folder = out / "run"

    def tell(text: str) -> None:
        if not as_json:
            show(text)

    where, at = shlex.quote(str(folder)), shlex.quote(str(out))
    tell(
        f"{out}/eggs has 216 pictures of intact eggs and 24 of cracked ones.\n\n$ lopsided fit {at}/eggs --out {where}"
    )
    run = fit(eggs, out=folder, seed=seed, resume=(folder / "recipe.toml").is_file(), quiet=quiet or as_json)
    metrics = run.metrics or {}
    tested = metrics.get("test")
    if tested is None:  # The folder may hold any finished run.
        raise RunError(f"{folder} is not a run of the demo: it has no test images. Choose another folder.")
    lines = [line.words() for line in headlines(tested)]
    tell("\n".join(lines) + f"\nBalanced accuracy: {interval(tested['figures']['uwa'])}\n\n$ lopsided report {where}")
    page = run.report(quiet=True)
    tell(f"The mistakes are on {page}, which opens in any browser.\n\n$ lopsided predict {where} {at}/new")
    answers = run.predict(new)
    strange = answers.unfamiliar if answers.unfamiliar is not None else [False] * len(answers)
    found: list[dict[str, Any]] = [
        {
            "path": name,
            "predicted": answers.labels[place],
            "p:cracked": float(answers.probabilities[place][answers.classes.index("cracked")]),
            "unfamiliar": bool(strange[place]),
        }
        for place, name in enumerate(answers.names)
    ]
    if as_json:
        show_json({"out": str(out), "run": str(folder), "headlines": lines, "page": str(page), "new": found})
        return
    unlike = "unlike the training images: do not trust the answer"
    rows = [
        [Path(row["path"]).name, row["predicted"], f"{row['p:cracked']:.2f}", unlike if row["unfamiliar"] else ""]
        for row in found
    ]
    tell(table(["picture", "predicted", "p:cracked", ""], rows))
    tell("\n" + rule_words(Decision.model_validate(metrics["decision"]["decision"]), metrics["classes"]))
    next_steps = {
        "the mistakes": f"lopsided report {where} --open",
        "miss fewer": f"lopsided predict {where} {at}/new --decide recall:cracked=0.95",
        "your images": "lopsided fit PHOTOS",
        "the losses": "lopsided demo --losses",
    }
    tell("\n".join(["", "Try next", *(f"  {why:13} {step}" for why, step in next_steps.items())]))


def _compare_losses(out: Path, *, seed: int, quiet: bool, as_json: bool) -> None:
    from lopsided.runs.demo import run_demo, summarise
    from lopsided.runs.progress import reporter

    with reporter(quiet=quiet) as watcher:
        runs = run_demo(out, seed=seed, reporter=watcher.named)
    summary = summarise(runs)
    if as_json:
        show_json({"out": str(out), **summary})
    else:
        show(_loss_words(summary, out))


def _loss_words(summary: Mapping[str, Any], out: Path) -> str:
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
            f"With {min(counts['test'].values())} rare test images the intervals are wide: one run does not say which "
            "loss is better. To compare losses, use lopsided compare with folds.",
            f"Written to {out}: one run folder per row, and summary.json. See the mistakes of quick with "
            f"lopsided report {shlex.quote(str(out / 'quick'))}.",
        ]
    )
