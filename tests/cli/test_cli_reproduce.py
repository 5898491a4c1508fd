"""The command from a tiny sweep to tables, and what it says when something is wrong."""

from __future__ import annotations

import csv
import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from cli.test_cli_bad_input import assert_refused
from lopsided.paper.protocol import CL, Setting, base_recipe
from lopsided.runs.keys import LossTable, family_of
from lopsided.runs.records import Record
from synthetic_records import make_records
from tiny import write_photos
from tiny_command import Call, Ended, command, command_here, names_below, start
from tiny_sweep import wait_until

RECIPE = """
[data]
source = "{photos}"
scenario = "90:10,total=40"
split = "random"
test = 0.3
val = 0.0
held_out = true
[encoder]
name = "mlp"
[encoder_training]
epochs = {epochs}
batch_size = 16
[classifier]
epochs = 1
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose runs take a moment."""
    folder = tmp_path_factory.mktemp("tiny")
    photos = write_photos(folder / "photos", {"cat": 60, "dog": 60})
    path = folder / "mine.toml"
    path.write_text(RECIPE.format(photos=photos, epochs=1))
    return path


def reproduce(recipe: Path, out: Path, *more: str, run: Call = command_here) -> Ended:
    return run("reproduce", "eta", "--recipe", recipe, "--out", out, "--workers", "1", *more)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory, recipe: Path) -> tuple[Path, Ended]:
    """A sweep of two scenarios, two losses and two runs, made by the command; not to be changed."""
    out = tmp_path_factory.mktemp("sweeps") / "sweep"
    return out, reproduce(recipe, out, "--scenarios", "60:40,90:10", "--values", "0,300", "--runs", "2", run=command)


def write_records(path: Path, records: list[Record]) -> Path:
    path.write_text("".join(f"{record.to_json()}\n" for record in records))
    return path


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of both Fashion-MNIST tables and of ISIC by image and by lesion; not to be changed."""
    few = ["50:50", "60:40", "80:20", "90:10"]  # All eleven take three times as long, and are tested with the tables.
    both = {record.cell: record for t in ("eta", "gamma") for record in make_records(t, runs=3, scenarios=few)}
    small = {"encoder": "resnet18", "image_size": 64}
    isic = []
    for split, rule in (("image", "random"), ("lesion", "group")):
        recipe = base_recipe("isic", preset="small", split=split)
        family = {"family": family_of(recipe), "epochs": recipe.spec.epochs(recipe)}
        isic += make_records("isic", runs=3, split=rule, **small, **family)
    return write_records(tmp_path_factory.mktemp("records") / "records.jsonl", [*both.values(), *isic])


def out_of(ended: Ended) -> str:
    """What was printed, however its lines were broken."""
    return " ".join(ended.out.split())


@pytest.mark.slow
def test_a_sweep_on_other_data_becomes_tables_and_figures(sweep: tuple[Path, Ended]) -> None:
    out, ended = sweep
    assert ended.code == 0, ended.err
    assert len((out / "records.jsonl").read_text().splitlines()) == 8
    assert names_below(out / "tables") == [
        "eta-mine.csv",
        "eta-mine.md",
        "eta-mine.tex",
        *(f"figures/eta-mine-{figure}.{kind}" for figure in ("accuracy", "uwa") for kind in ("png", "svg")),
    ]
    with (out / "tables" / "eta-mine.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2 * 2
    assert {row["runs"] for row in rows} == {"2"}
    assert {row["split"] for row in rows} == {"test", "held_out"}
    assert ended.out.startswith("photos over eta (gamma = 0): UWA, per cent\n")
    assert {Record.from_json(line).source for line in (out / "records.jsonl").read_text().splitlines()} == {"photos"}
    assert "The paper's claims are about other data, so there are no verdicts for these runs." in out_of(ended)
    assert "published" not in ended.out
    assert ended.out.endswith(f"\nWritten to {out / 'tables'}.\nTo see all runs on one page: lopsided report {out}\n")
    assert "verdict" not in ended.err  # The paper makes no claims about these images.


@pytest.mark.slow
def test_a_sweep_on_the_papers_data_becomes_tables_figures_and_verdicts(recipe: Path, tmp_path: Path) -> None:
    mine, out = tmp_path / "mine.toml", tmp_path / "sweep"
    photos = recipe.parent / "photos"
    mine.write_text(recipe.read_text().replace(f'"{photos}"', '"fashion-mnist-tops"'))
    ended = reproduce(mine, out, "--scenarios", "60:40,90:10", "--values", "0,300", "--runs", "1")
    assert ended.code == 0, ended.err
    assert "eta-mine-verdicts.md" in names_below(out / "tables")
    assert ended.out.startswith("Fashion-MNIST tops over eta (gamma = 0): UWA, per cent\n")
    assert "A larger eta helps as imbalance grows from 60:40 to 90:10 cannot tell UWA, held-out images: " in out_of(
        ended
    )
    assert "Without 3 paired runs at 60:40 and 90:10, where the claim's range ends (of CL " in out_of(ended)
    assert "This is a part of the paper's table: 4 of its 66 cells have a run here." in out_of(ended)


@pytest.mark.slow
def test_the_same_command_again_trains_nothing(sweep: tuple[Path, Ended], recipe: Path) -> None:
    out, before = sweep
    lines = (out / "records.jsonl").read_bytes()
    ended = reproduce(recipe, out, "--scenarios", "60:40,90:10", "--values", "0,300", "--runs", "2")
    assert (ended.code, ended.out) == (0, before.out)
    assert (out / "records.jsonl").read_bytes() == lines


@pytest.mark.slow
def test_a_source_may_have_had_another_name_when_the_sweep_was_begun(
    sweep: tuple[Path, Ended], recipe: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(sweep[0], tmp_path / "sweep")
    lines = (out / "records.jsonl").read_text().splitlines(keepends=True)
    old = [line.replace('"source":"photos"', '"source":"pictures"') for line in lines[:4]]
    assert old != lines[:4]
    (out / "records.jsonl").write_text("".join([*old, *lines[4:]]))
    ended = reproduce(recipe, out, "--scenarios", "60:40,90:10", "--values", "0,300", "--runs", "2")
    assert ended.code == 0, ended.err
    assert ended.out.replace(str(out), str(sweep[0])) == sweep[1].out


@pytest.mark.slow
def test_a_smaller_request_later_loses_nothing_of_the_table(
    sweep: tuple[Path, Ended], recipe: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(sweep[0], tmp_path / "sweep")
    ended = reproduce(recipe, out, "--scenarios", "90:10", "--values", "0,60", "--runs", "1", "--quiet")
    assert ended.code == 0, ended.err
    assert len((out / "records.jsonl").read_text().splitlines()) == 9
    with (out / "tables" / "eta-mine.csv").open() as file:
        runs = {(row["scenario"], row["eta"]): row["runs"] for row in csv.DictReader(file)}
    assert runs == {
        **{(scenario, eta): "2" for scenario in ("60:40", "90:10") for eta in ("0", "300")},
        ("90:10", "60"): "1",
        ("60:40", "60"): "0",
    }
    assert ended.err == ""


@pytest.mark.slow
def test_a_failing_cell_is_named_and_the_others_go_on(recipe: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    # 98 of 61 cats are not to be had, 50 are.
    mine.write_text(recipe.read_text().replace("total=40", "total=100"))
    out = tmp_path / "sweep"
    ended = reproduce(mine, out, "--scenarios", "50:50,98:2", "--values", "0", "--runs", "1")
    assert ended.code == 1
    assert "98:2 CL seed 0 failed: 98:2,total=100 needs cat 98, dog 2, but the source has cat 60, dog 60." in ended.out
    assert "1 cell has no run (-): 98:2 CL." in ended.out
    assert (out / "tables" / "eta-mine.md").is_file()


@pytest.mark.slow
def test_an_interrupted_sweep_keeps_what_is_done_and_says_how_to_go_on(recipe: Path, tmp_path: Path) -> None:
    import signal

    long = tmp_path / "long.toml"
    long.write_text(recipe.read_text().replace("epochs = 1\nbatch", "epochs = 12\nbatch"))
    out = tmp_path / "sweep"
    flags = ("--scenarios", "90:10", "--values", "0,300", "--runs", "2")
    process = start("reproduce", "eta", "--recipe", long, "--out", out, "--workers", "1", *flags)
    wait_until(lambda: (out / "records.jsonl").exists() or process.poll() is not None, 240)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert err.splitlines()[-1] == f"lopsided: interrupted. Run the same command again to continue in {out}."
    assert "Traceback" not in err
    assert 0 < len((out / "records.jsonl").read_text().splitlines()) < 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "stem", "told"),
    [
        (("eta",), "eta", "A larger eta helps"),
        (("gamma",), "gamma", "gamma = 0 is best at 50:50"),
        (("isic", "--preset", "small"), "isic-small", "ACL(300) has the best UWA on ISIC"),
        (("isic", "--preset", "small", "--split-by", "lesion"), "isic-small-lesion", "split by group"),
        (("eta", "--losses", "cl,acl:300,afcl:0:7"), "eta-losses", "AFCL(0, 7)"),
        (("isic", "--preset", "small", "--losses", "cl,fcl"), "isic-losses-small", "FCL"),
        (
            ("eta", "--scenarios", "60:40,90:10"),
            "eta",
            "This is a part of the paper's table: 12 of its 66 cells have a run here.",
        ),
    ],
)
def test_records_alone_make_every_table(
    arguments: tuple[str, ...], stem: str, told: str, call: Call, records: Path, tmp_path: Path
) -> None:
    ended = call("reproduce", *arguments, "--records", records, "--out", tmp_path)
    assert ended.code == 0, ended.err
    assert told in ended.out
    text = (tmp_path / "tables" / f"{stem}.md").read_text()
    assert f"(figures/{stem}-uwa.svg)" in text
    assert (tmp_path / "tables" / "figures" / f"{stem}-uwa.svg").is_file()
    assert (tmp_path / "tables" / f"{stem}-verdicts.md").is_file()
    assert not (tmp_path / "sweep.json").exists()


def test_records_are_shown_without_a_folder_to_write_to(
    call: Call, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = call("reproduce", "eta", "--records", records, "--scenarios", "90:10", "--values", "0,300", "--json")
    assert ended.code == 0
    content = json.loads(ended.out)
    assert {(entry["scenario"], entry["eta"]) for entry in content["entries"]} == {("90:10", 0), ("90:10", 300)}
    assert content["files"] == []
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_records_that_was_cut_in_half_loses_its_last_line_alone(
    call: Call, records: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "records.jsonl"
    eta = write_records(tmp_path / "whole.jsonl", make_records("eta", runs=2))
    cut.write_bytes(eta.read_bytes()[:-100])
    before = cut.read_bytes()
    ended = call("reproduce", "eta", "--records", cut, "--json")
    assert ended.code == 0
    assert f"Skipped the last line of {cut}: it is incomplete." in ended.err
    runs = [entry["runs"] for entry in json.loads(ended.out)["entries"]]
    assert (min(runs), sum(runs)) == (1, 4 * (6 * 11 * 2 - 1))
    assert cut.read_bytes() == before


def test_records_with_a_broken_line_in_their_middle_are_refused(call: Call, tmp_path: Path) -> None:
    broken = write_records(tmp_path / "records.jsonl", make_records("isic", runs=1))
    lines = broken.read_text().splitlines()
    lines[2] = lines[2][:50]
    broken.write_text("\n".join(lines) + "\n")
    assert_refused(
        call("reproduce", "isic", "--records", broken), f"{broken}, line 3: a line must be a record", "Remove that line"
    )


def test_records_of_another_protocol_are_refused(call: Call, records: Path) -> None:
    ended = call("reproduce", "isic", "--records", records)
    assert_refused(ended, f"{records} has no runs of the table isic by resnet50 at 128 px", "--preset, --split")


def test_runs_of_another_recipe_are_left_out_and_said(call: Call, tmp_path: Path) -> None:
    short = make_records("eta", runs=3, scenarios=["90:10"], family="0123456789abcdef", epochs=(1, 1))
    mixed = write_records(tmp_path / "records.jsonl", [*short, *make_records("eta", runs=2, scenarios=["90:10"])])
    ended = call("reproduce", "eta", "--records", mixed, "--json")
    assert ended.code == 0, ended.err
    assert {entry["runs"] for entry in json.loads(ended.out)["entries"]} == {2}
    assert "Ignored 18 records of other recipes: " in ended.err
    assert "paper normalization, 1 + 1 epochs, recipe 01234567." in ended.err
    assert json.loads(ended.out)["protocol"].endswith("20 + 10 epochs, recipe paper-fmnist")
    alone = write_records(tmp_path / "alone.jsonl", short)
    assert_refused(call("reproduce", "eta", "--records", alone), "1 + 1 epochs, recipe 01234567")


def test_runs_with_a_loss_that_is_none_of_the_papers_are_left_out_and_said(call: Call, tmp_path: Path) -> None:
    own = make_records("eta", runs=2, scenarios=["90:10"])
    zero = (("eta", 0.0), ("gamma", 0.0), ("normalization", "paper"), ("temperature", 0.07))
    other = LossTable("proxy", zero)  # As much like CL as a loss can be that is another.
    others = [replace(record, cell=f"{record.seed:016x}", loss=other) for record in own[:2]]
    mixed = write_records(tmp_path / "records.jsonl", [*others, *own])
    ended = call("reproduce", "eta", "--records", mixed, "--json")
    assert ended.code == 0, ended.err
    alone = call("reproduce", "eta", "--records", write_records(tmp_path / "own.jsonl", own), "--json")
    assert json.loads(ended.out)["entries"] == json.loads(alone.out)["entries"]
    assert "Ignored 2 records of losses that are not in the paper: proxy(eta=0.0, gamma=0.0, " in ended.err


def test_runs_on_other_data_are_left_out_and_said_or_refused_where_none_were_asked_for(
    call: Call, tmp_path: Path
) -> None:
    others = [make_records("eta", runs=2, seed=i, scenarios=["90:10"], source=f"photos-{i}") for i in range(2)]
    own = make_records("eta", runs=3, scenarios=["90:10"])
    mixed = write_records(tmp_path / "records.jsonl", [*others[0], *own])
    ended = call("reproduce", "eta", "--records", mixed, "--json")
    content = json.loads(ended.out)
    assert content["source"] == "fashion-mnist-tops"
    assert {entry["runs"] for entry in content["entries"]} == {3}
    assert "Ignored 12 records of other data: photos-0." in ended.err
    alone = write_records(tmp_path / "alone.jsonl", others[0])
    content = json.loads(call("reproduce", "eta", "--records", alone, "--json").out)
    assert (content["source"], content["verdicts"]) == ("photos-0", [])
    both = write_records(tmp_path / "both.jsonl", [*others[0], *others[1]])
    assert_refused(call("reproduce", "eta", "--records", both), "The records are of several sources: 'photos-0'")


@pytest.mark.parametrize(
    ("table", "data", "told"),
    [
        ("isic", 'scenario = "90:10"', "The table isic uses all images, but the recipe has data.scenario = '90:10'"),
        ("eta", "test = 0.0", "A table needs test images, but the recipe has data.test = 0."),
    ],
)
def test_a_recipe_whose_runs_no_table_could_show_is_refused_before_they_are_made(
    table: str, data: str, told: str, call: Call, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(f'[data]\nsource = "fashion-mnist-tops"\n{data}\n')
    assert_refused(call("reproduce", table, "--recipe", mine, "--out", tmp_path / "sweep"), told)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_where_no_cluster_answers_nothing_is_left(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with socket.socket() as unused:
        unused.bind(("127.0.0.2", 0))
        address = f"127.0.0.2:{unused.getsockname()[1]}"
    ended = call("reproduce", "eta", "--out", tmp_path / "sweep", "--engine", f"ray:{address}")
    assert_refused(ended, f"Cannot connect to a Ray cluster at {address}: no cluster answers (")
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("--scenarios", "55:45,90:10"),
            "{} has no run for --scenarios 55:45. It has runs for 60:40, 90:10.",
        ),
        (("--values", "0,60"), "{} has no run for --values ACL(60). It has runs for CL, ACL(300)."),
        (
            ("--losses", "cl,afcl:300:7"),
            "{} has no run for --losses AFCL(300, 7). It has runs for CL, ACL(300).",
        ),
    ],
)
def test_what_is_not_in_the_records_cannot_be_shown(
    arguments: tuple[str, ...], told: str, call: Call, tmp_path: Path
) -> None:
    settings = [CL, Setting(300.0, 0.0)]
    made = make_records("eta", runs=1, scenarios=["60:40", "90:10"], settings=settings)
    path = write_records(tmp_path / "records.jsonl", made)
    assert_refused(call("reproduce", "eta", "--records", path, *arguments), told.format(path))


@pytest.mark.slow
def test_records_that_are_lost_come_back_from_the_run_folders(
    sweep: tuple[Path, Ended], recipe: Path, call: Call, tmp_path: Path
) -> None:
    out = shutil.copytree(sweep[0], tmp_path / "sweep")
    before = sorted((out / "records.jsonl").read_text().splitlines())
    (out / "records.jsonl").unlink()
    ended = call("reproduce", "eta", "--recipe", recipe, "--records", out, "--json")
    assert ended.code == 0, ended.err
    assert f"Read 8 missing records from the run folders of {out}." in ended.err
    assert sorted((out / "records.jsonl").read_text().splitlines()) == before
    other = tmp_path / "other"
    other.mkdir()
    told = f"{other} contains no sweep. Give --records a file of records or the folder of a sweep."
    assert_refused(call("reproduce", "eta", "--records", other), told)
    (other / "thesis.tex").write_text("years of work")
    assert_refused(call("reproduce", "eta", "--records", other), told)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("theta",), "TABLE must be one of eta, gamma, isic, got 'theta'."),
        (("eta",), "--out is missing. Name the folder of the sweep, such as --out sweep."),
        (("eta", "--scenarios", "90:11"), "--scenarios must be among 50:50"),
        (("eta", "--values", "7"), "--values must be among 0, 60, 120, 180, 240, 300 for the table eta, got '7'."),
        (("eta", "--losses", "acl"), "'acl' is not a loss with its parameters."),
        (("eta", "--runs", "0"), "Invalid value for '--runs'"),
        (("eta", "--preset", "small"), "--preset small is for the table isic"),
        (("eta", "--normalization", "mine"), "encoder_training.loss.normalization must be one of"),
        (("eta", "--engine", "cloud", "--out", "x"), "--engine must be local, ray or ray:ADDRESS, got 'cloud'."),
        (
            ("eta", "--engine", "local:there", "--out", "x"),
            "--engine must be local, ray or ray:ADDRESS, got 'local:there'.",
        ),
        (("eta", "--records", "none.jsonl"), "none.jsonl"),
        (
            ("eta", "--records", "none.jsonl", "--runs", "3"),
            "--runs is for training and cannot be used with --records.",
        ),
        (("eta", "--recipe", "none.toml", "--out", "x"), "a recipe must be a readable TOML file, got none.toml"),
        (("isic", "--out", "x"), "isic2018 needs the environment variable LOPSIDED_DATA, which is not set."),
        (("isic", "--out", "x", "--data", "nowhere"), "nowhere, which does not exist."),
        (
            ("eta", "--out", "x", "--weights", "none.safetensors"),
            "none.safetensors does not exist.",
        ),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_leaves_nothing(
    arguments: tuple[str, ...], told: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(call("reproduce", *arguments), told)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_other_content_is_refused_and_left_alone(call: Call, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    ended = call("reproduce", "eta", "--out", tmp_path)
    assert_refused(ended, f"{tmp_path} contains other files and no sweep.")
    assert names_below(tmp_path) == ["thesis.tex"]


def test_without_ray_its_engine_is_refused(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ended = call("reproduce", "eta", "--out", tmp_path / "sweep", "--engine", "ray")
    assert_refused(
        ended, "--engine ray needs the package ray, which is not installed. Run pip install 'lopsided[ray]'."
    )
    assert not (tmp_path / "sweep").exists()


def test_a_split_by_lesion_needs_lesions(call: Call, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", {"cat": 4, "dog": 4})
    mine = tmp_path / "mine.toml"
    mine.write_text(f'[data]\nsource = "{photos}"\n')
    ended = call("reproduce", "isic", "--recipe", mine, "--split-by", "lesion", "--out", tmp_path / "sweep")
    assert_refused(ended, "photos has no table of lesions, so it cannot be split by lesion. Use --split-by image.")
    assert not (tmp_path / "sweep").exists()


def test_failed_cells_are_part_of_the_json(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lopsided.runs import sweep
    from lopsided.runs.keys import LossTable
    from lopsided.runs.records import Failure

    failure = Failure("0123", "98:2", LossTable("cl"), 3, "it broke.")
    monkeypatch.setattr(sweep, "run_sweep", lambda cells, out, **more: sweep.Outcome([], [failure], 0))
    ended = call("reproduce", "eta", "--out", tmp_path / "sweep", "--json")
    assert ended.code == 1
    named = [{"cell": "0123", "name": "98:2 CL seed 3", "error": "it broke."}]
    assert json.loads(ended.out)["failed"] == named


def test_a_quick_look_says_what_it_leaves_out_before_it_trains(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from lopsided.runs import sweep

    trained = []

    def run_sweep(cells: list[object], out: Path, **more: object) -> sweep.Outcome:
        trained.extend(cells)
        return sweep.Outcome([], [], 0)

    monkeypatch.setattr(sweep, "run_sweep", run_sweep)
    ended = call("reproduce", "eta", "--out", tmp_path / "sweep", "--quick")
    assert ended.code == 0
    assert len(trained) == 2 * 3 * 4
    assert ended.err.startswith("This quick table omits 9 of 11 scenarios (50:50, ")
    assert "This quick table omits 9 of 11 scenarios" in ended.out
    assert "6 cells have no run" in ended.out


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        (1, "1 run of each cell cannot give a verdict on the paper's claims: a verdict needs at least 3."),
        (2, "2 runs of each cell cannot give a verdict on the paper's claims: a verdict needs at least 3."),
        (3, ""),
    ],
)
def test_too_few_runs_for_a_verdict_are_named_before_they_are_made(
    runs: int, told: str, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from lopsided.runs import sweep

    monkeypatch.setattr(sweep, "run_sweep", lambda cells, out, **more: sweep.Outcome([], [], 0))
    flags = ("reproduce", "eta", "--out", tmp_path / "sweep", "--scenarios", "90:10", "--runs", str(runs))
    ended = call(*flags)
    assert ended.code == 0, ended.err
    do = " The tables will still have all figures. Use --runs 3 or more for verdicts."
    assert " ".join(ended.err.split()) == (f"{told}{do}" if told else "")
    assert call(*flags, "--quiet").err == ""


def test_runs_of_an_earlier_command_count_towards_a_verdict(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from lopsided.runs import sweep

    out = sweep.open_sweep(tmp_path / "sweep", {"kind": "reproduce"})
    write_records(out / "records.jsonl", make_records("eta", runs=4, scenarios=["90:10"]))
    monkeypatch.setattr(sweep, "run_sweep", lambda cells, out, **more: sweep.Outcome([], [], 0))
    ended = call("reproduce", "eta", "--out", out, "--scenarios", "90:10", "--runs", "2")
    assert (ended.code, ended.err) == (0, "")
