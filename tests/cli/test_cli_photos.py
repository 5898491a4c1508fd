"""A folder of photographs as a new user has it: masks beside images, mixed sizes, typos, simple mistakes."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lopsided.cli import output
from lopsided.recipe import Recipe
from lopsided.runs.folder import Run
from tiny import write_photos
from tiny_command import SMALL, Call, environment


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    """Photographs with a mask beside each, of the same name."""
    folder = write_photos(tmp_path / "masked", {"cat": 14, "dog": 10})
    for path in sorted(folder.rglob("*.png")):
        Image.new("L", (12, 12), 255).save(path.with_suffix(".bmp"))
    return folder


def notes_of(run: Path, event: str = "note") -> list[str]:
    return [line["text"] for line in Run.open(run).events() if line["event"] == event]


@pytest.mark.slow
def test_masks_beside_photographs_are_warned_about_and_can_be_left_out(
    call: Call, masked: Path, tmp_path: Path
) -> None:
    pairs = "24 pairs of images differ only in the suffix, for example cat/000.bmp and cat/000.png"
    assert pairs in call("data", masked).out
    ended = call("fit", masked, "--out", tmp_path / "both", *SMALL)
    assert ended.code == 0
    assert f"warning: {pairs}" in ended.err
    ended = call("fit", masked, "--out", tmp_path / "run", *SMALL, "exclude=*.bmp", "exclude=cat/013.*")
    assert ended.code == 0
    assert pairs not in ended.err
    assert "data.include and data.exclude left out 25 images." in ended.err
    counts = json.loads((tmp_path / "run" / "metrics.json").read_text())["counts"]
    assert sum(sum(split.values()) for split in counts.values()) == 23
    assert Recipe.load(tmp_path / "run" / "recipe.toml").data.exclude == ("*.bmp", "cat/013.*")

    ended = call("predict", tmp_path / "run", masked, "--out", tmp_path / "all.csv")
    assert "warning: 24 pairs of images differ only in the suffix" in ended.err
    ended = call("predict", tmp_path / "run", masked, "--out", tmp_path / "some.csv", "--include", "*.png")
    assert "pairs" not in ended.err
    with (tmp_path / "some.csv").open(newline="") as table:
        assert {Path(row["path"]).suffix for row in csv.DictReader(table)} == {".png"}
    ended = call("evaluate", tmp_path / "run", masked, "--exclude", "*.bmp", "--json")
    assert json.loads(ended.out)["num_images"] == 24
    assert "pairs" not in ended.err
    assert "24 pairs of images" in call("evaluate", tmp_path / "run", masked).err
    assert "24 images are left out by --include and --exclude." in call("data", masked, "--exclude", "*.bmp").out
    ended = call("predict", tmp_path / "run", masked, "--include", "*.jpg")
    assert ended.code == 2
    assert ended.err.endswith("the patterns must leave at least one image, got none of 48 with include='*.jpg'.\n")


def test_photographs_of_mixed_sizes_need_no_flag(call: Call, tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", {"cat": 14, "dog": 10})
    for i, path in enumerate(sorted(folder.rglob("*.png"))):
        image = Image.open(path)
        image.resize((14 + i % 3, 20)).save(path)
    ended = call("fit", folder, "--out", tmp_path / "run", *SMALL)
    assert ended.code == 0
    assert "The images have different sizes and are resized to 15 x 15 pixels. Set another size with" in ended.err
    assert json.loads((tmp_path / "run" / "model.json").read_text())["image_size"] == 15
    assert call("fit", "--out", tmp_path / "run", "--resume").code == 0
    ended = call("evaluate", tmp_path / "run")
    assert ended.code == 0


def test_fit_says_how_it_split_and_how_long_all_of_it_took(call: Call, photos: Path, tmp_path: Path) -> None:
    ended = call("fit", photos, "--out", tmp_path / "run", *SMALL)
    said = (
        "The images are split at random within each class (stratified); the default, because the data have neither "
        "splits nor groups."
    )
    assert said in ended.err.splitlines()
    assert said in notes_of(tmp_path / "run")
    assert f"Written to {tmp_path / 'run'} in " in ended.out
    assert " s of training; the rest is start-up, reading images and evaluation)." in ended.out


def test_the_time_of_a_command_counts_the_start_of_its_process() -> None:
    begin = time.monotonic()
    code = "import time; time.sleep(0.3); from lopsided.cli.output import process_age; print(process_age())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    if Path("/proc/uptime").exists():
        assert 0.25 < float(ended.stdout) < time.monotonic() - begin + 0.05
    output.begin(100.0)
    assert output.elapsed() >= 100.0


@pytest.mark.parametrize("how", ["random", "stratified"])
def test_a_split_that_ignores_the_groups_is_refused(call: Call, photos: Path, tmp_path: Path, how: str) -> None:
    ended = call("fit", photos, "--out", tmp_path / "run", f"split={how}", "--group", "patient")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        f"lopsided: split={how} and --group patient contradict each other: the split would ignore the groups, so "
        "images of one group could be in two splits. Use split=group, or leave out one of the two.\n"
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--encoder", "resnet19"], "--encoder must be a timm model or \"mlp\", got 'resnet19'. Did you mean resnet1"),
        (["epochs=0"], "epochs must be an integer >= 1"),
        (["image_size=0"], "image_size must be an integer >= 1"),
        (["batch_size=0"], "batch_size must be an integer >= 1"),
        (["--loss", "afcl", "eta=-1"], "eta must be"),
        (["split=sometimes"], "split must be one of"),
        (["encoder.name=resnet19"], "encoder.name must be a timm model"),
    ],
)
def test_an_error_names_the_flag_that_was_given(
    call: Call, photos: Path, tmp_path: Path, flags: list[str], said: str
) -> None:
    ended = call("fit", photos, "--out", tmp_path / "run", *flags)
    assert ended.code == 2
    assert ended.err.startswith(f"lopsided: {said}")


def test_typos_in_labels_are_named_all_at_once(call: Call, photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    shutil.copytree(photos, folder)
    for name, number in {"Cat": 1, "dgo": 1}.items():
        (folder / name).mkdir()
        for i in range(number):
            shutil.copy(folder / "cat" / f"{i:03d}.png", folder / name)
    ended = call("fit", folder, "--out", tmp_path / "run", *SMALL)
    assert ended.code == 2
    assert "got 1 in 'Cat' and in 'dgo' of photos. Did you mean cat?" in ended.err


def test_a_run_that_is_not_trained_enough_says_so(call: Call, photos: Path, tmp_path: Path) -> None:
    flags = ["encoder_training.schedule=constant", "lr=0.00003", "--loss", "ce"]
    ended = call("fit", photos, "--out", tmp_path / "run", *SMALL, *flags)
    assert ended.code == 0
    said = "The training loss of stage end-to-end still fell steeply at its last epoch"
    assert f"warning: {said}" in ended.err
    assert any(
        text.startswith(said) for text in json.loads((tmp_path / "run" / "metrics.json").read_text())["warnings"]
    )


def test_evaluate_without_data_repeats_the_figures_of_the_test_split(call: Call, finished: Path, photos: Path) -> None:
    ended = call("evaluate", finished, "--json", "--quiet", "--device", "cpu")
    assert ended.code == 0
    assert ended.err == ""
    found, metrics = json.loads(ended.out), json.loads((finished / "metrics.json").read_text())
    assert found["confusion"] == metrics["test"]["confusion"]
    for name, figure in metrics["test"]["figures"].items():
        assert found["figures"][name] == pytest.approx(figure), name
    ended = call("evaluate", finished, "--split", "val", "--quiet")
    assert ended.out.startswith(f"val split of {finished}: ")
    assert ended.err == "warning: the validation split selected the model, so the metrics are too high.\n"
    assert "the model was trained on images of these data" in call("evaluate", finished, "--split", "train").err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--split", "half"], "--split must be train, val or test, got half."),
        (["--group", "patient"], "--group needs DATA. Name the data, or leave the option out"),
        (["--exclude", "*.bmp"], "--exclude needs DATA. "),
    ],
)
def test_evaluate_without_data_refuses_options_of_data(call: Call, finished: Path, flags: list[str], said: str) -> None:
    ended = call("evaluate", finished, *flags)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"lopsided: {said}")


def test_evaluate_without_data_notices_that_the_images_have_changed(call: Call, tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", {"cat": 14, "dog": 10})
    assert call("fit", folder, "--out", tmp_path / "run", *SMALL, "val=0").code == 0
    ended = call("evaluate", tmp_path / "run", "--split", "val")
    assert ended.err.startswith(f"lopsided: The run in {tmp_path / 'run'} has no val split.")
    pixels = np.asarray(Image.open(folder / "cat" / "003.png")).copy()
    pixels[0, 0, 0] ^= 1
    Image.fromarray(pixels).save(folder / "cat" / "003.png")
    ended = call("evaluate", tmp_path / "run")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        f"lopsided: The images or labels of {folder} have changed since the run was trained, so its test split cannot "
        "be found again. Restore them, or name the data.\n"
    )


def test_a_file_that_is_replaced_is_named(call: Call, model: Path, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.csv"
    assert "replaced" not in call("predict", model, photos, "--out", out).err
    assert f"{out} exists and is replaced.\n" in call("predict", model, photos, "--out", out).err
    assert call("predict", model, photos, "--out", out, "--quiet").err == ""
    figures = tmp_path / "figures.json"
    figures.write_text("{}")
    assert f"{figures} exists and is replaced.\n" in call("evaluate", model, photos, "--out", figures).err


MISTAKES = {
    "missing column": ["fit", "{photos}/t.csv", "--out", "{tmp}/run", "--group", "patient"],
    "unknown encoder": ["fit", "{photos}", "--out", "{tmp}/run", "--encoder", "resnet19"],
    "output below a file": ["fit", "{photos}", "--out", "{photos}/t.csv/run"],
    "missing weights": ["fit", "{photos}", "--out", "{tmp}/run", "weights={tmp}/gone.safetensors"],
    "missing data": ["fit", "{tmp}/gone", "--out", "{tmp}/run"],
    "missing column of an evaluation": ["evaluate", "{tmp}", "{photos}/t.csv", "--group", "patient"],
    "no run to predict with": ["predict", "{tmp}", "{photos}"],
    "no run to export": ["export", "{tmp}"],
    "groups of a folder": ["fit", "{photos}", "--out", "{tmp}/run", "--group", "patient"],
}


@pytest.mark.slow
def test_a_simple_mistake_is_found_before_heavy_imports_and_before_images_are_read(
    photos: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "photos"
    shutil.copytree(photos, folder)
    (folder / "t.csv").write_text("path,label\ncat/000.png,cat\ndog/000.png,dog\n")
    (folder / "cat" / "000.png").write_bytes(b"not an image")
    mistakes = {
        name: [text.format(photos=folder, tmp=tmp_path) for text in arguments] for name, arguments in MISTAKES.items()
    }
    code = (
        "import sys, lopsided.cli\n"
        f"for name, arguments in {mistakes!r}.items():\n"
        "    code = lopsided.cli.run(arguments)\n"
        "    heavy = [name for name in ('torch', 'timm', 'torchvision') if name in sys.modules]\n"
        "    print(name, code, heavy)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True, cwd=tmp_path
    )
    assert ended.stdout.splitlines() == [f"{name} 2 []" for name in MISTAKES]
    assert "000.png" not in ended.stderr
    assert not (tmp_path / "run").exists()


HANGING = """
import os, signal, threading, time
from lopsided.cli import main
from lopsided.data import decoding, images

signal.signal(signal.SIGINT, signal.default_int_handler)  # Also where the tests ignore it.
waiting = threading.Event()

def hang(*_):  # A decoder that asks for nothing any more.
    waiting.set()
    time.sleep(3600)

decoding._Watched.read = hang
os.cpu_count = lambda: 2
threading.Thread(target=lambda: (waiting.wait(), os.kill(os.getpid(), signal.SIGINT)), daemon=True).start()
main()
"""


@pytest.mark.slow
def test_an_interrupt_does_not_wait_for_a_decoder_that_cannot_be_interrupted(photos: Path, tmp_path: Path) -> None:
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    arguments = ["fit", str(photos), "--out", str(tmp_path / "run"), *SMALL]
    ended = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=300,
    )
    assert ended.returncode == 130, ended.stderr
    assert not (tmp_path / "run" / ".lock").exists()
