"""Contrastive learning for class-imbalanced images.

The losses are in ``lopsided.losses``. Importing this package is fast: torch is imported only when a name needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lopsided.estimator import TwoStageClassifier

__version__ = "0.1.0"
__all__ = ["TwoStageClassifier", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "TwoStageClassifier":
        from lopsided.estimator import TwoStageClassifier

        return TwoStageClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
