"""The errors that a user can cause, and the one shape of their sentences.

Every message says what must hold, what was received, and, where there is something to do, what to do:

    eta must be >= 0, got -3.0. Use 0 for the symmetric loss.

The command prints the sentence and ends with exit code 2; a Python caller catches ``LopsidedError``, or the built-in
class that each child also is.
"""

from __future__ import annotations


class LopsidedError(Exception):
    """Something the user can repair; its text is one sentence, with a second one for the repair."""


class InputError(LopsidedError, ValueError):
    """A value, an option or a recipe that cannot be used."""


class DataError(LopsidedError, ValueError):
    """A source, a table or an image that cannot be read or does not fit."""


class RunError(LopsidedError, RuntimeError):
    """A run folder, a checkpoint or a model that cannot be used or continued."""


class MissingDependencyError(LopsidedError, ImportError):
    """An optional package that the asked-for work needs is not installed."""


class SaidError(LopsidedError):
    """An error, its cause, that another process of the same job says; this one ends without a word."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is not enough memory; torch says so by a class of its own on accelerators only.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    told = isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "out of memory" in str(error))
    return isinstance(error, MemoryError) or told or type(error).__name__ == "OutOfMemoryError"


def sentence(must: str, got: object, do: str = "") -> str:
    """Join what must hold, what was received and what to do.

    >>> sentence("eta must be >= 0", -3.0, "Use 0 for the symmetric loss.")
    'eta must be >= 0, got -3.0. Use 0 for the symmetric loss.'
    """
    return f"{must}, got {got}." + (f" {do}" if do else "")
