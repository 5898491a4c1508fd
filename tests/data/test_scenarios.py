from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopsided.data.scenarios import Scenario, apportion, draw, draw_held_out, parse_scenario
from lopsided.errors import DataError, InputError

TWO = np.repeat([0, 1], [2000, 2000])
NAMES = ("T-shirt", "Shirt")
CLASSES = ("cat", "dog")

proportions = st.integers(1, 99).map(lambda a: (float(a), float(100 - a)))
scenarios = st.builds(
    lambda proportion, total: Scenario(proportion=proportion, total=total),
    proportions,
    st.none() | st.integers(1, 10**6),
) | st.builds(
    lambda factor, shape, total: Scenario(long_tail=factor, shape=shape, total=total),
    st.floats(1, 1e6),
    st.sampled_from(["exponential", "step"]),
    st.none() | st.integers(1, 10**6),
)


def numbers(labels: np.ndarray, drawn: np.ndarray) -> list[int]:
    return np.bincount(labels[drawn], minlength=labels.max() + 1).tolist()


@pytest.mark.parametrize(
    ("text", "scenario"),
    [
        ("90:10", Scenario(proportion=(90.0, 10.0))),
        ("97.5:2.5, total=1000", Scenario(proportion=(97.5, 2.5), total=1000)),
        ("70:20:10", Scenario(proportion=(70.0, 20.0, 10.0))),
        ("long-tail:100", Scenario(long_tail=100.0)),
        ("long-tail:100,exponential", Scenario(long_tail=100.0)),
        ("long-tail:50,step,total=300", Scenario(long_tail=50.0, shape="step", total=300)),
    ],
)
def test_the_grammar_is_read(text: str, scenario: Scenario) -> None:
    assert parse_scenario(text) == scenario


@settings(max_examples=200, deadline=None)
@given(scenario=scenarios)
def test_a_scenario_is_read_back_from_its_text(scenario: Scenario) -> None:
    assert parse_scenario(str(scenario)) == scenario


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("90:20", "shares must add up to 100, got 90:20, which adds up to 110"),
        ("100:0", "a proportion must have two or more shares above 0, got 100:0"),
        ("100", "a proportion must have two or more shares above 0, got 100"),
        ("nan:10", "a proportion must have two or more shares above 0, got nan:10"),
        ("ninety:ten", "a scenario must be a proportion or a long tail, got 'ninety:ten'"),
        ("", "a scenario must be a proportion or a long tail, got ''"),
        ("90:10/1000", "a scenario must be a proportion or a long tail, got '90:10/1000'"),
        ("90:10,step", "a scenario must be a proportion or a long tail, got '90:10,step'"),
        ("90:10,total=many", "a scenario must be a proportion or a long tail, got '90:10,total=many'"),
        ("90:10,total=0", "total must be >= 1 and <= 1,000,000,000, got 0"),
        ("90:10,total=1000000001", "total must be >= 1 and <= 1,000,000,000, got 1000000001"),
        (f"90:10,total={'9' * 400}", f"total must be >= 1 and <= 1,000,000,000, got {'9' * 30}"),
        ("long-tail:0.5", "the factor of a long tail must be >= 1 and <= 1,000,000,000, got 0.5"),
        ("long-tail:inf", "the factor of a long tail must be >= 1 and <= 1,000,000,000, got inf"),
        ("long-tail:1e308", "the factor of a long tail must be >= 1 and <= 1,000,000,000, got 1e+308"),
        ("long-tail", "a scenario must be a proportion or a long tail, got 'long-tail'"),
        ("long-tail:10,linear", "a scenario must be a proportion or a long tail, got 'long-tail:10,linear'"),
    ],
)
def test_a_text_outside_the_grammar_is_an_error_that_shows_the_grammar(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_scenario(text)
    assert str(caught.value).startswith(message + ". Write 90:10 or 90:10,total=1000, or long-tail:100")


def test_a_scenario_is_one_thing_or_the_other() -> None:
    with pytest.raises(InputError, match="a scenario must have either a proportion or a long tail, got "):
        Scenario()
    with pytest.raises(InputError, match="the shape of a long tail must be exponential or step, got linear"):
        Scenario(long_tail=10.0, shape="linear")  # type: ignore[arg-type]


@pytest.mark.parametrize("minority", [50, 45, 40, 35, 30, 25, 20, 15, 10, 5, 2])
def test_the_papers_eleven_scenarios_draw_a_thousand_images_exactly(minority: int) -> None:
    scenario = parse_scenario(f"{100 - minority}:{minority},total=1000")
    drawn = draw(TWO, NAMES, scenario, seed=0)
    assert numbers(TWO, drawn) == [1000 - 10 * minority, 10 * minority]


@pytest.mark.parametrize("text", ["90:10,total=1000000000", "long-tail:1000000000"])
def test_the_largest_numbers_that_are_taken_ask_for_more_than_there_is(text: str) -> None:
    with pytest.raises(DataError, match=r" needs | must draw an image of every class"):
        draw(TWO, NAMES, parse_scenario(text), seed=0)


def test_without_a_total_the_draw_is_as_large_as_the_classes_allow() -> None:
    assert numbers(TWO, draw(TWO, NAMES, parse_scenario("90:10"), seed=0)) == [2000, 222]
    few = np.repeat([0, 1], [2000, 100])
    assert numbers(few, draw(few, NAMES, parse_scenario("90:10"), seed=0)) == [900, 100]


def test_the_exponential_tail_falls_by_a_constant_factor() -> None:
    labels = np.repeat(np.arange(3), 1000)
    assert numbers(labels, draw(labels, ("a", "b", "c"), parse_scenario("long-tail:100"), seed=0)) == [1000, 100, 10]


def test_the_step_leaves_the_first_half_full() -> None:
    labels = np.repeat(np.arange(5), 100)
    drawn = draw(labels, tuple("abcde"), parse_scenario("long-tail:20,step"), seed=0)
    assert numbers(labels, drawn) == [100, 100, 100, 5, 5]


def test_a_long_tail_with_a_total_has_that_total() -> None:
    labels = np.repeat(np.arange(3), 1000)
    drawn = draw(labels, ("a", "b", "c"), parse_scenario("long-tail:100,total=555"), seed=0)
    assert numbers(labels, drawn) == [500, 50, 5]


def test_a_draw_is_sorted_distinct_and_its_own_seeds() -> None:
    scenario = parse_scenario("80:20,total=500")
    drawn = draw(TWO, NAMES, scenario, seed=1)
    assert (np.diff(drawn) > 0).all()
    assert np.array_equal(drawn, draw(TWO, NAMES, scenario, seed=1))
    assert not np.array_equal(drawn, draw(TWO, NAMES, scenario, seed=2))


def test_of_two_scenarios_the_smaller_draw_of_a_class_is_part_of_the_larger() -> None:
    even = draw(TWO, NAMES, parse_scenario("50:50,total=1000"), seed=3)
    steep = draw(TWO, NAMES, parse_scenario("90:10,total=1000"), seed=3)
    assert set(even[even < 2000]) < set(steep[steep < 2000])
    assert set(steep[steep >= 2000]) < set(even[even >= 2000])


def test_more_than_there_is_is_an_error_with_the_counts() -> None:
    with pytest.raises(
        DataError, match=r"95:5,total=3000 needs T-shirt 2850, Shirt 150, but the source has T-shirt 2000, Shirt 2000\."
    ):
        draw(TWO, NAMES, parse_scenario("95:5,total=3000"), seed=0)


def test_a_class_that_would_be_empty_is_an_error_with_the_counts() -> None:
    with pytest.raises(
        DataError,
        match=r"98:2,total=10 must draw an image of every class, but it draws T-shirt 10, Shirt 0 of T-shirt 2000",
    ):
        draw(TWO, NAMES, parse_scenario("98:2,total=10"), seed=0)


def test_a_proportion_for_another_number_of_classes_is_an_error() -> None:
    with pytest.raises(
        InputError,
        match=r"a proportion must have one share for each of the 2 classes \(T-shirt, Shirt\), got 3 in 80:10:10",
    ):
        draw(TWO, NAMES, parse_scenario("80:10:10"), seed=0)


@settings(max_examples=200, deadline=None)
@given(weights=st.lists(st.floats(0.01, 1000), min_size=1, max_size=8), total=st.integers(0, 5000))
def test_shares_add_up_and_are_off_by_less_than_one(weights: list[float], total: int) -> None:
    shares = apportion(weights, total)
    assert shares.sum() == total
    assert (np.abs(shares - np.array(weights) / sum(weights) * total) < 1 + 1e-6).all()


def test_the_held_out_set_has_as_many_of_each_class_and_nothing_that_was_drawn() -> None:
    labels = np.array([0] * 60 + [1] * 40)
    drawn = draw(labels, CLASSES, parse_scenario("90:10,total=50"), 3)
    held_out = draw_held_out(labels, CLASSES, drawn, 3)
    assert np.bincount(labels[held_out]).tolist() == [15, 15]  # 60 - 45 of the first class are left
    assert not set(held_out) & set(drawn)
    assert len(set(held_out)) == 30


def test_the_held_out_set_follows_the_seed() -> None:
    labels = np.array([0] * 60 + [1] * 40)
    draws = [draw_held_out(labels, CLASSES, np.arange(10), seed).tolist() for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_no_group_that_was_drawn_from_is_in_the_held_out_set() -> None:
    labels, groups = np.array([0, 1] * 20), np.repeat([f"patient {i}" for i in range(10)], 4)
    held_out = draw_held_out(labels, CLASSES, np.array([0, 9]), 0, groups)
    assert len(held_out) == 32
    assert not {"patient 0", "patient 2"} & set(groups[held_out])


def test_a_held_out_set_without_a_class_is_an_error_with_the_counts() -> None:
    with pytest.raises(DataError, match=r"every class, but the scenario leaves cat 3, dog 0\. Draw fewer images"):
        draw_held_out([0, 0, 0, 0, 1], CLASSES, [0, 4], 0)
