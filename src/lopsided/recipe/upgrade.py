"""Conversion of recipes of earlier versions to the current fields."""

from __future__ import annotations

from typing import Any

from lopsided.losses import catalogue
from lopsided.losses.catalogue import CatalogueError

_FLAT = {
    "encoder_training": ("eta", "eta_unit", "gamma", "temperature", "normalization", "focal_gamma"),
    "classifier": ("focal_gamma",),
}
"""Loss parameters that version 0.1 kept beside ``loss`` in the table of the stage, whether or not the loss had them."""
DECISION = {"rule": "plain", "calibration": "none"}
"""How the models of version 0.1 decided."""
_UNSAID = {"encoder_training": "afcl", "classifier": "ce"}


def upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a recipe of version 0.1 with each loss in its own table.

    A parameter that the loss does not have is dropped if it has no effect, such as ``eta = 0`` for CL. Otherwise it
    stays in the table of the loss, and validation raises an error. Such a recipe decides for the most probable class.
    """
    found = {name: _stage(name, table) if name in _FLAT else table for name, table in values.items()}
    return found if found == values else {"decision": dict(DECISION), **found}


def _stage(section: str, table: Any) -> Any:
    if not isinstance(table, dict) or isinstance(table.get("loss"), dict):
        return table
    flat = {name: table[name] for name in _FLAT[section] if name in table}
    if not flat:
        return table
    loss = table.get("loss", _UNSAID[section])
    try:
        known = catalogue.find(loss).defaults() if isinstance(loss, str) else {}
    except CatalogueError:
        known = {}
    if loss == "focal" and flat.get("gamma", 0) == 0:  # In 0.1, gamma belonged to the contrastive losses.
        flat["gamma"] = flat.get("focal_gamma", known["gamma"])
    kept = {name: value for name, value in flat.items() if name in known or (name in ("eta", "gamma") and value != 0)}
    rest = {name: value for name, value in table.items() if name not in flat}
    return {**rest, "loss": {"name": loss, **kept}}
