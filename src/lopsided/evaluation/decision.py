"""The decision rule: from probabilities to a predicted class."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def decide(probabilities: ArrayLike) -> NDArray[np.int64]:
    """Return the most probable class of each row of (n, K); the first one if classes tie.

    >>> decide([[0.2, 0.8], [0.5, 0.5]])
    array([1, 0])
    """
    decided: NDArray[np.int64] = np.argmax(np.asarray(probabilities), axis=-1)
    return decided
