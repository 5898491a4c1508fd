"""Check the name of an encoder without importing torch or timm, so that a typo is reported at once."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lopsided.errors import InputError, sentence
from lopsided.models.pretrained import EMBEDDED_SHA256
from lopsided.recipe.weights import JOINT, trained_names

MLP_NAME = re.compile(r"mlp((?:-\d{1,5})*)|identity")
_REGISTERED = re.compile(r"^@register_model\s+def (\w+)\(", flags=re.MULTILINE)
_QUOTED = re.compile(r"'(\w+)'")
_LEAST = 100
"""timm has hundreds of models. If fewer are found, its files look different, and only timm itself can tell."""


def check_encoder_name(name: str) -> None:
    """Raise if timm certainly has no model of this name. Its files are searched; they are not imported."""
    if JOINT in name:
        for part in trained_names(name):
            check_encoder_name(part)
        return
    if MLP_NAME.fullmatch(name) is not None or name in EMBEDDED_SHA256:
        return
    if "timm" in sys.modules:  # Another package may have added models.
        import timm

        if not timm.is_model(name):
            raise unknown_encoder(name, timm.list_models())
        return
    models, quoted = _timm_names()
    arch = name.partition(".")[0]
    if len(models) >= _LEAST and arch not in models and arch not in quoted:
        raise unknown_encoder(name, sorted(models))


def unknown_encoder(name: str, known: Iterable[str]) -> InputError:
    """Return the error for an unknown encoder, with the most similar names."""
    near = difflib.get_close_matches(name[:100], ["mlp", *known], n=3)
    do = f"Did you mean {' or '.join(near)}?" if near else "timm.list_models() lists them."
    return InputError(sentence('encoder.name must be a timm model or "mlp"', f"{name!r:.100}", do))


@cache
def _timm_names() -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of timm's models, and all quoted names in the same files, such as older names of models."""
    spec = find_spec("timm")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    models: set[str] = set()
    quoted: set[str] = set()
    for folder in folders:
        for path in sorted((Path(folder) / "models").glob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            models.update(_REGISTERED.findall(text))
            quoted.update(_QUOTED.findall(text))
    return frozenset(models), frozenset(quoted)
