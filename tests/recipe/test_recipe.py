import functools
import json
import math
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopsided.errors import InputError
from lopsided.recipe import (
    RUNTIME_FIELDS,
    EncoderTraining,
    Recipe,
    find_recipe,
    named_recipe,
    named_recipes,
    read_words,
)
from lopsided.recipe.words import leaves

LOSS = "encoder_training.loss"
NAMES = ["adapter", "few", "fine-tune", "from-scratch", "paper-fmnist", "paper-isic", "quick", "thorough"]
TEXTS = st.text(min_size=1).filter(lambda text: "\0" not in text)


def test_a_recipe_without_any_field_is_the_one_from_scratch_but_for_its_description():
    assert named_recipe("from-scratch") == Recipe(description=named_recipe("from-scratch").description)


def test_the_default_is_a_frozen_encoder_that_needs_no_network_and_no_validation():
    recipe = named_recipe("quick")
    assert (recipe.method, recipe.encoder.weights, recipe.augment.normalisation) == ("frozen", "embedded", "weights")
    assert (recipe.data.val, recipe.data.test) == (0.0, 0.15)
    assert recipe.loss == recipe.classifier.loss
    assert named_recipe("from-scratch").loss == named_recipe("from-scratch").encoder_training.loss


def test_the_regression_counts_in_the_hash_of_a_frozen_recipe_only():
    for name, counts in (("quick", True), ("from-scratch", False)):
        recipe = named_recipe(name)
        other = recipe.model_copy(update={"regression": recipe.regression.model_copy(update={"folds": 3})})
        assert (other.content_hash() != recipe.content_hash()) is counts
        assert any(path == "regression.folds" for path, _, _ in recipe.leaves()) is counts
    with pytest.raises(InputError, match=r"regression\.folds has no effect"):
        named_recipe("from-scratch").override(**{"regression.folds": 3})


def test_embedded_weights_bring_their_pixel_scale_along():
    recipe = Recipe().override(**{"encoder.name": "tf_efficientnet_lite0", "encoder.weights": "embedded"})
    assert recipe.augment.normalisation == "weights"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"encoder.weights": "embedded", "augment.normalisation": "half"},
            'augment.normalisation must be "weights" with encoder.weights = "embedded", got "half".',
        ),
        (
            {"encoder.weights": "none"},
            'encoder.weights cannot be "none" with method "frozen": random features are of no use. '
            "Start from --recipe quick, or set encoder.weights.",
        ),
        (
            {
                "method": "end-to-end",
                "encoder.weights": "none",
                "encoder_training.loss": "ce",
                "encoder.scaling": "none",
                "encoder.name": "tf_efficientnet_lite0",
            },
            'augment.normalisation cannot be "weights" without pretrained weights. Set encoder.weights, or '
            'augment.normalisation = "source".',
        ),
        (
            {"classifier.loss": "focal"},
            'classifier.loss cannot be focal with method "frozen". Use one of ce, weighted-ce.',
        ),
        (
            {"encoder_training.epochs": 3},
            'encoder_training.epochs has no effect with method "frozen". Use another recipe, such as from-scratch, to '
            "train an encoder.",
        ),
        (
            {"augment.rotation": 3.0},
            'augment.rotation has no effect with method "frozen". Use another recipe, such as from-scratch, to train '
            "an encoder.",
        ),
    ],
)
def test_what_a_frozen_encoder_cannot_use_is_refused(changes, text):
    with pytest.raises(InputError) as caught:
        named_recipe("quick").override(**changes)
    assert str(caught.value) == text


@pytest.mark.parametrize("name", NAMES)
def test_a_named_recipe_has_a_description_and_survives_toml(name):
    recipe = named_recipe(name)
    assert named_recipes()[name] == recipe.description != ""
    assert Recipe.from_toml(recipe.to_toml()) == recipe


def test_the_named_recipes_are_those_of_the_documentation():
    assert list(named_recipes()) == NAMES


@pytest.mark.parametrize("name", ["paper-fmnist", "paper-isic"])
def test_a_recipe_of_the_paper_leaves_no_field_to_a_default(name):
    recipe = named_recipe(name)
    idle = {"regression", "adapter", "fine_tune"}  # Their method has none.
    used = [s for s in type(recipe).model_fields if s not in idle]
    sections = [recipe, *(getattr(recipe, s) for s in used)]
    for section in [*sections, recipe.encoder_training.loss, recipe.classifier.loss]:
        if hasattr(section, "model_fields_set"):
            unset = {field for field in type(section).model_fields if getattr(section, field) is None}
            unset |= idle & set(type(section).model_fields)
            assert section.model_fields_set | unset == set(type(section).model_fields)


# The expected values below are copied by hand from the paper's protocol table.
COMMON = {
    "method": "two-stage",
    "data.test": 0.3,
    "data.val": 0.0,
    "data.split": "random",
    "head.out": 128,
    "encoder_training.loss.eta": 300.0,
    "encoder_training.loss.eta_unit": "absolute",
    "encoder_training.loss.temperature": 0.07,
    "encoder_training.loss.normalization": "paper",
    "encoder_training.lr": 0.01,
    "encoder_training.batch_size": 128,
    "encoder_training.optimizer": "adam",
    "encoder_training.sampler": "plain",
    "classifier.lr": 0.01,
    "classifier.batch_size": 128,
    "classifier.epochs": 10,
    "classifier.optimizer": "adam",
    "classifier.sampler": "plain",
    "augment.horizontal_flip": True,
}
FMNIST = {
    "data.scenario": "90:10,total=1000",
    "data.image_size": 28,
    "data.channels": 1,
    "encoder.name": "resnet18",
    "head.hidden": 512,
    "encoder_training.epochs": 20,
    "encoder_training.loss.name": "acl",
    "classifier.loss.name": "ce",
}
ISIC = {
    "data.source": "isic2018",
    "data.classes": ("MEL", "DF"),
    "data.scenario": None,
    "data.image_size": 128,
    "data.channels": 3,
    "encoder.name": "resnet50",
    "head.hidden": 2048,
    "encoder_training.epochs": 40,
    "encoder_training.loss.name": "afcl",
    "encoder_training.loss.gamma": 7.0,
    "classifier.loss.name": "focal",
    "classifier.loss.gamma": 2.0,
}


@pytest.mark.parametrize(("name", "facts"), [("paper-fmnist", FMNIST), ("paper-isic", ISIC)])
def test_a_recipe_of_the_paper_is_its_protocol(name, facts):
    values = {path: value for path, _, value in leaves(named_recipe(name))}
    expected = COMMON | facts
    assert {path: values[path] for path in expected} == expected
    assert values["augment.rotation"] > 0


def test_every_choice_that_the_paper_leaves_open_says_so_in_its_description():
    descriptions = {path: field.description for path, field, _ in leaves(Recipe())}
    for path in (
        "augment.rotation",
        "augment.horizontal_flip",
        "augment.vertical_flip",
        "augment.normalisation",
        "encoder_training.last_batch",
        "encoder.weights",
        "data.redraw",
        "data.split",
    ):
        assert "paper does not state" in descriptions[path]


def test_every_field_has_a_description_and_every_field_that_can_be_unset_is_unset_by_default():
    for path, field, value in leaves(Recipe()):
        assert field.description, path
        if type(None) in getattr(field.annotation, "__args__", ()):
            assert value is None, path  # TOML has no null, so a missing field must be unset.


@pytest.mark.parametrize("loss", ["ce", "weighted-ce", "focal"])
def test_a_baseline_is_the_recipe_from_scratch_end_to_end_with_as_many_passes_as_its_two_stages(loss):
    scratch = named_recipe("from-scratch")
    baseline = scratch.baseline(loss)
    assert (baseline.method, baseline.encoder_training.loss.name) == ("end-to-end", loss)
    assert baseline.encoder_training.epochs == scratch.encoder_training.epochs + scratch.classifier.epochs
    assert baseline == scratch.override(**{"encoder_training.loss": loss})


def test_a_baseline_of_a_baseline_keeps_its_budget():
    baseline = Recipe().baseline("ce")
    assert baseline.baseline("focal").encoder_training.epochs == baseline.encoder_training.epochs


@pytest.mark.parametrize(
    ("loss", "parameters"),
    [
        ("cl", {}),
        ("fcl", {"gamma": 1}),
        ("acl", {"eta": 0.5, "eta_unit": "parity"}),
        ("afcl", {"eta": 0.5, "eta_unit": "parity", "gamma": 2}),
    ],
)
def test_parameters_that_are_left_out_are_those_of_the_loss(loss, parameters):
    found = EncoderTraining(loss=loss).loss.parameters
    assert found == parameters | {"temperature": 0.07, "normalization": "paper"}


def test_eta_that_is_left_out_is_300_in_absolute_units():
    assert EncoderTraining(loss={"name": "acl", "eta_unit": "absolute"}).loss.eta == 300


def test_a_new_loss_keeps_the_parameters_that_were_set_where_it_has_them():
    paper = named_recipe("paper-isic")
    assert paper.override(**{LOSS: "cl"}).encoder_training.loss == EncoderTraining(loss="cl").loss
    acl = paper.override(**{f"{LOSS}.eta": 60.0, f"{LOSS}.temperature": 0.2}).override(**{LOSS: "acl"})
    assert acl.encoder_training.loss.parameters == {
        "eta": 60, "eta_unit": "absolute", "temperature": 0.2, "normalization": "paper",
    }  # fmt: skip
    back = acl.override(**{LOSS: "afcl", f"{LOSS}.gamma": 4.0}).encoder_training.loss
    assert (back.eta, back.gamma, back.temperature) == (60, 4, 0.2)
    assert acl.override(**{LOSS: {"name": "afcl", "eta": 90.0}}).encoder_training.loss.eta == 90


def test_a_new_loss_keeps_no_default_of_the_old_one():
    assert Recipe().override(**{LOSS: "fcl"}).encoder_training.loss.gamma == 1  # and not the 2 of AFCL


def test_the_gamma_of_a_contrastive_loss_does_not_become_that_of_the_focal_loss():
    assert named_recipe("paper-isic").override(**{LOSS: "focal"}).encoder_training.loss.gamma == 2


def test_the_same_loss_again_changes_nothing():
    paper = named_recipe("paper-isic")
    assert paper.override(**{LOSS: "afcl", "classifier.loss": "focal"}) == paper
    assert paper.override(**{f"{LOSS}.name": "afcl"}) == paper
    assert paper.override(**{LOSS: paper.encoder_training.loss}) == paper


def test_an_override_changes_its_fields_and_no_other():
    recipe = named_recipe("paper-isic")
    changed = recipe.override(seed=3, **{"encoder_training.loss.eta": 60.0, "data.classes": None})
    before = {path: value for path, _, value in leaves(recipe)}
    after = {path: value for path, _, value in leaves(changed)}
    assert {path for path in after if after[path] != before[path]} == {"seed", f"{LOSS}.eta", "data.classes"}
    assert recipe.override() == recipe


def test_a_recipe_cannot_be_changed_in_place():
    with pytest.raises(ValueError, match="frozen"):
        Recipe().seed = 3


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("seed = -1", "seed must be an integer >= 0 and <= 9223372036854775807, got -1."),
        ("seed = true", "seed must be an integer >= 0 and <= 9223372036854775807, got True."),
        ("data = 3", "data must be a table, got 3."),
        (
            'method = "both"',
            'method must be one of "two-stage", "end-to-end", "frozen", "distance", "adapter", "fine-tune", '
            "got 'both'.",
        ),
        ('device = ""', 'device must be "auto", "cpu", "cuda", "cuda:1" or "mps", got \'\'.'),
        (
            "[encoder_training.loss]\nname = 'acl'\neta = nan",
            "encoder_training.loss.eta must be a finite number >= 0, got nan.",
        ),
        (
            "[encoder_training]\nloss = 'afxl'",
            "encoder_training.loss is not valid. There is no loss 'afxl'; the losses are cl, fcl, acl, afcl, "
            "averaged-cl, ce, weighted-ce, focal",
        ),
        (
            "[encoder_training]\nloss = 3",
            "encoder_training.loss must be a loss's name, or a table with name and parameters, got 3.",
        ),
        (
            "[encoder_training.loss]\neta = 3.0",
            "encoder_training.loss must be a loss's name, or a table with name and parameters, got {'eta': 3.0}.",
        ),
        (
            "[encoder_training.loss]\nname = 'acl'\neta_unit = 'paper'",
            'encoder_training.loss.eta_unit must be one of "absolute", "parity", got \'paper\'.',
        ),
        ("[encoder_training]\nlr = inf", "encoder_training.lr must be a finite number > 0, got inf."),
        ("[encoder_training]\nlr = 1e999", "encoder_training.lr must be a finite number > 0, got inf."),
        (
            "[encoder_training.loss]\nname = 'cl'\ntemperature = 0",
            "encoder_training.loss.temperature must be a finite number >= 1e-06 and <= 1000000.0, got 0.",
        ),
        (
            "[classifier.loss]\nname = 'focal'\ngamma = '2'",
            "classifier.loss.gamma must be a finite number >= 0, got '2'.",
        ),
        (
            "[encoder_training]\nepochs = 2.0",
            "encoder_training.epochs must be an integer >= 1 and <= 2147483647, got 2.0.",
        ),
        ("[head]\nhidden = 0", 'head.hidden must be an integer >= 1 and <= 65536 or "auto", got 0.'),
        ("[data]\nchannels = 2", "data.channels must be one of 1, 3, got 2."),
        ("[data]\nclasses = [1, 2]", "data.classes must be a list of strings, got 1 as an entry."),
        ("[data]\ntest = 1.0", "data.test must be a finite number >= 0 and < 1, got 1.0."),
        (
            '[encoder]\nweights = "model.pt"',
            'encoder.weights must be "none", "embedded", "timm", hf-hub:OWNER/NAME@COMMIT or a path that ends in '
            ".safetensors, got 'model.pt'.",
        ),
        (
            "[encoder_training.loss]\nname = 'afcl'\neta = 0x" + "f" * 500,
            "encoder_training.loss.eta must be a finite number >= 0, got ",
        ),
        ("seed = " + "9" * 5000, "The recipe is not valid TOML: Exceeds the limit"),
        ("seed = " + "[" * 5000, "The recipe is not valid TOML: it is nested too deeply."),
        ("seed = ", "The recipe is not valid TOML: Invalid value"),
        ("[encoder]\nname = '" + "x" * 5000 + "'\nweights = '" + "y" * 5000 + "'", "... (5,002 characters)."),
        (
            "seed = 1979-05-27",
            "seed must be an integer >= 0 and <= 9223372036854775807, got datetime.date(1979, 5, 27).",
        ),
        ("eta = 300.0", "A recipe has no field 'eta'. Did you mean encoder_training.loss.eta?"),
        (
            "[encoder_trainning]\neta = 300.0",
            "A recipe has no field 'encoder_trainning'. Did you mean encoder_training?",
        ),
        (
            "[augment]\nnormalization = 'none'",
            "A recipe has no field 'augment.normalization'. Did you mean augment.normalisation?",
        ),
        ("zzz = 1", "A recipe has no field 'zzz'. `lopsided recipes NAME` shows the fields of a recipe."),
        ("seed = -1\n[head]\nout = 0", "got -1. (1 more of this recipe's fields cannot be used.)"),
    ],
)
def test_a_field_that_cannot_be_used_is_named_in_one_sentence(toml, message):
    with pytest.raises(InputError) as caught:
        Recipe.from_toml(toml)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data.test": 0.5, "data.val": 0.5},
            "data.test + data.val must be < 1, got 0.5 + 0.5. The remaining images are for training.",
        ),
        ({"data.classes": ["a", "a"]}, "data.classes must be different names, got ['a', 'a']."),
        ({"data.classes": []}, "data.classes must be different names, got []."),
        (
            {LOSS: "ce", "method": "two-stage"},
            'encoder_training.loss cannot be ce with method "two-stage". Use one of cl, fcl, acl, afcl',
        ),
        (
            {"method": "end-to-end"},
            'encoder_training.loss cannot be afcl with method "end-to-end". Use one of ce, weighted-ce, focal',
        ),
        (
            {"method": "end-to-end"},
            "ldam, bcl, or method=two-stage.",
        ),
        (
            {LOSS: "ce", "method": "two-stage"},
            "supproto, or method=end-to-end.",
        ),
        ({"classifier.loss": "cl"}, "classifier.loss cannot be cl. Use one of ce, weighted-ce, focal"),
        (
            {LOSS: "cl", f"{LOSS}.eta": 0.1},
            "encoder_training.loss \"cl\" has no parameter 'eta'; it has temperature and normalization.",
        ),
        (
            {LOSS: {"name": "cl", "eta": 0.1}},
            "encoder_training.loss \"cl\" has no parameter 'eta'; it has temperature and normalization.",
        ),
        (
            {LOSS: "acl", f"{LOSS}.gamma": 2.0},
            "encoder_training.loss \"acl\" has no parameter 'gamma'; it has eta, eta_unit, temperature",
        ),
        ({LOSS: "ce", f"{LOSS}.eta": 0.1}, "encoder_training.loss \"ce\" has no parameter 'eta'; it has none."),
        ({"classifier.loss.gamma": 2.0}, "classifier.loss \"ce\" has no parameter 'gamma'; it has none."),
        (
            {f"{LOSS}.eta": 300.0},
            "encoder_training.loss is inconsistent: eta is 300 in units of parity, but at most 20 is plausible. "
            "For the paper's scale, set eta_unit=absolute.",
        ),
        ({"encoder_training.batch_size": 1}, "encoder_training.batch_size must be >= 2 for a contrastive loss, got 1."),
        ({LOSS: "ce", "encoder_training.views": 2}, "encoder_training.views must be 1 with the loss ce, got 2."),
        ({LOSS: "ce", "encoder_training.queue": 64}, "encoder_training.queue must be 0 with the loss ce, got 64."),
        (
            {"encoder_training.queue_balanced": True},
            "encoder_training.queue_balanced must be false when encoder_training.queue is 0, got true. "
            "Set encoder_training.queue.",
        ),
        (
            {"encoder_training.chunk_size": 1},
            "encoder_training.chunk_size must be an integer >= 2 and <= 2147483647 (one image has no batch "
            "statistics), got 1.",
        ),
        (
            {"encoder_training.sampler": "m-per-class", "encoder_training.m_per_class": 129},
            "encoder_training.m_per_class must be at most encoder_training.batch_size, got 129 > 128.",
        ),
        (
            {"data.val": 0.0, "selection.patience": 5},
            "selection.patience must be unset when data.val is 0, got 5. Set data.val, or remove selection.patience.",
        ),
        ({f"{LOSS}.etta": 1.0}, "encoder_training.loss \"afcl\" has no parameter 'etta'; it has eta, eta_unit, gamma"),
        ({"encoder_training.eta": 1.0}, "has no field 'encoder_training.eta'. Did you mean encoder_training.loss.eta?"),
        (
            {"encoder_training.sampel": 1},
            "has no field 'encoder_training.sampel'. Did you mean encoder_training.sampler?",
        ),
        ({"seed.x": 1}, "A recipe has no field 'seed.x'. Did you mean seed?"),
        ({f"{LOSS}.eta.x": 1}, "has no field 'encoder_training.loss.eta.x'. Did you mean encoder_training.loss.eta?"),
        (
            {"encoder_training": {}},
            "encoder_training is a section and cannot be {}. Set a field, such as encoder_training.epochs.",
        ),
        ({"classifier_training.epochs": 1}, "'classifier_training.epochs'. Did you mean classifier.epochs?"),
        ({"encoder.epochs": 1}, "'encoder.epochs'. Did you mean encoder_training.epochs?"),
        ({"training.lr": 1}, "'training.lr'. Did you mean encoder_training.lr?"),
        ({"classifier.los": "ce"}, "'classifier.los'. Did you mean classifier.loss?"),
        ({"losss": "cl"}, "'losss'. Did you mean encoder_training.loss?"),
        ({"encoders": "mlp"}, "no field 'encoders'. encoder is a section with fields such as encoder.name."),
        ({"selections": "uwa"}, "'selections'. selection is a section with fields such as selection.metric."),
    ],
)
def test_fields_that_contradict_each_other_are_named_in_one_sentence(changes, message):
    with pytest.raises(InputError) as caught:
        Recipe().override(**changes)
    assert str(caught.value).startswith(message) or message in str(caught.value)


def test_a_recipe_is_read_from_a_file_or_by_its_name(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(named_recipe("adapter").to_toml(), encoding="utf-8")
    assert Recipe.load(path) == find_recipe(str(path)) == find_recipe(path) == find_recipe("adapter")


def test_a_file_that_is_no_recipe_is_named_in_one_sentence(tmp_path: Path):
    with pytest.raises(InputError, match=r"a recipe must be a readable TOML file, got .*none\.toml \(No such file"):
        Recipe.load(tmp_path / "none.toml")
    with pytest.raises(InputError, match=r"a recipe must be a readable TOML file, got .* \(Is a directory\)"):
        Recipe.load(tmp_path)
    (tmp_path / "image.toml").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(InputError, match=r"The recipe .*image\.toml is not UTF-8 text\."):
        Recipe.load(tmp_path / "image.toml")
    (tmp_path / "large.toml").write_bytes(b"#" * 1_000_001)
    with pytest.raises(InputError, match=r"The recipe .*large\.toml is larger than 1,000,000 bytes\."):
        Recipe.load(tmp_path / "large.toml")


def test_an_unknown_name_gets_the_nearest_one_as_a_suggestion():
    with pytest.raises(
        InputError, match=r"a named recipe must be one of .*, got 'paper-fminst'\. Did you mean paper-fmnist\?"
    ):
        named_recipe("paper-fminst")
    with pytest.raises(InputError, match="a named recipe must be one of"):
        find_recipe("../quick")
    with pytest.raises(InputError, match=r"^default is not one recipe: .* Name one of the two\.$"):
        find_recipe("default")


@settings(max_examples=100, deadline=None)
@given(
    source=TEXTS,
    classes=st.none() | st.lists(TEXTS, min_size=2, unique=True),
    description=st.text(),
    lr=st.floats(1e-300, 1e300),
    eta=st.floats(0, 20),
    seed=st.integers(0, 2**63 - 1),
    hidden=st.just("auto") | st.integers(1, 2**16),
    flip=st.booleans(),
)
def test_a_recipe_written_and_read_is_the_same_recipe(*, source, classes, description, lr, eta, seed, hidden, flip):
    changes = {"data.source": source, "data.classes": classes, "encoder_training.lr": lr, f"{LOSS}.eta": eta}
    more = {"head.hidden": hidden, "augment.vertical_flip": flip}
    recipe = Recipe(description=description, seed=seed).override(**changes, **more)
    text = recipe.to_toml()
    assert Recipe.from_toml(text) == recipe
    assert Recipe.from_toml(text).content_hash() == recipe.content_hash()


def test_the_written_recipe_holds_every_field_as_a_value_or_as_a_comment():
    recipe = named_recipe("paper-isic")
    text = recipe.to_toml()
    table = tomllib.loads(text)
    for path, field, value in leaves(recipe):
        *sections, name = path.split(".")
        held = functools.reduce(dict.__getitem__, sections, table)
        assert name in held if value is not None else f"# {name} is unset" in text
        assert field.description.split()[0] in text


def test_the_hash_ignores_what_does_not_decide_the_outcome_and_sees_everything_else():
    recipe = named_recipe("from-scratch")
    other = {
        "device": "cpu",
        "threads": 1,
        "fast": False,
        "compile": True,
        "compare_quick": False,
        "track": ["tensorboard"],
        "data.cache": "none",
        "data.allow_outside": True,
        "description": "mine",
    }
    assert set(other) == RUNTIME_FIELDS
    assert recipe.override(**other).content_hash() == recipe.content_hash()
    changed = {f"{LOSS}.eta": 0.25, "seed": 1, "data.source": "x", "augment.crop": 0.5, "classifier.lr": 0.1}
    hashes = {recipe.override(**{path: value}).content_hash() for path, value in changed.items()}
    assert len(hashes | {recipe.content_hash()}) == len(changed) + 1


def test_the_hash_covers_the_losses_and_what_is_not_at_its_default_so_a_further_field_changes_no_hash():
    recipe = Recipe()
    assert dict(recipe.chosen()) == {f"{LOSS}.name": "afcl", "classifier.loss.name": "ce"}
    changed = recipe.override(**{"data.folds": 5, f"{LOSS}.eta": 0.25})
    assert dict(changed.chosen()) == {**dict(recipe.chosen()), "data.folds": 5, f"{LOSS}.eta": 0.25}


def test_the_hash_does_not_depend_on_how_a_number_was_written():
    one = Recipe.from_toml("[encoder_training.loss]\nname = 'afcl'\neta = 2\ngamma = -0.0")
    two = Recipe.from_toml("[encoder_training]\nloss = { name = 'afcl', eta = 2.0, gamma = 0 }")
    assert one == two
    assert one.content_hash() == two.content_hash()
    assert math.copysign(1, one.encoder_training.loss.gamma) == 1


def test_reading_a_recipe_needs_no_torch():
    code = "import sys, lopsided.recipe as r; r.named_recipes(); sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=env).returncode == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[classifier]\nloss = 'focal'\ntemperature = 0.1", "A recipe has no field 'classifier.temperature'."),
        (
            "[encoder_training]\neta = 1.0\nloss = { name = 'afcl' }",
            "A recipe has no field 'encoder_training.eta'. Did you mean encoder_training.loss.eta?",
        ),
    ],
)
def test_a_parameter_beside_its_loss_is_refused(text, message):
    with pytest.raises(InputError) as caught:
        Recipe.from_toml(text)
    assert message in str(caught.value)


def test_every_field_can_be_changed_by_the_text_that_toml_has_for_it():
    for name in ("quick", "from-scratch", "paper-isic"):
        recipe = named_recipe(name)
        for path, _, value in leaves(recipe):
            if value is not None and recipe.unused(path) is None:
                text = f"{path}={json.dumps(value)}"
                assert recipe.override(**read_words([text]).values) == recipe, text


def test_a_loss_for_classification_trains_for_the_passes_of_both_stages():
    changes = {"encoder_training.epochs": 3, "classifier.epochs": 2, LOSS: "weighted-ce"}
    for order in (changes, dict(reversed(changes.items()))):
        recipe = Recipe().override(**order)
        assert (recipe.method, recipe.encoder_training.epochs) == ("end-to-end", 5)


def test_recipes_are_equal_if_their_losses_have_the_same_parameters_whatever_class_holds_them():
    from lopsided.recipe.losses import settings_model

    before = Recipe()
    settings_model.cache_clear()
    after = Recipe().override(**{LOSS: "cl"}).override(**{LOSS: "afcl"})
    assert type(before.encoder_training.loss) is not type(after.encoder_training.loss)
    assert before == after
    assert hash(before.encoder_training.loss) == hash(after.encoder_training.loss)
    assert before != after.override(**{f"{LOSS}.eta": 0.25})


def test_a_budget_in_minutes_replaces_one_in_steps_and_the_other_way_round() -> None:
    timed = named_recipe("fine-tune").override(**{"fine_tune.minutes": 2.0})
    assert (timed.fine_tune.steps, timed.fine_tune.minutes) == (None, 2.0)
    counted = timed.override(**{"fine_tune.steps": 5})
    assert (counted.fine_tune.steps, counted.fine_tune.minutes) == (5, None)
