from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopsided.errors import InputError
from lopsided.paper.claims import FEWEST, judge
from lopsided.paper.protocol import (
    CL,
    FIGURES,
    TABLES,
    Setting,
    base_recipe,
    cell_recipe,
    is_misprint,
    make_plan,
    parse_setting,
    published,
    published_beside,
)
from lopsided.recipe import Recipe, named_recipe
from lopsided.runs.keys import cell_key
from tiny_command import environment

SCENARIOS = ("50:50", "55:45", "60:40", "65:35", "70:30", "75:25", "80:20", "85:15", "90:10", "95:5", "98:2")


def test_the_tables_have_the_papers_rows_and_columns() -> None:
    assert published("eta").scenarios == published("gamma").scenarios == SCENARIOS
    assert [setting.eta for setting in published("eta").settings] == [0, 60, 120, 180, 240, 300]
    assert [setting.gamma for setting in published("gamma").settings] == [0, 1, 2, 4, 7, 10]
    assert [str(s) for s in published("isic").settings] == ["CL", "FCL", "ACL(300)", "AFCL(300, 2)", "AFCL(300, 7)"]


def test_figures_that_the_paper_names_in_its_text_are_those_of_the_tables() -> None:
    assert published("eta").figure("90:10", Setting(300, 0), "accuracy") == 91.67
    assert published("eta").figure("90:10", Setting(300, 0), "uwa") == 72.58
    assert published("gamma").figure("90:10", Setting(0, 7), "uwa") == 80.54
    assert published("isic").figure(None, Setting(300, 7), "accuracy") == 93.75
    assert published("isic").figure(None, Setting(0, 1), "uwa") == 74.34


def test_accuracies_of_300_images_and_four_runs_are_multiples_of_a_1200th() -> None:
    """Two of them, 81.59 and 95.09, were rounded up in the paper."""
    odd = [
        (table, key)
        for table in ("eta", "gamma")
        for key, value in published(table).figures.items()
        if key[2] == "accuracy" and abs(value * 12 - round(value * 12)) > 12 * 0.0085
    ]
    assert odd == []


def test_the_misprinted_row_is_never_given_out() -> None:
    assert published("gamma").misprints == {("60:40", "uwa")}
    for setting in published("gamma").settings:
        assert published("gamma").figure("60:40", setting, "uwa") is None
        assert published_beside("gamma", "60:40", setting, "uwa") is None
        assert published("gamma").figure("60:40", setting, "accuracy") is not None
    assert len(published("gamma").figures) == 11 * 6 * 2 - 6
    assert len(published("eta").figures) == 11 * 6 * 2


def test_a_loss_of_the_other_table_has_its_published_figure_from_there() -> None:
    assert published_beside("eta", "90:10", Setting(0, 7), "uwa") == 80.54
    assert published_beside("eta", "90:10", CL, "uwa") == 64.91
    assert published_beside("gamma", "90:10", CL, "uwa") == 64.0
    assert published_beside("eta", "90:10", Setting(300, 7), "uwa") is None
    assert published_beside("isic", None, Setting(60, 0), "uwa") is None


def test_what_is_misprinted_is_so_in_the_table_that_has_the_loss() -> None:
    assert is_misprint("gamma", "60:40", Setting(0, 7), "uwa")
    assert is_misprint("eta", "60:40", Setting(0, 7), "uwa")
    assert not is_misprint("eta", "60:40", CL, "uwa")
    assert not is_misprint("gamma", "60:40", Setting(300, 0), "uwa")
    assert not is_misprint("gamma", "60:40", Setting(0, 7), "accuracy")
    assert not is_misprint("isic", None, Setting(0, 1), "uwa")


@given(st.sampled_from(["acl", "afcl"]), st.floats(0, 1e6), st.floats(0, 50))
def test_a_loss_reads_back_from_its_name_and_parameters(name: str, eta: float, gamma: float) -> None:
    if name == "acl":
        assert parse_setting(f"acl:{eta!r}") == Setting(eta, 0)
    else:
        setting = parse_setting(f"AFCL:{eta!r}:{gamma!r}")
        assert setting == Setting(eta, gamma)
        loss = Recipe().override(**{"encoder_training.loss": setting.table}).encoder_training.loss
        given = {name: value for name, value in (("eta", eta), ("gamma", gamma)) if name in loss.parameters}
        assert {name: loss.parameters[name] for name in given} == given  # The narrowest loss takes what it has.


def test_one_loss_has_one_recipe_whatever_it_is_called() -> None:
    assert parse_setting("afcl:0:0") == parse_setting("acl:0") == parse_setting("cl") == CL
    assert parse_setting("afcl:0:1") == parse_setting("fcl")
    base = base_recipe("eta")
    assert cell_key(cell_recipe(base, "90:10", parse_setting("afcl:0:1"), 0)) == cell_key(
        cell_recipe(base_recipe("gamma"), "90:10", Setting(0.0, 1.0), 0)
    )


@pytest.mark.parametrize("text", ["acl", "afcl:300", "cl:3", "acl:-1", "acl:much", "ce", "", "acl:nan", "acl:inf"])
def test_a_loss_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InputError, match=r" is not a loss with its parameters\. Write cl, fcl, acl:ETA"):
        parse_setting(text)


@pytest.mark.parametrize("table", TABLES)
def test_the_whole_table_is_planned_by_default(table: str) -> None:
    plan = make_plan(table, base_recipe(table))
    whole = published(table)
    cells = plan.cells()
    assert len(cells) == len(whole.scenarios) * len(whole.settings) * 4
    assert len({cell_key(cell) for cell in cells}) == len(cells)
    assert {cell.seed for cell in cells} == {0, 1, 2, 3}
    assert plan.left_out == ""
    first = cells[: len(cells) // 4]
    assert {cell.seed for cell in first} == {0}  # A sweep that is cut off has whole tables.


def test_a_cell_differs_from_the_papers_recipe_in_scenario_loss_and_seed_alone() -> None:
    base = named_recipe("paper-fmnist")
    cell = cell_recipe(base_recipe("gamma"), "80:20", Setting(0.0, 4.0), 2)
    assert cell.data.scenario == "80:20,total=1000"
    assert cell.encoder_training.loss.label == "AFCL(eta=0, eta_unit=absolute, gamma=4)"
    loss = {"name": "acl", "eta": 300.0}
    back = cell.override(seed=0, **{"data.scenario": base.data.scenario, "encoder_training.loss": loss})
    assert back == base


@pytest.mark.slow
def test_more_runs_only_add_cells() -> None:
    base = base_recipe("eta")
    four = {cell_key(cell) for cell in make_plan("eta", base).cells()}
    eight = {cell_key(cell) for cell in make_plan("eta", base, runs=8).cells()}
    assert four < eight
    assert len(eight) == 2 * len(four)


def test_both_fashion_tables_share_the_cells_of_cl() -> None:
    keys = [{cell_key(cell) for cell in make_plan(name, base_recipe(name)).cells()} for name in ("eta", "gamma")]
    assert len(keys[0] | keys[1]) == 11 * 11 * 4


def test_the_small_preset_changes_encoder_head_and_size_alone() -> None:
    small, paper = base_recipe("isic", preset="small"), named_recipe("paper-isic")
    assert (small.encoder.name, small.data.image_size, small.head.hidden) == ("resnet18", 64, "auto")
    sizes = {"encoder.name": "resnet50", "data.image_size": 128, "head.hidden": 2048}
    assert small.override(**sizes, **{"encoder_training.loss": paper.encoder_training.loss}) == paper


def test_a_split_by_lesion_is_one_by_group() -> None:
    assert base_recipe("isic").data.split == "random"
    assert base_recipe("isic", split="lesion").data.split == "group"


def test_the_other_normalization_is_another_cell() -> None:
    released = base_recipe("eta", normalization="released")
    assert released.encoder_training.loss.parameters["normalization"] == "released"
    assert cell_key(released) != cell_key(base_recipe("eta"))


def test_a_recipe_of_ones_own_takes_the_papers_place(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[data]\nscenario = "90:10,total=40"\n[encoder]\nname = "mlp"\n')
    cell = cell_recipe(base_recipe("eta", recipe=path), "60:40", Setting(60.0, 0.0), 1)
    assert (cell.encoder.name, cell.data.scenario) == ("mlp", "60:40,total=40")
    assert cell.encoder_training.loss.label == "ACL(eta=60, eta_unit=absolute)"


def test_a_choice_of_scenarios_and_values_keeps_the_papers_order() -> None:
    plan = make_plan("eta", base_recipe("eta"), scenarios="90:10, 50:50", values="300,0", runs=1)
    assert plan.scenarios == ("50:50", "90:10")
    assert plan.settings == (CL, Setting(300.0, 0.0))
    assert len(plan.cells()) == 4


def test_losses_are_taken_as_they_are_listed() -> None:
    plan = make_plan("eta", base_recipe("eta"), losses="cl,afcl:300:7,acl:600,cl")
    assert [str(setting) for setting in plan.settings] == ["CL", "AFCL(300, 7)", "ACL(600)"]


@pytest.mark.parametrize("table", TABLES)
def test_a_quick_look_is_part_of_the_table_and_says_what_it_leaves_out(table: str) -> None:
    base = base_recipe(table, preset="small" if table == "isic" else "paper")
    quick, whole = make_plan(table, base, quick=True), make_plan(table, base)
    assert {cell_key(cell) for cell in quick.cells()} < {cell_key(cell) for cell in whole.cells()}
    assert len(quick.cells()) <= 24
    assert CL in quick.settings
    assert quick.left_out.startswith("This quick table omits ")
    assert quick.runs >= FEWEST
    told = quick.left_out.partition(" It can ")[0]
    for setting in whole.settings:
        is_named = f"({setting}" in told or f", {setting}" in told
        assert is_named == (setting not in quick.settings)
    for scenario in whole.scenarios:
        assert scenario is None or (scenario in told) == (scenario not in quick.scenarios)


@pytest.mark.parametrize(("table", "can"), [("eta", {"eta"}), ("gamma", {"gamma-lopsided"}), ("isic", set())])
def test_a_quick_look_says_which_claims_it_cannot_support(table: str, can: set[str]) -> None:
    plan = make_plan(table, base_recipe(table), quick=True)
    best = {"eta": Setting(300.0, 0.0), "gamma": Setting(0.0, 7.0), "isic": Setting(300.0, 7.0)}[table]

    def value(scenario: str | None, setting: Setting, seed: int) -> float:
        sign = 1 if scenario in (None, "90:10", "70:30") else -1
        return 70 + seed / 7 + sign * (setting == best) * (10 + seed / 11)

    values = {
        (scenario, setting, "test", figure): {seed: value(scenario, setting, seed) for seed in range(plan.runs)}
        for scenario in plan.scenarios
        for setting in plan.settings
        for figure in FIGURES
    }
    assert {verdict.claim for verdict in judge(table, values) if verdict.decision == "supported"} == can
    assert ("the claim that" in plan.left_out) == (table != "eta")


@pytest.mark.parametrize(
    ("table", "options", "told"),
    [
        ("eta", {"scenarios": "90:11"}, "--scenarios must be among 50:50, 55:45, .*, got '90:11'. Did you mean 90:10?"),
        (
            "eta",
            {"scenarios": "90:10,"},
            "--scenarios must be a comma-separated list without empty entries, got '90:10,'.",
        ),
        ("eta", {"values": "0,70"}, "--values must be among 0, 60, 120, 180, 240, 300 for the table eta, got '70'."),
        ("gamma", {"values": "ten"}, "--values must be among 0, 1, 2, 4, 7, 10 for the table gamma, got 'ten'."),
        ("eta", {"values": "0", "losses": "cl"}, "--values and --losses cannot be used together."),
        (
            "isic",
            {"scenarios": "90:10"},
            "--scenarios is for the tables eta and gamma, not for isic. Remove --scenarios.",
        ),
        (
            "isic",
            {"values": "0"},
            "--values is for the tables eta and gamma, not for isic. Name losses with --losses",
        ),
    ],
)
def test_a_choice_that_the_table_does_not_have(table: str, options: dict[str, str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        make_plan(table, base_recipe(table), **options)


@pytest.mark.parametrize(
    ("table", "options", "told"),
    [
        ("theta", {}, "TABLE must be one of eta, gamma, isic, got 'theta'. Did you mean eta?"),
        ("isic", {"preset": "smal"}, "--preset must be one of paper, small, got 'smal'. Did you mean small?"),
        ("isic", {"split": "patient"}, "--split-by must be one of image, lesion, got 'patient'."),
        ("eta", {"preset": "small"}, "--preset small is for the table isic, not for the table eta."),
        ("gamma", {"split": "lesion"}, "--split-by lesion is for the table isic, not for the table gamma."),
        ("eta", {"data": "photos"}, "--data photos is for the table isic, not for the table eta."),
        ("eta", {"normalization": "mine"}, "encoder_training.loss.normalization must be one of"),
        ("isic", {"weights": "x.pth"}, "encoder.weights must be"),
    ],
)
def test_a_protocol_that_there_is_not(table: str, options: dict[str, str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        base_recipe(table, **options)  # type: ignore[arg-type]


def test_tables_are_read_without_torch() -> None:
    code = (
        "import sys, lopsided.paper.compare, lopsided.paper.tables, lopsided.paper.latex\n"
        "import lopsided.paper.figures as figures, lopsided.paper.protocol as paper\n"
        "paper.published('eta'), paper.make_plan('eta', paper.base_recipe('eta')).cells()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0


def test_every_published_figure_is_a_share_in_per_cent() -> None:
    for table in TABLES:
        for (_, _, figure), value in published(table).figures.items():
            assert figure in FIGURES
            assert 45 < value < 100
