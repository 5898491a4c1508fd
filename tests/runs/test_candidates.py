from __future__ import annotations

from pathlib import Path

import pytest

from lopsided.errors import InputError
from lopsided.recipe import Recipe, named_recipe
from lopsided.runs.comparison_plan import (
    Candidate,
    ComparisonPlan,
    check_candidates,
    parse_candidate,
    parse_candidates,
    split_changes,
    with_scenario,
)
from lopsided.runs.keys import treatment_of

BASE = Recipe().override(
    seed=5, threads=2, **{"data.source": "fashion-mnist-tops", "data.test": 0.3, "data.image_size": 16}
)


def test_methods_are_separated_by_commas_and_their_words_by_spaces() -> None:
    methods = parse_candidates(
        ["ce, afcl eta=300 eta_unit=absolute gamma=7 ,cl temperature=0.5", "from-scratch encoder_training.loss=focal"]
    )
    names = [
        "ce",
        "afcl eta=300 eta_unit=absolute gamma=7",
        "cl temperature=0.5",
        "from-scratch encoder_training.loss=focal",
    ]
    assert [method.name for method in methods] == names
    assert [method.applied(BASE).loss.label for method in methods] == [
        "CE",
        "AFCL(eta=300, eta_unit=absolute, gamma=7)",
        "CL(temperature=0.5)",
        "focal",
    ]


def test_a_loss_changes_the_base_and_one_for_classification_is_trained_end_to_end_for_as_long() -> None:
    ce, cl = (method.applied(BASE) for method in parse_candidates(["ce,cl"]))
    assert (ce.method, ce.encoder_training.epochs) == ("end-to-end", 40)
    assert (cl.method, cl.encoder_training.epochs, cl.classifier.epochs) == ("two-stage", 30, 10)
    assert cl.override(**{"encoder_training.loss": BASE.encoder_training.loss}) == BASE


def test_an_method_may_change_any_field_that_is_no_data() -> None:
    method = parse_candidate("cl temperature=0.5 encoder_training.sampler=balanced data.image_size=32").applied(BASE)
    assert (method.encoder_training.sampler, method.data.image_size) == ("balanced", 32)
    assert method.encoder_training.loss.label == "CL(temperature=0.5)"


def test_a_recipe_brings_all_but_the_data_the_seed_and_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('seed = 9\n[data]\nsource = "isic2018"\ntest = 0.1\nchannels = 3\n[encoder]\nname = "mlp"\n')
    method = parse_candidate(str(file), {"encoder_training.epochs": 2})
    recipe = method.applied(BASE)
    assert method.name == "mine"
    assert (recipe.encoder.name, recipe.encoder_training.epochs) == ("mlp", 2)
    assert (recipe.seed, recipe.threads, recipe.data.source, recipe.data.test) == (5, 2, "fashion-mnist-tops", 0.3)
    assert (recipe.data.image_size, recipe.data.channels) == (
        16,
        3,
    )  # How images are seen is the method's own if it says.
    named = parse_candidate("paper-isic gamma=2").applied(BASE)
    assert (named.head.hidden, named.data.image_size) == (2048, 128)
    assert named.encoder_training.loss.parameters["gamma"] == 2
    assert named.data.classes == BASE.data.classes != named_recipe("paper-isic").data.classes


def test_the_default_is_an_method_with_the_data_of_the_base_and_the_pixels_of_its_weights() -> None:
    sets = {"encoder_training.epochs": 3, "fast": False}
    recipe = parse_candidate("quick", sets).applied(BASE.override(**sets))
    assert (recipe.method, recipe.encoder.weights, recipe.fast) == ("frozen", "embedded", False)
    assert (recipe.data.source, recipe.data.test, recipe.data.image_size) == ("fashion-mnist-tops", 0.3, None)
    assert recipe.seed == 5
    method, loss, _, _ = treatment_of(recipe)
    assert (method, loss.name, recipe.spec.epochs(recipe)) == ("frozen", "ce", ())
    assert parse_candidate("quick").applied(BASE).loss.label == "CE"


def test_a_loss_is_no_change_of_a_frozen_base() -> None:
    with pytest.raises(
        InputError, match=r"^method 'cl': encoder_training\.loss has no effect with method \"frozen\"\. Use"
    ):
        check_candidates(parse_candidates(["cl"]), named_recipe("quick"))


def test_methods_made_in_python_are_changes_by_dotted_names() -> None:
    recipes = check_candidates(
        [Candidate("plain"), Candidate("warm", {"encoder_training.loss.temperature": 0.5})], BASE
    )
    assert recipes["plain"] == BASE
    assert recipes["warm"].encoder_training.loss.parameters["temperature"] == 0.5


@pytest.mark.parametrize(
    ("methods", "told"),
    [
        ("cll", r"^a method must be a loss, a named recipe or a recipe's TOML file, got 'cll'\. Did you mean cl\?$"),
        ("qqqq", r"got 'qqqq'\. The losses are cl, fcl, "),
        ("ce,,cl", r"^--methods must be a comma-separated list without empty entries, got 'ce,,cl'\. Such as "),
        ("", r"^--methods must be a comma-separated list"),
        ("ce,ce", r"^The method 'ce' is listed twice\. Remove one of the two\.$"),
        (
            "cl,cl temperature=0.07",
            r"^The methods 'cl' and 'cl temperature=0\.07' are the same recipe\. Remove",
        ),
        ("cl eta=3", r"^method 'cl eta=3': encoder_training\.loss \"cl\" has no parameter 'eta'; it has"),
        ("acl eta=-1", r"^method 'acl eta=-1': encoder_training\.loss\.eta must be a finite number >= 0, got -1\.$"),
        ("cl seed=3", r"^The method 'cl seed=3' sets seed, but a method cannot change data or seed\. Choose seeds"),
        ("cl gamma", r"^The method 'cl gamma' has a word that cannot be read: 'gamma'\. Separate methods by commas"),
        ("cl 'x", r"^The method .* cannot be read: no closing quotation\.$"),
        ("cl gama=3", r"^method 'cl gama=3': A recipe has no field 'gama'\. Did you mean gamma\?$"),
        ("quick blend=0.5", r"^method 'quick blend=0\.5': blend=0\.5 may mean adapter\.blend or fine_tune\.blend\."),
        ("default", r"^default is not one recipe: "),
        (
            "cl encoder_training=3",
            r"^method 'cl encoder_training=3': encoder_training is a section and cannot be 3\. Set a field, such as "
            r"encoder_training\.epochs\.$",
        ),
        ("cl data.test=0.5", r"^The method 'cl data\.test=0\.5' sets data\.test, but "),
        ("gone.toml", r"^a recipe must be a readable TOML file, got gone\.toml"),
    ],
)
def test_methods_that_cannot_be_compared_are_refused(methods: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        check_candidates(parse_candidates([methods]), BASE)


def test_cells_are_methods_by_scenarios_by_seeds_on_the_same_data(tmp_path: Path) -> None:
    base = BASE.override(**{"data.scenario": "90:10,total=100"})
    methods = parse_candidates(["ce,cl"])
    found = ComparisonPlan(tmp_path, methods, base, scenarios=["50:50", "98:2,total=50"], runs=2).cells
    assert [(cell.compared_as, cell.recipe.data.scenario, cell.recipe.seed) for cell in found] == [
        (method, scenario, seed)
        for seed in (5, 6)
        for scenario in ("50:50,total=100", "98:2,total=50")
        for method in ("ce", "cl")
    ]
    assert len({cell.key for cell in found}) == 8
    assert len({(cell.compared_as, treatment_of(cell.recipe)) for cell in found}) == 4  # Totals are not taken together.


def test_without_a_scenario_the_recipes_own_stays() -> None:
    base = BASE.override(**{"data.scenario": "90:10"})
    assert with_scenario(base, None) == base
    assert with_scenario(base, "50:50").data.scenario == "50:50"


def test_changes_that_fit_only_the_losses_of_the_methods_apply_to_them() -> None:
    sets = {"encoder_training.mixup": 0.2, "data.test": 0.2}
    base, late = split_changes(named_recipe("from-scratch"), sets, {"data.source": "x"})
    assert late == {"encoder_training.mixup": 0.2}
    assert (base.data.test, base.encoder_training.mixup) == (0.2, 0.0)
    recipes = check_candidates(parse_candidates(["ce,focal"], sets, late), base)
    assert [recipe.encoder_training.mixup for recipe in recipes.values()] == [0.2, 0.2]
    with pytest.raises(InputError, match=r"^method 'cl': encoder_training\.mixup"):
        check_candidates(parse_candidates(["ce,cl"], sets, late), base)
    assert split_changes(named_recipe("from-scratch"), {"encoder_training.epochs": 3}, {})[1] == {}


def test_a_comma_in_quotes_does_not_separate_methods() -> None:
    methods = parse_candidates(["""quick decide='cost:a=10,b=1', ce, "cl" gamma=7"""])
    assert [method.name for method in methods][1:] == ["ce", "cl gamma=7"]
    assert methods[0].changes["decision.rule"] == "cost:a=10,b=1"
