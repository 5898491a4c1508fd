"""What do large batches and several ranks cost? Time and peak memory of a stage-1 step, per rank.

Run as ``python benchmarks/scale.py QUESTION ...`` with ``--record FILE.json``; the questions:

512, 2048, 8192, 32768   a step of that global batch in chunks of 512, on 1 and on 2 ranks, with one thread each
memory                   peak memory of batch 512 and 4096 whole, and of 4096 in chunks of 512
queue                    a step of batch 512 beside queues of 0, 8,192 and 65,536 past features

The step is that of ``lopsided fit``: ResNet-18 on 28x28 images, AFCL, gloo between the ranks. Ranks are processes that
find each other by a file. ``seconds`` are by the clock, ``cpu_seconds`` those that a rank's process computed, which
other work on the machine hardly changes. Memory is the most that a rank held above what stood before the first step.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lopsided.data.augment import Augment
from lopsided.data.inputs import MemoryInputs, Part
from lopsided.data.samplers import BatchSampler
from lopsided.distributed import joined
from lopsided.losses import FeatureQueue
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import ProjectionHead
from lopsided.models.machine import arrange
from lopsided.ranks import Ranks
from lopsided.recipe import EncoderTraining
from lopsided.training.batch_norm import BatchStatistics
from lopsided.training.batches import cut
from lopsided.training.loop import Stage
from lopsided.training.optimizers import make_optimizer
from lopsided.training.step import Step
from measure import start_peak, status

CHUNK, SIZES = 512, (512, 2048, 8192, 32768)
WIDTH = 128
"""Of a projection."""
CPU = torch.device("cpu")


def make_stage(num: int) -> Stage:
    """Stage 1 on random images of two classes, nine to one."""
    generator = np.random.default_rng(0)
    labels = (generator.random(num) < 0.1).astype(np.int64)
    settings = EncoderTraining()
    encoder, width = build_encoder("resnet18", channels=1, image_size=28)
    arrange(encoder, CPU, (1, 28, 28))
    module = nn.Sequential(encoder, ProjectionHead(width, out=WIDTH))
    counts = torch.from_numpy(np.bincount(labels, minlength=2))
    objective = settings.loss.entry.load()(counts, WIDTH, **settings.loss.parameters)
    augment = Augment(rotation=15.0, horizontal_flip=True)

    def transform(x: Tensor, draws: torch.Generator, start: int, total: int) -> Tensor:
        return augment(x, draws, start=start, total=total)

    return Stage(
        name="encoder", section="encoder_training", module=module, settings=settings,
        part=Part(MemoryInputs(torch.from_numpy(generator.integers(0, 256, (num, 1, 28, 28), dtype=np.uint8))), labels),
        sampler=BatchSampler(labels, num, seed=0), transform=transform, output=module,
        objective=objective, projected=WIDTH,
    )  # fmt: skip


def watched(function: Callable[..., Any], seen: list[tuple[float, float]]) -> Callable[..., Any]:
    """Note seconds by the clock and of computing at each call."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        begin = time.perf_counter(), time.process_time()
        result = function(*arguments)
        seen.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
        return result

    return call


def work(ranks: Ranks, batch: int, chunk: int | None, steps: int, queue: int) -> dict[str, float]:
    """On one rank: some steps, after a small one in which torch loads what it needs."""
    stage = make_stage(batch)
    past = FeatureQueue(queue) if queue else None
    statistics_over = BatchStatistics(stage.module, ranks, synchronised=True)
    step = Step(stage, ranks=ranks, device=CPU, seed=0, statistics=statistics_over, queue=past)
    optimizer = make_optimizer(stage.module, stage.settings, CPU)
    losses: list[tuple[float, float]] = []
    whole: list[tuple[float, float]] = []
    step._loss = watched(step._loss, losses)  # type: ignore[method-assign]
    stage.module.train()

    def once(rows: Any) -> None:
        shares = cut(rows, ranks.size, chunk_size=chunk)
        inputs = stage.part.inputs.batch(shares.rows[shares.positions(ranks.rank)])
        optimizer.zero_grad(set_to_none=True)
        step.gradients(shares, inputs, 0, 0)
        optimizer.step()

    with statistics_over.over_ranks():
        once(np.arange(32))
        if past is not None:
            generator = torch.Generator().manual_seed(0)
            past.push(
                torch.randn(queue, WIDTH, generator=generator), torch.randint(0, 2, (queue,), generator=generator)
            )
        losses.clear()
        before = start_peak()
        for _ in range(steps):
            watched(once, whole)(np.arange(batch))
    medians = [statistics.median(column) for column in (*zip(*whole, strict=True), *zip(*losses, strict=True))]
    names = ("seconds", "cpu_seconds", "loss_seconds", "loss_cpu_seconds")
    return {**dict(zip(names, medians, strict=True)), "peak_mib": (status("VmHWM") - before) / 1024}


def measure(batch: int, size: int = 1, *, chunk: int | None = CHUNK, steps: int = 3, queue: int = 0) -> dict[str, Any]:
    """Steps on ``size`` ranks, each a process of its own; figures of the rank that took longest."""
    with tempfile.TemporaryDirectory() as folder:
        facts = {"batch": batch, "chunk": chunk, "steps": steps, "queue": queue}
        command = [sys.executable, __file__, "--work", json.dumps(facts), f"{folder}/store", str(size)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(size)
        ]
        found = [json.loads(process.communicate()[0]) for process in ranks]
    worst = {name: max(one[name] for one in found) for name in found[0]}
    share = worst["loss_cpu_seconds"] / worst["cpu_seconds"]
    return {"batch": batch, "ranks": size, "chunk": chunk, "queue": queue, **worst, "loss_share": share}


def answer(question: str) -> list[dict[str, Any]]:
    """All rows of a question."""
    if question == "memory":
        return [measure(512, chunk=None), measure(4096, chunk=None, steps=1), measure(4096, steps=1)]
    if question == "queue":
        return [measure(512, chunk=None, queue=size) for size in (0, 8192, 65536)]
    batch = int(question)
    return [measure(batch, size, steps=3 if batch <= 2048 else 1) for size in (1, 2)]


def growth(record: dict[str, Any]) -> dict[str, Any]:
    """By which power of the batch computing grows, from one size to the next, on one rank."""
    rows = [record[str(size)][0] for size in SIZES if str(size) in record]
    found = {}
    for small, large in itertools.pairwise(rows):
        ratio = math.log(large["batch"] / small["batch"])
        powers = {
            name: math.log(large[f"{name}cpu_seconds"] / small[f"{name}cpu_seconds"]) / ratio for name in ("", "loss_")
        }
        found[f"{small['batch']} to {large['batch']}"] = {"step": powers[""], "loss": powers["loss_"]}
    return found


def main() -> None:
    """Answer questions and record the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    questions = [*map(str, SIZES), "memory", "queue"]
    parser.add_argument("questions", nargs="*", choices=[*questions, []], metavar="QUESTION")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        facts, store, size, rank = options.work
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        with joined(f"file://{store}", rank=int(rank), size=int(size)) as ranks:
            print(json.dumps(work(ranks, **json.loads(facts))))
        return
    record: dict[str, Any] = {}
    if options.record and options.record.exists():
        record = json.loads(options.record.read_text())
    for question in options.questions or questions:
        record[question] = answer(question)
        for row in record[question]:
            print(json.dumps({name: round(v, 4) if isinstance(v, float) else v for name, v in row.items()}), flush=True)
        record["growth"] = growth(record)
        record["machine"] = {"torch": torch.__version__, "cores": os.cpu_count(), "system": platform.system()}
        if options.record:
            options.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
