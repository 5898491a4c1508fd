"""Ranks: the processes that share one training, as one of them sees them. ``distributed`` connects several.

Every rank holds the whole data set and the whole model, and computes its share of each batch. ``sum_`` adds tensors
over the ranks. ``gather`` collects the rows of all ranks. ``told`` and ``spread`` send values of the first rank to all
ranks. Only the first rank writes files and prints. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lopsided.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor


class Ranks:
    """The ranks of a training, seen from one rank. This base class is a single process, which exchanges nothing."""

    rank, size = 0, 1
    local_rank, local_size = 0, 1
    """Rank and number of ranks on this machine."""

    @property
    def first(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks. The sum has the same bits on all ranks."""

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return flag

    def gather(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the rows of all ranks, in the order of ranks. Rank r has ``sizes[r]`` rows, possibly 0."""
        return rows

    def told(self, make: Callable[[], Any]) -> Any:
        """Return on all ranks what ``make`` returns on the first rank, by JSON. Only the first rank calls ``make``."""
        return make()

    def spread(self, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return on all ranks the tensors that ``make`` returns on the first rank; on the CPU of the other ranks.

        Only the first rank calls ``make``.
        """
        return dict(make())

    def check_same(self, what: str, value: str) -> None:
        """Raise unless all ranks have the same ``value``."""
        if value != self.told(lambda: value):
            raise RunError(f"All ranks must have the same {what}, but rank {self.rank} and rank 0 differ.")

    def speaks(self, error: BaseException) -> bool:
        """Return whether this rank prints the error that ended it. Call it once."""
        return True


ALONE = Ranks()
"""The ranks of a training in one process."""
