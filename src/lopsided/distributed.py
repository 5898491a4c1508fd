"""Several processes that train one model together. No other file talks to torch.distributed.

Every process, a rank, has the whole data set and the whole model, and computes its share of each batch. They exchange
little: ``sum_`` adds tensors up over the ranks, ``gather`` puts the rows of all ranks together, and ``told`` and
``spread`` give all ranks what the first one knows. Files and words are the first rank's alone.

A rank that fails closes its connections, so that the others fail in their next exchange instead of waiting for it. The
ranks then agree by a common store which of them says what went wrong, so that it is said once.
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

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others. One that dies is noticed at once; this ends a job in which one hangs."""
_PATIENCE = timedelta(seconds=2)
"""How long a rank lets the first one say what both of them have to say."""
_BUCKET = 2**24
"""Numbers in one exchange: large enough to be worth one, small enough not to double the memory of a large model."""


class LostRankError(RunError):
    """Another rank ended, or cannot be reached."""


class Ranks:
    """The ranks of a training, seen by one of them. ``Ranks()`` is a process alone, which exchanges nothing."""

    rank, size = 0, 1
    local_rank, local_size = 0, 1
    """The same on this machine."""

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and speaks."""
        return self.rank == 0

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, in which all of them agree bit by bit."""

    def gather(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """The rows of all ranks, in the order of ranks; rank r has ``sizes[r]`` of them, none perhaps."""
        return rows

    def told(self, make: Callable[[], Any]) -> Any:
        """What ``make`` returns on the first rank, as JSON can tell it; it is called there alone."""
        return make()

    def spread(self, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors that ``make`` returns on the first rank, on the CPU of all others; it is called there alone."""
        return dict(make())

    def check_same(self, what: str, value: str) -> None:
        """Raise unless all ranks have the same ``value``."""
        if value != self.told(lambda: value):
            got = f"others on rank {self.rank} than on rank 0"
            raise RunError(sentence(f"all ranks must have the same {what}", got))

    def speaks(self, error: BaseException) -> bool:
        """Whether it is for this rank to say an error that ends it; asked once."""
        return True


class _Group(Ranks):
    """Ranks that are connected by torch's default process group."""

    def __init__(self, store: Store | None) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._store = None if store is None else PrefixStore("lopsided", store)
        # A group of NCCL alone, as another program may have made it, takes no tensors of the CPU.
        self._device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Bucket by bucket, each one exchange."""
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
            flat = self._carried(flat)
            with _exchange():
                dist.all_reduce(flat)
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

    def gather(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Each rank's rows are filled up to the longest share, because an exchange is of equal shapes."""
        padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
        padded[: len(rows)] = rows.detach()
        padded = self._carried(padded)
        parts = [torch.empty_like(padded) for _ in sizes]
        with _exchange():
            dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).to(rows.device)

    def _carried(self, tensor: Tensor) -> Tensor:
        """A tensor where the group can exchange it."""
        needed = self._device.type == "cuda" and tensor.device.type == "cpu"
        return tensor.to(self._device) if needed else tensor

    def told(self, make: Callable[[], Any]) -> Any:
        """As JSON."""
        return json.loads(self._bytes(lambda: json.dumps(make()).encode()))

    def spread(self, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """As the bytes of a safetensors file."""
        from safetensors.torch import load, save

        def content() -> bytes:
            return save({key: value.detach().cpu().contiguous() for key, value in make().items()})

        return load(self._bytes(content))

    def _bytes(self, make: Callable[[], bytes]) -> bytes:
        """The first rank's bytes; an error in making them is raised on every rank."""
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
        """The rank that failed by itself says it; of several that have the same to say, the first one.

        That a rank is gone is said at once, by whoever is quickest: torchrun is about to end the others.
        """
        if self._store is None:
            return True
        said = "said/" + hashlib.sha256(str(error).encode(errors="replace")).hexdigest()
        try:
            if isinstance(error, LostRankError):
                return not self._store.check(["failed"]) and self._store.add("lost", 1) == 1
            self._store.set("failed", "1")
            if not self.first and _appears(self._store, said):
                sleep(_PATIENCE.total_seconds() / 2)  # torchrun ends the others when one has ended: let them speak.
                return False
            return self._store.add(said, 1) == 1
        except RuntimeError:  # The store was another rank's, which is gone.
            return True


def _appears(store: Store, key: str) -> bool:
    try:
        store.wait([key], _PATIENCE)
    except RuntimeError:
        return False
    return True


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one kind together, in their order."""
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
    """Say in a sentence what becomes of an exchange when another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        do = "The rank that ended first says why, unless it was killed. Continue with the same command and --resume."
        got = f"a broken exchange ({_reason(error)})"
        raise LostRankError(sentence("all ranks must go on until the end", got, do)) from error


def _reason(error: RuntimeError) -> str:
    """The first sentence of what a library says, without the place in its source.

    >>> _reason(RuntimeError("[/gloo/tcp/pair.cc:553] Connection closed by peer [::1]:4567. This may mean that"))
    'Connection closed by peer [::1]:4567'
    """
    lines = re.sub(r"^\[[^\]]*:\d+\]\s*", "", str(error).strip()).splitlines()
    return re.split(r"\.\s", lines[0])[0].rstrip(".") if lines else type(error).__name__


@contextmanager
def joined(init_method: str = "env://", *, rank: int = -1, size: int = -1) -> Iterator[Ranks]:
    """Join the other ranks of this job while the block runs, and yield all of them.

    These are the ranks of torch's process group, if the program has made one; else those that torchrun, or whoever sets
    ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, started; else this process alone. ``init_method``,
    ``rank`` and ``size`` are torch's, for a job that is put together by hand. An error that is for another rank to say
    leaves the block as ``SaidError``.
    """
    made = False
    if dist.is_available() and dist.is_initialized():
        ranks: Ranks = _Group(None)
    elif size > 1 or (size < 0 and _asked_for() > 1):
        ranks, made = _join(init_method, rank, size), True
    else:
        ranks = Ranks()
    try:
        yield ranks
    except Exception as error:
        if not ranks.speaks(error):
            raise SaidError(str(error)) from error
        raise  # Without leaving the group, which can wait for ranks that are gone.
    if made:
        dist.destroy_process_group()


def _asked_for() -> int:
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal():
        raise InputError(sentence("WORLD_SIZE must be the number of ranks", repr(text), "Start them with torchrun."))
    return int(text)


def _join(init_method: str, rank: int, size: int) -> _Group:
    from torch.distributed.rendezvous import rendezvous

    try:
        store, rank, size = next(iter(rendezvous(init_method, rank, size, timeout=TIMEOUT)))
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        # Words between ranks are exchanged on the CPU, gradients where they lie.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise InputError(sentence("all ranks must find each other", reason, "Start them with torchrun.")) from error
    return _Group(store)
