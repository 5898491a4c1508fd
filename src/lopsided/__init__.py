"""Contrastive learning for lopsided data.

The losses live in ``lopsided.losses``. Importing this package stays cheap: torch is imported when a name that needs it
is first used.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__"]
