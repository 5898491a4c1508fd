"""How fast is training? This package against a stock loop, in turns, in one run.

Run as ``python benchmarks/training.py QUESTION ...`` with ``--record FILE.json``; the questions:

step18     a stage-1 step of ResNet-18 on 28x28 images, batch 128
whole      a whole paper-fmnist training with its second stage (minutes)
step50     a stage-1 step of ResNet-50 on 128x128 images
decode     JPEG files of 600x450 to 128x128, and what a second epoch costs
parallel   two single-threaded steps side by side against one with two threads
augment    a batch of 128: transforms per image against the batched ones
agreement  the losses of the first steps with and without the fast paths
options    a step by default, with bfloat16, and with torch.compile

The stock loop is what a careful person writes first: torchvision's ResNet, a DataLoader with transforms per image,
Adam, the loss from plain operations. Ratios are of the medians over rounds; peak memory is that of a process of its
own.
"""

from __future__ import annotations

import argparse
import json
import os
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
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from lopsided.data.augment import Augment
from lopsided.data.images import FileImages
from lopsided.data.inputs import MemoryInputs, row_batches
from lopsided.data.prepare import split_source
from lopsided.facts.log import Reporter
from lopsided.losses import AsymmetricFocalContrastiveLoss
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import ProjectionHead
from lopsided.models.machine import arrange, compile_encoder, keep_freed_memory
from lopsided.recipe import named_recipe
from lopsided.training.fit import fit
from lopsided.training.optimizers import in_memory_order
from lopsided.training.step import Precision
from measure import in_turns, peak_of

ETA, GAMMA, TEMPERATURE = 300.0, 7.0, 0.07
CPU = torch.device("cpu")
Step = Callable[[], object]


def plain_loss(z: Tensor, y: Tensor) -> Tensor:
    """AFCL from plain operations."""
    z = normalize(z, dim=1)
    itself = torch.eye(len(z), dtype=torch.bool)
    log_p = torch.log_softmax((z @ z.t() / TEMPERATURE).masked_fill(itself, -torch.inf), 1).masked_fill(itself, 0.0)
    p = log_p.exp()
    positive, negative = (y[:, None] == y) & ~itself, y[:, None] != y
    pull = ((1 - p).pow(GAMMA) * log_p * positive).sum(1) / positive.sum(1).clamp(min=1)
    push = torch.log1p(-p.masked_fill(~negative, 0.0).clamp(max=1 - 1e-6)).sum(1) / negative.sum(1).clamp(min=1)
    return -(pull + ETA * push).mean()


def stock_encoder(name: str, channels: int) -> tuple[nn.Module, int]:
    """torchvision's ResNet without its classifier."""
    model = getattr(torchvision.models, name)(weights=None)
    model.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
    width = model.fc.in_features
    model.fc = nn.Identity()
    return model, width


def stock_step(name: str, channels: int, size: int, batch: int) -> Step:
    """One step of the stock loop, its batch already loaded and augmented."""
    encoder, width = stock_encoder(name, channels)
    model = nn.Sequential(encoder, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 128))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = torch.rand(batch, channels, size, size), (torch.arange(batch) % 10 == 0).long()

    def step() -> None:
        optimizer.zero_grad()
        plain_loss(model(x), y).backward()
        optimizer.step()

    return step


def our_step(
    name: str, channels: int, size: int, batch: int, *, precision: str = "float32", compiled: bool = False
) -> Step:
    """The same step as this package does it."""
    keep_freed_memory()
    encoder, width = build_encoder(name, channels=channels, image_size=size)
    arrange(encoder, CPU, (channels, size, size))
    if compiled:
        compile_encoder(encoder, CPU, 1)
    autocast = Precision(precision, CPU).autocast
    model = nn.Sequential(encoder, ProjectionHead(width))
    optimizer = in_memory_order(torch.optim.Adam(model.parameters(), lr=1e-2, fused=True))
    loss = AsymmetricFocalContrastiveLoss(ETA, GAMMA, TEMPERATURE)
    x, y = torch.rand(batch, channels, size, size), (torch.arange(batch) % 10 == 0).long()

    def step() -> None:
        optimizer.zero_grad()
        with autocast():
            z = model(x)
        loss(z.float(), y).backward()
        optimizer.step()

    return step


def medians(methods: dict[str, Step], seconds: float, rounds: int = 3) -> dict[str, float]:
    """Median seconds of each method, all taking turns."""
    return {name: statistics.median(values) for name, values in in_turns(methods, seconds, rounds).items()}


def matrix_rate() -> float:
    """GFLOP/s of a matrix product of 2048: what the machine can do at best."""
    a, out = torch.randn(2048, 2048), torch.empty(2048, 2048)
    seconds = medians({"product": lambda: torch.mm(a, a, out=out)}, 2.0)["product"]
    return 2 * 2048**3 / seconds / 1e9


def step_gflop(name: str, channels: int, size: int, batch: int) -> float:
    """Multiplications and additions of one step in 10^9: the forward pass counted, three times."""
    from torch.utils.flop_counter import FlopCounterMode

    encoder, _ = stock_encoder(name, channels)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        encoder(torch.rand(2, channels, size, size))
    return 3 * counter.get_total_flops() / 2 * batch / 1e9


def step_question(name: str, channels: int, size: int, batch: int, seconds: float) -> dict[str, Any]:
    """Stock against ours, with the share of the machine's rate that each reaches."""
    facts = (name, channels, size, batch)
    found = medians({"stock": stock_step(*facts), "lopsided": our_step(*facts)}, seconds)
    rate, work = matrix_rate(), step_gflop(*facts)
    return {
        "encoder": name, "size": size, "batch": batch, "stock_s": found["stock"], "lopsided_s": found["lopsided"],
        "times_faster": found["stock"] / found["lopsided"], "matrix_gflops": rate,
        "stock_share": work / found["stock"] / rate, "lopsided_share": work / found["lopsided"] / rate,
        "stock_peak_mib": peak("step", "stock", *facts), "lopsided_peak_mib": peak("step", "lopsided", *facts),
    }  # fmt: skip


def peak(question: str, method: str, *facts: object) -> float:
    """Peak memory in MiB of a method in a process of its own, above what stood before it."""
    command = [sys.executable, __file__, "--measure-memory", question, method, *map(str, facts)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure_memory(question: str, method: str, *facts: str) -> None:
    """In the child process: a small step first, so that what torch loads when it is first used does not count."""
    stock_step("resnet18", 1, 32, 4)()
    if question == "step":
        make = stock_step if method == "stock" else our_step
        name, channels, size, batch = facts
        step = make(name, int(channels), int(size), int(batch))
        run: Step = lambda: (step(), step())  # noqa: E731
    elif question == "options":
        step = option_steps()[method]()
        run = lambda: (step(), step())  # noqa: E731
    elif question == "augment":
        run = augment_methods()[method]
        run()
    elif question == "whole":
        run = whole_methods(epochs=2, classifier_epochs=1)[method]
    else:
        run = decode_methods([Path(path) for path in Path(facts[0]).iterdir()])[method]
    print(peak_of(run))


class PerImage(Dataset[tuple[Tensor, int]]):
    """Images transformed one by one, as a DataLoader is usually fed."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, train: bool) -> None:
        self.pixels, self.labels = pixels, labels
        flips = [v2.RandomRotation(15), v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()] if train else []
        self.transform = v2.Compose([*flips, v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.pixels[index])), int(self.labels[index])


def whole_methods(epochs: int = 20, classifier_epochs: int = 10) -> dict[str, Step]:
    """The recipe paper-fmnist, from the embedded images to test predictions, by both loops."""
    from lopsided.data.prepare import Sources

    recipe = named_recipe("paper-fmnist").override(
        **{"encoder_training.epochs": epochs, "classifier.epochs": classifier_epochs}
    )
    source = Sources().open(recipe)[0]
    splits = split_source(recipe, source)
    pixels = source.images.load(np.arange(len(source)), 28, 1).numpy()[:, 0]

    def loader(rows: np.ndarray, train: bool) -> DataLoader[tuple[Tensor, int]]:
        return DataLoader(PerImage(pixels[rows], source.labels[rows], train), batch_size=128, shuffle=train)

    def stock() -> None:
        encoder, width = stock_encoder("resnet18", 1)
        head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 128))
        optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=1e-2)
        for _ in range(epochs):
            for x, y in loader(splits.train, True):
                optimizer.zero_grad()
                plain_loss(head(encoder(x)), y).backward()
                optimizer.step()
        encoder.eval()
        classifier = nn.Linear(width, 2)
        optimizer = torch.optim.Adam(classifier.parameters(), lr=1e-2)
        for _ in range(classifier_epochs):
            for x, y in loader(splits.train, True):
                with torch.no_grad():
                    features = encoder(x)
                optimizer.zero_grad()
                nn.functional.cross_entropy(classifier(features), y).backward()
                optimizer.step()
        with torch.no_grad():
            for x, _ in loader(splits.test, False):
                classifier(encoder(x)).softmax(1)

    return {"stock": stock, "lopsided": lambda: fit(recipe, source)}


def whole(rounds: int) -> dict[str, Any]:
    """Whole trainings in turns. Peak memory is that of two epochs and one, which is that of any number."""
    found: dict[str, list[float]] = {"stock": [], "lopsided": []}
    methods = whole_methods()
    for run in whole_methods(1, 1).values():
        run()
    for _ in range(rounds):
        for name, run in methods.items():
            begin = time.perf_counter()
            run()
            found[name].append(time.perf_counter() - begin)
    median = {name: statistics.median(values) for name, values in found.items()}
    return {
        "recipe": "paper-fmnist", "rounds": rounds, "stock_s": median["stock"], "lopsided_s": median["lopsided"],
        "times_faster": median["stock"] / median["lopsided"],
        "stock_peak_mib": peak("whole", "stock"), "lopsided_peak_mib": peak("whole", "lopsided"),
    }  # fmt: skip


def decode_methods(paths: Sequence[Path]) -> dict[str, Step]:
    """Photographs to 128x128, one after the other with Pillow, and by the package with a thread per core."""

    def plain() -> None:
        batch = []
        for path in paths:
            with Image.open(path) as image:
                batch.append(np.asarray(image.convert("RGB").resize((128, 128), Image.Resampling.BILINEAR)))
        np.stack(batch)

    images = FileImages(tuple(paths))
    return {
        "stock": plain,
        "lopsided": lambda: images.load(np.arange(len(paths)), 128, 3, workers=os.cpu_count() or 1),
    }


def decode() -> dict[str, Any]:
    """1,228 photographs of 600x450, made here: smooth shapes with some noise, as a camera gives them."""
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(1228):
            coarse = Image.fromarray(generator.integers(60, 220, (9, 12, 3), dtype=np.uint8))
            smooth = np.asarray(coarse.resize((600, 450), Image.Resampling.BICUBIC), dtype=np.float32)
            noisy = smooth + generator.normal(0, 4, smooth.shape).astype(np.float32)
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(Path(folder) / f"{i}.jpg", quality=90)
        paths = sorted(Path(folder).iterdir())
        found = medians(decode_methods(paths), 0.0)
        cached = MemoryInputs(FileImages(tuple(paths)).load(np.arange(1228), 128, 3, workers=2))
        begin = time.perf_counter()
        for _ in cached.batches(row_batches(1228, 128)):
            pass
        later = time.perf_counter() - begin
        peaks = {name: peak("decode", name, folder) for name in ("stock", "lopsided")}
        kib = sum(path.stat().st_size for path in paths) / 1024 / 1228
    return {
        "images": 1228, "mean_kib": kib, "stock_s": found["stock"], "lopsided_s": found["lopsided"],
        "times_faster": found["stock"] / found["lopsided"], "later_epoch_s": later,
        "stock_peak_mib": peaks["stock"], "lopsided_peak_mib": peaks["lopsided"],
    }  # fmt: skip


def option_steps() -> dict[str, Callable[[], Step]]:
    """What makes a ResNet-18 step as it is by default, with bfloat16, and compiled."""
    return {
        "default": lambda: our_step("resnet18", 1, 28, 128),
        "bf16": lambda: our_step("resnet18", 1, 28, 128, precision="bf16"),
        "compile": lambda: our_step("resnet18", 1, 28, 128, compiled=True),
    }


def options() -> dict[str, Any]:
    """The steps of all options, what the first two of each cost, and the peak memory of two."""
    methods = {name: make() for name, make in option_steps().items()}
    first = {}
    for name, step in methods.items():
        begin = time.perf_counter()
        step()
        step()
        first[name] = time.perf_counter() - begin
    found = medians(methods, 10.0)
    return {
        name: {"first_two_s": first[name], "step_s": found[name], "peak_mib": peak("options", name)} for name in methods
    }


def agreement() -> dict[str, Any]:
    """By how much the losses of the first twelve steps of paper-fmnist differ with and without ``fast``."""
    from lopsided.data.prepare import Sources

    found = {}
    for seed in (0, 1):
        losses: dict[bool, list[float]] = {}
        for fast in (True, False):
            recipe = named_recipe("paper-fmnist").override(
                seed=seed, fast=fast, **{"encoder_training.epochs": 2, "classifier.epochs": 1}
            )
            told = StepLosses()
            fit(recipe, Sources().open(recipe)[0], reporter=told)
            losses[fast] = told.losses[:12]
        found[f"seed_{seed}"] = [abs(a - b) / b for a, b in zip(losses[True], losses[False], strict=True)]
    return found


class StepLosses(Reporter):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def step(self, loss: float, images: int) -> None:
        """After each step."""
        self.losses.append(loss)


PARALLEL = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
sys.path.insert(0, sys.argv[2])
from measure import status
from training import our_step
before = status("VmRSS")
step = our_step("resnet18", 1, 28, 128)
step()
begin = time.perf_counter()
for _ in range(10):
    step()
print((time.perf_counter() - begin) / 10, (status("VmHWM") - before) / 1024)
"""


def parallel() -> dict[str, Any]:
    """Seconds per step and run: two runs with a thread each, side by side, and one run with both threads.

    Peak memory is that of a process above its imports, with model, optimizer and what torch loads at its first step.
    """

    def start(threads: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PARALLEL, str(threads), str(Path(__file__).parent)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def answer(process: subprocess.Popen[str]) -> list[float]:
        return [float(word) for word in process.communicate()[0].split()]

    side_by_side, alone = [], []
    for _ in range(3):
        pair = [start(1), start(1)]
        side_by_side += [answer(process) for process in pair]
        alone.append(answer(start(2)))
    two, two_mib = map(statistics.median, zip(*side_by_side, strict=True))
    one, one_mib = map(statistics.median, zip(*alone, strict=True))
    return {
        "two_runs_one_thread_each_s": two, "one_run_two_threads_s": one, "runs_per_time_ratio": 2 * one / two,
        "two_runs_peak_mib_each": two_mib, "one_run_peak_mib": one_mib,
    }  # fmt: skip


def augment_methods() -> dict[str, Step]:
    """A batch of 128: transforms per image, and the batched ones."""
    pixels = np.random.default_rng(0).integers(0, 256, (128, 28, 28), dtype=np.uint8)
    data = PerImage(pixels, np.zeros(128, np.int64), True)
    batch, augment = torch.from_numpy(pixels)[:, None], Augment(rotation=15, horizontal_flip=True, vertical_flip=True)
    generator = torch.Generator().manual_seed(0)
    return {
        "stock": lambda: torch.stack([data[i][0] for i in range(128)]),
        "lopsided": lambda: augment(batch, generator),
    }


def augmentation() -> dict[str, Any]:
    """Transforms per image against the batched ones."""
    found = medians(augment_methods(), 2.0)
    return {
        "stock_s": found["stock"], "lopsided_s": found["lopsided"], "times_faster": found["stock"] / found["lopsided"],
        "stock_peak_mib": peak("augment", "stock"), "lopsided_peak_mib": peak("augment", "lopsided"),
    }  # fmt: skip


def main() -> None:
    """Answer the questions asked, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("step18", "whole", "step50", "decode", "parallel", "augment", "options", "agreement")
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=2, help="of whole trainings")
    parser.add_argument("--batch50", type=int, default=128, help="batch of the ResNet-50 step")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--measure-memory", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure_memory:
        return measure_memory(*arguments.measure_memory)
    unknown = set(arguments.questions) - set(names)
    if unknown:
        parser.error(f"the questions are {', '.join(names)}, got {', '.join(sorted(unknown))}.")
    torch.set_flush_denormal(True)
    answers: dict[str, Callable[[], dict[str, Any]]] = {
        "step18": lambda: step_question("resnet18", 1, 28, 128, 30.0),
        "whole": lambda: whole(arguments.rounds),
        "step50": lambda: step_question("resnet50", 3, 128, arguments.batch50, 30.0),
        "decode": decode,
        "parallel": parallel,
        "augment": augmentation,
        "options": options,
        "agreement": agreement,
    }
    record = json.loads(arguments.record.read_text()) if arguments.record and arguments.record.exists() else {}
    record["machine"] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    for question in arguments.questions or names:
        key = question if question != "step50" or arguments.batch50 == 128 else f"step50_batch{arguments.batch50}"
        record[key] = answers[question]()
        print(key, json.dumps(record[key], indent=1), flush=True)
        if arguments.record:
            arguments.record.write_text(json.dumps(record, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
