"""No sentence on the page of a run is about something that its method, or its way of testing, does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from lopsided.models.encoders import build_encoder
from lopsided.models.pretrained import Preprocessing
from lopsided.recipe import named_recipe
from lopsided.reports.run_page import run_page
from lopsided.runs.run import run_recipe
from reports.test_run_page import text_of
from tiny import write_photos

ENCODER = "test_resnet"
SMALL = {"threads": 1, "device": "cpu", "compare_quick": False, "data.image_size": 32}
TRAINED = {"encoder.name": "mlp", "encoder_training.batch_size": 16, "encoder_training.epochs": 2}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "frozen": ("quick", {}),
    "adapter": ("adapter", {"encoder_training.epochs": 2, "adapter.heads": 2}),
    "fine-tune": ("fine-tune", {"fine_tune.blocks": 1, "fine_tune.views": 1, "fine_tune.steps": 4}),
    "two-stage": ("from-scratch", {**TRAINED, "classifier.epochs": 2}),
    "end-to-end": ("from-scratch", {**TRAINED, "method": "end-to-end", "encoder_training.loss": "ce"}),
}
TESTED = {"split": {"data.test": 0.3}, "folds": {"data.folds": 2}}
WORDS = {
    r"\bepochs?\b": {"adapter", "fine-tune", "two-stage", "end-to-end"},
    r"\bstage of|(second|first|classifier) stage\b": {"two-stage"},
    r"\bheads?\b": {"adapter"},
    r"\banchors?\b|contrastive": {"two-stage", "adapter"},
    r"\bregressions?\b": {"frozen", "adapter", "fine-tune"},
    r"\bbatch(es)?\b": {"adapter", "fine-tune", "two-stage", "end-to-end"},
    r"training loss": {"adapter", "fine-tune", "two-stage", "end-to-end"},
    r"log of the run is missing": set[str](),
    r"(?<!inner )\bfolds?\b|out-of-fold": {"folds"},
    r"selected (on|the model)|which selected": {"two-stage", "end-to-end", "fine-tune"},
    r"\btest splits?\b|two splits|one split|\btest images?\b|are split": {"split"},
}
"""What a sentence may be about, and the methods or ways of testing that have it."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], str]]:
    folder = tmp_path_factory.mktemp("runs")
    photos = write_photos(folder / "photos", {"cat": 20, "dog": 10})
    encoder, _ = build_encoder(ENCODER, channels=3, image_size=32, seed=7)
    pixels = Preprocessing(32, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    save_file(encoder.state_dict(), folder / "small.safetensors", {"lopsided": pixels.to_json()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOPSIDED_CACHE", str(folder / "cache"))
        yield {
            (method, tested): _page(folder / f"{method}-{tested}", photos, folder / "small.safetensors", method, tested)
            for method in METHODS
            for tested in TESTED
        }


def _page(folder: Path, photos: Path, weights: Path, method: str, tested: str) -> str:
    name, fields = METHODS[method]
    own = {} if "encoder.name" in fields else {"encoder.name": ENCODER, "encoder.weights": str(weights)}
    run = run_recipe(named_recipe(name).override(**SMALL | own | fields | TESTED[tested]), folder, data=photos)
    return text_of(run_page(run.folder)).partition("The complete recipe")[0]


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("tested", TESTED)
@pytest.mark.parametrize("method", METHODS)
def test_a_page_is_about_what_its_run_has(
    method: str, tested: str, words: str, pages: dict[tuple[str, str], str]
) -> None:
    if not {method, tested} & WORDS[words]:
        page = pages[method, tested]
        assert [page[max(m.start() - 60, 0) : m.end() + 60] for m in re.finditer(words, page)] == []
