"""The text of decision rules."""

from __future__ import annotations

import pytest

from lopsided.errors import InputError
from lopsided.recipe import Recipe, named_recipe
from lopsided.recipe.rules import parse_rule


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "balanced",
        "tuned",
        "prevalence:a=0.25,b=0.75",
        'prevalence:{"a,b": 0.25, "c=d": 0.75}',
        "cost:a=1,b=10",
        "cost:[[0.0, 1.0], [10.0, 0.0]]",
        'cost:{"a": {"b": 1.0}, "b": {"a": 10.0}}',
        "recall:a>=b=0.95",
        "alarms:a<<=100",
        "threshold:a>=0.5",
    ],
)
def test_the_text_of_a_rule_gives_the_same_rule_again(text: str) -> None:
    rule = parse_rule(text)
    assert str(rule) == text
    assert parse_rule(str(rule)) == rule


def test_names_with_signs_survive() -> None:
    assert parse_rule('prevalence:{"a,b": 0.25, "c=d": 0.75}').values == {"a,b": 0.25, "c=d": 0.75}
    assert parse_rule("recall:a>=b>=0.95").target == "a>=b"
    assert parse_rule("recall:a>>=0.95").target == "a>"


@pytest.mark.parametrize("text", ["recall:a>=0.95", "precision:a >= 0.5", "alarms:a<=100", "false-alarms:a<=0.05"])
def test_a_rule_shows_no_sign_that_a_shell_would_read_as_a_file(text: str) -> None:
    rule = parse_rule(text)
    assert rule.target == "a"
    assert not set("<>") & set(str(rule))
    assert parse_rule(str(rule)) == rule


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("best", "There is no decision rule 'best'"),
        ("plain:3", "takes no values"),
        ("recall", "needs values"),
        ("recall:a", "must name a class and a recall between 0 and 1"),
        ("recall:a>=1.2", "must name a class and a recall between 0 and 1"),
        ("recall:>=0.9", "must name a class"),
        ("prevalence:a=0.5,b=0.6", "must add up to 1, got 1.1"),
        ("prevalence:a=-0.5,b=1.5", "one share >= 0 per class"),
        ("prevalence:a=0.5,a=0.5", "one share >= 0 per class"),
        ("prevalence:a", "one share >= 0 per class"),
        ("cost:a=nan,b=1", "one cost >= 0 per class"),
        ("cost:a=inf,b=1", "one cost >= 0 per class"),
        ("cost:a=0,b=0", "needs a value above 0"),
        ("cost:[[0, 1], [1]]", "must be square"),
        ("cost:[[0, -1], [1, 0]]", "0 on the diagonal"),
        ("cost:[[1, 1], [1, 0]]", "0 on the diagonal"),
        ("cost:[[0, NaN], [1, 0]]", "finite numbers"),
        ("cost:[[0, 0], [0, 0]]", "one cost above 0"),
        ("cost:[[0, 1], ", "not valid JSON"),
        ('cost:{"a": {"b": -1}, "b": {"a": 1}}', "must be numbers >= 0"),
        ('cost:{"a": {"a": 2, "b": 1}, "b": {"a": 1}}', "must be 0, got 2"),
    ],
)
def test_a_text_that_is_no_rule_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_rule(text)


def test_recipes_hold_a_rule_and_refuse_others_by_name() -> None:
    assert Recipe().decision.rule == "balanced"
    assert Recipe().override(**{"decision.rule": "cost: a=2, b=1"}).decision.rule == "cost:a=2,b=1"
    with pytest.raises(InputError, match=r"^decision.rule cannot be used. There is no decision rule 'best'"):
        Recipe().override(**{"decision.rule": "best"})


def test_the_rule_is_not_part_of_what_is_trained() -> None:
    assert Recipe().override(**{"decision.rule": "plain"}).content_hash() == Recipe().content_hash()


@pytest.mark.parametrize("name", ["paper-fmnist", "paper-isic"])
def test_the_recipes_of_the_paper_decide_for_the_most_probable_class(name: str) -> None:
    decision = named_recipe(name).decision
    assert (decision.rule, decision.calibration) == ("plain", "none")


@pytest.mark.parametrize("written", ['"df, a=b"', "'df, a=b'", "df, a=b"])
def test_the_class_of_a_threshold_may_be_in_quotes(written: str) -> None:
    rule = parse_rule(f"recall:{written}>=0.9")
    assert (rule.target, str(rule)) == ("df, a=b", "recall:df, a=b=0.9")
    assert parse_rule(str(rule)) == rule


def test_names_with_a_comma_or_an_equals_sign_can_be_written() -> None:
    rule = parse_rule('cost:{"a, b": 10, "c=d": 1}')
    assert rule.values == {"a, b": 10, "c=d": 1}
    assert parse_rule(str(rule)) == rule
    assert parse_rule("recall:a, b=c=0.9").target == "a, b=c"
    with pytest.raises(InputError, match=r'Names with a comma need quotes: cost:\{"a, b": 10, "c": 1\}\.$'):
        parse_rule("cost:a, b=10,c=1")
