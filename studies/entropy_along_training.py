"""L_con against H(Z|Y) - H(Z) along training: Eq. (18) of the paper, looked at on balanced data.

Run ``python studies/entropy_along_training.py``; about a minute on one core. It writes
``studies/records/entropy_along_training.json`` and, from that record, ``docs/figures/entropy_along_training.svg``.

A small encoder is trained with CL on a synthetic mixture: four equally frequent classes of two Gaussian clusters each
in 16 dimensions, overlapping, so that no encoder can collapse a class to a point. On held-out samples, as training goes
on, the loss and the two entropies are recorded: k-nearest-neighbour estimates on the sphere that the features lie on.

"Proportional" in Eq. (18) cannot be meant literally: L_con is positive, the right side is minus a mutual information.
So the question is how straight and how monotone the relation is: Pearson's and Spearman's correlation, one of each per
training. They are given twice, for all checkpoints, and for those at which the loss is below log(n - 1), the loss of
features that are all the same. Above that level the features are worse than none, and the loss first falls by
contracting them, which tells nothing about the classes. Checkpoints of one training depend on each other, so an
interval is taken over seeds and never over checkpoints.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import LogNorm
from scipy import stats
from torch import Tensor, nn

from lopsided.information import conditional_differential_entropy, differential_entropy, feature_information
from lopsided.losses import contrastive_loss
from lopsided.seeds import derive_seed

DOCS = Path(__file__).resolve().parent.parent / "docs"
RECORD = Path(__file__).parent / "records" / "entropy_along_training.json"
FIGURE = DOCS / "figures" / "entropy_along_training.svg"

SETTINGS: dict[str, Any] = {
    "seeds": [0, 1, 2, 3, 4],
    "feature_dimensions": [3, 8],
    "temperatures": [0.07, 0.5],
    "classes": 4,
    "clusters_per_class": 2,
    "input_dimension": 16,
    "cluster_distance": 3.0,
    "held_out_samples": 1600,
    "batch": 256,
    "learning_rate": 1e-3,
    "neighbours": 3,
    "checkpoints": [0, 2, 4, 6, 8, 10, 13, 16, 20, 25, 30, 40, 50, 65, 80, 100, 130, 160, 200, 250, 300, 400],
}


def generator(seed: int, *names: str | int) -> torch.Generator:
    """Random numbers of one named purpose."""
    return torch.Generator().manual_seed(derive_seed(seed, "entropy_along_training", *names))


def draw(num_per_class: int, centres: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Samples of the balanced mixture; ``centres`` is (classes, clusters, d)."""
    classes, clusters, d = centres.shape
    y = torch.arange(classes).repeat_interleave(num_per_class)
    cluster = torch.randint(clusters, y.shape, generator=random)
    return centres[y, cluster] + torch.randn(len(y), d, generator=random), y


def make_encoder(inputs: int, features: int, seed: int) -> nn.Sequential:
    """Three layers; the caller normalises the features."""
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(seed, "entropy_along_training", "init"))
        return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, features))


def measure(encoder: nn.Module, x: Tensor, y: Tensor, temperature: float) -> dict[str, float]:
    """Loss (nats) and entropies (bits) of held-out samples."""
    with torch.no_grad():
        z = nn.functional.normalize(encoder(x).double(), dim=1)
        loss = contrastive_loss(z, y, temperature=temperature)
    features, labels, k = z.numpy(), y.numpy(), SETTINGS["neighbours"]
    surface = features.shape[1] - 1
    return {
        "loss": loss.item(),
        "entropy": differential_entropy(features, k=k, dimension=surface),
        "conditional_entropy": conditional_differential_entropy(features, labels, k=k, dimension=surface),
        "information": feature_information(features, labels, k=k),
    }


def train(seed: int, features: int, temperature: float) -> list[dict[str, float]]:
    """Train one encoder and measure it at every checkpoint."""
    s = SETTINGS
    shape = (s["classes"], s["clusters_per_class"], s["input_dimension"])
    centres = nn.functional.normalize(torch.randn(shape, generator=generator(seed, "centres")), dim=-1)
    centres = s["cluster_distance"] / 2**0.5 * centres
    x_held, y_held = draw(s["held_out_samples"] // s["classes"], centres, generator(seed, "held-out"))
    encoder = make_encoder(s["input_dimension"], features, seed)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=s["learning_rate"])
    batches = generator(seed, "batches")
    points = []
    for step in range(s["checkpoints"][-1] + 1):
        if step in s["checkpoints"]:
            points.append({"step": step, **measure(encoder, x_held, y_held, temperature)})
        x, y = draw(s["batch"] // s["classes"], centres, batches)
        loss = contrastive_loss(nn.functional.normalize(encoder(x), dim=1), y, temperature=temperature)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return points


def columns(points: list[dict[str, float]]) -> dict[str, list[float]]:
    """Turn one dictionary per checkpoint into one list per quantity."""
    return {name: [point[name] for point in points] for name in points[0]}


def correlations(series: dict[str, list[float]]) -> dict[str, float]:
    """Correlate the loss with H(Z|Y) - H(Z) and with the estimate of I(Z;Y), for one training."""
    loss, information = np.array(series["loss"]), np.array(series["information"])
    difference = np.array(series["conditional_entropy"]) - np.array(series["entropy"])
    found = {}
    for suffix, kept in (("", loss < math.inf), (" below log(n-1)", loss < uninformed_loss())):
        found[f"pearson{suffix}"] = float(stats.pearsonr(difference[kept], loss[kept])[0])
        found[f"spearman{suffix}"] = float(stats.spearmanr(difference[kept], loss[kept])[0])
        found[f"slope{suffix}"] = float(stats.linregress(difference[kept], loss[kept]).slope)
        found[f"pearson with -I(Z;Y){suffix}"] = float(stats.pearsonr(-information[kept], loss[kept])[0])
    found["checkpoints below log(n-1)"] = int(np.count_nonzero(loss < uninformed_loss()))
    return found


def uninformed_loss() -> float:
    """Loss of held-out features that are all the same."""
    return math.log(SETTINGS["held_out_samples"] - 1)


def over_seeds(values: list[float]) -> dict[str, float]:
    """Mean, range, and a 95 % interval of the mean by resampling seeds."""
    random = np.random.default_rng(derive_seed(0, "entropy_along_training", "bootstrap"))
    array = np.array(values)
    means = random.choice(array, size=(10_000, len(array))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    found = {"mean": array.mean(), "min": array.min(), "max": array.max(), "low": low, "high": high}
    return {name: float(value) for name, value in found.items()}


def rounded(value: Any) -> Any:
    """Six digits, so that a rerun gives the same bytes."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def make_record() -> dict[str, Any]:
    """Train all encoders."""
    conditions = []
    for features in SETTINGS["feature_dimensions"]:
        for temperature in SETTINGS["temperatures"]:
            trainings = []
            for seed in SETTINGS["seeds"]:
                series = columns(train(seed, features, temperature))
                trainings.append({"seed": seed, "correlations": correlations(series), "series": series})
            found = columns([training["correlations"] for training in trainings])
            summary = {name: over_seeds(values) for name, values in found.items()}
            conditions.append(
                {"feature_dimension": features, "temperature": temperature, "summary": summary, "trainings": trainings}
            )
            print(describe(conditions[-1]), flush=True)
    command = "python studies/entropy_along_training.py"
    record: dict[str, Any] = rounded({"command": command, "settings": SETTINGS, "conditions": conditions})
    return record


def describe(condition: dict[str, Any]) -> str:
    """Tell the correlations of one dimension and temperature."""
    lines = [f"d = {condition['feature_dimension']}, temperature {condition['temperature']}"]
    for name, s in condition["summary"].items():
        interval = f"95 % interval {s['low']:6.3f} to {s['high']:6.3f}, seeds {s['min']:6.3f} to {s['max']:6.3f}"
        lines.append(f"    {name:37s} {s['mean']:6.3f}   {interval}")
    return "\n".join(lines)


def draw_figure(record: dict[str, Any], path: Path = FIGURE) -> None:
    """Draw the loss over H(Z|Y) - H(Z), one panel per condition and one line per seed."""
    mpl.rcParams.update({"svg.hashsalt": "entropy_along_training", "svg.fonttype": "none", "font.size": 9})
    conditions = record["conditions"]
    figure, axes = plt.subplots(2, len(conditions) // 2, figsize=(8.0, 6.8), layout="constrained")
    colours = LogNorm(1, 1 + record["settings"]["checkpoints"][-1])
    for axis, condition in zip(axes.flat, conditions, strict=True):
        for training in condition["trainings"]:
            series = training["series"]
            difference = np.array(series["conditional_entropy"]) - np.array(series["entropy"])
            axis.plot(difference, series["loss"], color="0.75", linewidth=0.8, zorder=1)
            steps = 1 + np.array(series["step"])
            dots = axis.scatter(difference, series["loss"], c=steps, norm=colours, cmap="viridis", s=12, zorder=2)
        axis.axhline(uninformed_loss(), color="0.4", linewidth=0.8, linestyle="--", zorder=0)
        s = condition["summary"]
        axis.set_title(
            f"d = {condition['feature_dimension']}, temperature {condition['temperature']}\n"
            f"all: Pearson {s['pearson']['mean']:.2f}, Spearman {s['spearman']['mean']:.2f}\n"
            f"below the line: {s['pearson below log(n-1)']['mean']:.2f}, {s['spearman below log(n-1)']['mean']:.2f}",
            fontsize=9,
        )
    figure.supxlabel("H(Z|Y) - H(Z) of held-out features, bits", fontsize=10)
    figure.supylabel("held-out contrastive loss per anchor, nats; dashed: log(n - 1)", fontsize=10)
    figure.colorbar(dots, ax=axes, label="training step + 1", shrink=0.6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def write_record(record: dict[str, Any]) -> None:
    """Write JSON with every list of numbers on one line."""
    text = json.dumps(record, indent=1)
    text = re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found.group().split()), text)
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Make the record and the figure."""
    torch.set_num_threads(1)
    mpl.use("svg")
    record = make_record()
    write_record(record)
    draw_figure(record)


if __name__ == "__main__":
    main()
