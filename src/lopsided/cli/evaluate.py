"""The subcommand that evaluates a trained model: evaluate."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from lopsided.cli.options import Applied, Focus, Json, Quiet, argument, grouped, option
from lopsided.cli.output import (
    check_out,
    figures_table,
    interval,
    rule_words,
    say,
    say_replaced,
    shortened,
    show,
    show_json,
    table,
    tell_facts,
)
from lopsided.data.listed import Tested
from lopsided.errors import InputError


@grouped
def evaluate(
    *,
    words: Annotated[
        list[str] | None,
        argument(
            "RUN: folder of a finished run; default: the newest in runs/. DATA: labelled images: a folder, a "
            "table or the name of a source; default: the test split of the run.",
            metavar="[RUN] [DATA]",
        ),
    ] = None,
    out: Annotated[Path | None, option(None, "Also write the metrics to this JSON file.")] = None,
    listed: Tested,
    split: Annotated[
        str | None,
        option(None, "Use only this split of the data, or of the run if DATA is missing: train, val or test."),
    ] = None,
    focus: Focus = None,
    applied: Applied,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Evaluate a trained model on labelled images, with intervals.

    Every label must be a class of the model. Do not evaluate on the training
    images. Without DATA, the test split of the run is evaluated again: its
    images are opened from where `fit` found them, and the command stops if
    they have changed.

    \b
    Examples:
      lopsided evaluate other-hospital
      lopsided evaluate run other-hospital
      lopsided evaluate run
      lopsided evaluate run lesions.csv --group patient --out result.json
    """
    from lopsided.runs.evaluate import evaluate_run
    from lopsided.runs.folder import run_and_words
    from lopsided.runs.progress import counter

    run, others = run_and_words(words or (), quiet=quiet)
    if len(others) > 1:
        raise InputError(f"DATA is given twice: {others[0]} and {others[1]}. Name one source.")
    data = others[0] if others else None
    check_out(out, *others)
    evaluated = evaluate_run(
        run,
        data,
        split=split,
        listed=listed,
        focus=focus,
        **vars(applied),
        quiet=quiet,
        counting=partial(counter, quiet=quiet),
    )
    for warning in evaluated.warnings:
        say(f"warning: {warning}")
    tell_facts(evaluated.facts, quiet=quiet)
    result = evaluated.result
    _write(result, out, quiet=quiet)
    if as_json:
        show_json(result)
        return
    what = f"{split or 'test'} split of {run}" if data is None else result["data"]
    rule = rule_words(evaluated.decision, evaluated.classes, stated=applied.prevalence is not None)
    _show(result, what, evaluated.focus, rule, out)


def _write(result: Mapping[str, Any], out: Path | None, *, quiet: bool) -> None:
    import json

    from lopsided import files

    if not quiet:
        say_replaced(out)
    if out is not None:
        files.atomic_write(out, json.dumps(result, indent=2, allow_nan=False) + "\n")


def _trade_off_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the table of what a person must see and which errors are left, if the rule asks a person."""
    if "trade_off" not in result:
        return []
    rows = [
        [f"{point['error']:g}", interval(point["asked"]), interval(point["errors"])] for point in result["trade_off"]
    ]
    shares = result["trade_off_shares"] or {}
    named = " and ".join(f"{shortened(name)} has {100 * share:.4g} %" for name, share in shares.items())
    return [
        *([f"If {named} of the images:"] if named else []),
        table(["abstain", "a person sees", "errors left"], rows),
    ]


def _show(result: Mapping[str, Any], what: str, focus: str | None, rule: str, out: Path | None) -> None:
    from lopsided.evaluation.doubt import doubt_words
    from lopsided.recipe.words import amount
    from lopsided.runs.metrics import headlines

    for item in result["unreadable"]:
        say(f"skipped unreadable image: {item['name']} ({item['reason']})")
    lines = [line.words(shortened(line.label)) for line in headlines(result, focus)]
    counts = "\n".join([f"{what}: {amount(result['num_images'], 'image')}", "", *lines])
    show(f"{counts}\n\n{figures_table(result)}\n\n{rule}")
    for line in [*doubt_words(result), *_trade_off_lines(result)]:
        show(f"\n{line}")
    if "familiar" in result:
        familiar = result["familiar"]
        show(f"\nWithout unfamiliar images: {amount(familiar['num_images'], 'image')}\n\n{figures_table(familiar)}")
    if out is not None:
        show(f"\nWritten to {out}.")
