"""The errors that a user can cause.

A message is one line. It gives the condition, the received value and, if possible, the repair:

    eta must be >= 0, got -3.0. Use 0 for the symmetric loss.

A message about a field of a recipe starts with its name: the command replaces it by the option or word that set the
field, prints the message and ends with exit code 2. A Python caller catches ``LopsidedError``, or the built-in
exception that each subclass also derives from.
"""

from __future__ import annotations


class LopsidedError(Exception):
    """An error that the user can repair. Its text is one line: what is wrong, and what to do."""


class InputError(LopsidedError, ValueError):
    """A value, an option or a recipe that cannot be used."""


class DataError(LopsidedError, ValueError):
    """A source, a table or an image that cannot be read or does not fit."""


class RunError(LopsidedError, RuntimeError):
    """A run folder, a checkpoint or a model that cannot be used or continued."""


class MissingDependencyError(LopsidedError, ImportError):
    """A required optional package is not installed."""


class SaidError(LopsidedError):
    """An error that another process of the same job prints; this process ends silently. Its cause is the error."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory is exhausted.

    torch raises ``OutOfMemoryError`` on accelerators only; on the CPU, and for a library that does not fit, only the
    text of the error tells.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    signs = {RuntimeError: ("can't allocate memory", "out of memory"), ImportError: ("failed to map segment",)}
    told = any(isinstance(error, kind) and any(sign in str(error) for sign in signs[kind]) for kind in signs)
    return isinstance(error, MemoryError) or told or type(error).__name__ == "OutOfMemoryError"


def sentence(must: str, got: object, do: str = "") -> str:
    """Join the condition, the received value and the repair.

    >>> sentence("eta must be >= 0", -3.0, "Use 0 for the symmetric loss.")
    'eta must be >= 0, got -3.0. Use 0 for the symmetric loss.'
    """
    return f"{must}, got {got}." + (f" {do}" if do else "")
