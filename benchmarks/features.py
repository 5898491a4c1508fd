"""How fast are features of the embedded encoder, and how much memory do they need?

    python benchmarks/features.py [speed] [recipes] [exported] [predict] [memory] [--record FILE.json]
    python benchmarks/features.py folder --photos FOLDER [--peer SRC]

speed     images per second at 224 px from JPEG files of 600 x 450 pixels, with decoding: lopsided against timm's model
          in plain torch. Both decode in the same way, so that the ratio is that of the encoders. Also without decoding.
recipes   images per second of the features of ``quick`` and ``thorough``, of both as they were without stages (one and
          three encoders), and of timm's model at 224 px in plain torch; from the same JPEG files.
exported  images per second of encoders with random weights that torch's exporter writes, by onnxruntime and by torch.
          Decoded images of 224 px.
predict   images per second of a ResNet-18 at 64 px through the engine of ``lopsided predict``, against torch with the
          fast paths and memory layout of training, and against timm's model as it is, channels-last. Decoded images.
          ``products`` are as many multiplications as the network has, as matrix products of 1,024 x 1,024: what the
          processor can do at best.
memory    peak memory of a process that computes features of ``quick`` of 1,000 files, and of another one of 10,000.
folder    seconds of whole commands on a folder of class folders, with a cache of their own: a run, a second run with
          another seed, and the prediction of five images. The second run and the prediction are repeated with the
          sources of another version in ``--peer``, such as the folder ``src`` of an older clone. Seconds of the
          processor (user and system) are given beside those of the clock, and the load of the machine as well.
          ``methods`` are the seconds of each method of a comparison on these features, in one process.

The variants run in turns, and the figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import lopsided
from lopsided.data.images import FileImages
from lopsided.data.inputs import StreamedInputs, row_batches
from lopsided.inference.engine import Engine
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import ClassifierHead
from lopsided.models.machine import arrange, evaluating
from lopsided.models.model import Model
from lopsided.models.pretrained import EMBEDDED_ENCODER, preprocessing_of
from lopsided.recipe import named_recipe
from lopsided.recipe.views import PLAIN, computed_views

RECORD = Path(__file__).parent / "records" / "features_speed.json"
NUM, SIZE, BATCH, ROUNDS = 256, 224, 64, 3


def write_photos(folder: Path, number: int) -> list[Path]:
    """Write smooth random JPEGs of 600 x 450 pixels. Above 256 files, the same content repeats."""
    folder.mkdir(exist_ok=True)
    paths = []
    for i in range(number):
        path = folder / f"{i:05d}.jpg"
        if i < NUM:
            generator = np.random.default_rng(i)
            small = Image.fromarray(generator.integers(0, 256, (15, 20, 3), dtype=np.uint8))
            small.resize((600, 450), Image.Resampling.BICUBIC).save(path, quality=90)
        else:
            path.hardlink_to(folder / f"{i % NUM:05d}.jpg")
        paths.append(path)
    return paths


def make_model(name: str, weights: str, size: int, views: Sequence[str] = PLAIN) -> Model:
    """Return a model in eval mode."""
    encoder, width = build_encoder(name, channels=3, image_size=size, weights=weights)
    pixels = preprocessing_of(name if weights == "embedded" else EMBEDDED_ENCODER, "embedded")
    return Model(encoder, ClassifierHead(width, 2), pixels.mean, pixels.std, views=views).eval()


def in_turns(variants: dict[str, Callable[[], int]]) -> dict[str, float]:
    """Return the median images per second of each variant, over rounds in which all of them run.

    The rates by the time of the processor are returned, too, because other work on the machine hardly changes them.
    """
    rates: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, run in variants.items():
            begin, computed = time.perf_counter(), time.process_time()
            number = run()
            rates.setdefault(name, []).append(number / (time.perf_counter() - begin))
            rates.setdefault(f"{name}, per CPU second", []).append(number / (time.process_time() - computed))
    return {name: round(statistics.median(values), 1) for name, values in rates.items()}


def by_torch(model: Model, batch: torch.Tensor) -> None:
    """Compute features in plain torch."""
    with evaluating(model):
        model.features(batch.float() / 255)


def speed() -> dict[str, Any]:
    """Compare the engine with timm's model, with and without decoding."""
    model = make_model(EMBEDDED_ENCODER, "embedded", SIZE)
    begin = time.perf_counter()
    engine = Engine(model, (3, SIZE, SIZE))
    built = time.perf_counter() - begin
    assert engine.is_fast
    with tempfile.TemporaryDirectory() as folder:
        images = FileImages(write_photos(Path(folder), NUM), 3)
        inputs = StreamedInputs(images, SIZE, 3, torch.get_num_threads())

        def from_files(compute: Callable[[torch.Tensor], object]) -> int:
            for _, batch in inputs.batches(row_batches(NUM, BATCH)):
                compute(batch)
            return NUM

        decoded = inputs.batch(np.arange(BATCH))

        def in_memory(compute: Callable[[torch.Tensor], object]) -> int:
            compute(decoded)
            return BATCH

        variants = {"lopsided": engine.features, "timm": lambda batch: by_torch(model, batch)}
        found = {
            "from files": in_turns({name: lambda c=compute: from_files(c) for name, compute in variants.items()}),
            "decoded": in_turns({name: lambda c=compute: in_memory(c) for name, compute in variants.items()}),
        }
    for rates in found.values():
        rates["ratio"] = round(rates["lopsided"] / rates["timm"], 2)
    return {**found, "seconds to build the engine": round(built, 2)}


BEFORE = {
    "quick": "tf_efficientnet_lite0+pixels",
    "thorough": "tf_efficientnet_lite0+tf_efficientnet_lite1+tf_efficientnet_lite2+pixels",
}
"""The encoders of the recipes before they had stages."""


def recipes() -> dict[str, Any]:
    """Compare the features of recipes with timm's model, from files."""
    plain = make_model(EMBEDDED_ENCODER, "embedded", SIZE)
    with tempfile.TemporaryDirectory() as folder:
        images = FileImages(write_photos(Path(folder), BATCH // 2), 3)

        def variant(side: int, compute: Callable[[torch.Tensor], object]) -> Callable[[], int]:
            def run() -> int:
                batches = StreamedInputs(images, side, 3, torch.get_num_threads()).batches(
                    row_batches(len(images), BATCH)
                )
                for _, batch in batches:
                    compute(batch)
                return len(images)

            return run

        variants = {"timm": variant(SIZE, lambda batch: by_torch(plain, batch))}
        for name, before in BEFORE.items():
            section, side = named_recipe(name).encoder, named_recipe(name).data.image_size or SIZE
            for label, encoder in ((name, section.name), (f"{name} before", before)):
                model = make_model(encoder, "embedded", side, computed_views(section.views))
                variants[label] = variant(side, Engine(model, (3, side, side)).features)
        rates = in_turns(variants)
    for name in BEFORE:
        for unit in ("", ", per CPU second"):
            rates[f"{name}, ratio to timm{unit}"] = round(rates[name + unit] / rates[f"timm{unit}"], 2)
            rates[f"{name}, ratio to before{unit}"] = round(rates[name + unit] / rates[f"{name} before{unit}"], 2)
    return rates


def exported() -> dict[str, Any]:
    """Compare onnxruntime and torch on encoders that the package cannot translate by itself."""
    batch = torch.randint(0, 256, (4, 3, SIZE, SIZE), dtype=torch.uint8)
    found = {}
    for name in ("vit_small_patch14_dinov2", "convnext_tiny"):
        model, shape = make_model(name, "none", SIZE), (3, SIZE, SIZE)
        engines = {"onnxruntime": Engine(model, shape), "torch": Engine(model, shape, fast=False)}
        assert engines["onnxruntime"].is_fast
        rates = in_turns({label: lambda own=own: len(own.encode(batch)) for label, own in engines.items()})
        for unit in ("", ", per CPU second"):
            rates[f"ratio{unit}"] = round(rates[f"onnxruntime{unit}"] / rates[f"torch{unit}"], 2)
        found[name] = rates
    return found


def multiplications(model: Model, image: torch.Tensor) -> int:
    """Return how many multiplications the convolutions and linear layers of a network need for one image."""
    total = 0

    def count(layer: torch.nn.Module, _: object, out: torch.Tensor) -> None:
        nonlocal total
        total += int(layer.weight[0].numel()) * out.numel()

    kinds = (torch.nn.Conv2d, torch.nn.Linear)
    hooks = [each.register_forward_hook(count) for each in model.modules() if isinstance(each, kinds)]
    by_torch(model, image)
    for hook in hooks:
        hook.remove()
    return total


def predict() -> dict[str, Any]:
    """Compare the engine with torch and its fast paths for a ResNet-18 at 64 px."""
    model = make_model("resnet18", "none", 64)
    engine = Engine(model, (3, 64, 64))
    assert engine.is_fast
    plain = copy.deepcopy(model)
    plain.encoder.to(memory_format=torch.channels_last)
    arrange(model.encoder, torch.device("cpu"), (3, 64, 64))
    batch = torch.randint(0, 256, (256, 3, 64, 64), dtype=torch.uint8)

    side = 1024
    square = torch.rand(side, side)
    number = round(multiplications(plain, batch[:1]) * len(batch) / side**3)

    def products() -> int:
        for _ in range(number):
            torch.mm(square, square)
        return len(batch)

    def run(compute: Callable[[torch.Tensor], object]) -> int:
        for part in batch.split(BATCH):
            compute(part)
        return len(batch)

    variants = {
        "lopsided": lambda: run(engine.features),
        "torch": lambda: run(lambda b: by_torch(model, b)),
        "timm, channels-last": lambda: run(lambda b: by_torch(plain, b.to(memory_format=torch.channels_last))),
        "products": products,
    }
    rates = in_turns(variants)
    ratios = {"ratio": "torch", "ratio to timm": "timm, channels-last", "ratio to products": "products"}
    return rates | {name: round(rates["lopsided"] / rates[peer], 2) for name, peer in ratios.items()}


def memory() -> dict[str, Any]:
    """Return the peak memory of processes that compute features of few and of many files, in MiB."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_photos(Path(folder) / "photos", 10_000)
        for number in (1_000, 10_000):
            command = [sys.executable, __file__, "--child", str(number), "--photos", str(Path(folder) / "photos")]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[f"{number} images"] = json.loads(done.stdout)
    return found


def folder(photos: Path, peer: Path | None) -> dict[str, Any]:
    """Time whole commands on a folder of photographs, in turns with those of another version."""
    versions = {"lopsided": Path(lopsided.__file__).parents[1]} | ({} if peer is None else {"peer": peer})
    few = [str(path) for path in sorted(photos.glob("*/*"))[:5]]
    found: dict[str, Any] = {"images": len(list(photos.glob("*/*"))), "load before": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory() as folder:

        def fit(out: str, seed: int) -> list[str]:
            return [*f"fit {photos} --out {folder}/{out} --recipe quick --folds 1 --seed {seed} -q".split()]

        found["first run"] = timed(fit("first", 0), versions["lopsided"], folder)
        for name, source in versions.items():  # The first prediction keeps the graph of the encoder.
            timed(["predict", f"{folder}/first", *few, "--out", f"{folder}/{name}.csv"], source, folder)
        for name, source in versions.items():
            found[f"second run, other seed, {name}"] = timed(fit(f"{name}-second", 1), source, folder)
            found[f"predict 5 images, {name}"] = timed(
                ["predict", f"{folder}/first", *few, "--out", f"{folder}/{name}-2.csv"], source, folder
            )
        methods = f"compare {photos} --out {folder}/methods --methods quick,adapter --seeds 1 --workers 1 -q"
        timed(methods.split(), versions["lopsided"], folder)
        lines = map(json.loads, Path(folder, "methods", "records.jsonl").read_text().splitlines())
        found["methods"] = {line["compared_as"]: line["seconds"] for line in lines}
        found["help"] = timed(["--help"], versions["lopsided"], folder)
        for name in versions:
            for file in ("{}.csv", "{}-2.csv", "{}-second/model.safetensors", "{}-second/predictions.csv"):
                own, first = (Path(folder, file.format(one)).read_bytes() for one in (name, "lopsided"))
                assert own == first, f"{file.format(name)} differs"
    found["load after"] = round(os.getloadavg()[0], 1)
    return found


def timed(arguments: list[str], source: Path, cache: str) -> dict[str, float]:
    """Run the command with the sources of one version. Return its seconds by the clock and by the processor."""
    environment = {**os.environ, "PYTHONPATH": str(source), "LOPSIDED_CACHE": f"{cache}/cache"}
    before, begin = os.times(), time.perf_counter()
    command = [sys.executable, "-m", "lopsided", *arguments]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall, after = time.perf_counter() - begin, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": round(wall, 2), "CPU seconds": round(used, 2)}


def child(number: int, photos: Path) -> None:
    """Compute features batch by batch as ``lopsided predict`` does, and print the peak memory."""
    model = make_model(named_recipe("quick").encoder.name, "embedded", SIZE)
    engine = Engine(model, (3, SIZE, SIZE))
    inputs = StreamedInputs(FileImages(sorted(photos.iterdir())[:number], 3), SIZE, 3, torch.get_num_threads())
    begin = time.perf_counter()
    for _, batch in inputs.batches(row_batches(number, BATCH)):
        engine.probabilities(engine.features(batch))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds = round(time.perf_counter() - begin, 1)
    print(json.dumps({"peak MiB": round(peak), "seconds": seconds, "threads": torch.get_num_threads()}))


QUESTIONS = {"speed": speed, "recipes": recipes, "exported": exported, "predict": predict, "memory": memory}


def main() -> None:
    """Answer the questions and add the answers to the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", choices=[*QUESTIONS, "folder", []])
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--child", type=int)
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--under", default="", help="added to the name of the question in the record")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.photos)
        return
    record = json.loads(arguments.record.read_text()) if arguments.record.exists() else {}
    import onnxruntime

    record["machine"] = {"processor": platform.machine(), "threads": torch.get_num_threads()}
    record["machine"] |= {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
    for question in arguments.questions or ["speed", "predict", "memory"]:
        about = question + arguments.under
        if question == "folder":
            if arguments.photos is None:
                parser.error("folder needs --photos FOLDER")
            record[about] = folder(arguments.photos.resolve(), arguments.peer)
        else:
            record[about] = QUESTIONS[question]()
        print(about, json.dumps(record[about], indent=2), flush=True)
        arguments.record.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
