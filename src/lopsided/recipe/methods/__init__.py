"""The methods of training: one file each with its spec, and the list of them. This package does not need torch.

An installed package can add a method through an entry point of the group ``lopsided.methods``. The name of the entry
point is the value of ``method`` in a recipe, and its object is a spec (see ``MethodSpec``).
"""

from lopsided.recipe.entries import Entries
from lopsided.recipe.methods.spec import MethodSpec

__all__ = ["GROUP", "METHODS", "MethodSpec", "find", "names"]

GROUP = "lopsided.methods"
METHODS: Entries[MethodSpec] = Entries(
    GROUP,
    "method",
    MethodSpec,
    {
        "two-stage": "lopsided.recipe.methods.staged:TWO_STAGE",
        "end-to-end": "lopsided.recipe.methods.staged:END_TO_END",
        "frozen": "lopsided.recipe.methods.frozen:FROZEN",
        "distance": "lopsided.recipe.methods.distance:DISTANCE",
        "adapter": "lopsided.recipe.methods.adapter:ADAPTER",
        "fine-tune": "lopsided.recipe.methods.fine_tune:FINE_TUNE",
    },
)
names, find = METHODS.names, METHODS.find
