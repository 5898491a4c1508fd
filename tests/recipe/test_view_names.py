from __future__ import annotations

import pytest

from lopsided.errors import InputError
from lopsided.recipe import Recipe, named_recipe
from lopsided.recipe.views import SETS, VIEWS, check_views, name_views, parse_views


def test_sets_and_names_of_views_are_read_and_written() -> None:
    assert parse_views("dihedral") == VIEWS
    assert parse_views(" hflip ,identity") == SETS["flip"]
    assert parse_views("rot90") == ("rot90",)
    for text in (*SETS, "identity,rot180", "vflip"):
        assert name_views(parse_views(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mirror", r"^There is no view 'mirror'\. Use none, flip, flips, dihedral, or names of views: identity, hflip"),
        ("", r"^There is no view ''\. Use none"),
        ("flip,rot90", r"^There is no view 'flip'\."),
        ("hflip,hflip", r"^Each view may be named once, got hflip 2 times\.$"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_views(text)
    with pytest.raises(InputError, match=r"^encoder\.views cannot be used\. " + message[1:]):
        Recipe().override(**{"encoder.views": text})


def test_turned_views_need_squares_and_vectors_have_no_views() -> None:
    check_views(SETS["flips"], "image", (3, 20, 30))
    check_views(VIEWS, "image", (3, 20, 20))
    check_views(SETS["none"], "vector", (7,))
    with pytest.raises(InputError, match=r"^Images of 30 x 20 pixels have no view rot90, which dihedral contains"):
        check_views(VIEWS, "image", (3, 20, 30))
    with pytest.raises(InputError, match=r"^views must be none for vectors, got flip\."):
        check_views(SETS["flip"], "vector", (7,))


def test_a_recipe_writes_the_views_in_one_way_and_only_other_views_change_its_hash() -> None:
    plain = named_recipe("quick")
    flip = plain.override(**{"encoder.views": "hflip,identity"})
    assert flip.encoder.views == "flip"
    assert Recipe.from_toml(flip.to_toml()) == flip
    assert flip.content_hash() != plain.content_hash()
    assert plain.override(**{"encoder.views": "identity"}).content_hash() == plain.content_hash()
