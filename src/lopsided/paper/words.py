"""The words of the paper's tables, which call the balanced accuracy unweighted accuracy, UWA."""

from __future__ import annotations

from lopsided.runs import comparison

WORDS = {**comparison.WORDS, "uwa": "UWA"}
