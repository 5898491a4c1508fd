"""Contrastive learning for class-imbalanced images.

The losses are in ``lopsided.losses``. Importing this package is fast: torch is imported only when a name needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lopsided.estimator import LopsidedClassifier, TwoStageClassifier

__version__ = "0.1.0"
__all__ = ["LopsidedClassifier", "TwoStageClassifier", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("LopsidedClassifier", "TwoStageClassifier"):
        from lopsided import estimator

        return getattr(estimator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
