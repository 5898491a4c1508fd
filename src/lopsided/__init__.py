"""Train an image classifier when one class is rare, and know how far to trust it.

``lopsided.fit`` and ``lopsided.open`` do what the command does. The losses are in ``lopsided.losses``. Importing this
package is fast: torch is imported only when a name needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lopsided.api import Run, fit
    from lopsided.api import open_run as open
    from lopsided.estimator import LopsidedClassifier, TwoStageClassifier

__version__ = "0.1.0"
__all__ = ["LopsidedClassifier", "Run", "TwoStageClassifier", "__version__", "fit", "open"]

_PLACES = {
    "LopsidedClassifier": ("lopsided.estimator", "LopsidedClassifier"),
    "TwoStageClassifier": ("lopsided.estimator", "TwoStageClassifier"),
    "Run": ("lopsided.api", "Run"),
    "fit": ("lopsided.api", "fit"),
    "open": ("lopsided.api", "open_run"),
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        module, attribute = _PLACES[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
