"""A request to stop, such as SIGTERM of a cluster: what is trained is saved before the process ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

SECONDS = 20.0
"""How long a step may still take after a request. Clusters kill a process after 30 s."""


class Stopping:
    """Interrupts the process on request: at once or, inside ``saving``, when its work is saved or after ``SECONDS``.

    An interrupt is a ``KeyboardInterrupt``, which releases locks. Only the main thread may make a request.
    """

    def __init__(self) -> None:
        self.requested = False
        self._is_saving = False

    @contextmanager
    def saving(self, possible: bool = True) -> Iterator[None]:
        """Let a request wait inside the block, which must look at ``requested``, if that is ``possible``."""
        self._is_saving = possible
        try:
            yield
        finally:
            self._is_saving = False
        if self.requested:
            raise KeyboardInterrupt

    def request(self) -> None:
        """Ask to stop."""
        self.requested = True
        if not self._is_saving or not hasattr(signal, "setitimer"):
            raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Interrupt the process after the block, which saves its work and may take as long as it needs."""
        if self.requested and hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        yield
        raise KeyboardInterrupt


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


STOPPING = Stopping()
"""The requests to this process."""
