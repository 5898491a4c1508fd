"""Connects several processes (``ranks``) that train one model together.

Only ``losses/ranks.py``, which is for training loops of other packages and needs torch alone, also exchanges tensors.

A rank that fails closes its connections, so the other ranks fail in their next exchange instead of waiting. The ranks
then use a common store to choose the rank that prints the error, so that the error is printed once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from time import sleep
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lopsided.errors import InputError, RunError, SaidError, sentence
from lopsided.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others.

A rank that dies is noticed at once; the limit ends a job in which a rank hangs.
"""
_PATIENCE = timedelta(seconds=2)
"""How long a rank waits for the first rank to print the same error."""
_BUCKET = 2**24
"""Numbers per exchange: enough for an efficient exchange, but too few to double the memory of a large model."""


class LostRankError(RunError):
    """Another rank ended, or cannot be reached."""


class _Group(Ranks):
    """Ranks that are connected by torch's default process group."""

    def __init__(self, store: Store | None) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._store = None if store is None else PrefixStore("lopsided", store)
        # Another program may have made a group with NCCL only, which cannot exchange CPU tensors.
        self._device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum in buckets, with one exchange per bucket."""
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
            flat = self._carried(flat)
            with _exchange():
                dist.all_reduce(flat)
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

    def any(self, flag: bool) -> bool:
        """Add the flags up."""
        number = torch.tensor([float(flag)])
        self.sum_([number])
        return number.item() > 0

    def gather(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Gather after padding the rows of each rank to the largest size, because all shapes must be equal."""
        padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
        padded[: len(rows)] = rows.detach()
        padded = self._carried(padded)
        parts = [torch.empty_like(padded) for _ in sizes]
        with _exchange():
            dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).to(rows.device)

    def _carried(self, tensor: Tensor) -> Tensor:
        """Return a tensor on a device on which the group can exchange it."""
        needed = self._device.type == "cuda" and tensor.device.type == "cpu"
        return tensor.to(self._device) if needed else tensor

    def told(self, make: Callable[[], Any]) -> Any:
        """Send the result as JSON."""
        return json.loads(self._bytes(lambda: json.dumps(make()).encode()))

    def spread(self, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Send the tensors as the bytes of a safetensors file."""
        from safetensors.torch import load, save

        def content() -> bytes:
            return save({key: value.detach().cpu().contiguous() for key, value in make().items()})

        return load(self._bytes(content))

    def _bytes(self, make: Callable[[], bytes]) -> bytes:
        """Return the bytes that ``make`` returns on the first rank. If ``make`` fails there, every rank raises."""
        failure: Exception | None = None
        content = b""
        if self.first:
            try:
                content = b"+" + make()
            except Exception as error:
                failure, content = error, b"-" + str(error).encode(errors="replace")
        size = torch.tensor([len(content)], device=self._device)
        with _exchange():
            dist.broadcast(size, 0)
        buffer = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        if self.first:
            buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        with _exchange():
            dist.broadcast(buffer, 0)
        if failure is not None:
            raise failure
        content = buffer.cpu().numpy().tobytes()
        if content[:1] == b"-":
            raise RunError(content[1:].decode())
        return content[1:]

    def speaks(self, error: BaseException) -> bool:
        """Return True on the rank that failed by itself; on the first rank if several ranks have the same error.

        A lost rank is reported at once, by the fastest rank, because torchrun is about to end the others.
        """
        if self._store is None:
            return True
        said = "said/" + hashlib.sha256(str(error).encode(errors="replace")).hexdigest()
        try:
            if isinstance(error, LostRankError):
                return not self._store.check(["failed"]) and self._store.add("lost", 1) == 1
            self._store.set("failed", "1")
            if not self.first and _appears(self._store, said):
                sleep(
                    _PATIENCE.total_seconds() / 2
                )  # torchrun ends all ranks when one ends: give the other rank time to print.
                return False
            return self._store.add(said, 1) == 1
        except RuntimeError:  # The rank that held the store has ended.
            return True


def _appears(store: Store, key: str) -> bool:
    try:
        store.wait([key], _PATIENCE)
    except RuntimeError:
        return False
    return True


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in buckets of one dtype and device, in their order."""
    for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
        bucket: list[Tensor] = []
        for tensor in tensors:
            if (tensor.dtype, tensor.device) != kind:
                continue
            if bucket and sum(one.numel() for one in bucket) + tensor.numel() > _BUCKET:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket


@contextmanager
def _exchange() -> Iterator[None]:
    """Raise ``LostRankError`` if an exchange fails because another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        cause = "The rank that ended first prints the cause, unless it was killed."
        do = "Continue with the same command and --resume."
        raise LostRankError(f"The connection to another rank failed ({_reason(error)}). {cause} {do}") from error


def _reason(error: RuntimeError) -> str:
    """Return the first sentence of a library's error, without the place in its source.

    >>> _reason(RuntimeError("[/gloo/tcp/pair.cc:553] Connection closed by peer [::1]:4567. This may mean that"))
    'Connection closed by peer [::1]:4567'
    """
    lines = re.sub(r"^\[[^\]]*:\d+\]\s*", "", str(error).strip()).splitlines()
    return re.split(r"\.\s", lines[0])[0].rstrip(".") if lines else type(error).__name__


@contextmanager
def joined(init_method: str = "env://", *, rank: int = -1, size: int = -1) -> Iterator[Ranks]:
    """Join the other ranks of this job while the block runs, and yield the ``Ranks``.

    If the program has made a torch process group, its ranks are used. Otherwise the ranks are those that torchrun
    started, or any launcher that sets ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``. Otherwise this
    process runs alone. ``init_method``, ``rank`` and ``size`` are the arguments of torch, for a job without a launcher.
    If another rank prints the error, this block raises ``SaidError``.
    """
    made = False
    if dist.is_available() and dist.is_initialized():
        ranks: Ranks = _Group(None)
    elif size > 1 or (size < 0 and _asked_for() > 1):
        ranks, made = _join(init_method, rank, size), True
    else:
        ranks = ALONE
    try:
        yield ranks
    except Exception as error:
        if not ranks.speaks(error):
            raise SaidError(str(error)) from error
        raise  # Without destroying the group, which can wait for ranks that have ended.
    if made:
        dist.destroy_process_group()


def _asked_for() -> int:
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal():
        raise InputError(sentence("WORLD_SIZE must be the number of ranks", repr(text), "Start with torchrun."))
    return int(text)


def _join(init_method: str, rank: int, size: int) -> _Group:
    from torch.distributed.rendezvous import rendezvous

    try:
        store, rank, size = next(iter(rendezvous(init_method, rank, size, timeout=TIMEOUT)))
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        # Ranks exchange JSON on the CPU, and gradients on their device.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise InputError(f"The ranks cannot connect: {reason}. Start them with torchrun.") from error
    return _Group(store)
