from __future__ import annotations

import csv
import io
import json
import math
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lopsided.data.images import FileImages
from lopsided.inference.evaluate import prior_shift
from tiny import SIZE, write_photos
from tiny_command import SMALL, Call, command_here, names_below


def test_evaluate_gives_figures_with_intervals_on_other_images(call: Call, finished: Path, other_photos: Path) -> None:
    ended = call("evaluate", finished, other_photos, "--quiet")  # A slow machine would print its progress.
    assert ended.code == 0
    assert ended.err == ""
    assert ended.out.startswith("others: 15 images\n")
    uwa = next(line for line in ended.out.splitlines() if line.startswith("balanced accuracy"))
    assert uwa.count("[") == 1
    assert uwa.split()[-1] == "0.500"
    assert "always cat" in ended.out


def test_evaluate_on_the_test_images_gives_what_the_run_gave(
    call: Call, finished: Path, photos: Path, tmp_path: Path
) -> None:
    with (finished / "predictions.csv").open(newline="") as file:
        held_out = [row for row in csv.DictReader(file) if row["split"] == "test"]
    for row in held_out:
        (tmp_path / "held" / row["label"]).mkdir(parents=True, exist_ok=True)
        shutil.copy(photos / row["name"], tmp_path / "held" / row["name"])
    out = tmp_path / "figures.json"
    ended = call("evaluate", finished, tmp_path / "held", "--json", "--out", out)
    result = json.loads(ended.out)
    assert result == json.loads(out.read_text())
    expected = json.loads((finished / "metrics.json").read_text())["test"]
    assert result["confusion"] == expected["confusion"]
    for name in ("uwa", "accuracy", "auroc", "brier"):
        assert result["figures"][name]["value"] == pytest.approx(expected["figures"][name]["value"], abs=1e-6)


def test_views_are_averaged_by_predict_and_evaluate(call: Call, model: Path, other_photos: Path) -> None:
    def answers(*options: str) -> dict[str, float]:
        rows = csv.DictReader(io.StringIO(call("predict", model, other_photos, *options).out))
        return {row["path"]: math.log(float(row["p:cat"]) / float(row["p:dog"])) for row in rows}

    each = [answers("--tta", view) for view in ("identity", "hflip", "vflip", "rot180")]
    assert each[0] == answers()
    assert each[0] != each[1]
    for path, score in answers("--tta", "flips").items():
        assert score == pytest.approx(sum(one[path] for one in each) / 4, abs=1e-5)
    ended = call("evaluate", model, other_photos, "--tta", "flips", "--json")
    assert json.loads(ended.out)["views"] == ["identity", "hflip", "vflip", "rot180"]
    for verb in ("predict", "evaluate"):
        ended = call(verb, model, other_photos, "--tta", "mirror")
        assert ended.code == 2
        assert ended.err.startswith("lopsided: There is no view 'mirror'. Use none, flip, flips, dihedral,")
    for verb in ("predict", "evaluate", "export"):
        ended = call(verb, model, *([] if verb == "export" else [other_photos]), "--tta", "auto")
        assert ended.code == 2
        assert ended.err.startswith("lopsided: --tta auto chooses views in fit, and a finished model has its own.")


def test_evaluate_counts_the_answers_of_predict(call: Call, model: Path, other_photos: Path) -> None:
    answers = csv.DictReader(io.StringIO(call("predict", model, other_photos).out))
    pairs = Counter((Path(row["path"]).parent.name, row["predicted"]) for row in answers)
    expected = [[pairs[true, predicted] for predicted in ("cat", "dog")] for true in ("cat", "dog")]
    assert expected != [[9, 0], [0, 6]]
    assert json.loads(call("evaluate", model, other_photos, "--json").out)["confusion"] == expected


def test_evaluate_warns_of_the_data_that_the_model_was_trained_on(call: Call, finished: Path, photos: Path) -> None:
    counts = json.loads((finished / "metrics.json").read_text())["counts"]
    trained, every = (sum(sum(counts[split].values()) for split in part) for part in (("train",), counts))
    warning = f"the model was trained on {trained} of these {every} images, so the metrics are too high."
    assert warning in call("evaluate", finished, photos).err


def test_evaluate_notices_copies_of_training_images_at_another_place(
    call: Call, finished: Path, photos: Path, other_photos: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(other_photos, tmp_path / "mixed")
    with (finished / "predictions.csv").open(newline="") as file:
        held = {row["name"] for row in csv.DictReader(file)}
    name = next(name for name in names_below(photos) if name.endswith(".png") and name not in held)
    shutil.copy(photos / name, copied / Path(name).parent.name / "copy.png")
    assert "the model was trained on 1 of these 16 images" in call("evaluate", finished, copied).err


def test_images_of_an_unknown_class_are_left_out_on_request(
    call: Call, model: Path, other_photos: Path, tmp_path: Path
) -> None:
    mixed = shutil.copytree(other_photos, tmp_path / "mixed")
    shutil.copytree(mixed / "cat", mixed / "zebra")
    refused = call("evaluate", model, mixed)
    assert refused.code == 2
    assert "--known-classes" in refused.err
    ended = call("evaluate", model, mixed, "--known-classes", "--json")
    assert json.loads(ended.out)["num_images"] == 15
    assert "9 images of classes that the model does not have are left out." in ended.err


def test_evaluate_says_that_the_classes_have_other_shares_than_the_probabilities_assume() -> None:
    def rows(*support: int) -> list[dict[str, int]]:
        return [{"support": number} for number in support]

    note = prior_shift(rows(300, 200), (0.98, 0.02), ("ok", "defective"))
    assert note.startswith("defective has 40.0% of these images, but the probabilities assume 2.0%")
    assert note.endswith("--prevalence ok=0.6,defective=0.4.")
    assert prior_shift(rows(300, 200), (0.6, 0.4), ("ok", "defective")) == ""
    assert prior_shift(rows(48, 2), (0.98, 0.02), ("ok", "defective")) == "", "Chance explains two of 50."


def test_a_table_may_name_files_elsewhere_only_when_it_is_allowed(
    call: Call, finished: Path, other_photos: Path, tmp_path: Path
) -> None:
    rows = [f"{path},{path.parent.name}" for path in sorted(other_photos.rglob("*.png"))]
    (tmp_path / "table.csv").write_text("\n".join(["path,label", *rows]))
    for arguments in (("evaluate", finished), ("data",)):
        assert "paths must stay below the folder of the table" in call(*arguments, tmp_path / "table.csv").err
        assert call(*arguments, tmp_path / "table.csv", "--allow-outside").code == 0


def test_evaluate_says_when_a_class_is_not_there(call: Call, finished: Path, tmp_path: Path) -> None:
    ended = call("evaluate", finished, write_photos(tmp_path / "dogs", {"dog": 4}))
    assert ended.code == 0
    assert "The test set has no image of cat: means over classes omit such classes." in ended.out


def test_evaluate_takes_one_part_of_data_that_come_split(call: Call, finished: Path, tmp_path: Path) -> None:
    for split, number in (("train", 5), ("test", 3)):
        write_photos(tmp_path / split, {"cat": number, "dog": number}, start=200 + number)
    assert json.loads(call("evaluate", finished, tmp_path, "--split", "test", "--json").out)["num_images"] == 6
    ended = call("evaluate", finished, tmp_path, "--split", "val")
    assert ended.err == f"lopsided: --split must be one of test, train, got val for {tmp_path}.\n"


def test_evaluate_and_data_take_a_table_or_a_folder_of_test_images_alone(
    call: Call, finished: Path, tmp_path: Path
) -> None:
    folder = write_photos(tmp_path / "photos" / "test", {"cat": 3, "dog": 2}).parent
    rows = [f"{path.relative_to(tmp_path)},{path.parent.name},test" for path in sorted(folder.rglob("*.png"))]
    (tmp_path / "table.csv").write_text("\n".join(["path,label,split", *rows]))
    for data in (folder, tmp_path / "table.csv"):
        assert json.loads(call("evaluate", finished, data, "--json", "--quiet").out)["num_images"] == 5
        assert json.loads(call("data", data, "--json").out)["splits"] == {"test": {"cat": 3, "dog": 2}}


def test_evaluate_leaves_unreadable_images_out_when_asked(call: Call, finished: Path, tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", {"cat": 3, "dog": 3})
    (folder / "dog" / "000.png").write_bytes(b"")
    ended = call("evaluate", finished, folder)
    assert ended.code == 2
    assert "000.png (the file is empty)" in ended.err
    ended = call("evaluate", finished, folder, "--skip-unreadable")
    assert ended.code == 0
    assert "skipped unreadable image: dog/000.png (the file is empty)" in ended.err
    assert "5 images" in ended.out


@pytest.mark.slow
def test_predict_writes_the_readable_and_lists_the_rest(finished: Path, other_photos: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_text("no image")
    out = tmp_path / "answers.csv"
    ended = command_here("predict", finished, other_photos, tmp_path / "broken.jpg", "--out", out)
    assert ended.code == 0
    assert "broken.jpg (not an image of a supported format)" in ended.err
    assert ended.out.startswith("15 images predicted (")
    assert ended.out.rstrip().endswith(f", 1 unreadable: {out}")
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 15
    right = [Path(row["path"]).parent.name == row["predicted"] for row in rows]
    assert sum(right) >= 13
    assert names_below(tmp_path) == ["answers.csv", "answers.unreadable.csv", "broken.jpg"]


def test_predict_without_a_file_writes_to_stdout(call: Call, finished: Path, other_photos: Path) -> None:
    ended = call("predict", finished, other_photos / "cat")
    rows = list(csv.DictReader(io.StringIO(ended.out)))
    assert [row["path"] for row in rows] == sorted(str(path) for path in (other_photos / "cat").iterdir())
    lines = [json.loads(line) for line in call("predict", finished, other_photos / "cat", "--json").out.splitlines()]
    assert [line["predicted"] for line in lines] == [row["predicted"] for row in rows]
    for line, row in zip(lines, rows, strict=True):
        assert line["probabilities"]["cat"] == pytest.approx(float(row["p:cat"]))


def test_predict_as_json_counts(call: Call, finished: Path, other_photos: Path, tmp_path: Path) -> None:
    ended = call("predict", finished, other_photos, "--out", tmp_path / "a.csv", "--json", "--quiet")
    result = json.loads(ended.out)
    assert result["images"] == sum(result["predicted"].values()) == 15
    assert result["unreadable"] == {"number": 0, "first": []}
    assert ended.err == ""


def test_predict_with_no_readable_image_ends_with_code_2(call: Call, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    ended = call("predict", finished, tmp_path / "a.png", "--out", tmp_path / "answers.csv")
    assert ended.code == 2
    assert "No image is readable: 1 failed, the first " in ended.err
    assert names_below(tmp_path) == ["a.png"]


@pytest.mark.slow
def test_an_exported_file_answers_as_predict_does(finished: Path, other_photos: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    out = tmp_path / "model.onnx"
    ended = command_here("export", finished, "--to", "onnx", "--out", out)
    assert ended.code == 0
    assert ended.out.startswith(f"Written to {out} (")
    assert "onnxruntime agrees with torch on batches of 1 and 3 images" in ended.out
    assert all(line.startswith("exporting: ") for line in ended.err.splitlines())
    assert names_below(tmp_path) == ["model.onnx"]
    paths = sorted(other_photos.rglob("*.png"))
    pixels = FileImages(paths).load(np.arange(len(paths)), SIZE, 3).numpy().astype(np.float32) / 255
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    _, found, _, label, *_ = session.run(None, {"images": pixels})
    csv_text = command_here("predict", finished, other_photos, "--quiet").out
    rows = {row["path"]: row for row in csv.DictReader(io.StringIO(csv_text))}
    np.testing.assert_allclose(found[:, 1], [float(rows[str(path)]["p:dog"]) for path in paths], atol=1e-4)
    assert [("cat", "dog")[i] for i in label] == [rows[str(path)]["predicted"] for path in paths]


@pytest.mark.slow
def test_export_writes_into_the_run_unless_told_otherwise(call: Call, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    run = shutil.copytree(model, tmp_path / "run")
    result = json.loads(call("export", run, "--json", "--quiet").out)
    assert result["file"] == str(run / "model.onnx")
    assert result["difference"] <= 1e-4
    assert (run / "model.onnx").stat().st_size == result["bytes"]


def test_export_says_that_there_is_no_run_before_it_looks_at_out(call: Call, tmp_path: Path) -> None:
    ended = call("export", tmp_path / "gone")
    assert ended.code == 2
    assert str(tmp_path / "gone") in ended.err
    assert "--out" not in ended.err


def decided(text: str) -> dict[str, tuple[str, float]]:
    return {row["path"]: (row["predicted"], float(row["p:dog"])) for row in csv.DictReader(io.StringIO(text))}


def test_predict_decides_by_the_rule_of_the_model_or_by_another_one(
    call: Call, finished: Path, other_photos: Path
) -> None:
    card = json.loads((finished / "model.json").read_text())
    assert card["decision"]["rule"] == "balanced"
    own, plain = (decided(call("predict", finished, other_photos, *more).out) for more in ((), ("--decide", "plain")))
    for path, (label, dog) in plain.items():
        assert label == ("dog" if dog > 0.5 else "cat")
        assert own[path] == ("dog" if dog / card["prior"][1] > (1 - dog) / card["prior"][0] else "cat", dog)


def test_predict_moves_probabilities_to_the_expected_prevalence(call: Call, finished: Path, other_photos: Path) -> None:
    prior = json.loads((finished / "model.json").read_text())["prior"]
    own = decided(call("predict", finished, other_photos).out)
    ended = call("predict", finished, other_photos, "--prevalence", "dog=0.01,cat=0.99")
    assert "An image is called dog if its probability is at least 1.0 %, its stated share (balanced)." in ended.err
    moved = decided(ended.out)
    for path, (label, dog) in own.items():
        odds = dog / (1 - dog) * (0.01 / prior[1]) / (0.99 / prior[0])
        assert moved[path][1] == pytest.approx(odds / (1 + odds), rel=1e-5, abs=1e-9)
        assert moved[path][0] == label  # The rule balanced does not depend on the prevalence.


def test_evaluate_judges_by_another_rule_and_by_costs_in_a_file(
    call: Call, finished: Path, other_photos: Path, tmp_path: Path
) -> None:
    costs = tmp_path / "costs.csv"
    costs.write_text(",cat,dog\ncat,0,1\ndog,1000000,0\n")
    ended = call("evaluate", finished, other_photos, "--decide", f"cost:{costs}", "--json")
    result = json.loads(ended.out)
    assert result["decision"]["costs"] == [[0.0, 1.0], [1000000.0, 0.0]]
    assert result["confusion"][1][0] == 0
    assert set(result["rules"]) == {"plain", "balanced"}
    assert "(plain)" in call("evaluate", finished, other_photos, "--decide", "plain").out


def test_rules_that_are_fitted_use_the_validation_images_of_the_run(
    call: Call, finished: Path, other_photos: Path, tmp_path: Path
) -> None:
    with (finished / "predictions.csv").open(newline="") as file:
        dogs = [float(row["p:dog"]) for row in csv.DictReader(file) if (row["split"], row["label"]) == ("val", "dog")]
    result = json.loads(call("evaluate", finished, other_photos, "--decide", "recall:dog>=0.9", "--json").out)
    assert result["decision"]["threshold"] == pytest.approx(min(dogs), rel=1e-5)
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "predictions.csv").unlink()
    ended = call("evaluate", tmp_path / "run", other_photos, "--decide", "tuned")
    assert ended.code == 2
    assert "there are no validation images" in ended.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--decide", "best"), "There is no decision rule 'best'"),
        (("--decide", "cost:cat=-1,dog=2"), "one cost >= 0 per class"),
        (("--decide", "cost:cat=1,fish=2"), "no class 'fish'"),
        (("--decide", "cost:[[0,1,1],[1,0,1],[1,1,0]]"), "2 rows and columns"),
        (("--decide", "cost:none.csv"), "none.csv cannot be read"),
        (("--prevalence", "cat=0.5,dog=0.4"), "must add up to 1, got 0.9"),
        (("--prevalence", "cat=1"), "there is no share for dog"),
    ],
)
def test_rules_that_cannot_be_used_are_one_sentence(
    call: Call, finished: Path, other_photos: Path, flags: tuple[str, str], words: str
) -> None:
    for verb in ("evaluate", "predict"):
        ended = call(verb, finished, other_photos, *flags)
        assert ended.code == 2
        assert words in ended.err
        assert ended.err.count("\n") == 1
        assert ended.out == ""


def test_images_that_chose_a_threshold_are_decided_without_their_labels_everywhere(
    call: Call, photos: Path, tmp_path: Path
) -> None:
    run, rule = tmp_path / "run", ("--decide", "recall:dog>=0.9", "val=0.4")
    assert call("fit", photos, "--out", run, *SMALL, *rule).code == 0
    metrics = json.loads((run / "metrics.json").read_text())
    with (run / "predictions.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "val"]
    pairs = Counter((row["label"], row["predicted"]) for row in rows)
    written = [[pairs[true, predicted] for predicted in ("cat", "dog")] for true in ("cat", "dog")]
    judged = json.loads(call("evaluate", run, "--split", "val", "--json").out)
    assert metrics["val"]["confusion"] == written == judged["confusion"]
    threshold = metrics["decision"]["decision"]["threshold"]
    seen = [float(row["p:dog"]) >= threshold for row in rows]
    assert seen != [row["predicted"] == "dog" for row in rows], "The threshold that saw all labels decides otherwise."
    assert any("fitted without it" in note for note in metrics["val"]["notes"])


def test_shares_on_the_command_line_replace_those_of_the_model_and_are_given_once(
    call: Call, finished: Path, other_photos: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    card = json.loads((run / "model.json").read_text())
    card["decision"] = {"rule": "prevalence:cat=0.999,dog=0.001", "offsets": [0.0, -9.0]}
    (run / "model.json").write_text(json.dumps(card))
    for label, dog in decided(call("predict", run, other_photos, "--prevalence", "cat=0.5,dog=0.5").out).values():
        assert label == ("dog" if dog > 0.5 else "cat")
    both = ("--prevalence", "cat=0.5,dog=0.5", "--decide", "prevalence:cat=0.2,dog=0.8")
    ended = call("predict", run, other_photos, *both)
    assert ended.code == 2
    assert "both state class shares" in ended.err
