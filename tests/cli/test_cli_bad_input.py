"""Each bad input: one sentence with the file's name, exit code 2, nothing half-written."""

from __future__ import annotations

import json
import re
import resource
import shutil
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tiny import write_photos
from tiny_command import SMALL, Call, Ended, command_here, names_below


def assert_refused(ended: Ended, *told: str) -> None:
    """One sentence on stderr with all of ``told``, and code 2."""
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.startswith("lopsided: ")
    assert ended.err.count("\n") == 1
    assert ended.err.endswith((".\n", "?\n"))
    assert "Traceback" not in ended.err
    for text in told:
        assert text in ended.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos", {"cat": 8, "dog": 6})


@pytest.fixture
def assert_fit_refused(call: Call, folder: Path) -> Callable[..., None]:
    """Fit on the folder, or on other data, and see that it is refused and leaves nothing behind."""

    def assert_fit_refused(*told: str, data: Path | None = None, flags: tuple[str, ...] = ()) -> None:
        before = names_below(folder.parent)
        ended = call("fit", data or folder, "--out", folder.parent / "deep" / "run", *SMALL, *flags)
        assert_refused(ended, *told)
        assert names_below(folder.parent) == before
        assert not (folder.parent / "deep").exists()

    return assert_fit_refused


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def test_a_folder_that_is_missing(assert_fit_refused: Callable[..., None], tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert_fit_refused(
        "DATA must be a folder, a CSV or Parquet table, an NPZ file of vectors, or one of",
        f"got {gone}, which does not exist.",
        data=gone,
    )


def test_no_data_at_all(call: Call, tmp_path: Path) -> None:
    ended = call("fit", "--out", tmp_path / "run")
    assert_refused(ended, "DATA is missing, and the recipe names no source.")


def test_an_empty_class(assert_fit_refused: Callable[..., None], folder: Path) -> None:
    (folder / "fox").mkdir()
    assert_fit_refused(f"every class folder must hold at least one image, got none in {folder / 'fox'}.")


def test_one_class_only(assert_fit_refused: Callable[..., None], folder: Path) -> None:
    shutil.rmtree(folder / "dog")
    assert_fit_refused(
        "train must hold at least 2 classes, got 1 with", "Use --recipe few, which needs one class only."
    )


def test_a_class_with_one_image(assert_fit_refused: Callable[..., None], folder: Path) -> None:
    write_photos(folder, {"fox": 1})
    assert_fit_refused("a class must hold at least 2 images to be split, got 1 in 'fox' of photos.")


def test_a_truncated_file(assert_fit_refused: Callable[..., None], folder: Path) -> None:
    path = folder / "cat" / "003.png"
    path.write_bytes(path.read_bytes()[:100])
    assert_fit_refused(f"Cannot read the image {path} (", "skip_unreadable=true.")


def test_a_text_file_called_jpg(assert_fit_refused: Callable[..., None], folder: Path) -> None:
    path = folder / "dog" / "letter.jpg"
    path.write_text("dear reader")
    assert_fit_refused(f"Cannot read the image {path} (not an image of a supported format).")


def test_a_pixel_bomb(assert_fit_refused: Callable[..., None], folder: Path) -> None:
    path = folder / "dog" / "bomb.png"
    path.write_bytes(png_header(60_000, 60_000))
    assert_fit_refused(f"{path} (", "pixels, but at most 89,478,485 are allowed")


@pytest.mark.parametrize("header", ["file,label", "path,class", "a"])
def test_a_table_without_its_columns(header: str, assert_fit_refused: Callable[..., None], folder: Path) -> None:
    table = folder / "table.csv"
    table.write_text(f"{header}\n" + ",".join(["x"] * (header.count(",") + 1)) + "\n")
    assert_fit_refused(
        f"a table must have the columns path and label, got {', '.join(header.split(','))} in {table}.", data=table
    )


def test_a_table_without_the_column_of_groups(assert_fit_refused: Callable[..., None], folder: Path) -> None:
    table = folder / "table.csv"
    table.write_text("path,label\ncat/000.png,cat\ndog/000.png,dog\n")
    assert_fit_refused("must have the columns path and label and patient", data=table, flags=("--group", "patient"))


def test_a_table_that_names_missing_images(assert_fit_refused: Callable[..., None], folder: Path) -> None:
    table = folder / "table.csv"
    table.write_text("path,label\ncat/000.png,cat\ndog/999.png,dog\n")
    first = folder / "dog/999.png"
    told = f"{table} lists missing images: 1 of 2, the first {first}."
    assert_fit_refused(told, data=table)


def test_labels_that_differ_between_train_and_test(assert_fit_refused: Callable[..., None], tmp_path: Path) -> None:
    split = tmp_path / "split"
    write_photos(split / "train", {"cat": 4, "dog": 4})
    write_photos(split / "test", {"cat": 4, "fox": 4})
    assert_fit_refused("labels must be the same in train and test, got 'dog' only in train of", str(split), data=split)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("scenario=90:10,total=900",), "90:10,total=900 needs cat 810, dog 90, but the source has cat 8, dog 6."),
        (("scenario=90:20",), "shares must add up to 100, got 90:20, which adds up to 110."),
        (("--encoder", "resnet19"), "--encoder must be a timm model or \"mlp\", got 'resnet19'."),
        (
            ("--loss", "afc"),
            "--loss is not valid. There is no loss 'afc'; the losses are cl, fcl, acl,",
        ),
        (("eta=-1",), "eta must be a finite number >= 0, got -1."),
        (("epoch=3",), "A recipe has no field 'epoch'. Did you mean epochs?"),
        (("views=2",), "views=2 may mean tta or encoder_training.views or fine_tune.views. Write one of these names."),
        (("dogs",), "DATA is given twice: "),
        (("--loss", "cl", "eta=1"), "--loss \"cl\" has no parameter 'eta'; it has temperature and"),
        (
            ("encoder_training.vews=2",),
            "A recipe has no field 'encoder_training.vews'. Did you mean encoder_training.views?",
        ),
        (
            ("encoder_training.eta=2",),
            "A recipe has no field 'encoder_training.eta'. Did you mean encoder_training.loss.eta?",
        ),
        (
            ("encoder_training.loss.eat=2",),
            "encoder_training.loss \"afcl\" has no parameter 'eat'; it has eta,",
        ),
        (
            ("augment=none",),
            "augment is a section and cannot be 'none'. Set a field, such as augment.rotation.",
        ),
        (
            ("epochs=2", "encoder_training.epochs=3"),
            "epochs=2 and encoder_training.epochs=3 set the same field to different values. Remove one of",
        ),
        (
            ("--loss", "cl", "encoder_training.loss.name=fcl"),
            "--loss cl and encoder_training.loss.name=fcl set the same field to different values.",
        ),
        (
            ("--encoder", "mlp", "encoder.name=resnet18"),
            "--encoder mlp and encoder.name=resnet18 set the same field to different values.",
        ),
        (
            ("skip_unreadable=true", "data.skip_unreadable=false"),
            "skip_unreadable=true and data.skip_unreadable=false set the same field to different values.",
        ),
        (("val=0.2", "data.val=unset"), "val=0.2 and data.val=unset set the same field"),
        (("data.source=others",), "/photos and data.source=others set the same field"),
        (
            ("--recipe", "from-scratch", "method=end-to-end", "--loss", "cl"),
            '--loss cannot be cl with method "end-to-end". Use one of ce, weighted-ce, focal, logit-adjusted, '
            "class-balanced, label-aware-smoothing, ldam, bcl, or method=two-stage.",
        ),
        (("augment.rotation=much",), "augment.rotation must be a finite number >= 0 and <= 180, got 'much'."),
        (("seed=" + "9" * 5000,), "seed must be an integer >= 0 and <= 9223372036854775807, got '999"),
        (("--loss", "ce", "encoder_training.views=2"), "encoder_training.views must be 1 with the loss ce"),
        (("val=0.6", "test=0.5"), "test + data.val must be < 1, got 0.5 + 0.6."),
        (("--recipe", "none.toml"), "a recipe must be a readable TOML file, got none.toml (No such file"),
        (("--device", "quantum"), "device must be"),
        (("weights=/none/w.safetensors",), "/none/w.safetensors"),
        (("split=group",), "A split by group needs groups, but photos has none."),
        (("split=given",), "photos does not define splits, so a given split cannot be used."),
    ],
)
def test_a_flag_that_cannot_be_used(flags: tuple[str, ...], told: str, assert_fit_refused: Callable[..., None]) -> None:
    assert_fit_refused(told, flags=flags)


def test_an_empty_folder_that_was_there_stays_empty_after_an_error(call: Call, folder: Path) -> None:
    out = folder.parent / "run"
    out.mkdir()
    assert_refused(call("fit", folder, "--out", out, *SMALL, "--encoder", "resnet19"))
    assert list(out.iterdir()) == []


def test_corrupt_images_are_left_out_and_listed_when_asked(call: Call, folder: Path) -> None:
    (folder / "cat" / "003.png").write_bytes(b"")
    (folder / "dog" / "letter.jpg").write_text("dear reader")
    run = folder.parent / "run"
    ended = call("fit", folder, "--out", run, *SMALL, "skip_unreadable=true")
    assert ended.code == 0
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["unreadable"] == [
        {"name": "cat/003.png", "reason": "the file is empty"},
        {"name": "dog/letter.jpg", "reason": "not an image of a supported format"},
    ]
    assert sum(sum(split.values()) for split in metrics["counts"].values()) == 13
    assert "2 unreadable images were skipped" in ended.out


def test_a_run_of_another_version(call: Call, finished: Path, other_photos: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    for name in ("metrics.json", "model.json"):
        content = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps({**content, "format": 9, "lopsided": "7.0"}))
    ended = call("fit", "--out", run, "--resume")
    assert_refused(ended, f"a run must have format 1, got format 9 in {run / 'metrics.json'}.", "lopsided 7.0")
    for arguments in (("evaluate", run, other_photos), ("predict", run, other_photos), ("export", run)):
        assert_refused(call(*arguments, "--quiet"), f"{run / 'model.json'} must have format 2, got 9.", "lopsided 7.0")
    assert not (run / "model.onnx").exists()


def test_a_model_that_was_truncated(call: Call, model: Path, other_photos: Path, tmp_path: Path) -> None:
    run = shutil.copytree(model, tmp_path / "run")
    weights = run / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert_refused(call("predict", run, other_photos), str(weights), "the file was changed or truncated")


def test_metrics_that_are_no_json(call: Call, finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "metrics.json").write_text("[1, 2")
    assert_refused(call("fit", "--out", run, "--resume"), f"got {run / 'metrics.json'} (")


@pytest.mark.parametrize("verb", ["evaluate", "predict", "export"])
def test_a_folder_that_is_no_run(verb: str, call: Call, other_photos: Path, tmp_path: Path) -> None:
    more = () if verb == "export" else (other_photos,)
    assert_refused(call(verb, tmp_path, *more, "--quiet"), f"{tmp_path} holds no model.json.")


def test_labels_that_the_model_does_not_know(call: Call, model: Path, tmp_path: Path) -> None:
    others = write_photos(tmp_path / "others", {"cat": 2, "fox": 2})
    ended = call("evaluate", model, others, "--out", tmp_path / "figures.json")
    assert_refused(ended, "labels must be classes of the model (cat, dog), got fox in others.")
    assert not (tmp_path / "figures.json").exists()


@pytest.mark.parametrize("verb", ["evaluate", "predict", "export"])
def test_an_output_in_a_folder_that_does_not_exist_is_refused_before_the_work(
    verb: str, call: Call, model: Path, other_photos: Path, tmp_path: Path
) -> None:
    more = () if verb == "export" else (other_photos,)
    out = tmp_path / "none" / "file"
    ended = call(verb, model, *more, "--out", out)
    assert_refused(ended, f"{out} is in a folder that does not exist. Set --out to a file in an existing folder.")


@pytest.mark.parametrize(
    ("arguments", "out"),
    [
        (("evaluate", "run", "table.csv"), "table.csv"),
        (("evaluate", "run", "link.csv"), "table.csv"),
        (("evaluate", "run", "photos"), "run/metrics.json"),
        (("evaluate", "run", "photos"), "photos/cat/000.png"),
        (("predict", "run", "photos"), "photos/cat/000.png"),
        (("predict", "run", "plain"), "plain"),
        (("predict", "run", "plain.unreadable.csv"), "plain.csv"),
        (("predict", "run", "photos"), "run/model.json"),
        (("predict", "run", "photos"), "run/predictions.csv"),
        (("report", "run"), "run/model.safetensors"),
        (("report", "sweep"), "sweep/records.jsonl"),
        (("export", "run"), "run/model.safetensors"),
    ],
)
def test_an_output_that_would_replace_what_is_read_is_refused(
    arguments: tuple[str, ...], out: str, call: Call, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    shutil.copytree(model, "run")
    for name in ("recipe.toml", "metrics.json", "predictions.csv"):
        Path("run", name).touch()
    Path("sweep").mkdir()
    Path("sweep", "sweep.json").touch()
    Path("table.csv").write_text("path,label\nphotos/cat/000.png,cat\nphotos/dog/000.png,dog\n")
    Path("link.csv").symlink_to("table.csv")
    for name in ("plain", "plain.unreadable.csv"):
        shutil.copy("photos/dog/000.png", name)
    before = {name: Path(name).read_bytes() for name in names_below(folder.parent)}
    assert_refused(call(*arguments, "--out", out), "--out would overwrite ")
    assert {name: Path(name).read_bytes() for name in names_below(folder.parent)} == before


def test_an_output_may_replace_itself_and_have_the_name_of_a_runs_file_elsewhere(
    call: Call, model: Path, folder: Path
) -> None:
    (folder.parent / "recipe.toml").touch()
    for _ in range(2):
        assert call("evaluate", model, folder, "--out", folder.parent / "metrics.json").code == 0


@pytest.mark.parametrize("kind", ["too long", "a circle of links", "below a file"])
@pytest.mark.parametrize(
    "arguments",
    [
        "predict MODEL PATH", "predict PATH PHOTOS", "predict MODEL PHOTOS --out PATH", "evaluate MODEL PATH",
        "evaluate PATH PHOTOS", "evaluate MODEL PHOTOS --out PATH", "report PATH", "report MODEL --out PATH",
        "data PATH", "data PATH.csv", "export PATH", "export MODEL --out PATH", "recipes PATH.toml",
        "fit --recipe PATH.toml --out OUT", "fit PATH --out OUT", "fit PHOTOS --out PATH",
        "fit PHOTOS weights=PATH --out OUT",
    ],
)  # fmt: skip
def test_a_path_that_cannot_be_opened(arguments: str, kind: str, call: Call, model: Path, folder: Path) -> None:
    below = {"too long": "x" * 300, "a circle of links": "circle/x", "below a file": "photos/cat/000.png/x"}[kind]
    (folder.parent / "circle").symlink_to("circle")
    paths = {"MODEL": model, "PHOTOS": folder, "PATH": folder.parent / below, "OUT": folder.parent / "new"}
    before = names_below(folder.parent)
    words = [re.sub("^[A-Z]+", lambda found: str(paths[found[0]]), word) for word in arguments.split()]
    assert_refused(call(*words, "--quiet") if words[0] != "recipes" else call(*words))
    assert names_below(folder.parent) == before


@pytest.mark.parametrize("verb", ["predict", "evaluate", "fit"])
def test_a_working_folder_that_was_removed(
    verb: str, call: Call, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = folder.parent / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert_refused(call("fit", "photos", "--out", "run") if verb == "fit" else call(verb, model, "photos"))


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file system that refuses even root")
def test_a_disk_that_cannot_be_written(call: Call, folder: Path, model: Path) -> None:
    assert_refused(call("fit", folder, "--out", "/sys/run", *SMALL), "cannot create the folder /sys/run (")
    assert_refused(call("predict", model, folder, "--out", "/sys/a.csv"), "cannot write /sys/a.csv: ")
    assert_refused(call("evaluate", model, folder, "--out", "/sys/a.json", "--quiet"), "cannot write /sys/a.json: ")


def limited(arguments: list[str | Path], limit: int) -> Ended:
    """Run the command where no file may grow above ``limit`` bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        return command_here(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_a_full_disk_leaves_no_run_behind(folder: Path) -> None:
    out = folder.parent / "run"
    before = names_below(folder.parent)
    ended = limited(["fit", folder, "--out", out, *SMALL, "--quiet"], 50_000)
    warnings, told = ended.err.splitlines()[:-1], ended.err.splitlines()[-1]
    assert all(line.startswith("warning: ") for line in warnings)
    assert_refused(Ended(ended.code, ended.out, f"{told}\n"), f"cannot write {out}/checkpoint/", ": file too")
    assert names_below(folder.parent) == before
    assert not out.exists()


@pytest.mark.slow
def test_a_full_disk_leaves_no_half_of_a_prediction(model: Path, folder: Path) -> None:
    out = folder.parent / "answers.csv"
    ended = limited(["predict", model, folder, "--out", out, "--quiet"], 500)
    assert_refused(ended, f"cannot write {out}: file too large.")
    assert [name for name in names_below(folder.parent) if not name.startswith("photos/")] == []
