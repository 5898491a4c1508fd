"""The catalogue, and losses that other packages add to it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from example_losses import add_package, blocks, write_package
from lopsided.cli import run
from lopsided.errors import InputError
from lopsided.losses import Objective, catalogue
from lopsided.losses.catalogue import CatalogueError, Loss, Parameter
from lopsided.losses.contrastive import ContrastiveObjective
from lopsided.recipe import Recipe
from lopsided.recipe.losses import settings_model
from tiny import write_photos
from tiny_command import Ended, environment

SRC = Path(catalogue.__file__).parents[2]


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command with the package in ``folder`` installed."""
    env = environment() | {"PYTHONPATH": f"{folder}:{SRC}"}
    command = [sys.executable, "-m", "lopsided", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


With = Callable[..., Ended]


@pytest.fixture
def call_with(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[With]:
    """Run the command in this process with the package in a folder installed, which spares an interpreter's start."""
    caches, modules = (catalogue._added, catalogue.find, settings_model), set(sys.modules)

    def call_with(site: Path, *arguments: str) -> Ended:
        monkeypatch.syspath_prepend(site)
        for cache in caches:
            cache.cache_clear()
        code = run(list(arguments))
        return Ended(code, *capsys.readouterr())

    yield call_with
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()
    for name in {"broken", "cl", "prototypes"} & (set(sys.modules) - modules):
        del sys.modules[name]


def test_reading_the_catalogue_and_the_room_of_losses_needs_no_torch() -> None:
    code = (
        "import sys, lopsided.losses.catalogue as c; c.losses(); sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment()).returncode == 0


@pytest.mark.parametrize("name", list(catalogue.BUILT_IN))
def test_an_entry_names_a_class_that_takes_its_parameters(name: str) -> None:
    loss = catalogue.find(name)
    objective = loss.load()(torch.tensor([3, 2]), 4, **loss.defaults())
    assert isinstance(objective, Objective)
    assert loss.title
    assert all(parameter.description.endswith(".") for parameter in loss.parameters)


def test_an_unknown_loss_gets_all_names_and_the_nearest() -> None:
    with pytest.raises(CatalogueError, match=r"no loss 'wieghted-ce'; .*cl, fcl.* Did you mean weighted-ce\?"):
        catalogue.find("wieghted-ce")


def test_a_loss_is_described_by_what_differs_from_its_defaults() -> None:
    assert catalogue.find("cl").describe({"temperature": 0.07}) == "CL"
    assert catalogue.find("afcl").describe({"eta": 0.1, "gamma": 7.0}) == "AFCL(eta=0.1, gamma=7)"


@pytest.mark.parametrize("name", list(catalogue.BUILT_IN))
def test_a_parameter_that_a_loss_does_not_have_is_refused_with_those_it_has(name: str) -> None:
    has = catalogue.find(name).defaults()
    with pytest.raises(InputError) as caught:
        Recipe().override(**{"encoder_training.loss": name, "encoder_training.loss.breadth": 1.0})
    text = str(caught.value)
    assert f"\"{name}\" has no parameter 'breadth'" in text
    assert all(parameter in text for parameter in has) if has else "it has none" in text


def test_the_page_shows_a_package_that_can_be_installed() -> None:
    project = tomllib.loads(blocks("toml")[0])["project"]
    assert project["entry-points"]["lopsided.losses"] == {"prototypes": "prototypes:LOSS"}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    return write_package(tmp_path / "site")


@pytest.mark.slow
def test_a_loss_of_another_package_is_listed_fitted_resumed_and_reported(
    installed: Path, tmp_path: Path, call_with: With
) -> None:
    listed = call_with(installed, "losses", "--json")
    assert json.loads(listed.out)["prototypes"]["parameters"]["temperature"]["default"] == 0.1
    photos = write_photos(tmp_path / "photos", {"cat": 12, "dog": 8})
    folder = tmp_path / "run"
    flags = "--loss prototypes encoder_training.loss.temperature=0.2 --encoder mlp-8 epochs=1"
    flags += " classifier_epochs=1 --quiet"
    fitted = call(installed, "fit", str(photos), "--out", str(folder), *flags.split())
    assert fitted.returncode == 0, fitted.stderr
    recipe = tomllib.loads((folder / "recipe.toml").read_text())
    assert recipe["encoder_training"]["loss"] == {"name": "prototypes", "temperature": 0.2}
    assert call_with(installed, "fit", "--out", str(folder), "--resume", "--quiet").code == 0
    reported = call_with(installed, "report", str(folder))
    assert reported.code == 0, reported.err
    assert "prototype loss (PROTOTYPES) with temperature = 0.2" in (folder / "report.html").read_text()


def test_a_run_of_a_loss_that_is_no_longer_installed_says_which_one_is_missing(tmp_path: Path, call_with: With) -> None:
    path = tmp_path / "run"
    path.mkdir()
    text = Recipe().to_toml().replace('name = "afcl"', 'name = "prototypes"')
    (path / "recipe.toml").write_text(text)
    found = call_with(tmp_path / "nothing", "report", str(path))
    assert found.code == 2
    assert "There is no loss 'prototypes'" in found.err


@pytest.mark.parametrize(
    ("code", "value", "message"),
    [
        ("raise RuntimeError('no such thing')", "", "cannot be imported (RuntimeError: no such thing)"),
        ("LOSS = 3", "", "must be a lopsided.losses.catalogue.Loss, got int"),
        ("x = 1", "", "cannot be imported (AttributeError"),
        (
            "from lopsided.losses.catalogue import Loss\nLOSS = Loss('other', 'contrastive', 'x', 'x:y')",
            "",
            "has another name in its entry, 'other'",
        ),
        (
            "from lopsided.losses.catalogue import Loss\nLOSS = Loss('broken', 'odd', 'x', 'x:y')",
            "",
            "has the unknown kind 'odd'; the kinds are contrastive, classification, joint",
        ),
    ],
)
def test_a_package_whose_loss_cannot_be_used_stops_that_loss_and_no_other(
    tmp_path: Path, code: str, value: str, message: str, call_with: With
) -> None:
    site = write_package(tmp_path / "site", "broken", code, value)
    listed = call_with(site, "losses")
    assert listed.code == 0
    assert "afcl" in listed.out
    assert message in listed.err
    refused = call_with(site, "fit", "fashion-mnist-tops", "--out", str(tmp_path / "run"), "--loss", "broken")
    assert refused.code == 2
    assert message in refused.err
    assert refused.err.count("\n") == 1


def test_a_package_cannot_replace_a_loss_of_this_one_and_the_list_tells_so(tmp_path: Path, call_with: With) -> None:
    site = write_package(tmp_path / "site", "cl", "raise RuntimeError('loaded')")
    listed = call_with(site, "losses")
    assert listed.code == 0
    assert listed.err == (
        "The loss 'cl' of the package lopsided-cl is ignored, because lopsided has a loss of this name. "
        "Rename it there.\n"
    )


def of_package(name: str = "broken", **fields: Any) -> Loss:
    return Loss(name, "contrastive", "Broken loss", ContrastiveObjective, **fields)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"parameters": (Parameter("a", 1.0, "x"), Parameter("a", 2.0, "x"))}, "two parameters with the name 'a'"),
        (
            {"parameters": (Parameter("unit", "mile", "x", choices=("metre", "foot")),)},
            "a parameter unit whose default 'mile' is not one of metre, foot",
        ),
        ({"parameters": (Parameter("a", -1.0, "x", least=0),)}, "a parameter a whose default -1.0 must be >= 0"),
        ({"parameters": (Parameter("a", 0.0, "x", above=0),)}, "a parameter a whose default 0.0 must be > 0"),
        ({"parameters": (Parameter("a", 3, "x", least=0, most=2.5),)}, "a parameter a whose default 3 must be <= 2.5"),
        ({"parameters": (Parameter("a", math.nan, "x"),)}, "a parameter a whose default nan is not finite"),
        (
            {"parameters": (Parameter("a", "x", "x", most=1),)},
            "a parameter a whose default 'x' is not a number, but has a range",
        ),
        ({"parameters": ("a",)}, "a parameter that is not a lopsided.losses.catalogue.Parameter: 'a'"),
        ({"parameters": (Parameter("copy", 1.0, "x"),)}, "a parameter with the invalid name 'copy'"),
        ({"parameters": 3}, "an entry that cannot be read (TypeError: 'int' object is not iterable)"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_parameters_that_contradict_themselves_are_found_when_the_entry_is_read(
    fields: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_package(monkeypatch, of_package(**fields))
    told = f"The loss 'broken' from broken:LOSS has {problem}."
    with pytest.raises(CatalogueError) as caught:
        catalogue.find("broken")
    assert str(caught.value) == told
    assert catalogue.problems() == [told]


def test_pushes_names_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    add_package(monkeypatch, of_package(pushes="eta"))
    with pytest.raises(CatalogueError, match=r"names 'eta' in pushes, which is not one of its parameters\.$"):
        catalogue.find("broken")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"head": "round"}, "has the unknown head 'round'; the heads are linear, cosine"),
        ({"head": "cosine"}, "has a cosine head, but no logits and parameter scale"),
        (
            {"head": "cosine", "parameters": (Parameter("scale", 1.0, "x"),)},
            "has a cosine head, but no logits and parameter scale",
        ),
        ({"views": 0}, "needs 0 views; give a number >= 1"),
        ({"classes": 1}, "has classes=1; give a number >= 2 or None"),
    ],
)
def test_a_head_views_and_classes_that_cannot_be_are_found_when_the_entry_is_read(
    fields: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_package(monkeypatch, of_package(**fields))
    with pytest.raises(CatalogueError) as caught:
        catalogue.find("broken")
    assert str(caught.value) == f"The loss 'broken' from broken:LOSS {problem}."


def test_two_packages_with_a_loss_of_one_name_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    add_package(monkeypatch, of_package(), of_package())
    told = "The package lopsided-broken and the package lopsided-broken add a loss 'broken'. Uninstall all but one."
    assert catalogue.problems() == [told]


def _raising(*_: object) -> Any:
    raise KeyError("beta")


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"complete": _raising}, "complete (KeyError: 'beta')"),
        ({"complete": lambda values: None}, "complete (TypeError: 'NoneType' object is not iterable)"),
        (
            {"complete": lambda values: {"etta": 1}},
            "complete (ValueError: it returned 'etta', which is not one of the loss's parameters)",
        ),
        ({"check": _raising}, "check (KeyError: 'beta')"),
        (
            {"check": lambda values: False},
            "check (TypeError: it returned False, which is neither a sentence nor None)",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_an_error_inside_a_loss_of_another_package_names_the_loss_and_the_package(
    fields: dict[str, Any], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_package(monkeypatch, of_package(**fields))
    with pytest.raises(InputError) as caught:
        Recipe().override(**{"encoder_training.loss": "broken"})
    assert str(caught.value) == (
        "encoder_training.loss is not valid. The loss 'broken' of the package lopsided-broken failed in its function "
        f"{part}. Correct that package, or choose another loss."
    )


def test_such_an_error_ends_the_command_with_code_2(tmp_path: Path, call_with: With) -> None:
    code = (
        "from lopsided.losses.catalogue import Loss\n"
        "LOSS = Loss('broken', 'contrastive', 'x', 'x:y', check=lambda values: values['beta'])"
    )
    site = write_package(tmp_path / "site", "broken", code)
    refused = call_with(site, "fit", "fashion-mnist-tops", "--out", str(tmp_path / "run"), "--loss", "broken")
    assert refused.code == 2
    assert "The loss 'broken' of the package lopsided-broken failed in its function check (KeyError: 'beta')." in (
        refused.err
    )


def test_the_json_of_the_losses_has_the_range_and_the_choices_of_every_parameter(call_with: With) -> None:
    found = json.loads(call_with(SRC, "losses", "--json").out)["acl"]["parameters"]
    limits = {name: {key: value[key] for key in ("least", "above", "most", "choices")} for name, value in found.items()}
    assert limits["eta"] == {"least": 0, "above": None, "most": None, "choices": None}
    assert limits["eta_unit"] == {"least": None, "above": None, "most": None, "choices": ["absolute", "parity"]}
    assert limits["temperature"] == {"least": 1e-6, "above": None, "most": 1e6, "choices": None}
