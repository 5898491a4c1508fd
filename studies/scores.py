"""Train the runs of two studies and keep their scores: which rule decides best, and which epoch to keep.

Run as ``python studies/scores.py rules --out FOLDER`` and ``python studies/scores.py epochs --out FOLDER``. Each
run writes one file of logits. A second start skips the runs that are done, so both commands can be interrupted.
``studies/decisions.py`` computes the records from these files.

rules    The paper's protocol on Fashion-MNIST tops: CE, weighted CE, CL, ACL(300) and AFCL(300, 7) at 90:10, 95:5 and
         98:2. The file holds the logits of the 300 test images and of the held-out images.
epochs   The recipe ``from-scratch`` at 90:10 and 95:5, 12 seeds, CE and AFCL. The file holds the validation logits of
         every epoch, the held-out logits of the epochs that one of the rules selects, and of averaged weights.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.optim.optimizer import register_optimizer_step_post_hook

import shared
from lopsided.data.inputs import Part, prepare
from lopsided.data.prepare import Sources, split_source
from lopsided.facts.log import Log
from lopsided.models.machine import evaluating, flushed_denormals, keep_freed_memory, threads
from lopsided.recipe import Recipe, named_recipe
from lopsided.seeds import derive_seed
from lopsided.training.checkpoint import Checkpoint, State
from lopsided.training.loop import Stage
from lopsided.training.methods.staged import EndToEndTrainer, StagedTrainer, TwoStageTrainer
from lopsided.training.selection import probe_rows

Floats = npt.NDArray[np.float64]
Weights = list[Tensor]

PAPER_METHODS: dict[str, dict[str, Any]] = {
    "ce": {"encoder_training.loss": "ce"},
    "weighted-ce": {"encoder_training.loss": "weighted-ce"},
    "cl": {"encoder_training.loss": "cl"},
    "acl-300": {},
    "afcl-300-7": {"encoder_training.loss": "afcl", "encoder_training.loss.gamma": 7.0},
}
SCENARIOS = ("90:10", "95:5", "98:2")
SCRATCH = {
    "data.source": "fashion-mnist-tops",
    "data.scenario": "90:10,total=1000",
    "data.split": "stratified",
    "data.held_out": True,
    "threads": 1,
}
EMA_STEPS = 20
"""Steps over which averaged weights forget: decay 1 - 1/20, about three epochs of 700 images in batches of 128."""


def main() -> None:
    """Train the runs that are missing."""
    parser = shared.parser(__doc__)
    parser.add_argument("study", choices=("rules", "epochs"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the files of logits")
    parser.add_argument("--seeds", type=int, default=None, help="number of seeds; default: 8 for rules, 12 for epochs")
    parser.add_argument("--workers", type=int, default=1, help="runs at once, with one thread each")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    jobs = list(_jobs(given.study, given.seeds or (8 if given.study == "rules" else 12)))
    left = [job for job in jobs if not (given.out / f"{job[0]}.npz").exists()]
    print(f"{len(jobs)} runs, {len(left)} to do", flush=True)
    work = train_rules if given.study == "rules" else train_epochs
    with ProcessPoolExecutor(given.workers) as pool:
        begin = time.perf_counter()
        futures = [pool.submit(_run, work, name, recipe.to_toml(), given.out) for name, recipe in left]
        for done, future in enumerate(futures, start=1):
            name, seconds = future.result()
            rest = (time.perf_counter() - begin) / done * (len(left) - done) / 60
            print(f"{done}/{len(left)} {name}: {seconds:.0f} s, {rest:.0f} min left", flush=True)


def _jobs(study: str, seeds: int) -> Iterator[tuple[str, Recipe]]:
    for seed in range(seeds):
        if study == "rules":
            paper = named_recipe("paper-fmnist")
            for scenario in SCENARIOS:
                for method, changes in PAPER_METHODS.items():
                    recipe = paper.override(**changes).override(
                        **{"data.scenario": f"{scenario},total=1000", "seed": seed, "threads": 1}
                    )
                    yield f"rules-{method}-{scenario.replace(':', '-')}-{seed}", recipe
        else:
            scratch = named_recipe("from-scratch").override(**SCRATCH, seed=seed)
            for scenario in SCENARIOS[:2]:
                for method in ("afcl", "ce"):
                    recipe = scratch.override(**{"encoder_training.loss": method}).override(
                        **{"data.scenario": f"{scenario},total=1000"}
                    )
                    yield f"epochs-{method}-{scenario.replace(':', '-')}-{seed}", recipe


def _run(work: Callable[[Recipe], dict[str, Any]], name: str, text: str, folder: Path) -> tuple[str, float]:
    begin = time.perf_counter()
    with threads(1), flushed_denormals(True):
        keep_freed_memory()
        content = work(Recipe.from_toml(text))
    temporary = folder / f".{name}.{os.getpid()}.npz"
    np.savez_compressed(temporary, **content)
    temporary.replace(folder / f"{name}.npz")
    return name, time.perf_counter() - begin


def tensors(module: nn.Module) -> list[Tensor]:
    """Return parameters and buffers as they are in memory. A state dict would rearrange the weights of small maps."""
    return [value.detach() for value in (*module.parameters(), *module.buffers())]


def snapshot(module: nn.Module) -> Weights:
    """Return copies of the parameters and buffers of a module."""
    return [value.clone() for value in tensors(module)]


def restore(module: nn.Module, weights: Weights) -> None:
    """Write copies back into a module."""
    for value, old in zip(tensors(module), weights, strict=True):
        value.copy_(old)


class _Watched(StagedTrainer):
    """A trainer that keeps the scores and weights of every epoch, and averaged weights."""

    def watch(self, stage: Stage, scores: Callable[[], Floats]) -> tuple[list[Floats], list[Weights], Weights]:
        """Run a stage. Return the validation scores and the weights of every epoch, and the averaged weights."""
        found: list[Floats] = []
        kept: list[Weights] = []
        average = snapshot(stage.module)

        def update(*_: object) -> None:
            for old, value in zip(average, tensors(stage.module), strict=True):
                if value.is_floating_point():
                    old.lerp_(value, 1 / EMA_STEPS)
                else:
                    old.copy_(value)

        def judge() -> dict[str, float]:
            found.append(scores())
            kept.append(snapshot(stage.module))
            return {}

        handle = register_optimizer_step_post_hook(update)
        self.begin = time.perf_counter()
        try:
            self.run_stage(replace(stage, judge=judge), State("", "", stage.name), {})
        finally:
            handle.remove()
        return found, kept, average

    def logits(self, part: Part) -> Floats:
        """Return the logits of a part by the model as it is."""
        with evaluating(self.model):
            logits: Floats = self.model.classifier(self.features(part.inputs)).double().numpy()
        return logits

    def distances(self, val: Part) -> Floats:
        """Return minus the squared distances of validation features to class means, as logits without a scale."""
        train = self.prepared.train
        rows = probe_rows(train.labels, derive_seed(self.recipe.seed, "probe"))
        with evaluating(self.model):
            known = normalize(self.features(train.inputs, rows).double(), dim=1)
            queries = normalize(self.features(val.inputs).double(), dim=1)
        labels = torch.from_numpy(train.labels[rows])
        means = torch.stack([known[labels == c].mean(dim=0) for c in range(self.num_classes)])
        return -torch.cdist(queries, means).square().numpy()


class _TwoStage(_Watched, TwoStageTrainer):
    pass


class _EndToEnd(_Watched, EndToEndTrainer):
    pass


def _open(recipe: Recipe) -> tuple[_Watched, dict[str, Part]]:
    source, held = Sources().open(recipe)
    assert held is not None
    splits = split_source(recipe, source)
    prepared, _ = prepare(recipe, source, splits)
    kind = _TwoStage if recipe.method == "two-stage" else _EndToEnd
    stages = kind(recipe, prepared, torch.device("cpu"), Log(None, None), Checkpoint(None))
    stages.build()
    parts = {"held": Part(_inputs(stages, held, recipe), held.labels)}
    if len(splits.test):
        test = source.subset(splits.test)
        parts["test"] = Part(_inputs(stages, test, recipe), test.labels)
    return stages, parts


def _inputs(stages: _Watched, source: Any, recipe: Recipe) -> Any:
    from lopsided.data.inputs import MemoryInputs

    size, channels = stages.card.image_size, stages.card.channels
    return MemoryInputs(source.images.load(np.arange(len(source)), size, channels, workers=1))


def train_rules(recipe: Recipe) -> dict[str, Any]:
    """Train by the recipe. Return the logits of the test images and the held-out images."""
    stages, parts = _open(recipe)
    stages.run(State("", "", "encoder" if recipe.method == "two-stage" else "end-to-end"), {})
    content: dict[str, Any] = {"counts": stages.prepared.counts()}
    for name, part in parts.items():
        content |= {f"{name}_logits": stages.logits(part).astype(np.float32), f"{name}_labels": part.labels}
    return content


def train_epochs(recipe: Recipe) -> dict[str, Any]:
    """Train by the recipe. Return validation logits of all epochs and held-out logits of selected epochs."""
    stages, parts = _open(recipe)
    val = stages.prepared.val
    assert val is not None
    content: dict[str, Any] = {"counts": stages.prepared.counts(), "val_labels": val.labels}
    content["held_labels"] = parts["held"].labels
    if recipe.method == "end-to-end":
        scores, weights, average = stages.watch(stages.first_stage(), lambda: stages.logits(val))
        content["val_logits"] = np.stack(scores).astype(np.float32)
        chosen = select(scores, val.labels, stages.prepared.counts())
        for rule, epoch in chosen.items():
            content[f"epoch_{rule}"] = epoch
        for epoch in sorted(set(chosen.values())):
            restore(stages.model, weights[epoch])
            content[f"held_{epoch}"] = stages.logits(parts["held"]).astype(np.float32)
        restore(stages.model, average)
        content["held_ema"] = stages.logits(parts["held"]).astype(np.float32)
        content["val_ema"] = stages.logits(val).astype(np.float32)
        return content
    stage = stages.first_stage()
    scores, weights, average = stages.watch(stage, lambda: stages.distances(val))
    content["val_distances"] = np.stack(scores).astype(np.float32)
    chosen = select(scores, val.labels, scale=True)
    fresh = snapshot(stages.model.classifier)
    for rule, encoder in [*((rule, weights[epoch]) for rule, epoch in chosen.items()), ("ema", average)]:
        restore(stage.module, encoder)
        restore(stages.model.classifier, fresh)
        second = stages.classifier_stage()
        val_features = stages.features(val.inputs)

        def logits(head: nn.Module = second.module, rows: Tensor = val_features) -> Floats:
            with torch.no_grad():
                found: Floats = head(rows).double().numpy()
            return found

        linear, heads, mean = stages.watch(second, logits)
        own = select(linear, val.labels)
        epoch = own.get(rule, len(linear) - 1)
        head = mean if rule == "ema" else heads[epoch]
        restore(stages.model.classifier, head)
        if rule != "ema":
            content[f"epoch_{rule}"] = chosen[rule]
        content[f"classifier_epoch_{rule}"] = epoch
        content[f"held_{rule}"] = stages.logits(parts["held"]).astype(np.float32)
        content[f"val_{rule}"] = stages.logits(val).astype(np.float32)
    return content


def select(
    scores: list[Floats],
    labels: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64] | None = None,
    *,
    scale: bool = False,
) -> dict[str, int]:
    """Return the epoch that each rule selects, by the validation logits of all epochs.

    ``counts`` are the class counts of training, by which the balanced rules divide; None if the logits are balanced.
    """
    offset = 0.0 if counts is None else np.log(counts / counts.sum())
    plain = np.array([_uwa(rows, labels) for rows in scores])
    uwa = np.array([_uwa(rows - offset, labels) for rows in scores])
    loss = np.array([_weighted_log_loss(rows - offset, labels, scale=scale) for rows in scores])
    scaled = np.array([_weighted_log_loss(rows - offset, labels, scale=True) for rows in scores])
    last = len(scores) - 1
    return {
        "plain-uwa": last - int(np.argmax(plain[::-1])),
        "uwa": last - int(np.argmax(uwa[::-1])),
        "log-loss": last - int(np.argmin(loss[::-1])),
        "scaled-log-loss": last - int(np.argmin(scaled[::-1])),
        "smooth-uwa": last - int(np.argmax(_smooth(uwa)[::-1])),
        "smooth-log-loss": last - int(np.argmin(_smooth(loss)[::-1])),
        "smooth-scaled-log-loss": last - int(np.argmin(_smooth(scaled)[::-1])),
        "last": last,
    }


def _smooth(values: Floats, width: int = 5) -> Floats:
    """Return the mean over the last ``width`` epochs, fewer at the beginning."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - width, 0)
    means: Floats = (sums[ends] - sums[begins]) / (ends - begins)
    return means


def _uwa(logits: Floats, labels: npt.NDArray[np.int64]) -> float:
    predicted = logits.argmax(axis=1)
    return float(np.mean([np.mean(predicted[labels == c] == c) for c in np.unique(labels)]))


def _weighted_log_loss(logits: Floats, labels: npt.NDArray[np.int64], *, scale: bool) -> float:
    """Return the mean over the classes of the mean log loss of a class; with ``scale``, by the best temperature."""

    def loss(log_scale: float) -> float:
        z = logits * np.exp(log_scale)
        logs = z - np.logaddexp.reduce(z, axis=1, keepdims=True)
        own = -logs[np.arange(len(labels)), labels]
        return float(np.mean([own[labels == c].mean() for c in np.unique(labels)]))

    if not scale:
        return loss(0.0)
    return float(minimize_scalar(loss, bounds=(-6.0, 6.0), method="bounded").fun)


if __name__ == "__main__":
    sys.exit(main())
