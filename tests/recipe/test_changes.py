"""Words such as ``eta=300``: which fields they set, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lopsided.errors import InputError
from lopsided.recipe import Recipe, is_word, named_recipe, read_words

LOSS = "encoder_training.loss"


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("seed=3", ("seed", 3)),
        ("encoder_training.lr = 1e-3 ", ("encoder_training.lr", 1e-3)),
        ("augment.vertical_flip=true", ("augment.vertical_flip", True)),
        ("data.classes=['a', \"b\"]", ("data.classes", ["a", "b"])),
        ("encoder_training.loss={ name = 'acl', eta = 0.1 }", ("encoder_training.loss", {"name": "acl", "eta": 0.1})),
        ("encoder.name='resnet50'", ("encoder.name", "resnet50")),
        ("encoder.name=resnet50", ("encoder.name", "resnet50")),
        ("data.scenario=90:10,total=1000", ("data.scenario", "90:10,total=1000")),
        ("data.source= my photos ", ("data.source", "my photos")),
        ("description=", ("description", "")),
        ("description='half", ("description", "'half")),
        ("data.source=" + "[" * 5000, ("data.source", "[" * 5000)),
        ("seed=" + "9" * 5000, ("seed", "9" * 5000)),
    ],
)
def test_a_change_is_read_as_toml_or_else_as_a_text(text: str, change: tuple[str, object]) -> None:
    path, value = change
    assert read_words([text]).values == {path: value}


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("eta=300", {f"{LOSS}.eta": 300}),
        ("epochs=20", {"encoder_training.epochs": 20}),
        ("batch_size=8", {"encoder_training.batch_size": 8, "classifier.batch_size": 8}),
        ("classifier_epochs=2", {"classifier.epochs": 2}),
        ("encoder=resnet18", {"encoder.name": "resnet18"}),
        ("tta=flips", {"encoder.views": "flips"}),
        ("folds=5", {"data.folds": 5}),
        ("heads=3", {"adapter.heads": 3}),
        ("include=*.jpg", {"data.include": ["*.jpg"]}),
        ("scenario=10:20:30", {"data.scenario": "10:20:30"}),
        ("group=2019", {"data.group": "2019"}),
        ("scenario=unset", {"data.scenario": None}),
        (f"{LOSS}.name=cl", {LOSS: "cl"}),
    ],
)
def test_a_short_name_sets_the_field_that_it_stands_for(word: str, values: dict[str, object]) -> None:
    assert read_words([word]).values == values


def test_every_field_has_a_name_that_is_read() -> None:
    with pytest.raises(InputError, match=r"^lr=0.1 and lr=0.2 set the same field to different values\."):
        read_words(["lr=0.1", "lr=0.2"])
    assert read_words(["include=a", "include=b"]).values == {"data.include": ["a", "b"]}, "Lists grow."
    assert read_words(["loss=acl", "eta_unit=absolute"]).values == {LOSS: {"name": "acl", "eta_unit": "absolute"}}
    assert read_words(["tau=2", "loss=logit-adjusted"]).values == {LOSS: {"name": "logit-adjusted", "tau": 2}}
    assert read_words(["blend=0.5"], recipe=lambda: named_recipe("adapter")).values == {"adapter.blend": 0.5}
    assert read_words(["blend=0.5"], recipe=lambda: named_recipe("fine-tune")).values == {"fine_tune.blend": 0.5}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["views=2"], "views=2 may mean tta or encoder_training.views or fine_tune.views. Write one of these names."),
        (["sampler=balanced"], "sampler=balanced may mean encoder_training.sampler or classifier.sampler. Write"),
        (["tau=1"], "tau=1 may mean classifier.tau or encoder_training.loss.tau."),
        (["epoch=3"], "A recipe has no field 'epoch'. Did you mean epochs?"),
        (["zzzz=1"], "A recipe has no field 'zzzz'. `lopsided recipes NAME` shows the fields of a recipe."),
        (["lr=1", "encoder_training.lr=2"], "lr=1 and encoder_training.lr=2 set the same field to different values."),
    ],
)
def test_an_unknown_or_ambiguous_word_gets_the_nearest_names(words: list[str], told: str) -> None:
    with pytest.raises(InputError) as caught:
        read_words(words)
    assert str(caught.value).startswith(told)


def test_an_error_names_what_the_user_wrote() -> None:
    changes = read_words(["val=2"], {"seed": ("--seed", -1), "data.group": ("--group", None)})
    with pytest.raises(InputError, match=r"^val must be a finite number >= 0 and < 1, got 2\."), changes.named():
        Recipe().override(**{"data.val": changes.values["data.val"]})
    with pytest.raises(InputError, match=r"^--seed must be an integer >= 0"), changes.named():
        Recipe().override(seed=changes.values["seed"])
    with pytest.raises(InputError, match=r"^data\.test must be"), changes.named():
        Recipe().override(**{"data.test": 3})


def test_paths_are_no_words() -> None:
    assert not any(map(is_word, ("photos", "./a=b", "/x/a=b", "a-b=c", "C:\\photos=2", "=3", "")))
    assert all(map(is_word, ("eta=300", "a=", "data.val=0.2", "augment.rotation = 5", "include=*.jpg")))


def test_a_folder_that_looks_like_a_word_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    with pytest.raises(
        InputError, match=r"^A recipe has no field 'a'\. If you mean the file or folder, write \./a=b\.$"
    ):
        read_words(["a=b"])
