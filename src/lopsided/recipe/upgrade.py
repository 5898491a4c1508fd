"""Recipes of earlier versions: what their fields are called now."""

from __future__ import annotations

from typing import Any

from lopsided.losses import catalogue
from lopsided.losses.catalogue import CatalogueError

_FLAT = ("eta", "eta_unit", "gamma", "temperature", "normalization", "focal_gamma")
"""Parameters of losses that stood beside ``loss`` in a stage's own table, whether or not the loss had them."""


def upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a recipe with each loss in a table of its own, as version 0.1 did not have it.

    What a loss does not have is left out if it says nothing, as ``eta = 0`` for CL; otherwise it stays with the loss,
    where it is refused.
    """
    return {
        name: _stage(table) if name in ("encoder_training", "classifier") else table for name, table in values.items()
    }


def _stage(table: Any) -> Any:
    if not isinstance(table, dict) or not any(name in table for name in _FLAT) or isinstance(table.get("loss"), dict):
        return table
    loss = table.get("loss", "afcl")
    try:
        known = catalogue.find(loss).defaults() if isinstance(loss, str) else {}
    except CatalogueError:
        known = {}
    flat = {name: table[name] for name in _FLAT if name in table}
    if loss == "focal":
        flat["gamma"] = flat.get("focal_gamma", known["gamma"])
    silent = {"eta": (0, 0.0), "gamma": (1,) if loss == "fcl" else (0, 0.0)}
    kept = {
        name: value for name, value in flat.items() if name in known or (name in silent and value not in silent[name])
    }
    rest = {name: value for name, value in table.items() if name not in _FLAT}
    return {**rest, "loss": {"name": loss, **kept}}
