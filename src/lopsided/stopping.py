"""A request to stop, such as SIGTERM of a cluster: what is trained is saved before the process ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
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


@contextmanager
def handling(handlers: Mapping[signal.Signals, Callable[..., object] | signal.Handlers]) -> Iterator[None]:
    """Replace signal handlers inside the block. Does nothing outside the main thread, which alone can set them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let interrupts wait until the block ends.

    To block their signals is not enough: a thread that does not, such as one of BLAS, may receive what is sent to the
    process, and the handler then runs in the main thread.
    """
    came: list[int] = []

    def keep(number: int, _: object) -> None:
        came.append(number)

    try:
        with handling({signal.SIGINT: keep, signal.SIGTERM: keep}):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])
