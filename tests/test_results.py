"""The page of results says what the committed records say."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy.stats import binomtest, nct
from scipy.stats import t as student

from lopsided.evaluation.metrics import evaluate
from lopsided.paper.protocol import CL, RUNS, Setting, published
from synthetic_records import figures, record

ROOT = Path(__file__).parents[1]


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Where dataclasses look for the names in annotations.
    spec.loader.exec_module(module)
    return module


script = _script("results")
lesions = _script("lesions")
NAMES = [part.name for part in script.PARTS] + [name for name, _, _ in script.SUMMARIES]


@pytest.fixture(scope="module")
def written():
    return dict(script.written())


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_what_the_records_say(name, written):
    shown = script.parts_of(script.PAGE.read_text("utf-8"))

    assert shown[name] == written[name].strip("\n"), "renew it: python scripts/results.py"


def test_every_figure_that_the_page_shows_is_there():
    page = script.PAGE.read_text("utf-8")
    named = [f"{part.name}-{figure}.svg" for part in script.PARTS if part.has_records for figure in part.figures]

    assert named
    assert [name for name in named if f"(figures/results/{name})" not in page] == []
    assert [name for name in named if not (script.DRAWN / name).is_file()] == []


def test_the_records_are_small_and_all_of_them_can_be_read():
    files = sorted((ROOT / "results").glob("*.jsonl"))
    assert files
    assert sum(path.stat().st_size for path in files) < 1_000_000
    for path in files:
        records, notes = script.read_records(path)
        assert notes == []
        assert len(records) == len(path.read_text("utf-8").splitlines())


def test_a_band_is_the_mean_within_a_seed_over_scenarios_and_losses():
    losses = (Setting(60.0, 0.0), Setting(300.0, 0.0))
    gains = {("70:30", 60.0): (1, 3), ("70:30", 300.0): (3, 5), ("90:10", 60.0): (0, 2), ("90:10", 300.0): (4, 6)}
    runs = {}
    for (scenario, eta), points in gains.items():
        for seed, gain in enumerate(points):
            level = figures((0.7 + seed / 10, 0.7), 0.9)
            better = figures((0.7 + seed / 10 + 2 * gain / 100, 0.7), 0.9)
            runs[scenario, CL, seed] = record(scenario, CL, seed, level, level)
            setting = Setting(eta, 0.0)
            runs[scenario, setting, seed] = record(scenario, setting, seed, level, better)
    lone = record("70:30", CL, 2, level, level)  # A seed without its pairs counts for nothing.

    told = script._band({**runs, ("70:30", CL, 2): lone}, losses, ("70:30", "90:10"), "uwa")

    assert told == "+3.0 ±12.7"  # Seeds gain 2 and 4; Student's 97.5 % point of one degree of freedom is 12.706.


def _uwas() -> dict[tuple[str, int], float]:
    """The held-out UWA of Fashion-MNIST in per cent, by loss and seed, from the raw lines of the records."""
    found: dict[tuple[str, int], list[float]] = {}
    for line in (ROOT / "results" / "fmnist.jsonl").read_text("utf-8").splitlines():
        run = json.loads(line)
        if run["scenario"] in script.BANDS["70:30 to 90:10"]:
            name = f"{run['loss'].get('eta', 0):g}/{run['loss'].get('gamma', 0):g}"
            found.setdefault((name, run["seed"]), []).append(100 * float(np.mean(run["held_out"]["recalls"])))
    assert {len(values) for values in found.values()} == {5}
    return {key: float(np.mean(values)) for key, values in found.items()}


def test_the_model_of_all_losses_is_that_of_least_squares_on_the_raw_records():
    uwas = _uwas()
    names, seeds = (sorted({key[i] for key in uwas}) for i in range(2))
    assert (len(names), len(seeds)) == (11, 4)
    design = np.array([[name == n for n in names] + [seed == s for s in seeds[1:]] for name, seed in uwas], dtype=float)
    y = np.array(list(uwas.values()))
    coefficients, (squares,), rank, _ = np.linalg.lstsq(design, y, rcond=None)
    freedom = len(y) - rank
    assert freedom == 30
    etas, gammas = ([n for n in names if not n.startswith("0/")], [n for n in names if n[:2] == "0/" and n != "0/0"])

    def contrast(more: list[str], less: list[str]) -> tuple[float, float]:
        weights = np.array([(n in more) / len(more) - (n in less) / len(less) for n in names] + [0.0] * 3)
        error = np.sqrt(squares / freedom * weights @ np.linalg.inv(design.T @ design) @ weights)
        return float(weights @ coefficients), float(student.ppf(0.975, freedom) * error)

    rows = [line.strip("| ").split(" | ") for line in script.write_pooled().splitlines()]
    shown = {row[0]: row[2] for row in rows}
    for name, more, less in (
        ("ACL(60) less CL", ["60/0"], ["0/0"]),
        ("AFCL(0, 7) less CL", ["0/7"], ["0/0"]),
        ("mean over eta less CL", etas, ["0/0"]),
        ("mean over eta less mean over gamma", etas, gammas),
    ):
        value, half = contrast(more, less)
        star = "*" if abs(value) > half else ""
        assert shown[name] == f"{value:+.1f} ±{half:.1f}{star}"
    gaps = [np.mean([uwas[n, s] for n in etas]) - np.mean([uwas[n, s] for n in gammas]) for s in seeds]
    half = student.ppf(0.975, 3) * np.std(gaps, ddof=1) / 2
    assert shown["the same, from seeds alone"] == f"{np.mean(gaps):+.1f} ±{half:.1f}*"
    text = script.PAGE.read_text("utf-8")
    assert f"({-np.mean(gaps):.2f} ± {half:.2f})" in text
    below = [value for name in etas for value, half in [contrast([name], ["0/0"])] if value < -half]
    assert len(below) == 5
    assert f"by {-max(below):.1f} to {-min(below):.1f} points of UWA ± 0.8, and no gamma does" in text
    assert not [name for name in gammas if abs(contrast([name], ["0/0"])[0]) > contrast([name], ["0/0"])[1]]


@pytest.mark.slow
def test_what_four_runs_detect_follows_from_the_spread_of_their_differences():
    uwas = _uwas()
    names, seeds = (sorted({key[i] for key in uwas}) for i in range(2))
    spread = [np.var([uwas[n, s] - uwas["0/0", s] for s in seeds], ddof=1) for n in names if n != "0/0"]
    rows = {row[0]: row[1:] for row in (line.strip("| ").split(" | ") for line in script.write_power().splitlines())}
    deviation = float(np.sqrt(np.mean(spread)))
    assert rows["70:30 to 90:10"][3] == f"{deviation:.1f}"
    for column, comparisons in ((4, 1), (5, 5)):
        effect = float(rows["70:30 to 90:10"][column]) / deviation * 2  # times the root of four runs
        limit = student.ppf(1 - 0.025 / comparisons, 3)
        assert 1 - nct.cdf(limit, 3, effect) == pytest.approx(0.8, abs=0.03)  # The table has one decimal.


def test_the_leak_is_what_a_split_by_image_says_above_one_by_lesion(monkeypatch):
    def runs_of(part):
        gain = 0.02 if part.name == "isic-image" else 0.0
        return {
            (None, setting, seed): record(None, setting, seed, replace(figures((0.9 + gain, 0.6), 0.9), auroc=0.8))
            for setting in published("isic").settings
            for seed in range(RUNS - (part.name == "isic-lesion"))
        }

    monkeypatch.setattr(script, "runs_of", runs_of)
    rows = [line.strip("| ").split(" | ") for line in script.write_leak().splitlines()]

    assert [row[0] for row in rows[2:]] == [*map(str, published("isic").settings), "mean", "deviation over seeds"]
    for row in rows[2:-1]:
        assert row[1:] == ["76.0", "75.0", "+1.0", "88.8", "87.0", "+1.8", "80.0", "80.0", "+0.0"]


def test_the_noise_beside_the_leak_is_that_of_the_seeds_of_one_loss(monkeypatch):
    def runs_of(part):
        spread = 0.1 if part.name == "isic-image" else 0.2
        return {
            (None, setting, seed): record(
                None, setting, seed, replace(figures((0.5 + i / 10 + seed * spread, 0.6), 0.9), auroc=0.8)
            )
            for i, setting in enumerate(published("isic").settings[:2])
            for seed in range(2)
        }

    monkeypatch.setattr(script, "runs_of", runs_of)
    row = script.write_leak().splitlines()[-1].strip("| ").split(" | ")

    assert row[:4] == ["deviation over seeds", "3.5", "7.1", ""]  # 5 or 10 points of UWA apart, over the root of 2.


def test_test_images_are_counted_by_what_training_knows_of_their_lesion():
    told = [
        ("a", "MEL", "MEL", 0.1),  # a has photographs in training.
        ("a", "MEL", "DF", 0.7),
        ("a", "DF", "DF", 0.6),
        ("b", "MEL", "MEL", 0.2),
        ("b", "DF", "MEL", 0.4),
        ("c", "DF", "DF", 0.9),
    ]
    rows = [{"group": g, "label": y, "predicted": p, "p:DF": str(score)} for g, y, p, score in told]

    assert list(lesions.counted("cell", rows, ["a", "z"])) == [
        ["cell", "known", "2", "1", "1", "1", "0.50000"],
        ["cell", "several", "1", "1", "1", "0", "1.00000"],
        ["cell", "single", "0", "0", "1", "1", ""],
    ]


def test_images_of_known_lesions_are_set_beside_those_of_several_photographs_that_are_not(monkeypatch, tmp_path):
    settings = published("isic").settings

    def records(part):
        seeds = range(4 if part.name == "isic-image" else 2)
        runs = [record(None, setting, seed, figures((0.9, 0.6), 0.9)) for seed in seeds for setting in settings]
        runs = [replace(run, cell=f"{part.name} {i}") for i, run in enumerate(runs)]
        return runs[:-1] if part.name == "isic-image" else runs  # The last seed lacks a loss.

    monkeypatch.setattr(script.Part, "records", records)
    monkeypatch.setattr(script, "LESIONS", tmp_path / "lesions.csv")
    count = len(settings)
    lines = [",".join(lesions.HEADER)]
    lines += [f"isic-image {i},known,10,{9 if i < count else 8},4,2,0.9" for i in range(4 * count - 1)]
    lines += [f"isic-lesion {i},several,10,9,4,{3 if i % count else 2},0.8" for i in range(2 * count)]
    script.LESIONS.write_text("\n".join(lines))

    rows = [line.strip("| ").split(" | ") for line in script.write_lesions().splitlines()]

    assert rows[2][:5] == ["by image", "known", "10", "4", "83.3 ±14.3"]  # 90, 80 and 80; Student's 4.303 times 3.333.
    assert rows[3][:2] + rows[3][4:] == ["by lesion", "several", "90.0", "70.0", "80.0", "80.0"]
    assert rows[4][-4:] == ["-5.0 ±63.5", "-20.0", "-12.5 ±31.8", "+10.0"]


@pytest.mark.parametrize(("lost", "counts"), [(1, "10,9,4,2,0.9"), (0, "10,9,0,0,")], ids=["no loss", "no class"])
def test_lesions_of_which_no_seed_is_complete_leave_the_table_empty(monkeypatch, tmp_path, lost, counts):
    settings = published("isic").settings[lost:]
    runs = [record(None, setting, 0, figures((0.9, 0.6), 0.9)) for setting in settings]
    monkeypatch.setattr(script.Part, "records", lambda part: runs)
    monkeypatch.setattr(script, "LESIONS", tmp_path / "lesions.csv")
    script.LESIONS.write_text("\n".join([",".join(lesions.HEADER), *(f"{run.cell},known,{counts}" for run in runs)]))

    assert len(script.write_lesions().splitlines()) == 2  # The header and the line below it.


def test_the_run_of_the_full_protocol_is_shown_with_the_intervals_of_its_images(monkeypatch, tmp_path):
    labels, p = [0] * 9 + [1] * 3, np.tile([0.9, 0.1], (12, 1))
    p[9] = 0.2, 0.8
    metrics = evaluate(labels, p, classes=["MEL", "DF"], bootstrap=100)
    monkeypatch.setattr(script, "RUN", tmp_path / "metrics.json")
    script.RUN.write_text(json.dumps({"test": metrics.to_dict()}))

    rows = {row[0]: row[1:] for row in (line.strip("| ").split(" | ") for line in script.write_run().splitlines())}

    wilson = binomtest(1, 3).proportion_ci(method="wilson")
    assert rows["recall of DF, 1 of 3"] == ["33.3", f"[{100 * wilson.low:.1f}, {100 * wilson.high:.1f}]"]
    assert rows["recall of MEL, 9 of 9"][0] == "100.0"
    assert (rows["UWA"][0], rows["accuracy"][0]) == ("66.7", "83.3")


def test_hours_are_those_of_the_clock_and_the_median_of_several():
    runs = [replace(record("90:10", CL, i, figures((0.9, 0.6), 0.9)), seconds=s) for i, s in enumerate((50, 40, 3510))]

    assert script.told_time(runs) == "3 runs, 1.0 hours of one core by the clock; the median run took 50 s"
    assert script.told_time([replace(runs[2], threads=2)]) == "1 run, 58 minutes of 2 cores by the clock"


def test_the_record_of_the_full_protocol_is_that_of_its_metrics():
    (run,) = next(part for part in script.PARTS if part.name == "isic-paper").records()
    evaluation = json.loads(script.RUN.read_text("utf-8"))["test"]

    assert (run.test.images, run.test.minority) == (evaluation["num_images"], 36)
    assert run.test.uwa == pytest.approx(evaluation["figures"]["uwa"]["value"], abs=1e-5)
    assert run.test.auroc == pytest.approx(evaluation["figures"]["auroc"]["value"], abs=1e-5)
