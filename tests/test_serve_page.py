"""The examples of docs/serve.md, run against a real server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.test_process import served
from tiny import write_photos

PAGE = (Path(__file__).parents[1] / "docs" / "serve.md").read_text()


def example(language: str, word: str) -> str:
    found = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL) if word in text]
    assert len(found) == 1
    return found[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lopsided import cli

    folder = tmp_path_factory.mktemp("page")
    photos = write_photos(folder / "photos", {"cat": 12, "dog": 8})
    quick = ["--recipe", "quick", "--quiet", "--folds", "2", "--device", "cpu", "image_size=32"]
    assert cli.run(["fit", str(photos), "--out", str(folder / "run"), *quick]) == 0
    shutil.copytree(photos / "dog", folder / "inbox")
    shutil.copy(photos / "dog" / "001.png", folder / "photo.png")
    return folder


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    with served(folder / "run", "--work", folder / "work") as (_, port, _line):
        yield port


def run(command: list[str], folder: Path) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_curl(folder: Path, port: int) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    text = example("sh", "curl").replace("8765", str(port))
    assert json.loads(run(["sh", "-c", text], folder))["images"][0]["predicted"] == "dog"


@pytest.mark.slow
def test_python(folder: Path, port: int) -> None:
    text = example("python", "urllib").replace("8765", str(port))
    assert run([sys.executable, "-c", text], folder).startswith("dog {'cat': ")


@pytest.mark.slow
def test_javascript(folder: Path, port: int) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    assert run([node, "-e", example("javascript", "fetch").replace("8765", str(port))], folder).startswith(
        "dog { cat: "
    )


@pytest.mark.slow
def test_the_command(folder: Path, port: int) -> None:
    text = example("sh", "--url").replace("8765", str(port)).replace("lopsided", f"{sys.executable} -m lopsided", 1)
    run(["sh", "-c", text], folder)
    assert (folder / "answers.csv").read_text().count("dog") >= 8


def test_limits_are_those_of_the_server() -> None:
    from lopsided.serve.limits import MEGABYTE, Limits

    limits = Limits()
    said = " ".join(PAGE.split())
    assert f"At most {limits.images} images and {limits.request_bytes // MEGABYTE} MB per request" in said
    assert f"{limits.image_bytes // MEGABYTE} MB and {limits.pixels // 10**6} million pixels per image" in said
    assert f"{limits.seconds:g} s per answer, {limits.waiting} images and {limits.bytes_at_once // MEGABYTE} MB" in said


def test_speed_is_that_of_the_record() -> None:
    record = json.loads((Path(__file__).parents[1] / "benchmarks" / "records" / "serve.json").read_text())
    rows = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", PAGE, flags=re.MULTILINE))
    memory, processor = record["memory_mb_by_block"], record["processor_ms_per_image"]
    assert (record["requests"], record["together"]) == (2000, 16)
    assert list(rows.values())[list(rows).index("requests without an answer") - 3 :][:6] == [
        f"{record['ratio']}",
        f"{min(record['ratios'])} to {max(record['ratios'])}",
        f"{record['p50_seconds']:.3f} s, {record['p99_seconds']:.3f} s",
        f"{record['lost']}",
        f"{memory[0]} MB, {memory[-1]} MB",
        f"{processor['engine']} ms, {processor['server']} ms",
    ]
