"""Checks of this machine, and what each result means for training."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from lopsided import __version__

EXTRAS = {
    "dicom": (("pydicom",), "DICOM files"),
    "figures": (("matplotlib",), "figures of reproduce"),
    "gs": (("gcsfs",), "images at gs:// addresses"),
    "mlflow": (("mlflow",), "tracking with MLflow"),
    "notebook": (("IPython", "pandas"), "progress and data frames in notebooks"),
    "onnx": (("onnxscript",), "export to ONNX of models with heads or other encoders"),
    "parquet": (("pyarrow",), "tables in Parquet, and data sets at hf:// addresses"),
    "ray": (("ray", "pyarrow"), "sweeps on a cluster"),
    "s3": (("s3fs",), "images at s3:// addresses"),
    "serve": (("python_multipart", "starlette", "uvicorn"), "a model behind a web page"),
    "tensorboard": (("tensorboard",), "tracking with TensorBoard"),
    "umap": (("umap",), "maps of features by UMAP"),
    "wandb": (("wandb",), "tracking with Weights & Biases"),
}
"""Extras of the package: the modules that they bring, and the purpose."""
_PACKAGES = {"mlflow": "mlflow-skinny", "python_multipart": "python-multipart", "umap": "umap-learn"}
"""The packages of modules with another name. The full package mlflow brings this one."""

STEP_GFLOP = 16.7
"""Cost of one resnet18 training step on 128 images of 28 x 28.

0.0218 GMAC per image without padding, times 2 operations per MAC, times 3 for the forward and backward pass.
"""


@dataclass(frozen=True)
class Finding:
    """One result line: name of the check, result, meaning. ``ok`` is False if something is missing."""

    name: str
    value: str
    meaning: str
    ok: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


def examine() -> list[Finding]:
    """Check this machine. This takes some seconds, mostly for the speed of the recipes."""
    return [*_software(), *_processors(), *_devices(), *_room(), *_weights(), *_recipes(), *_extras()]


def _software() -> Iterator[Finding]:
    import torch

    yield Finding("lopsided", __version__, "recorded in every run and model")
    system = f"{platform.system()} {platform.machine()}"
    yield Finding("Python", platform.python_version(), f"on {system}; 3.11 or newer is needed")
    yield Finding("torch", torch.__version__, "results are bit-identical only with the same version")


def _processors() -> Iterator[Finding]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    meaning = (
        "all cores are used"
        if threads >= cores
        else f"{cores} cores are available; set threads in the recipe to use more"
    )
    yield Finding("threads", str(threads), meaning, ok=threads >= cores)
    libraries = [
        name
        for name, backend in (("MKL", torch.backends.mkl), ("oneDNN", torch.backends.mkldnn))
        if backend.is_available()
    ]
    known = "fast math libraries are available" if libraries else "neither MKL nor oneDNN: training will be slow"
    yield Finding("BLAS", " and ".join(libraries) or "other", known, ok=bool(libraries))
    flushed = torch.set_flush_denormal(True)
    torch.set_flush_denormal(False)
    paths = "small maps, channels last" + (", flushed denormals" if flushed else "")
    lacks = "" if flushed else "; this CPU cannot flush denormals"
    yield Finding(
        "fast paths",
        paths,
        f"used on the CPU unless the recipe sets fast = false; optimizers are always fused{lacks}",
    )
    # These are private functions of torch. A version without them skips this check.
    tests = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")]
    if any(tests):
        there = any(test() for test in tests if test is not None)
        meaning = "try precision=bf16" if there else "precision=bf16 works, but is slower than float32"
        yield Finding("bf16", "in hardware" if there else "not in hardware", meaning)
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    meaning = "compile = true in a recipe works; compiling takes a minute and pays off only in long runs"
    yield Finding(
        "compiler", compiler or "none", meaning if compiler else "compile = true in a recipe needs a C++ compiler"
    )
    speed = matmul_speed()
    steps = f"at most {speed / STEP_GFLOP:.1f} training steps per second with resnet18 on 128 images of 28 x 28"
    yield Finding("speed", f"{speed:.0f} GFLOP/s", steps)


def matmul_speed(size: int = 1024, seconds: float = 0.3) -> float:
    """Return the GFLOP/s of a float32 matrix product. Repeat the product for ``seconds`` and take the best time."""
    import torch

    a = torch.ones(size, size)
    best = float("inf")
    end = time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def _devices() -> Iterator[Finding]:
    import torch

    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        size = f"{facts.total_memory / 2**30:.0f} GiB"
        yield Finding(
            f"cuda:{i}", f"{facts.name}, {size}", "used with --device auto" if i == 0 else f"--device cuda:{i}"
        )
    if torch.backends.mps.is_available():
        yield Finding("mps", "Apple GPU", "used with --device mps")
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        yield Finding("GPU", "none", "everything runs on the CPU; keep images small (image_size)")


def _room() -> Iterator[Finding]:
    from lopsided.data.inputs import MEMORY_SHARE, free_memory

    memory = free_memory()
    if memory is not None:
        images = int(MEMORY_SHARE * memory / (3 * 224 * 224))
        meaning = f"{MEMORY_SHARE:.0%} of the free memory can cache {images:,} images of 224 x 224"
        yield Finding("memory", f"{memory / 2**30:.1f} GiB free", meaning)
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    writable = os.access(here, os.W_OK)
    meaning = "a run with resnet18 needs about 0.2 GiB" if writable else "this folder is read-only: set --out"
    yield Finding("disk", f"{free / 2**30:.1f} GiB free in {here}", meaning, ok=writable and free > 2**30)


def _weights() -> Iterator[Finding]:
    """Yield the pretrained weights that need no network, and the cache of features."""
    from lopsided.errors import LopsidedError
    from lopsided.inference.feature_cache import cache_limit, cache_root, list_cache
    from lopsided.models.pretrained import EMBEDDED_SHA256, embedded_file

    try:
        sizes = [f"{name}, {embedded_file(name).stat().st_size / 1e6:.0f} MB" for name in EMBEDDED_SHA256]
        yield Finding("embedded", "; ".join(sizes), "the recipes with pretrained encoders work offline")
    except LopsidedError as error:
        yield Finding("embedded", "damaged", str(error), ok=False)
    downloaded = sorted(_downloaded())
    shown = ", ".join(downloaded[:5]) + (f" and {len(downloaded) - 5} more" if len(downloaded) > 5 else "")
    meaning = "these encoders work offline" if downloaded else "encoder.weights = timm needs a network"
    yield Finding("hub's cache", shown or "no weights", meaning)
    root = cache_root()
    if root is None:
        yield Finding("features", "not cached", "LOPSIDED_CACHE_GIB is 0, or there is no home folder")
    else:
        size = sum(space["bytes"] for space in list_cache(root))
        meaning = f"at most {cache_limit() / 1e6:,.0f} MB; lopsided cache clear removes them"
        yield Finding("features", f"{size / 1e6:,.1f} MB in {root}", meaning)


def _recipes() -> Iterator[Finding]:
    """Yield how fast the recipes with frozen encoders see new images."""
    from lopsided.errors import LopsidedError
    from lopsided.recipe import named_recipe
    from lopsided.reports.wording import duration
    from lopsided.runs.features import images_per_second

    for name in ("quick", "thorough"):
        try:
            speed = images_per_second(named_recipe(name))
        except LopsidedError as error:
            yield Finding(name, "not possible", str(error), ok=False)
        else:
            meaning = f"features of 1,000 new images take about {duration(1000 / speed)}, also in predict and find"
            yield Finding(name, f"{speed:.3g} images a second", meaning)


def _downloaded() -> Iterator[str]:
    """Yield the weights in the cache of the Hugging Face hub with their sizes, without asking the network.

    Those of timm have its names, and those of others the addresses that ``encoder.weights`` takes.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    from lopsided.models.pretrained import WEIGHTS

    for path in (path for name in WEIGHTS for path in Path(HF_HUB_CACHE).glob(f"models--*/snapshots/*/{name}")):
        owner, _, name = path.parents[2].name.removeprefix("models--").partition("--")
        shown = name if owner == "timm" else f"hf-hub:{owner}/{name}@{path.parent.name}"
        yield f"{shown} ({path.stat().st_size / 1e6:,.0f} MB)"


def _extras() -> Iterator[Finding]:
    for name, (modules, purpose) in EXTRAS.items():
        missing = [module for module in modules if util.find_spec(module) is None]
        if missing:
            meaning = f"needed for {purpose}: pip install 'lopsided[{name}]'"
            yield Finding(name, f"missing {', '.join(missing)}", meaning, ok=False)
        else:
            versions = ", ".join(f"{module} {metadata.version(_PACKAGES.get(module, module))}" for module in modules)
            yield Finding(name, versions, f"available: {purpose}")
