"""The command from a tiny comparison to its table and page, and what it says when something is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from cli.test_cli_bad_input import assert_refused
from lopsided.runs import sweep
from lopsided.runs.keys import LossTable
from lopsided.runs.plan import Cell
from lopsided.runs.records import Failure, append_records, read_records
from made_comparison import run
from tiny import write_photos
from tiny_command import Call, Ended, command_here, names_below
from tiny_sweep import record_of

PHOTOS = {"cat": 8, "dog": 6}
TINY = [
    *("encoder.name=mlp", "encoder_training.epochs=1", "encoder_training.batch_size=8"),
    *("classifier.epochs=1", "device=cpu", "--workers", "1"),
]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Ended]:
    """The photos, the folder and the output of a comparison of three methods with two seeds; not to be changed."""
    folder = tmp_path_factory.mktemp("compared")
    photos = write_photos(folder / "photos", {"cat": 30, "dog": 12})
    methods = ("--methods", "weighted-ce,cl,afcl gamma=7", "--baseline", "cl", "--seeds", "2")
    return photos, folder / "CMP", command_here("compare", photos, *methods, "--out", folder / "CMP", *TINY)


@pytest.mark.slow
def test_methods_are_trained_on_the_same_data_and_stand_in_one_table(comparison: tuple[Path, Path, Ended]) -> None:
    _, out, ended = comparison
    assert ended.code == 0, ended.err
    records = read_records(out / "records.jsonl")[0]
    assert {(record.compared_as, record.method, record.seed) for record in records} == {
        *(("weighted-ce", "end-to-end", seed) for seed in (0, 1)),
        *((method, "two-stage", seed) for method in ("cl", "afcl gamma=7") for seed in (0, 1)),
    }
    assert len({record.data for record in records}) == 2
    assert {record.seed: record.epochs for record in records if record.compared_as == "weighted-ce"} == {
        0: (2,),
        1: (2,),
    }
    lines = ended.out.splitlines()
    assert lines[0] == "photos: test images, per cent"
    assert [line.split("  ")[0].strip() for line in lines[2:7] if line[:1] != " "] == [
        "weighted-ce",
        "cl",
        "afcl gamma=7",
    ]
    assert sum("less cl" in line for line in lines) == 2
    assert " has the highest balanced accuracy on test images, " in lines[-2]
    assert lines[-1] == f"For a page, run: lopsided report {out}"
    about = json.loads((out / "sweep.json").read_text())
    assert (about["kind"], about["baseline"]) == ("compare", "cl")


@pytest.mark.slow
def test_more_methods_only_add_and_the_json_has_every_run(comparison: tuple[Path, Path, Ended], tmp_path: Path) -> None:
    photos, done, _ = comparison
    out = shutil.copytree(done, tmp_path / "CMP")
    ended = command_here(
        "compare", photos, "--methods", "ce,cl", "--seeds", "1", "--out", out, *TINY, "--json", "--quiet"
    )
    assert (ended.code, ended.err) == (0, "")
    content = json.loads(ended.out)
    assert [method["name"] for method in content["methods"]] == ["ce", "cl"]
    runs = {entry["method"]: len(entry["runs"]) for entry in content["entries"] if entry["metric"] == "uwa"}
    assert runs == {"ce": 1, "cl": 2}, "Runs of earlier commands count."
    assert content["failed"] == []
    assert len(read_records(out / "records.jsonl")[0]) == 7
    page = command_here("report", out)
    assert page.code == 0, page.err
    text = (out / "report.html").read_text()
    assert all(f"<bdi>{method}</bdi>" in text for method in ("ce", "cl", "weighted-ce", "afcl gamma=7"))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """The cells that were to be trained; each of them has a record at once."""
    cells: list[Cell] = []

    def run_sweep(wanted: Iterable[Cell], out: Path, *, about: dict[str, Any], **more: object) -> sweep.Outcome:
        sweep.open_sweep(out, about)
        for cell in wanted:
            cells.append(cell)
            record = record_of(cell.recipe, 0.5 + cell.recipe.seed / 10)
            append_records(out / "records.jsonl", record)
        return sweep.Outcome([], [], 0)

    monkeypatch.setattr(sweep, "run_sweep", run_sweep)
    return cells


def test_cells_are_methods_by_scenarios_by_seeds(call: Call, photos: Path, trained: list[Cell], tmp_path: Path) -> None:
    methods = ("--methods", "ce,afcl eta=0.1 gamma=7", "--methods", "from-scratch encoder_training.loss=focal")
    scenarios = ("--scenario", "90:10,total=20,50:50", "--scenario", "long-tail:10,step")
    ended = call("compare", photos, *methods, *scenarios, "--seeds", "2", "data.test=0.3", "--out", tmp_path / "CMP")
    assert ended.code == 0, ended.err
    assert {
        (cell.compared_as, cell.recipe.data.scenario, cell.recipe.seed, cell.recipe.data.test) for cell in trained
    } == {
        (method, scenario, seed, 0.3)
        for method in ("ce", "afcl eta=0.1 gamma=7", "from-scratch encoder_training.loss=focal")
        for scenario in ("90:10,total=20", "50:50", "long-tail:10,step")
        for seed in (0, 1)
    }
    assert "At long-tail:10,step, " in ended.out


def test_a_recipe_takes_the_place_of_the_default(call: Call, photos: Path, trained: list[Cell], tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(f'[data]\nsource = "{photos}"\n[encoder]\nname = "mlp"\n')
    assert call("compare", "--recipe", mine, "--methods", "cl", "--seeds", "1", "--out", tmp_path / "CMP").code == 0
    assert [cell.recipe.encoder.name for cell in trained] == ["mlp"]


def test_methods_and_seeds_and_scenarios_add_to_a_folder_with_the_same_settings(
    call: Call, photos: Path, trained: list[Cell], tmp_path: Path
) -> None:
    out = tmp_path / "CMP"
    for more in (
        ("--methods", "cl", "--seeds", "1"),
        ("--methods", "cl,afcl", "--seeds", "2", "device=cpu", "threads=1"),
        ("--methods", "ce", "--scenario", "50:50,total=8"),
        ("--methods", "afcl", "--scenario", "90:10"),
        ("--methods", "cl", "encoder_training.loss=fcl"),
    ):
        ended = call("compare", photos, "--out", out, *more)
        assert ended.code == 0, ended.err
    about = json.loads((out / "sweep.json").read_text())
    assert about["methods"] == ["cl", "afcl", "ce"]
    assert about["changes"]["ce"]["method"] == "end-to-end"


@pytest.mark.parametrize(
    ("methods", "flags", "told"),
    [
        ("cl", ("encoder_training.epochs=5",), "runs with other settings: encoder_training.epochs was 30 and"),
        ("ce", ("encoder_training.epochs=5",), "runs with other settings: encoder_training.epochs was 30 and"),
        ("cl", ("data.test=0.2",), "runs with other settings: data.test was 0.15 and is now 0.2. Use the same"),
        (
            "cl",
            ("selection.patience=5",),
            "runs with other settings: selection.patience was unset and is now 5.",
        ),
        (
            "afcl",
            ("encoder_training.loss.temperature=0.1",),
            "runs with other settings: encoder_training.loss.temperature was 0.07 and is now 0.1.",
        ),
        (
            "mine.toml",
            (),
            "runs of the method 'mine' with other settings: encoder_training.lr was 0.5 and is now 0.25.",
        ),
        (
            "cl",
            ("--scenario", "90:10,total=9"),
            "runs at 90:10 with other settings: data.scenario was '90:10,total=8' and is now '90:10,total=9'.",
        ),
    ],
    ids=["method", "other method", "data", "unset", "loss", "file", "total"],
)
def test_other_settings_than_those_of_the_runs_in_a_folder_are_named_and_refused(
    methods: str,
    flags: tuple[str, ...],
    told: str,
    call: Call,
    photos: Path,
    trained: list[Cell],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("[encoder_training]\nlr = 0.5\n")
    first = call("compare", photos, "--methods", "cl,mine.toml", "--scenario", "90:10,total=8", "--out", "CMP")
    assert first.code == 0, first.err
    before, number = Path("CMP", "sweep.json").read_text(), len(trained)
    Path("mine.toml").write_text("[encoder_training]\nlr = 0.25\n")
    assert_refused(call("compare", photos, "--methods", methods, *flags, "--out", "CMP"), f"CMP has {told}")
    assert (Path("CMP", "sweep.json").read_text(), len(trained)) == (before, number)


def forget(sweep_file: Path, *paths: str) -> None:
    """Write ``sweep.json`` as a version wrote it that did not have these fields."""
    about = json.loads(sweep_file.read_text())
    for table in (about["settings"], *about["changes"].values()):
        for path in paths:
            table.pop(path, None)
    sweep_file.write_text(json.dumps(about))


def test_a_folder_whose_settings_lack_a_field_is_refused(
    call: Call, photos: Path, trained: list[Cell], tmp_path: Path
) -> None:
    out = tmp_path / "CMP"
    command = ("compare", photos, "--methods", "cl,quick", "--seeds", "1", "--out", out)
    assert call(*command).code == 0
    forget(out / "sweep.json", "encoder_training.ema")
    told = f"{out} has runs with other settings: encoder_training.ema was unset and is now 0.0."
    assert_refused(call(*command), told)


def test_a_folder_without_settings_continues(call: Call, photos: Path, trained: list[Cell], tmp_path: Path) -> None:
    out = tmp_path / "CMP"
    flags = ("--methods", "cl", "--seeds", "1", "encoder_training.epochs=5", "--out", out)
    assert call("compare", photos, *flags).code == 0
    (out / "sweep.json").write_text('{"format": 1}')  # What an error about a damaged file advises.
    ended = call("compare", photos, *flags)
    assert ended.code == 0, ended.err


def test_other_settings_may_follow_where_no_run_has_ended(
    call: Call, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_sweep(cells: object, out: Path, *, about: dict[str, Any], **more: object) -> sweep.Outcome:
        sweep.open_sweep(out, about)
        return sweep.Outcome([], [], 0)

    monkeypatch.setattr(sweep, "run_sweep", run_sweep)
    for epochs in (5, 6):
        change = (f"encoder_training.epochs={epochs}",)
        assert call("compare", photos, "--methods", "cl", *change, "--out", tmp_path / "CMP").code == 0
    about = json.loads((tmp_path / "CMP" / "sweep.json").read_text())
    assert about["settings"]["encoder_training.epochs"] == 6


def test_failed_cells_are_named_and_the_code_is_1(
    call: Call, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Failure("0123", None, LossTable("cl"), 2, "it broke.", "mine")
    monkeypatch.setattr(sweep, "run_sweep", lambda cells, out, **more: sweep.Outcome([], [failure], 0))
    ended = call("compare", photos, "--methods", "cl", "--out", tmp_path / "CMP")
    assert ended.code == 1
    assert "all images mine seed 2 failed: it broke." in ended.out
    assert "On all images, no method has a finished run." in ended.out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("--methods", "cll"),
            "a method must be a loss, a named recipe or a recipe's TOML file, got 'cll'. Did you mean cl?",
        ),
        (("--methods", "cl,cl"), "The method 'cl' is listed twice."),
        (("--methods", "fcl,fcl gamma=1"), "The methods 'fcl' and 'fcl gamma=1' are the same recipe."),
        (("--methods", "cl,ce", "--baseline", "afcl"), "--baseline must be one of the methods, cl, ce, got 'afcl'."),
        (("--methods", "cl", "--seeds", "0"), "Invalid value for '--seeds'"),
        (("--methods", "cl", "--scenario", "ninety"), "a scenario must be a proportion or a long tail, got 'ninety'."),
        (
            ("--methods", "cl", "--scenario", "90:10,90:10,total=9"),
            "--scenario names the proportions of 90:10,total=9 twice.",
        ),
        (("--methods", "cl", "data.test=0"), "A comparison needs test images, but data.test is 0."),
        (
            ("--methods", "cl", "encoder.nam=mlp"),
            "A recipe has no field 'encoder.nam'. Did you mean encoder.name?",
        ),
        (("--methods", "cl", "--recipe", "quik"), "Did you mean quick?"),
        (
            ("--methods", "quick,thorough", "--folds", "2", "gamma=3"),
            "encoder_training.loss.gamma has no effect on any of the methods (quick, thorough). Remove it.",
        ),
        (
            ("--methods", "'ce include=\"a,b\"', cl"),
            "sets data.include, but a method cannot change data or seed.",
        ),
        (("--methods", "cl", "data.source=x"), "photos and data.source=x set the same field to"),
        (
            ("--methods", "cl", "--scenario", "90:10", "data.scenario=50:50"),
            "--scenario 90:10 and data.scenario=50:50 set the same field to different values.",
        ),
        (("--methods", "cl", "--engine", "cloud"), "--engine must be local, ray or ray:ADDRESS, got 'cloud'."),
        (
            ("--methods", "cl", "--engine", "local:there"),
            "--engine must be local, ray or ray:ADDRESS, got 'local:there'.",
        ),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_leaves_nothing(
    arguments: tuple[str, ...], told: str, call: Call, photos: Path, tmp_path: Path
) -> None:
    before = names_below(tmp_path)
    assert_refused(call("compare", photos, *arguments, "--out", tmp_path / "CMP"), told)
    assert names_below(tmp_path) == before
    assert not (tmp_path / "CMP").exists()


def test_an_method_for_two_classes_is_refused_before_three_classes_are_trained(call: Call, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", {"cat": 6, "dog": 6, "fox": 6})
    methods = ("--methods", "ce,supmin", "encoder_training.views=2")
    assert_refused(
        call("compare", photos, *methods, "--out", tmp_path / "CMP"),
        "method 'supmin': The loss supmin is for 2 classes, but the data have 3.",
    )
    assert not (tmp_path / "CMP").exists()


def test_without_a_folder_or_data_it_is_said(call: Call, photos: Path, tmp_path: Path) -> None:
    assert_refused(
        call("compare", photos, "--methods", "cl"),
        "--out is missing. Name the folder of the comparison, such as --out CMP.",
    )
    assert_refused(
        call("compare", "--methods", "cl", "--out", tmp_path / "CMP"),
        "DATA is missing, and the recipe names no source. Write lopsided compare DATA",
    )
    gone = call("compare", tmp_path / "gone", "--methods", "cl", "--out", tmp_path / "CMP")
    assert_refused(gone, "gone, which does not exist.")


def test_a_folder_with_runs_on_other_data_or_of_another_verb_is_refused_and_left_alone(
    call: Call, photos: Path, tmp_path: Path
) -> None:
    out = sweep.open_sweep(tmp_path / "CMP", {"kind": "compare"})
    append_records(out / "records.jsonl", run("cl", 0, 0.5, source="pictures"))
    before = names_below(tmp_path)
    told = f"{out} has runs on 'pictures', not on 'photos'. Choose"
    assert_refused(call("compare", photos, "--methods", "cl", "--out", out), told)
    paper = sweep.open_sweep(tmp_path / "paper", {"kind": "reproduce"})
    told = f"{paper} contains a sweep of `lopsided reproduce`, not of `lopsided compare`."
    assert_refused(call("compare", photos, "--methods", "cl", "--out", paper), told)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("years of work")
    told = "contains other files and no sweep. Choose a new or empty folder."
    assert_refused(call("compare", photos, "--methods", "cl", "--out", tmp_path / "notes"), told)
    assert names_below(tmp_path) == sorted([*before, "notes/thesis.tex", "paper/sweep.json"])


@pytest.mark.parametrize(
    ("kind", "records", "title"),
    [
        ("reproduce", [], "Sweep "),
        ("compare", [], "Comparison "),
        (None, ["cl", "acl"], "Comparison "),
    ],
)
def test_the_page_of_a_sweep_is_the_papers_if_it_was_made_for_one_of_its_tables(
    kind: str | None, records: list[str], title: str, call: Call, tmp_path: Path
) -> None:
    out = sweep.open_sweep(tmp_path / "it", {} if kind is None else {"kind": kind})
    for loss in records:
        append_records(out / "records.jsonl", run(loss, 0, 0.5))
    assert call("report", out).code == 0
    assert f"<title>{title}it</title>" in (out / "report.html").read_text()


def test_groups_and_outside_paths_are_options_of_a_comparison(call: Call, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    table = tmp_path / "tables" / "photos.csv"
    rows = [f"{path},{path.parent.name}" for path in sorted(photos.rglob("*.png"))]
    table.write_text("\n".join(["path,label", *rows]) + "\n")
    command = ("compare", table, "--methods", "ce", "--out", tmp_path / "CMP")
    assert_refused(call(*command), "paths must stay below the folder of the table")
    assert_refused(call(*command, "--allow-outside", "--group", "lesion"), "the columns path and label and lesion")
