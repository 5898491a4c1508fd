"""The subcommand that predicts the classes of images: predict."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lopsided.cli.options import Applied, Json, Quiet, Unfamiliar, argument, grouped, option
from lopsided.cli.output import (
    Terminal,
    check_out,
    rule_words,
    say,
    say_replaced,
    shortened,
    show,
    show_json,
    tell_facts,
    tell_unreadable,
    warn_of_twins,
)
from lopsided.cli.sweeping import Cluster, cluster_mapper
from lopsided.data.listed import Related
from lopsided.errors import InputError

if TYPE_CHECKING:
    from lopsided.data.sources.listing import Listing
    from lopsided.data.stored import ImagePath
    from lopsided.evaluation.decision import Decision
    from lopsided.inference.predict import Answer, Familiarity, Stream, Summary, Use
    from lopsided.models.model import Model, ModelCard
    from lopsided.runs.find import Elsewhere


@grouped
def predict(
    *,
    words: Annotated[
        list[str],
        argument(
            "RUN: folder of a finished run; default: the newest in runs/. IMAGES: image files, folders of images, "
            "and tables with a column path; or tables of vectors.",
            metavar="[RUN] IMAGES...",
        ),
    ],
    out: Annotated[Path | None, option(None, "CSV file to write. Default: standard output.")] = None,
    listed: Related,
    applied: Applied,
    unfamiliar: Unfamiliar = None,
    maps: Annotated[
        Path | None,
        option(None, "Folder for a picture of each image: red where it speaks for the decided class, blue where not."),
    ] = None,
    engine: Cluster = None,
    url: Annotated[
        str | None,
        option(None, "Send the images to the server of `lopsided serve` at this address; there is no RUN then."),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Predict the classes of images, with probabilities.

    The CSV has the columns path and predicted, and one column p:CLASS with the
    probability of each class. The decision rule of the model, or --decide,
    decides for the predicted class. It need not be the most probable one.

    The column typicality is the share of training images that are less
    typical than the image, and unfamiliar says whether it is unlike them:
    an image of another kind, such as a chart among photographs. A new object
    on the same camera may not be noticed.

    Images that cannot be read are skipped and listed on stderr. With --out,
    they are also listed in *.unreadable.csv next to the CSV file. With --json
    and without --out, each output line is the JSON object of one image.
    --engine ray shares the work among the machines
    of a cluster, which must see the images at the same paths.

    \b
    Examples:
      lopsided predict photo.jpg
      lopsided predict inbox --out answers.csv
      lopsided predict run inbox --exclude "*_mask.*" --out answers.csv
      lopsided predict run inbox --unfamiliar first --out answers.csv
      lopsided predict run inbox --maps where-it-looked --out answers.csv
      lopsided predict run inbox | sort -t, -k3 -g
      lopsided predict inbox --url http://127.0.0.1:8765 --out answers.csv
    """
    from lopsided.runs.folder import run_and_words

    output = _Output(out, as_json=as_json, quiet=quiet)
    if url is not None:
        here = {"--maps": maps, "--engine": engine, "--unfamiliar": unfamiliar}
        _predict_there(url, words, listed, applied, output, here)
        return
    run, images = run_and_words(words, quiet=quiet)
    if not images:
        raise InputError(f"Images are missing. Write lopsided predict {shlex.quote(str(run))} IMAGES.")
    output.check(images)
    _predict_here(run, images, listed, applied, output, unfamiliar=unfamiliar, maps=maps, engine=engine)


def _predict_here(
    run: Path,
    images: Sequence[str],
    listed: Related,
    applied: Applied,
    output: _Output,
    *,
    unfamiliar: str | None,
    maps: Path | None,
    engine: str | None,
) -> None:
    """Predict images or tables of vectors with the model of a run, on this machine or on a cluster."""
    from lopsided.inference.predict import grouping
    from lopsided.recipe.views import parse_tta
    from lopsided.runs.reopen import open_familiarity, open_model, open_use, use_views

    wanted = parse_tta(applied.tta)
    _check_cluster(engine, images, wanted)
    elsewhere = cluster_mapper(engine, run)
    tables = _list_vectors(images, listed, elsewhere)
    group_of = grouping(images, tables, listed)
    total, paths = (sum(len(table.names) for table in tables), ()) if tables else _list_images(run, images, listed)
    model, card = open_model(run, applied.device, kinds=("vector" if tables else "image",))
    card = use_views(model, card, wanted, quiet=output.quiet)
    use = open_use(run, card, applied.decide, applied.prevalence)
    familiarity = open_familiarity(run, card, unfamiliar, applied.level, group_of=group_of)
    _warn_of_formulas(card.classes)
    if not output.quiet and (applied.decide is not None or applied.prevalence is not None):
        say(rule_words(use.decision, card.classes, stated=use.shares is not None))
    from lopsided.runs.find import answering  # It needs torch, which mistakes in the options need not wait for.

    target = Terminal() if sys.stdout.isatty() else sys.stdout  # Before a cluster redirects the output of Ray.
    with answering(
        model,
        card,
        paths,
        use,
        total=total,
        batch_size=applied.batch_size,
        elsewhere=elsewhere,
        tables=tables,
        bank=None if familiarity is None else familiarity.bank,
    ) as given:
        answers = _mapped(given, model, card, use, maps)
        output.write(answers, card.classes, use.decision, familiarity, total, target)


def _check_cluster(engine: str | None, images: Sequence[str], views: tuple[str, ...] | None) -> None:
    """Raise for what a cluster cannot do."""
    from lopsided.data.stored import is_address

    if views is not None and engine == "ray":
        raise InputError(
            "--tta cannot be used with --engine ray, whose machines use the views of the model. Remove one."
        )
    if engine is not None and any(map(is_address, images)):
        raise InputError(
            "--engine shares files of this machine, not an address. Leave it out, or copy the images here."
        )


def _list_images(run: Path, images: Sequence[str], listed: Related) -> tuple[int, Iterable[ImagePath]]:
    """Return the number of images and their paths. Warn about pairs that differ only in the suffix."""
    from lopsided.data.sources.names import Twins
    from lopsided.inference.pool import find_images
    from lopsided.runs.reopen import columns_of

    pairs = Twins()
    found = find_images(images, listed, pairs, columns=columns_of(run))
    warn_of_twins(pairs)
    return found


def _predict_there(
    url: str, images: Sequence[str], listed: Related, applied: Applied, output: _Output, here: Mapping[str, object]
) -> None:
    """Send images to a server. ``here`` are options that only a run of this machine has, and their values."""
    from lopsided.inference.pool import find_images
    from lopsided.recipe.rules import read_rule
    from lopsided.serve.client import Client

    here = {**here, "--tta": applied.tta, "--level": applied.level}
    here |= {"--group": listed.group, "--group-from": listed.group_from}
    unused = next((name for name, value in here.items() if value is not None), None)
    if unused is not None:
        raise InputError(f"{unused} needs a run of this machine, not --url. Leave out one of the two.")
    output.check(images)
    with closing(Client(url, read_rule(applied.decide), applied.prevalence)) as client:
        total, paths = find_images(images, listed, columns=client.columns)
        _warn_of_formulas(client.classes)
        target = Terminal() if sys.stdout.isatty() else sys.stdout
        output.write(client.answers(paths), client.classes, client.decision, client.familiarity, total, target)


@dataclass(frozen=True)
class _Output:
    """Where answers go: to a file or to standard output, as CSV or as JSON."""

    out: Path | None
    as_json: bool
    quiet: bool

    def check(self, images: Sequence[str]) -> None:
        """Raise if a file cannot be written, or would overwrite an image."""
        from lopsided.inference.predict import unreadable_path

        for path in (self.out, None if self.out is None else unreadable_path(self.out)):
            check_out(path, *images)

    def write(
        self,
        answers: Iterator[Answer],
        classes: Sequence[str],
        decision: Decision,
        familiarity: Familiarity | None,
        total: int,
        target: Stream,
    ) -> None:
        """Write all answers, and tell what there is to say about them."""
        from lopsided.facts import notes
        from lopsided.inference import predict as stream
        from lopsided.runs.progress import counter

        with counter("predicting", quiet=self.quiet) as progress:
            if self.out is None:
                summary = stream.stream_predictions(
                    answers, classes, target, as_json=self.as_json, decision=decision, familiarity=familiarity
                )
                stream.check_any(summary)
            else:
                if not self.quiet:
                    say_replaced(self.out)
                summary = stream.write_predictions(
                    answers,
                    classes,
                    self.out,
                    decision=decision,
                    familiarity=familiarity,
                    total=total,
                    progress=progress,
                )
        _tell(summary, self.out, familiarity, as_json=self.as_json)
        tell_facts([notes.no_bank()] if familiarity is None else familiarity.facts(), quiet=self.quiet)


def _list_vectors(paths: Sequence[str], listed: Related, elsewhere: Elsewhere | None) -> list[Listing]:
    """Return the tables of vectors among the paths; none if all are of images. Raise if there are both."""
    from lopsided.data.sources.vectors import is_vectors, list_vectors

    tables, patterns = [path for path in paths if is_vectors(path)], listed.patterns
    if tables and (elsewhere is not None or patterns or len(tables) < len(paths)):
        what = "--engine" if elsewhere is not None else "--include and --exclude" if patterns else "image files"
        raise InputError(f"{tables[0]} is a table of vectors, which cannot be used with {what}. Predict it alone.")
    return [list_vectors(Path(table), listed.group, labelled=False) for table in tables]


def _mapped(
    answers: Iterator[Answer], model: Model, card: ModelCard, use: Use, folder: Path | None
) -> Iterator[Answer]:
    """Return the answers, with pictures of where the model looked on the way if there is a folder for them."""
    if folder is None:
        return answers
    from lopsided.inference.maps import Maps, write_maps

    return write_maps(answers, Maps(model, card), use.decision, folder)


def _tell(summary: Summary, out: Path | None, familiarity: Familiarity | None, *, as_json: bool) -> None:
    from lopsided.recipe.words import amount

    tell_unreadable([(str(error.path), error.reason) for error in summary.unreadable], summary.num_unreadable, out)
    seen = {} if familiarity is None else familiarity.to_dict()
    if out is not None and as_json:
        show_json({"out": str(out), **summary.to_dict(), **seen})
    elif out is not None:
        numbers = ", ".join(f"{number:,} {shortened(name)}" for name, number in summary.predicted.items())
        dropped = f", {summary.num_dropped:,} unfamiliar left out" if summary.num_dropped else ""
        words = f"{amount(summary.num_predicted, 'image')} predicted ({numbers}){dropped}"
        show(f"{words}, {summary.num_unreadable:,} unreadable: {out}")


def _warn_of_formulas(classes: Sequence[str]) -> None:
    """Warn about class names that a spreadsheet would read as formulas.

    The CSV keeps these names unchanged, because other programs compare them.
    """
    odd = [name for name in classes if is_formula(name)]
    if odd:
        say(
            f"warning: a spreadsheet may read the class name {shortened(odd[0])!r} as a formula. "
            "Import the columns of the CSV file as text."
        )


def is_formula(text: str) -> bool:
    """Return whether a spreadsheet would read a CSV cell as a formula. A plain number is not a formula.

    >>> is_formula("=1+1"), is_formula("@home"), is_formula("-1"), is_formula("cat")
    (True, True, False, False)
    """
    try:
        float(text)
    except ValueError:
        return text.startswith(("=", "+", "-", "@", "\t", "\r"))
    return False
