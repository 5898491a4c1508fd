"""Map a model over the images of a pool on a running Ray cluster, with Ray Data. Needs the extra ``ray``.

The driver sends the model and the names of the images. The nodes read the images themselves, from the same paths, and
send back scores. Packs are those of one machine, so the scores are, too. Ray Data gives a pack of a lost node to
another node.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lopsided import __version__
from lopsided.data.stored import cells_of, described
from lopsided.errors import RunError
from lopsided.inference.familiar import BANK_NAME, load_bank
from lopsided.inference.neighbours import Known
from lopsided.inference.pool import Mapper, Pack, Scores
from lopsided.inference.scorer import Scorer
from lopsided.models.model import CARD_NAME, WEIGHTS_NAME, load_model
from lopsided.runs.engines.ray_engine import check_installed, connect

WINDOW = 2_048
"""Packs whose names are sent at once: about a million images."""


class RayMap:
    """Scores packs on a cluster with the model in a folder, one task per core of the cluster.

    Every node needs this version of lopsided, and the images at the same paths (see ``RayEngine`` for the address).
    ``keep`` returns the features of the encoder as well.
    """

    def __init__(self, address: str, model: Path, *, keep: bool = False) -> None:
        check_installed("ray", "pyarrow", "pandas")
        self.address, self.model, self.keep = address, model, keep

    @contextmanager
    def mapping(self, known: Known | None = None) -> Iterator[Mapper]:
        """Connect inside the block. Yield a function that scores packs, in order."""
        with ExitStack() as closing:
            connect(self.address, closing)
            closing.enter_context(_quiet_data())
            ray = importlib.import_module("ray")
            names = [name for name in (CARD_NAME, WEIGHTS_NAME, BANK_NAME) if (self.model / name).is_file()]
            content = {name: (self.model / name).read_bytes() for name in names}
            images = None if known is None else (known.wanted, known.others)
            reference = ray.put((content, images, self.keep))  # Held as long as nodes may ask for it.

            def mapper(packs: Iterable[Pack]) -> Iterator[Scores]:
                rest = iter(packs)
                while window := list(islice(rest, WINDOW)):
                    yield from _mapped(window, reference)

            yield mapper


def _mapped(window: list[Pack], reference: Any) -> Iterator[Scores]:
    """Score packs on the cluster."""
    import pyarrow

    ray = importlib.import_module("ray")
    data = importlib.import_module("ray.data")
    kind = pyarrow.list_(pyarrow.list_(pyarrow.string()))
    tables = [
        pyarrow.table(
            {
                "number": [place],
                "paths": [list(map(os.fsencode, pack.paths))],
                "cells": pyarrow.array([[list(cells_of(path)) for path in pack.paths]], kind),
            }
        )
        for place, pack in enumerate(window)
    ]
    # Tasks, not actors: Ray gives the task of a lost node to another one, but an actor would wait for a free core.
    rows = data.from_arrow_refs([ray.put(table) for table in tables]).map_batches(
        _portable_task(),
        fn_kwargs={"version": __version__, "reference": [reference]},
        batch_size=1,
        batch_format="pyarrow",
        num_cpus=1,
    )
    for number, row in enumerate(rows.iter_rows()):
        if row["error"]:
            raise RunError(row["error"])
        if row["number"] != number:
            raise RunError(f"Ray returned pack {row['number']} instead of {number}. Run the command again.")
        yield _scores(window[number], row)


def _scores(pack: Pack, row: dict[str, Any]) -> Scores:
    """Return what a node sent. Raise if the node does not see an image that is here."""
    for path, reason in zip(pack.paths, row["reasons"], strict=True):
        if reason and os.path.isfile(path) and "no such file" in reason:
            do = "Images must be at the same path on every node, on storage that all nodes share."
            raise RunError(f"The node {row['host']} does not see {path}. {do}")
    num = len(pack.paths)
    near, typical = (np.frombuffer(row[name]).copy() for name in ("nearness", "typicality"))
    features = np.frombuffer(row["features"], dtype=np.float32).copy()
    return Scores(
        pack,
        tuple(row["reasons"]),
        tuple(row["digests"]),
        np.frombuffer(row["probabilities"]).reshape(num, -1).copy(),
        near if len(near) else None,
        features.reshape(num, -1) if len(features) else None,
        row["made_by"],
        typical if len(typical) else None,
    )


def _portable_task() -> Any:
    """Return the task of a node. Ray sends a nested function as code, so it can report that lopsided is missing."""

    def task(batch: Any, version: str, reference: list[Any]) -> Any:
        import socket

        import pyarrow
        import ray

        host = socket.gethostname()
        content: dict[str, Any] = {"number": batch.column("number").to_pylist()[0], "host": host, "error": ""}
        content |= {"node": ray.get_runtime_context().get_node_id(), "made_by": "", "reasons": [], "digests": []}
        content |= {"probabilities": b"", "nearness": b"", "typicality": b"", "features": b""}
        try:
            import lopsided
        except ImportError:
            found = "none"
        else:
            found = lopsided.__version__
        if found == version:
            from lopsided.runs.engines.ray_map import node_scorer, score_row

            sent = (batch.column(name).to_pylist()[0] for name in ("paths", "cells"))
            content |= score_row(node_scorer(reference[0]), *sent)
        else:
            do = "Install it there, or add it to the node's PYTHONPATH."
            content["error"] = f"every node must have lopsided {version}, got {found} on {host}. {do}"
        kinds = {"reasons": pyarrow.list_(pyarrow.string()), "digests": pyarrow.list_(pyarrow.string())}
        return pyarrow.table({name: pyarrow.array([value], kinds.get(name)) for name, value in content.items()})

    return task


_SCORERS: dict[str, Scorer] = {}
"""The scorer of the last search in this process of a node, by the reference to its model."""


def node_scorer(reference: Any) -> Scorer:
    """Return the scorer of a search on a node. Each process builds it once."""
    key = reference.hex()
    if key not in _SCORERS:
        _SCORERS.clear()
        _SCORERS[key] = make_scorer(*importlib.import_module("ray").get(reference))
    return _SCORERS[key]


def make_scorer(content: dict[str, bytes], known: tuple[Any, Any] | None, keep: bool) -> Scorer:
    """Build the model of the driver on a node, which uses the one core that Ray gave it."""
    import tempfile

    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="lopsided-") as scratch:
        for name, data in content.items():
            (Path(scratch) / name).write_bytes(data)
        model, card = load_model(scratch)
        bank = load_bank(Path(scratch), card)
    near = None if known is None else Known(*known)
    return Scorer(model, card, cached="none", known=near, bank=bank, keep=keep, workers=1)


def score_row(scorer: Scorer, paths: list[bytes], cells: list[list[str]]) -> dict[str, Any]:
    """Score a pack on a node. An error that a user can repair is sent as text."""
    from lopsided.errors import LopsidedError

    try:
        rows = zip(paths, cells, strict=True)
        found = scorer(Pack(0, tuple(described(Path(os.fsdecode(path)), row) for path, row in rows)))
    except LopsidedError as error:
        return {"error": str(error)}
    return {
        "reasons": list(found.reasons),
        "digests": list(found.digests),
        "probabilities": found.probabilities.tobytes(),
        "nearness": b"" if found.nearness is None else found.nearness.tobytes(),
        "typicality": b"" if found.typicality is None else found.typicality.tobytes(),
        "features": b"" if found.features is None else found.features.tobytes(),
        "made_by": found.made_by,
    }


@contextmanager
def _quiet_data() -> Iterator[None]:
    """Let Ray Data keep the order of packs and print nothing, inside the block."""
    context = importlib.import_module("ray.data").DataContext.get_current()
    before = context.execution_options.preserve_order, context.enable_progress_bars
    context.execution_options.preserve_order, context.enable_progress_bars = True, False
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.execution_options.preserve_order, context.enable_progress_bars = before
        logger.setLevel(level)
