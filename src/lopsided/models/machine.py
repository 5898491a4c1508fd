"""Settings of the machine that a run uses: device, threads, memory and compiler."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from lopsided.errors import InputError, sentence
from lopsided.models.small_maps import lay_out_weights, use_fast_paths
from lopsided.ranks import ALONE, Ranks
from lopsided.seeds import derive_seed


def pick_device(name: str, ranks: Ranks = ALONE) -> torch.device:
    """Return the device of this name. "auto" means the first CUDA device if there is one, otherwise the CPU.

    If there are several ranks on one machine, each rank gets its own CUDA device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if ranks.size > 1 and name.startswith("mps"):
        must = "several ranks must compute on the CPU or on CUDA devices"
        raise InputError(sentence(must, repr(name), "Set device to cpu, or start one process."))
    if ranks.local_size > 1 and name.startswith("cuda"):
        number = torch.cuda.device_count()
        if name != "cuda" or number < ranks.local_size:
            must = f"{ranks.local_size} ranks on one machine must have one CUDA device each"
            got = f"{number}" if name == "cuda" else repr(name)
            raise InputError(sentence(must, got, "Start fewer ranks, or set device to cpu."))
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
        do = 'Use "auto" to choose an available device.'
        raise InputError(sentence(f"device must be available on this machine ({', '.join(found)})", repr(name), do))
    return device


@contextmanager
def threads(number: int | None) -> Iterator[int]:
    """Use this number of CPU threads inside the block and yield the number. None keeps torch's setting."""
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
    """Replace numbers below 1e-38 by 0 inside the block, which makes some steps several times faster.

    torch sets this mode only for the calling thread. Threads that torch starts inside the block inherit the mode and
    keep it; threads that already run do not change. torch cannot read the mode, so after the block the calling thread
    has torch's default, which is off.
    """
    for kind in (np.float32, np.float64):
        np.finfo(kind)  # numpy 1 measures the numbers when it is first asked, and would warn of this mode.
    flushed = enabled and torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if flushed:
            torch.set_flush_denormal(False)


@functools.cache
def keep_freed_memory() -> bool:
    """Keep freed memory blocks of up to 32 MiB in this process. Return whether it worked, which needs glibc.

    By default, glibc returns the buffers of a step to the system and requests them again, page by page, in the next.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    trim_threshold, mmap_threshold = -1, -3
    return bool(mallopt(mmap_threshold, 32 << 20) and mallopt(trim_threshold, (2 << 30) - 1))


def compile_encoder(module: nn.Module, device: torch.device, num_ranks: int) -> None:
    """Compile an encoder in place with torch.compile, at its first use. The state dict does not change."""
    if num_ranks > 1:
        do = "A compiled encoder cannot run batch norm over ranks."
        raise InputError(sentence("compile must be false with several ranks", f"true with {num_ranks} ranks", do))
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        raise InputError("compile = true needs a C++ compiler on the PATH. Install g++, or set compile = false.")
    module.compile()


def arrange(module: nn.Module, device: torch.device, shape: tuple[int, ...]) -> None:
    """Give an encoder, in place, the memory layout and fast paths for images of this shape on this device."""
    module.to(memory_format=torch.channels_last)
    if device.type == "cpu" and use_fast_paths(module):
        lay_out_weights(module, torch.zeros(1, *shape))


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode without gradients inside the block, then restore the mode of each of its parts."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for child, mode in modes:
            child.training = mode


@contextmanager
def seeded(device: torch.device, seed: int, *names: str | int) -> Iterator[None]:
    """Seed random numbers that modules draw inside the block, such as dropout. The global state does not change."""
    cuda = device.type == "cuda"
    index = torch.cuda.current_device() if cuda and device.index is None else device.index
    with torch.random.fork_rng(devices=[index] if cuda else []):
        value = derive_seed(seed, *names)
        torch.default_generator.manual_seed(value)
        if cuda:
            torch.cuda.default_generators[index].manual_seed(value)
        yield
