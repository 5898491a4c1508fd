from __future__ import annotations

import codecs
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lopsided.cli import compare, train
from lopsided.cli.app import let_threads_sleep
from lopsided.errors import InputError
from lopsided.models.machine import threads
from lopsided.recipe import Changes, read_words
from tiny_command import Call, command, environment

VERBS = (
    "demo",
    "fit",
    "evaluate",
    "predict",
    "export",
    "compare",
    "report",
    "reproduce",
    "recipes",
    "losses",
    "data",
    "doctor",
)
HEAVY = ("torch", "sklearn", "scipy", "pydantic", "numpy", "timm", "PIL", "lopsided.recipe")


def test_help_names_every_verb_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, lopsided.cli\n"
        "code = lopsided.cli.run(['--help'])\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]), file=sys.stderr)\n"
        "sys.exit(code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", "import json\n" + code], capture_output=True, text=True, env=environment(), check=True
    )
    assert json.loads(ended.stderr) == []
    assert all(f" {verb} " in ended.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_each_verb_has_an_example_of_it(verb: str, call: Call) -> None:
    ended = call(verb, "--help")
    assert ended.code == 0
    assert f"lopsided {verb}" in ended.out.partition("Examples:")[2]


def test_fit_has_the_flags_that_are_promised(call: Call) -> None:
    flags = (
        "--out --recipe --loss --encoder --group --folds --decide --auto --more --seed --device --resume --workers "
        "--engine --track --verbose --quiet --json --help"
    )
    text = call("fit", "--help").out
    assert set(re.findall(r"^\W*(--[a-z]+) ", text.partition("Options")[2], re.MULTILINE)) == set(flags.split())
    words = "focus classes columns group_from origin epochs eta weights tta image_size val test split scenario include"
    assert [word for word in words.split() if f" {word}=" not in text] == []


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--weights", "timm"], "weights=timm"),
        (["--image-size", "64"], "image_size=64"),
        (["--views", "flips"], "tta=flips"),
        (["--skip-unreadable"], "skip_unreadable=true"),
        (["--eta", "-3"], "eta=-3"),
        (["--eta=-3", "--quiet"], "eta=-3"),
        (["--focus", "rare"], "focus=rare"),
        (["--normal", "good"], "classes=good"),
        (["--columns", "age, sex"], "columns=age,sex"),
        (["--source", "camera"], "origin=camera"),
        (["--group-from", "{group}_*", "--image-size", "64"], "data.group_from={group}_*"),
    ],
)
def test_an_option_that_is_called_like_a_setting_is_read_as_its_word(
    flags: list[str], word: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[str]] = []

    def keep(texts: Sequence[str], *_: object) -> Changes:
        read.append(list(texts))
        raise InputError("seen")

    for verb, module in (("fit", train), ("compare", compare)):
        monkeypatch.setattr(module, "read_changes", keep)
        assert call(verb, "photos", "--out", tmp_path, *flags).err == "lopsided: seen\n"
    path, value = next(iter(read_words([word]).values.items()))
    assert [read_words(texts).values[path] for texts in read] == [value, value]


def test_an_option_that_is_called_like_a_setting_needs_a_value(call: Call) -> None:
    ended = call("fit", "photos", "--epochs", "--quiet")
    assert (ended.code, ended.err) == (2, "lopsided: --epochs needs a value.\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["fit", "photos", "--minutes", "3"], "There is no option --minutes. Write --auto minutes=3."),
        (["compare", "photos", "--loss", "ce"], "There is no option --loss. Write --methods ce."),
        (
            ["fit", "photos", "--colums", "age"],
            "No such option: --colums. Did you mean --columns? See `lopsided fit --help`.",
        ),
        (
            ["compare", "photos", "--metods", "ce"],
            "No such option: --metods. Did you mean --methods? See `lopsided compare --help`.",
        ),
        (["fit", "photos", "device=foo"], 'device must be "auto", "cpu", "cuda", "cuda:1" or "mps", got \'foo\'.'),
    ],
)
def test_an_option_of_another_form_gets_a_sentence_that_then_works(arguments: list[str], told: str, call: Call) -> None:
    ended = call(*arguments)
    assert (ended.code, ended.out, ended.err) == (2, "", f"lopsided: {told}\n")


def test_without_a_verb_the_help_is_shown(call: Call) -> None:
    ended = call()
    assert ended.code == 2
    assert "Usage: lopsided" in ended.out + ended.err
    assert "lopsided: " not in ended.err


def test_the_version_is_the_packages(call: Call) -> None:
    from lopsided import __version__

    assert call("--version").out == f"lopsided {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["fit", "--shine", "3"], "No such option: --shine"),
        (["fly"], "No such command 'fly'"),
        (["fit", "--folds", "many"], "Invalid value for '--folds'"),
        (["predict", "run", "x.png", "--batch-size", "0"], "Invalid value for '--batch-size'"),
    ],
)
def test_a_misused_verb_ends_with_one_sentence_and_code_2(arguments: list[str], told: str, call: Call) -> None:
    ended = call(*arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert told in ended.err
    assert ended.err.count("\n") == 1
    assert "--help`." in ended.err


def test_something_unexpected_is_one_sentence_that_says_how_to_see_more(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lopsided.cli import doctor

    def fail() -> None:
        raise ZeroDivisionError("no way")

    monkeypatch.setattr(doctor, "examine", fail)
    ended = call("doctor")
    told = "unexpected error (ZeroDivisionError: no way). Set LOPSIDED_TRACEBACK=1 to see the traceback."
    assert (ended.code, ended.err) == (1, f"lopsided: {told}\n")
    monkeypatch.setenv("LOPSIDED_TRACEBACK", "1")
    ended = call("doctor")
    assert ended.code == 1
    assert "Traceback" in ended.err
    assert 'raise ZeroDivisionError("no way")' in ended.err


def test_an_interruption_ends_with_code_130(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from lopsided.cli import doctor

    def fail() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", fail)
    assert call("doctor") == type(call("--version"))(130, "", "lopsided: interrupted.\n")


def test_the_names_of_files_cannot_steer_the_terminal(call: Call, tmp_path: Path) -> None:
    ended = call("data", f"{tmp_path}/\x1b[31mred")
    assert ended.code == 2
    assert "\x1b" not in ended.err


def test_recipes_are_listed_and_printed_as_toml_that_reads_back(call: Call, tmp_path: Path) -> None:
    from lopsided.recipe import Recipe, named_recipe, named_recipes

    listed = call("recipes").out
    assert all(name in listed and text in listed for name, text in named_recipes().items())
    assert json.loads(call("recipes", "--json").out) == named_recipes()
    for name in named_recipes():
        assert Recipe.from_toml(call("recipes", name).out) == named_recipe(name)
    assert json.loads(call("recipes", "paper-isic", "--json").out)["data"]["source"] == "isic2018"
    ended = call("recipes", "papre-isic")
    assert ended.code == 2
    assert "Did you mean paper-isic?" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])  # The pipe is found broken at the end, or while it is written to.
def test_a_reader_that_closes_early_is_met_with_silence(unbuffered: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "from lopsided.cli import main; main(['recipes'])"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(PYTHONUNBUFFERED=unbuffered),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=120) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "closed", "code"), [("recipes", "1", 0), ("data nothing", "2", 2), ("data nothing", "12", 2)]
)
def test_a_stream_that_is_closed_is_written_nowhere(arguments: str, closed: str, code: int, tmp_path: Path) -> None:
    told = tmp_path / "told"
    text = (
        f"import lopsided.cli\ncode = lopsided.cli.run({arguments.split()})\nopen({str(told)!r}, 'w').write(str(code))"
    )
    redirected = " ".join(f"{number}>&-" for number in closed)
    ended = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" {redirected}', sys.executable, text],
        capture_output=True, text=True, env=environment(), check=False,
    )  # fmt: skip
    assert told.read_text() == str(code), ended.stderr
    assert ended.stdout + ended.stderr == ""


def test_doctor_says_what_each_finding_means(call: Call) -> None:
    with threads(1):
        ended = call("doctor", "--json")
    assert ended.code == 0
    assert ended.err == ""
    findings = {finding["name"]: finding for finding in json.loads(ended.out)}
    assert {"Python", "torch", "threads", "BLAS", "speed", "memory", "disk", "onnx", "quick", "thorough"} <= set(
        findings
    )
    assert all(finding["value"] and finding["meaning"] for finding in findings.values())
    assert findings["threads"]["value"] == "1"
    assert findings["speed"]["value"].endswith(" GFLOP/s")


def test_doctor_names_what_to_install_for_what_is_missing(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import util

    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    monkeypatch.setattr(
        "lopsided.runs.features.images_per_second", lambda recipe: 4.0 if recipe.encoder.views == "auto" else 40.0
    )
    ended = call("doctor")
    assert "40 images a second" in ended.out
    assert "features of 1,000 new images take about 4 min" in " ".join(ended.out.split())
    assert "missing onnxscript" in ended.out
    assert "pip install 'lopsided[onnx]'" in ended.out


@pytest.mark.slow
def test_completion_offers_the_verbs_and_the_values_of_a_flag() -> None:
    def offered(words: str) -> str:
        more = {"_LOPSIDED_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return command(**more).out

    assert "fit" in offered("lopsided f").split()
    assert set(offered("lopsided fit --loss a").split()) == {"acl", "afcl", "averaged-cl"}
    assert "paper-isic" in offered("lopsided fit --recipe paper-i").split()


def test_doctor_tells_the_room_that_the_cache_will_take_and_the_fast_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    from lopsided.cli import doctor
    from lopsided.data import inputs

    monkeypatch.setattr(inputs, "free_memory", lambda: 400 * 3 * 224 * 224)
    found = {finding.name: finding for finding in doctor.examine()}
    assert found["memory"].meaning == "25% of the free memory can cache 100 images of 224 x 224"
    assert found["fast paths"].value.startswith("small maps, channels last")
    assert "fast = false" in found["fast paths"].meaning


def test_a_recipe_is_printed_with_the_fields_that_have_an_effect(call: Call) -> None:
    quick, scratch, tuned = (call("recipes", name).out for name in ("quick", "from-scratch", "fine-tune"))
    assert "[regression]" in quick
    assert not any(section in quick for section in ("[encoder_training]", "[head]", "[fine_tune]", "[selection]"))
    assert "[encoder_training.loss]" in scratch
    assert not any(section in scratch for section in ("[regression]", "[adapter]", "[fine_tune]"))
    assert "[fine_tune]" in tuned


@pytest.mark.parametrize("verb", ["predict", "find", "cache"])
def test_verbs_that_do_not_train_have_no_panel_about_training(call: Call, verb: str) -> None:
    assert "train it" not in call(verb, "--help").out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["cache", "polish"], "The action must be show, fill or clear, got polish."),
        (["cache", "fill"], "DATA is missing. Write lopsided cache fill DATA."),
        (["cache", "clear", "photos"], "DATA is for fill and cannot be used with `lopsided cache clear`."),
    ],
)
def test_the_cache_is_shown_filled_or_cleared(call: Call, arguments: list[str], told: str) -> None:
    ended = call(*arguments)
    assert ended.code == 2
    assert told in ended.err


def test_names_of_files_are_printed_as_bytes_where_the_encoding_lacks_their_letters() -> None:
    from lopsided.cli import app

    content = io.BytesIO()
    codecs.register_error("lopsided-names", app._name_bytes)
    stream = io.TextIOWrapper(content, encoding="ascii", errors="lopsided-names")
    stream.write(f"ä.png {os.fsdecode(bytes([0xE4]))}.png")
    stream.flush()
    assert content.getvalue() == "ä.png ".encode() + b"\xe4.png"


@pytest.mark.parametrize(
    ("load", "given", "found"),
    [(9.0, None, "passive"), (0.5, None, None), (9.0, "active", "active")],
)
def test_threads_sleep_on_a_busy_machine_unless_the_user_says_otherwise(
    load: float, given: str | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")  # So that it is as before after the test.
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    let_threads_sleep()
    assert os.environ.get("OMP_WAIT_POLICY") == found
