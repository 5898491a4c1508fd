"""The command ``lopsided reproduce``, which repeats the paper's experiments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lopsided.cli import sweeping
from lopsided.cli.options import Json, Quiet, argument, grouped, option, words
from lopsided.cli.output import say, show, show_json
from lopsided.cli.sweeping import CHOICE, PROTOCOL, WORK
from lopsided.errors import InputError

if TYPE_CHECKING:
    from lopsided.paper.compare import Comparison, Protocol
    from lopsided.paper.protocol import Plan
    from lopsided.runs.records import Failure, Record

TABLES_FOLDER, FIGURES_FOLDER = "tables", "figures"


@grouped
def reproduce(
    *,
    table: Annotated[
        str,
        argument(
            "eta or gamma (Fashion-MNIST over eleven imbalances), or isic (five losses on ISIC 2018).",
            metavar="TABLE",
            autocompletion=words("eta", "gamma", "isic"),
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="SWEEP", help="The folder of the sweep. The same command continues it.")
    ] = None,
    scenarios: Annotated[str | None, option(CHOICE, "A subset of the imbalances, such as 50:50,90:10.")] = None,
    values: Annotated[
        str | None, option(CHOICE, "A subset of the table's values of eta or gamma, such as 0,300.")
    ] = None,
    losses: Annotated[
        str | None, option(CHOICE, "Losses to train instead of the table's values, such as cl,fcl,acl:300,afcl:300:7.")
    ] = None,
    runs: Annotated[
        int | None, option(CHOICE, "Runs of each cell, with seeds 0, 1, ...; 4 by default, as in the paper.", min=1)
    ] = None,
    quick: Annotated[
        bool, option(CHOICE, "A small part of the table: about 10 minutes on two cores, 25 for isic.", "--quick")
    ] = False,
    normalization: Annotated[
        str | None,
        option(
            PROTOCOL,
            "paper, or released for the loss in the authors' code.",
            autocompletion=words("paper", "released"),
        ),
    ] = None,
    preset: Annotated[
        str | None,
        option(PROTOCOL, "isic: paper, or small for ResNet-18 at 64 pixels.", autocompletion=words("paper", "small")),
    ] = None,
    split: Annotated[
        str | None,
        option(
            PROTOCOL,
            "isic: image as in the paper, or lesion to keep all images of a lesion in one split.",
            "--split-by",
            autocompletion=words("image", "lesion"),
        ),
    ] = None,
    data: Annotated[Path | None, option(PROTOCOL, "isic: the folder that contains the official folders.")] = None,
    weights: Annotated[str | None, option(PROTOCOL, "Initial weights: none, timm, or a .safetensors file.")] = None,
    recipe: Annotated[
        str | None,
        option(PROTOCOL, "A recipe to use instead of the paper's. The table still sets loss, scenario and seed."),
    ] = None,
    work: sweeping.Work,
    records: Annotated[
        Path | None,
        option(
            WORK,
            "Make tables, figures and verdicts from this file of records, or from this SWEEP, without training. "
            "Missing or outdated records of a SWEEP are read from its run folders again.",
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Repeat one of the paper's tables, with intervals, and check its claims.

    Finished runs are kept in SWEEP: the same command continues an
    interrupted sweep, and more runs add to it. Tables (Markdown, CSV,
    LaTeX), figures and verdicts are written to SWEEP/tables. A verdict on a
    claim needs at least three runs of each cell. A failed cell does not stop
    the others; the exit code is then 1. "lopsided report SWEEP" makes one
    page of all runs.

    \b
    Examples:
      lopsided reproduce eta --out sweep --quick
      lopsided reproduce gamma --out sweep --runs 8
      lopsided reproduce isic --out skin --preset small --split-by lesion
      lopsided reproduce eta --out other --normalization released --scenarios 50:50,90:10 --losses cl,afcl:300:7
      lopsided reproduce eta --records sweep/records.jsonl
    """
    from lopsided.paper.protocol import base_recipe, make_plan
    from lopsided.runs.tracking import say_trackers

    if quick and table == "isic" and preset is None and recipe is None:
        preset = "small"
    base = base_recipe(
        table,
        recipe=recipe,
        preset=preset or "paper",
        split=split or "image",
        data=data,
        weights=weights,
        normalization=normalization,
    )
    if not quiet:
        say_trackers(base, work.track or ())
    if work.track:
        base = base.override(track=work.track)
    plan = make_plan(table, base, scenarios=scenarios, values=values, losses=losses, runs=runs, quick=quick)
    stem = _stem(table, plan, losses=losses, preset=preset, recipe=recipe)
    failed: Sequence[Failure] = ()
    if records is not None:
        own = {f"--{name.replace('_', '-')}": value or None for name, value in vars(work).items()}
        sweeping.refuse({"--runs": runs, "--quick": quick, **own}, "is for training", "--records")
        columns = "--values" if values else "--losses" if losses else ""
        comparison = _from_file(records, plan, "--scenarios" if scenarios else "", columns, quiet)
    else:
        if out is None:
            raise InputError("--out is missing. Name the folder of the sweep, such as --out sweep.")
        source, failed = _train(plan, out, work, quiet=quiet)
        comparison = _from_sweep(out, plan, source, only_asked=bool(losses))
    written = [] if out is None else write_tables(comparison, out, stem)
    _show(comparison, written, failed, plan.left_out, out, as_json, from_records=records is not None)
    if failed:
        raise typer.Exit(1)


def _train(plan: Plan, out: Path, work: sweeping.Work, *, quiet: bool) -> tuple[str, list[Failure]]:
    """Train the missing runs of the plan. Return the name of the source, and the failed cells."""
    from lopsided.paper.page import KIND

    if not quiet and plan.left_out:
        say(plan.left_out)
    source = sweeping.open_data(plan.recipe).name
    if not quiet and (few := _too_few_runs(plan, source, out)):
        say(few)
    return source, sweeping.train(plan.cells(), out, work, about={"kind": KIND}, quiet=quiet)


def _too_few_runs(plan: Plan, source: str, out: Path) -> str:
    """Return a sentence if the runs will be too few for a verdict on the paper's claims, or an empty text."""
    from lopsided.paper.claims import FEWEST
    from lopsided.paper.protocol import SOURCES
    from lopsided.runs.records import read_records
    from lopsided.runs.sweep import RECORDS

    if plan.runs >= FEWEST or source not in SOURCES[plan.table]:
        return ""
    path = out / RECORDS
    if path.exists() and any(record.seed >= FEWEST - 1 for record in read_records(path)[0]):
        return ""  # An earlier command made more runs.
    have = "1 run" if plan.runs == 1 else f"{plan.runs} runs"
    what = f"{have} of each cell cannot give a verdict on the paper's claims: a verdict needs at least {FEWEST}."
    return f"{what} The tables will still have all figures. Use --runs {FEWEST} or more for verdicts."


def _stem(table: str, plan: Plan, *, losses: str | None, preset: str | None, recipe: str | None) -> str:
    """Return the stem of a table's file names. It differs between protocols, so that they can share a folder."""
    base = plan.recipe
    normalization = str(base.encoder_training.loss.parameters["normalization"])
    parts = [
        table,
        "losses" if losses is not None else "",
        Path(recipe).stem if recipe else "",
        "small" if preset == "small" else "",
        "lesion" if base.data.split == "group" else "",
        "" if base.encoder.weights == "none" else "pretrained",
        "" if normalization == "paper" else normalization,
    ]
    return "-".join(part for part in parts if part)


def _from_sweep(out: Path, plan: Plan, source: str, *, only_asked: bool) -> Comparison:
    """Compare all runs of the sweep that used the plan's recipe, including runs of earlier commands."""
    from lopsided.paper.compare import Protocol, compare
    from lopsided.paper.protocol import Setting, cell_recipe, published
    from lopsided.runs.keys import cell_key
    from lopsided.runs.records import read_records
    from lopsided.runs.run import settle
    from lopsided.runs.sweep import RECORDS

    def is_of_plan(record: Record) -> bool:
        if (record.scenario is None) != (plan.table == "isic"):
            return False
        setting = Setting.of(record)
        if setting is None:
            return False
        return record.cell == cell_key(settle(cell_recipe(plan.recipe, record.scenario, setting, record.seed)))

    path = out / RECORDS
    known = read_records(path)[0] if path.exists() else []
    there = [replace(record, source=source) for record in known if is_of_plan(record)]  # The hash covers the source.
    whole = published(plan.table)
    rows = {record.scenario for record in there} | set(plan.scenarios)
    columns = {Setting.of(record) for record in there} | set(plan.settings)
    return compare(
        there,
        plan.table,
        Protocol.of(plan.recipe),
        source=source,
        scenarios=plan.scenarios if only_asked else [name for name in whole.scenarios if name in rows],
        settings=plan.settings if only_asked else [setting for setting in whole.settings if setting in columns],
    )


def _from_file(path: Path, plan: Plan, rows: str, columns: str, quiet: bool) -> Comparison:
    """Compare the runs of a file or a sweep; ``rows`` and ``columns`` name the options that selected a subset."""
    from lopsided.data.sources import name_of
    from lopsided.paper.compare import Protocol, compare, select
    from lopsided.paper.protocol import Setting
    from lopsided.runs.records import read_records

    if path.is_dir():
        path = _with_missing(path, quiet)
    records, notes = read_records(path)
    protocol = Protocol.of(plan.recipe)
    kept = select(records, plan.table, protocol)
    data = plan.recipe.data.source or ""
    asked = [record for record in kept if record.source in (name_of(data), Path(data).name)]
    kept = asked or kept
    if not kept:
        others = "; ".join(dict.fromkeys(str(Protocol.of(record)) for record in records)) or "no records"
        do = "Choose the protocol with --preset, --split-by, --weights, --normalization or --recipe."
        raise InputError(f"{path} has no runs of the table {plan.table} by {protocol}. It has {others}. {do}")
    _check_there(rows, plan.scenarios, [record.scenario for record in kept], path)
    _check_there(columns, plan.settings, [Setting.of(record) for record in kept], path)
    chosen = plan.scenarios if rows else None, plan.settings if columns else None
    comparison = compare(kept, plan.table, Protocol.of(kept[0]), scenarios=chosen[0], settings=chosen[1])
    if not quiet:
        for note in [*notes, *_family_notes(records, kept, protocol)]:
            say(note)
    return comparison


def _with_missing(folder: Path, quiet: bool) -> Path:
    """Record the finished runs of a sweep that have no record yet, and return the file of records."""
    from lopsided.runs.sweep import RECORDS, SWEEP, about_sweep, record_missing

    if not (folder / SWEEP).exists():
        raise InputError(f"{folder} contains no sweep. Give --records a file of records or the folder of a sweep.")
    about_sweep(folder)  # Raises if it cannot be read.
    number = record_missing(folder)
    if number and not quiet:
        say(f"Read {number} missing records from the run folders of {folder}.")
    return folder / RECORDS


def _check_there(option: str, asked: Sequence[object], there: Sequence[object], path: Path) -> None:
    """Raise an error if an option names values without any run."""
    lost = [str(item) for item in asked if item not in there]
    if option and lost:
        known = ", ".join(dict.fromkeys(map(str, there)))
        missing = ", ".join(lost)
        raise InputError(f"{path} has no run for {option} {missing}. It has runs for {known}.")


def _family_notes(records: Sequence[Record], kept: Sequence[Record], protocol: Protocol) -> list[str]:
    """Return notes on the runs that were ignored because their recipe, data or loss differs."""
    from lopsided.paper.compare import Protocol
    from lopsided.paper.protocol import Setting

    alike = [record for record in records if Protocol.of(record).is_like(protocol)]
    family, source = Protocol.of(kept[0]).family, kept[0].source
    others = [record for record in alike if Protocol.of(record).family != family]
    sources = [r.source for r in alike if Protocol.of(r).family == family and r.source != source]
    losses = [record.loss.label for record in alike if Setting.of(record) is None]
    found = []
    if others:
        named = "; ".join(dict.fromkeys(str(Protocol.of(record)) for record in others))
        found.append(f"Ignored {len(others)} records of other recipes: {named}.")
    if sources:
        found.append(f"Ignored {len(sources)} records of other data: {', '.join(dict.fromkeys(sources))}.")
    if losses:
        named = ", ".join(dict.fromkeys(losses))
        found.append(f"Ignored {len(losses)} records of losses that are not in the paper: {named}.")
    return found


def write_tables(comparison: Comparison, out: Path, stem: str) -> list[Path]:
    """Write tables, verdicts and figures into a folder and return their paths."""
    from lopsided import files
    from lopsided.paper import figures, latex, tables

    folder = files.make_folder(out / TABLES_FOLDER)
    drawn: list[Path] = []
    if comparison.entries and figures.can_draw():
        drawn = figures.write_figures(comparison, folder / FIGURES_FOLDER, stem)
    elif comparison.entries:
        say("There are no figures, because matplotlib is not installed. Run pip install 'lopsided[figures]'.")
    pictures = [f"{FIGURES_FOLDER}/{path.name}" for path in drawn if path.suffix == ".svg"]
    texts = {
        f"{stem}.md": tables.to_markdown(comparison, pictures),
        f"{stem}.csv": tables.to_csv(comparison),
        f"{stem}.tex": latex.to_latex(comparison, stem),
    }
    if comparison.is_of_paper:
        texts[f"{stem}-verdicts.md"] = tables.verdicts_to_markdown(comparison)
    for name, text in texts.items():
        files.atomic_write(folder / name, text)
    return [*(folder / name for name in texts), *drawn]


def _show(
    comparison: Comparison,
    written: Sequence[Path],
    failed: Sequence[Failure],
    left_out: str,
    out: Path | None,
    as_json: bool,
    *,
    from_records: bool,
) -> None:
    if as_json:
        show_json(
            {
                "out": None if out is None else str(out),
                **comparison.to_dict(),
                "left_out": left_out,
                "failed": sweeping.failed_dict(failed),
                "files": [str(path) for path in written],
            }
        )
        return
    from lopsided.paper.tables import print_table

    print_table(comparison, sweeping.wide_console())
    lines = [left_out] if left_out else []
    lines += [f"{failure.name} failed: {failure.error}" for failure in failed]
    if out is not None:
        lines.append(f"Written to {out / TABLES_FOLDER}.")
        if not from_records:
            lines.append(f"To see all runs on one page: lopsided report {out}")
    show("\n".join(["", *lines]))
