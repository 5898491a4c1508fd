"""The model of a run as a server uses it: probabilities, decisions, maps and the nearest known images."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from lopsided.data.decoding import Pixels
from lopsided.errors import InputError, LopsidedError, sentence
from lopsided.evaluation.decision import explain
from lopsided.inference.engine import Engine, images_per_call
from lopsided.inference.maps import Maps, heat
from lopsided.inference.neighbours import Neighbours, chosen_rows
from lopsided.inference.predict import Use, choose_use
from lopsided.inference.scorer import BATCH, Scorer
from lopsided.models.blocks.columns import encode
from lopsided.recipe.blocks import Cells
from lopsided.runs.find import Labelled
from lopsided.runs.folder import RECIPE, Run
from lopsided.runs.reopen import held_back, open_familiarity, open_model, open_use
from lopsided.serve.gallery import Gallery
from lopsided.serve.requests import Row
from lopsided.serve.worker import Judged

if TYPE_CHECKING:
    from lopsided.models.model import Model, ModelCard

_MAP_SIDE = 256
Floats = npt.NDArray[np.float64]


class Served:
    """The model of one run. ``score`` and ``map`` belong into the threads of the worker."""

    def __init__(self, folder: Path, device: str = "auto") -> None:
        self.folder = folder
        model, self.card = open_model(folder, device)
        self._familiarity = open_familiarity(folder, self.card)
        bank = None if self._familiarity is None else self._familiarity.bank
        engine = Engine(model, self.card.shape)
        size = _batch_size(model, self.card)
        self.sent = Scorer(model, self.card, engine=engine, cached="none", bank=bank, keep=True, batch_size=size)
        """Scores what was sent, of which nothing is kept."""
        self.stored = Scorer(model, self.card, engine=engine, bank=bank, keep=True)
        """Scores files of this machine, whose features are cached."""
        self.engine = engine
        self.neighbours: Neighbours | None = None
        self.held = held_back(folder, self.card)
        self.use_of = lru_cache(64)(self._use_of)
        self.usual = self.use_of(None, None)
        self.maps: Maps | None = None
        self.no_maps = ""
        try:
            self.maps = Maps(model, self.card)
        except InputError as error:
            self.no_maps = str(error)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of the model."""
        return self.card.classes

    @property
    def rarest(self) -> str:
        """The class with the smallest share in training."""
        return min((share, name) for share, name in zip(self.card.prior, self.classes, strict=True) if share > 0)[1]

    def complete(self) -> None:
        """Make everything ready that the first image would otherwise wait for."""
        self.sent.complete()
        self.stored.complete()

    def _use_of(self, rule: str | None, prevalence: str | None) -> Use:
        """Return how to use the model by a rule, at a prevalence. The texts come from anybody and open no files."""
        if rule is None and prevalence is None:
            return open_use(self.folder, self.card)
        return choose_use(self.card, rule, prevalence, self.held)

    def answer(self, judged: Judged, use: Use) -> dict[str, Any]:
        """Return what is said about one image, with the names that ``lopsided predict --json`` has."""
        if judged.reason:
            return {"unreadable": judged.reason}
        return self.decided(use.probabilities(judged.probabilities), use) | self._typical(judged.typicality)

    def decided(self, p: Floats, use: Use) -> dict[str, Any]:
        """Return the decision for one image with these probabilities, which carry the shares of ``use``."""
        chosen = use.decision.set_of(p, self.classes)
        answer = {
            "predicted": use.decision.answer(p, self.classes),
            "probabilities": dict(zip(self.classes, p.tolist(), strict=True)),
        }
        return answer if chosen is None else answer | {"set": chosen}

    def _typical(self, typicality: float | None) -> dict[str, Any]:
        if typicality is None or self._familiarity is None:
            return {}
        unfamiliar = self._familiarity.bank.is_unfamiliar(np.array(typicality), self._familiarity.asked)
        return {"typicality": typicality, "unfamiliar": bool(unfamiliar)}

    def counts(self, use: Use) -> dict[str, Any] | None:
        """Return what a use means on the held-back images of the run, in counts; None if there are none."""
        if self.held is None:
            return None
        p, labels = use.probabilities(self.held.probabilities), self.held.labels
        decided, asked = use.decision.decide(p), use.decision.asks(p)
        rows = [
            {
                "label": name,
                "images": int((labels == c).sum()),
                "found": int(((labels == c) & (decided == c) & ~asked).sum()),
                "false_alarms": int(((labels != c) & (decided == c) & ~asked).sum()),
                "asked": int(((labels == c) & asked).sum()),
            }
            for c, name in enumerate(self.classes)
        ]
        counts: dict[str, Any] = {"kind": self.held.kind, "images": len(labels), "per_class": rows}
        if use.decision.sets:
            sizes = use.decision.members(p).sum(axis=1)
            counts["sets"] = {"one": int((sizes == 1).sum()), "several": int((sizes > 1).sum())}
        return counts

    def cells(self, given: Row | list[Row] | None, images: int) -> list[Cells]:
        """Return the cells of the columns beside each image of a request. Raise if they do not fit the model."""
        names = [column.name for column in self.card.beside]
        rows = given if isinstance(given, list) else [given or {}] * images
        if not names:
            if given is not None:
                raise InputError("The model takes images alone. Leave out columns.")
            return [()] * images
        if len(rows) != images:
            must = f"columns must have an object for each of the {images:,} images"
            raise InputError(sentence(must, f"{len(rows):,}"))
        for row in rows:
            if sorted(row) != sorted(names):
                must = f"columns must name {', '.join(names)} for each image"
                raise InputError(sentence(must, ", ".join(row)[:300] or "none", "null says that a value is not known."))
        found = [tuple("" if row[name] is None else str(row[name]) for name in names) for row in rows]
        encode(self.card.beside, found)  # Raises here, not among the images of others.
        return found

    def map_of(self, pixels: Pixels, label: int, cells: Cells) -> str:
        """Return where the model looked, as a transparent picture in a data address; "" if it cannot tell."""
        if self.maps is None:
            return ""
        content = io.BytesIO()
        heat(self.maps.of_pixels(pixels, label, cells), (_MAP_SIDE, _MAP_SIDE)).save(content, "WEBP", quality=70)
        return data_address(content.getvalue())

    def learn(self, labelled: Labelled, gallery: Gallery) -> Iterator[None]:
        """Compute the features of known images, step by step."""
        rows = chosen_rows(labelled.labels)
        ids, labels, parts, paths = [], [], [], [labelled.images.paths[row] for row in rows]
        places = iter(rows.tolist())
        for scores in self.stored.stream(paths):
            assert scores.features is not None
            for reason, row in zip(scores.reasons, places, strict=False):
                if not reason:
                    ids.append(gallery.add(labelled.digests[row], labelled.images.paths[row]))
                    labels.append(labelled.labels[row])
            good = [place for place, reason in enumerate(scores.reasons) if not reason]
            parts.append(self.compared(scores.features[good]))
            yield
        if ids:
            self.neighbours = Neighbours(ids, labels, np.concatenate(parts))

    def compared(self, features: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the features by which images are compared, given those of all views side by side, (n, f)."""
        return self.engine.compared(self.engine.average(self.stored.split_views(features)))

    def nearest(self, judged: Judged, number: int) -> list[dict[str, Any]]:
        """Return the nearest known images of an image; none as long as they are not known."""
        if self.neighbours is None or judged.features is None or judged.reason:
            return []
        found = self.neighbours.nearest(self.compared(judged.features[None])[0], number)
        return [{"id": name, "label": label, "similarity": round(cosine, 4)} for name, label, cosine in found]

    def facts(self) -> dict[str, Any]:
        """Return what there is to say about the model."""
        use, card = self.use_of(None, None), self.card
        return {
            "run": self.folder.name,
            "sha256": card.sha256,
            "classes": list(card.classes),
            "rarest": self.rarest,
            "prior": dict(zip(card.classes, card.prior, strict=True)),
            "encoder": card.encoder,
            "views": list(card.views),
            "input": {"channels": card.channels, "image_size": card.image_size},
            "columns": [column.model_dump(mode="json", include={"kind", "name", "values"}) for column in card.beside],
            "calibrated_on": card.calibrated_on,
            "decide": use.decision.rule,
            "decide_words": explain(use.decision, card.classes),
            "unfamiliar_level": None if self._familiarity is None else self._familiarity.level,
            "maps": self.maps is not None,
            "headlines": run_facts(self.folder)["headlines"],
        }


def run_facts(folder: Path) -> dict[str, Any]:
    """Return whether a run is finished, and what it found, as far as its files can be read."""
    if (folder / RECIPE).is_file():
        with suppress(LopsidedError, KeyError, TypeError):
            run = Run.open(folder)
            return {"finished": run.finished, "headlines": [line.words() for line in run.headlines()]}
    return {"finished": False, "headlines": []}


def _batch_size(model: Model, card: ModelCard) -> int:
    """Return the images of a batch: two calls of onnxruntime, or many for a device that computes them at once.

    While one batch is scored, the images of the next are sent and decoded.
    """
    if card.kind != "image" or model.classifier.weight.device.type != "cpu":
        return BATCH
    return min(2 * images_per_call(card.shape[1] * card.shape[2], torch.get_num_threads()), BATCH)


def data_address(content: bytes) -> str:
    """Return a WebP picture as a data address."""
    return f"data:image/webp;base64,{base64.b64encode(content).decode()}"
