from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lopsided.cli.output import interval
from lopsided.errors import InputError, RunError
from lopsided.evaluation.intervals import Estimate
from lopsided.facts import cautions, notes
from lopsided.reports import run_page as module
from lopsided.reports import threshold_section
from lopsided.reports.report import write_report, write_run_reports
from lopsided.reports.run_data import Judged, in_order, open_finished, read_judged, read_stages
from lopsided.reports.run_page import run_page
from lopsided.reports.wording import DASH
from lopsided.training.cautions import FEW_TEST
from made_runs import make_run, read_rows
from tiny_command import environment


def text_of(page: str) -> str:
    """The words of a page, without script, style and marks."""
    page = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def rewrite(folder: Path, **changes: Any) -> Path:
    metrics = json.loads((folder / "metrics.json").read_text())
    (folder / "metrics.json").write_text(json.dumps({**metrics, **changes}))
    return folder


@pytest.mark.slow
def test_building_a_report_imports_no_torch(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    code = (
        "import sys, lopsided.cli\n"
        f"code = lopsided.cli.run(['report', {str(tmp_path / 'run')!r}, '--no-maps'])\n"
        "assert code == 0\n"
        "print([name for name in ('torch', 'matplotlib', 'timm') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert ended.stdout.splitlines()[-1] == "[]"


def test_the_top_says_what_was_trained_on_what(tmp_path: Path) -> None:
    recipe = {"encoder_training.loss": "afcl", "encoder_training.epochs": 4, "classifier.epochs": 1}
    text = text_of(run_page(make_run(tmp_path / "run", train=(205, 65), recipe=recipe)))
    assert "AFCL on table.csv" in text
    assert (
        "A resnet18 learned to distinguish “common” from “rare”: 4 epochs of asymmetric focal contrastive loss (AFCL)"
        in text
    )
    assert "then 1 epoch of a linear classifier with cross-entropy." in text
    assert (
        "The model was trained on 270 images, selected on 28 validation images and evaluated on 52 new images." in text
    )


def test_the_top_has_the_figures_with_intervals_beside_the_majority_vote(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    figures = json.loads((folder / "metrics.json").read_text())["test"]
    text = text_of(run_page(folder))
    rare = next(row for row in figures["per_class"] if row["label"] == "rare")
    for figure in (rare["recall"], rare["precision"], figures["figures"]["uwa"]):
        assert f"{figure['value']:.3f} 95 % interval [{figure['low']:.3f}, {figure['high']:.3f}]" in text
    assert "always “common”: 0.500" in text
    assert f"calling every image “rare”: {12 / 52:.3f}" in text


def test_the_title_is_the_answer_in_counts(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", recipe={"encoder_training.loss": "afcl"})
    rows = read_rows(folder)
    found = sum(row.predicted == row.label == "rare" for row in rows)
    alarms = sum(row.predicted == "rare" != row.label for row in rows)
    metrics = json.loads((folder / "metrics.json").read_text())
    rare = metrics["test"]["per_class"][metrics["classes"].index("rare")]
    interval = f"{100 * rare['recall']['low']:.0f} to {100 * rare['recall']['high']:.0f}\N{NO-BREAK SPACE}%"
    title = (
        f"Finds {found} of 12 “rare” ({100 * found / 12:.0f}\N{NO-BREAK SPACE}%, {interval}) with {alarms} false alarms"
    )
    page = run_page(folder)
    assert f"<title>{title}</title>" in page
    assert f"<h1>{title}</h1>" in page
    assert "Tested on 52 test images of table.csv, on which the model was not trained." in text_of(page)
    assert "AFCL" not in text_of(page).partition("Recipe AFCL on table.csv")[0]
    assert "<title>Finds " in run_page(folder, focus="common")


def test_the_recall_by_the_models_rule_and_by_a_threshold_are_told_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ("a", "b", "c"), (40, 30, 20), (9, 9, 9), signal=1.0)
    rows = [row for row in read_rows(run) if row.label == "c"]
    by_rule, at_half = sum(row.predicted == "c" for row in rows), sum(row.p["c"] >= 0.5 for row in rows)
    assert by_rule != at_half, "Otherwise there is nothing to tell apart."
    text = text_of(run_page(run))
    assert f"{by_rule} of 20 images found" in text
    assert f"its own recall of “c”, {by_rule / 20:.3f} ({by_rule} of 20 images), can differ" in text
    assert f"By its own rule, the model finds {by_rule} of 20 images of “c”" in text
    assert f"rule of the model (plain) {DASH} {by_rule / 20:.3f}" in text
    assert f"half 0.500 {at_half / 20:.3f}" in text
    assert "If you choose a threshold by looking at test images, the metrics of these images are too high." in text
    assert "In practice, use the rule of the model." in text
    assert "use the validation threshold" not in text
    assert "own recall of" not in text_of(run_page(make_run(tmp_path / "two"))), "Two classes have one threshold."


def test_a_metric_that_no_image_has_is_not_listed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert json.loads((run / "metrics.json").read_text())["test"]["figures"].get("cost") is None
    assert "log loss" in text_of(run_page(run))
    assert "cost per image" not in text_of(run_page(run))


def test_a_page_follows_the_class_in_focus_and_starts_where_its_rule_is(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ("a", "b", "c"), (40, 30, 20), (9, 9, 9), signal=1.0)
    assert "recall of “c”, the rarest class" in text_of(run_page(run))
    page = run_page(run, focus="b")
    text = text_of(page)
    assert "recall of “b”, the class in focus" in text
    assert "b against all other classes" in text
    rows = read_rows(run)
    called = sum(row.predicted == "b" for row in rows)
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)[0])
    start = data["threshold"]["start"][0]
    assert sum(np.float32(row.p["b"]) >= np.float32(start) for row in rows) == called
    assert "as many images as by the rule" in text
    with pytest.raises(InputError, match="--focus must be a class of the run: a, b, c"):
        run_page(run, focus="x")


def test_few_test_images_of_the_rare_class_are_warned_of(tmp_path: Path) -> None:
    text = text_of(run_page(make_run(tmp_path / "few", test=(40, FEW_TEST - 1))))
    assert "Only 29 test images of “rare”." in text
    assert "changes the recall of this class by 3 percentage points" in text
    enough = text_of(run_page(make_run(tmp_path / "enough", test=(40, FEW_TEST))))
    assert "Only " not in enough


def test_a_missing_validation_split_is_warned_of(tmp_path: Path) -> None:
    sentence = str(cautions.no_validation_split())
    assert sentence in text_of(run_page(make_run(tmp_path / "without", val=None)))
    assert sentence not in text_of(run_page(make_run(tmp_path / "with")))


def test_intervals_that_hold_the_majority_vote_are_warned_of(tmp_path: Path) -> None:
    blind = text_of(run_page(make_run(tmp_path / "blind", test=(90, 10), signal=0.0)))
    assert "The balanced accuracy may not be higher than with always predicting “common”." in blind
    assert "The accuracy is lower than with always predicting “common”." in blind
    good = text_of(run_page(make_run(tmp_path / "good", test=(60, 40), signal=6.0)))
    assert "always answering “common”." not in good


def test_a_model_that_is_worse_than_the_majority_vote_is_said_to_be(tmp_path: Path) -> None:
    text = text_of(run_page(make_run(tmp_path / "run", test=(90, 40), signal=-6.0)))
    assert "The balanced accuracy is lower than with always predicting “common”." in text
    assert "The accuracy is lower than with always predicting “common”." in text
    assert "may not be higher" not in text
    assert "the price of finding the rare class" not in text


def test_an_accuracy_below_the_majority_vote_is_a_price_only_if_the_rare_class_is_found(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", test=(90, 10))
    test = json.loads((folder / "metrics.json").read_text())["test"]
    for uwa, is_price in ((0.7, True), (0.5, False), (0.4, False)):
        shares = {
            "uwa": {"value": uwa, "low": uwa - 0.05, "high": uwa + 0.05},
            "accuracy": {"value": 0.7, "low": 0.6, "high": 0.8},
        }
        rewrite(folder, test={**test, "figures": {**test["figures"], **shares}})
        assert ("the price of finding the rare class" in text_of(run_page(folder))) == is_price


def test_a_contrastive_loss_is_explained_only_where_there_is_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "two")
    assert "A contrastive loss pulls" in text_of(run_page(folder))
    folder = make_run(tmp_path / "one", recipe={"method": "end-to-end", "encoder_training.loss": "ce"})
    log = (folder / "log.jsonl").read_text().splitlines(keepends=True)
    kept = [line.replace('"classifier"', '"end-to-end"') for line in log if '"encoder"' not in line]
    (folder / "log.jsonl").write_text("".join(kept))
    text = text_of(run_page(folder))
    assert "of the loss." in text
    assert "contrastive" not in text.partition("The complete recipe")[0]


def test_a_class_without_test_images_is_warned_of(tmp_path: Path) -> None:
    text = text_of(run_page(make_run(tmp_path / "run", ("a", "b", "c"), (40, 35, 0), (5, 5, 5))))
    assert "No test image of “c”." in text


def test_a_warning_of_the_run_is_passed_on_unless_the_page_has_said_it(tmp_path: Path) -> None:
    said = cautions.few_test_images({"rare": 12}, 30)
    others = [
        cautions.shared_groups(2, "<p1>", "split"),
        cautions.shared_images(1, ["a", "train", "b", "test"], "split"),
        cautions.few_positives("rare", 1.2, learns=True),
    ]
    folder = make_run(tmp_path / "run", facts=[fact.to_dict() for fact in (said, *others)])
    text = text_of(run_page(folder))
    assert [fact for fact in others if str(fact) not in text] == []
    assert str(said) not in text


def test_a_run_without_any_test_image_shows_its_validation_and_says_so(tmp_path: Path) -> None:
    folder = rewrite(make_run(tmp_path / "run"), test=None)
    rows = (folder / "predictions.csv").read_text().splitlines()
    (folder / "predictions.csv").write_text("\n".join(row for row in rows if not row.startswith("test,")) + "\n")
    text = text_of(run_page(folder))
    assert "There is no test split." in text
    assert "These images selected the model, so the metrics are too high." in text
    assert "Only 8 validation images of “rare”" in text
    assert "it needs validation images" not in text
    assert "the metrics are already for the validation images" in text
    assert "With the validation threshold" not in text
    assert "use the rule of the model" not in text
    assert "evaluate the threshold on images that were not used for training or model selection." in text


def test_a_run_without_held_out_images_has_a_page_without_figures(tmp_path: Path) -> None:
    folder = rewrite(make_run(tmp_path / "run"), test=None, val=None)
    (folder / "predictions.csv").write_text("split,name,group,label,predicted,p:common,p:rare\n")
    page = run_page(folder)
    assert "No images were held out." in text_of(page)
    assert "<title>Trained on table.csv, not tested</title>" in page
    assert 'id="recipe-text"' in page
    assert 'id="matrix"' not in page


def test_figures_on_images_that_the_scenario_left_stand_beside_the_test(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    test = json.loads((folder / "metrics.json").read_text())["test"]
    left = {**test, "figures": {**test["figures"], "uwa": {"value": 0.6543, "low": 0.6, "high": 0.7}}}
    rows = (folder / "predictions.csv").read_text()
    further = [f"held_out{row[4:]}" for row in rows.splitlines(keepends=True) if row.startswith("test,")]
    (folder / "predictions.csv").write_text(rows + "".join(further))
    text = text_of(run_page(rewrite(folder, held_out=left)))
    assert "52 images not drawn by the scenario" in text
    assert "0.654 [0.600, 0.700]" in text


@pytest.mark.parametrize(
    ("figure", "words"),
    [
        ((0.00012, 0.00003, 0.00021), "0.00012 [0.00003, 0.00021]"),
        ((0.0003, 0.0, 0.006), "0.0003 [0.0000, 0.0060]"),
        ((0.0003, 0.0, 0.25), "0.000 [0.000, 0.250]"),
        ((0.0, 0.0, 0.0), "0.000 [0.000, 0.000]"),
        ((0.0, 0.0, 0.0001), "0.00000 [0.00000, 0.00010]"),
        ((1e-17, 0.0, 1e-17), "0.000 [0.000, 0.000]"),
        ((0.004, 0.002, 0.006), "0.004 [0.002, 0.006]"),
    ],
)
def test_a_small_figure_is_not_written_as_0(figure: tuple[float, float, float], words: str, tmp_path: Path) -> None:
    small = dict(zip(("value", "low", "high"), figure, strict=True))
    assert interval(small) == words
    folder = make_run(tmp_path / "run", pictures=False)
    test = json.loads((folder / "metrics.json").read_text())["test"]
    page = run_page(rewrite(folder, test={**test, "figures": {**test["figures"], "calibration_error": small}}))
    assert f"(calibration error {words})" in text_of(page)
    assert str(Estimate(*figure)) == words


def test_the_epochs_that_were_taken_are_those_that_the_run_says(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run, _ = open_finished(folder)
    stages, texts = read_stages(run)
    assert [(stage.name, stage.taken, stage.picked) for stage in stages] == [
        ("encoder", 3, True),
        ("classifier", 3, True),
    ]
    assert texts[0] == "A note of the run."
    for epoch, taken in ((4, 4), (9, 4), ("4", 4), ([4], 4), (2, 2)):
        again = {"event": "note", **notes.kept_epoch("encoder", epoch, 4, "uwa", 0.9).to_dict()}
        with (folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(again) + "\n")
        assert read_stages(run)[0][0].taken == taken, "The last line counts, if there is such an epoch."
    text = text_of(run_page(make_run(tmp_path / "without", val=None)))
    assert "epoch 4 of 4 of the encoder stage and epoch 3 of 3 of the classifier stage. These are the last" in text


def test_the_diagnostics_of_the_loss_are_in_words(tmp_path: Path) -> None:
    text = text_of(run_page(make_run(tmp_path / "run", train=(300, 100))))
    assert "“rare” has 25.0 % of the training images and contributes 22.5 % of the loss." in text
    assert "2.60 % of the anchors had no positive" in text  # The mean of 5 % / 1, / 2, / 3, / 4.


def test_calibration_is_told_by_the_interval(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    rows = read_rows(folder)
    sure = np.mean([max(row.p.values()) for row in rows])
    right = np.mean([row.label == max(row.p, key=row.p.get) for row in rows])
    text = text_of(run_page(folder))
    first = f"The mean of the highest probability is {100 * sure:.0f} %, and {100 * right:.0f} % of these classes"
    assert f"{first} are correct" in text


def judged(n: int, seed: int = 0) -> Judged:
    rng = np.random.default_rng(seed)
    p = rng.dirichlet([1, 1], n).astype(np.float32)
    truth = rng.integers(0, 2, n)
    return Judged("test", tuple(f"{i}" for i in range(n)), None, truth, p.argmax(axis=1), p, None)


def test_the_order_has_mistakes_first_the_surest_first_then_the_others_the_least_sure_first() -> None:
    found = in_order(judged(200), 0, 200)
    wrong, sure = found.judged.wrong, found.judged.confidence
    split = int(wrong.sum())
    assert wrong[:split].all()
    assert not wrong[split:].any()
    assert (np.diff(sure[:split]) <= 0).all()
    assert (np.diff(sure[split:]) >= 0).all()
    assert sorted(found.judged.names) == sorted(judged(200).names)
    assert found.number == 200
    assert found.note == ""


def test_of_too_many_images_a_sample_is_listed_and_said() -> None:
    found, again = in_order(judged(200), 0, 150), in_order(judged(200), 0, 150)
    assert found.judged.names == again.judged.names
    assert found.number == 150
    wrong = int(judged(200).wrong.sum())
    assert int(found.first().wrong.sum()) == wrong, "Every mistake is among them."
    assert found.note.startswith("This page lists 150 of 200 images: every mistake and a random sample")
    few = in_order(judged(200), 0, 50)
    assert int(few.first().wrong.sum()) == 40
    assert "the 40 most confident mistakes" in few.note
    assert len(few.judged) == 200


def test_counts_are_those_of_all_images_even_if_a_sample_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_IMAGES", 20)
    monkeypatch.setattr(threshold_section, "MOST_NUMBERS", 60)
    folder = make_run(tmp_path / "run", ("a", "b", "c"), (30, 20, 10), (5, 5, 5), train=(30, 20, 10))
    page = run_page(folder)
    text = text_of(page)
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)[0])
    assert len(data["names"]) == data["listed"] == 20
    assert data["images"] == 60
    assert data["threshold"]["classes"] == [2], "The rarest class, with the probabilities of all images."
    assert "Only the 1 rarest classes can be selected; 2 more do not fit." in text
    cells = [int(cell.replace(",", "")) for cell in re.findall(r'<td class="cell[^>]*>([\d,]+)<', page)]
    assert sum(cells) == 60


def test_of_very_many_classes_those_with_the_most_mistakes_are_in_the_matrix(tmp_path: Path) -> None:
    classes = [f"c{i}" for i in range(70)]
    page = run_page(make_run(tmp_path / "run", classes, [3] * 70, [1] * 70, pictures=False))
    assert "Only the 40 of 70 classes with the most mistakes are shown." in text_of(page)
    assert "70 classes; the largest has 20 training images, the smallest 20." in text_of(page)


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "metrics.json").unlink()
    with pytest.raises(RunError, match=r"^The run in .*run is not finished: it has no metrics\.json\."):
        write_report(folder)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("predictions.csv", None, r"^cannot read the predictions .*No such file"),
        (
            "predictions.csv",
            "split,name\n" + "val,x\n" * 28 + "test,x\n" * 52,
            r"predictions\.csv is not a valid table of predictions \(KeyError",
        ),
        ("features.safetensors", "nothing", r"^features.safetensors must be a readable safetensors file, got "),
    ],
)
def test_a_damaged_run_is_refused_in_a_sentence(tmp_path: Path, name: str, content: str | None, sentence: str) -> None:
    folder = make_run(tmp_path / "run")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(RunError, match=sentence):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_features_of_other_images_are_refused(tmp_path: Path) -> None:
    folder, other = make_run(tmp_path / "run"), make_run(tmp_path / "other", test=(9, 9))
    (folder / "features.safetensors").write_bytes((other / "features.safetensors").read_bytes())
    run, metrics = open_finished(folder)
    with pytest.raises(RunError, match=r"52 rows but 18 features of test"):
        read_judged(run, metrics)


def test_what_is_neither_run_nor_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"^FOLDER must be the folder of a run or of a sweep, got .*, which is neither\.$"
    ):
        write_report(tmp_path)
    with pytest.raises(RunError, match=r"which does not exist\.$"):
        write_report(tmp_path / "gone")
    with pytest.raises(RunError, match=r"^--runs is for the folder of a sweep, got .*, which has no sweep\.json\.$"):
        write_run_reports(tmp_path)


def test_a_report_is_the_same_each_time(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert run_page(folder, "tsne") == run_page(folder, "tsne")
