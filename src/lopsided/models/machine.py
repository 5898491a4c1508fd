"""The machine that a run computes on: its device and its threads."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lopsided.distributed import Ranks
from lopsided.errors import InputError, sentence
from lopsided.models.fast.small_maps import lay_out_weights, use_fast_paths
from lopsided.seeds import derive_seed


def pick_device(name: str, ranks: Ranks | None = None) -> torch.device:
    """Return the device of this name; "auto" is the first CUDA device if there is one, else the CPU.

    Several ranks on one machine have one CUDA device each.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if ranks is not None and ranks.size > 1 and name.startswith("mps"):
        must = "several ranks must compute on the CPU or on CUDA devices"
        raise InputError(sentence(must, repr(name), "Set device to cpu, or start one process."))
    if ranks is not None and ranks.local_size > 1 and name.startswith("cuda"):
        number = torch.cuda.device_count()
        if name != "cuda" or number < ranks.local_size:
            must = f"{ranks.local_size} ranks on one machine must have a CUDA device each"
            got = f"{number}" if name == "cuda" else repr(name)
            raise InputError(sentence(must, got, "Start fewer, or set device to cpu."))
        name = f"cuda:{ranks.local_rank}"
    try:
        device = torch.device(name)
    except RuntimeError:
        must = 'device must be "auto", "cpu", "cuda", "cuda:1" or "mps"'
        raise InputError(sentence(must, repr(name))) from None
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there.get(device.type, False):
        found = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        found += ["mps"] if there["mps"] else []
        do = 'Use "auto" to take what there is.'
        raise InputError(sentence(f"device must be one that this machine has, {', '.join(found)}", repr(name), do))
    return device


@contextmanager
def threads(number: int | None) -> Iterator[int]:
    """Compute with so many CPU threads inside the block, None: as torch has it; yields the number."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield torch.get_num_threads()
    finally:
        if number is not None:
            torch.set_num_threads(before)


@contextmanager
def flushed_denormals(enabled: bool) -> Iterator[None]:
    """Let numbers below 1e-38 be 0 inside the block, which some steps are several times faster for.

    Threads that torch starts inside the block inherit this and keep it afterwards; those it has already started keep
    what they have: torch sets it for the calling thread alone. It cannot tell what was set before, so that afterwards
    this thread has what torch starts with, not flushed.
    """
    flushed = enabled and torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if flushed:
            torch.set_flush_denormal(False)


@functools.cache
def keep_freed_memory() -> bool:
    """Let freed blocks of up to 32 MiB stay with this process, where its allocator is glibc's; returns whether.

    By itself glibc gives the buffers of a step back to the system and gets them anew in the next, page by page.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    trim_threshold, mmap_threshold = -1, -3
    return bool(mallopt(mmap_threshold, 32 << 20) and mallopt(trim_threshold, (2 << 30) - 1))


def compile_encoder(module: nn.Module, device: torch.device, num_ranks: int) -> None:
    """Have torch.compile make a program of an encoder when it is first used, in place, with the same state dict."""
    if num_ranks > 1:
        do = "Batch norm over ranks is not part of a compiled program."
        raise InputError(sentence("compile must be false on several ranks", f"true on {num_ranks}", do))
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        do = "Install g++, or set compile = false."
        raise InputError(sentence("compile needs a C++ compiler to be on the path", "none", do))
    module.compile()


def arrange(module: nn.Module, device: torch.device, shape: tuple[int, ...]) -> None:
    """Give an encoder of images of this shape the layout and the paths that are fastest on this device, in place."""
    module.to(memory_format=torch.channels_last)
    if device.type == "cpu" and use_fast_paths(module):
        lay_out_weights(module, torch.zeros(1, *shape))


@contextmanager
def seeded(device: torch.device, seed: int, *names: str | int) -> Iterator[None]:
    """Draw what modules draw by themselves, as dropout does, from a named seed; the global state stays as it is."""
    cuda = device.type == "cuda"
    index = torch.cuda.current_device() if cuda and device.index is None else device.index
    with torch.random.fork_rng(devices=[index] if cuda else []):
        value = derive_seed(seed, *names)
        torch.default_generator.manual_seed(value)
        if cuda:
            torch.cuda.default_generators[index].manual_seed(value)
        yield
