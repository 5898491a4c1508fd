"""Which Python the Makefile takes for the environment and what it says where there is none; what it installs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lopsided.data.sources.fashion import DEBIAN

ROOT = Path(__file__).parents[1]
MAKE = shutil.which("make")
pytestmark = pytest.mark.skipif(MAKE is None, reason="make is not installed")

# It answers as a Python of its version would, and the environment that it makes notes by whom it was made.
FAKE = """#!/bin/sh
[ "$1" = -c ] && exec {real} -I -S -c "import sys; sys.version_info = {version}; $2"
[ "$1 $2" = "-m venv" ] || exit 3
mkdir -p "$3/bin" && echo {name} > "$3/made-by" && printf '#!/bin/sh\\n' > "$3/bin/python" && chmod +x "$3/bin/python"
"""
BROKEN = "#!/bin/sh\necho 'command not found' >&2\nexit 127\n"  # A shim for a version that is not installed.


def make(folder: Path, pythons: dict[str, tuple[int, int] | None], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make in a copy of the repository, with these programs on the path; None: one that does not run."""
    programs = folder / "programs"
    programs.mkdir()
    for name, version in pythons.items():
        script = BROKEN if version is None else FAKE.format(real=sys.executable, version=version, name=name)
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    for name in ("mkdir", "chmod", "touch"):
        (programs / name).symlink_to(str(shutil.which(name)))
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-oldest.txt"):
        shutil.copy(ROOT / name, folder)
    command = [str(MAKE), *arguments]
    return subprocess.run(command, cwd=folder, env={"PATH": str(programs)}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("pythons", "taken"),
    [
        ({"python3": (3, 11)}, "python3"),
        ({"python3": (3, 12), "python3.11": (3, 11)}, "python3"),
        ({"python3": (3, 9), "python3.11": (3, 11), "python3.13": (3, 13)}, "python3.13"),
        ({"python3": None, "python3.14": None, "python3.12": (3, 12)}, "python3.12"),
        ({"python": (3, 15)}, "python"),
    ],
    ids=["one", "first", "too old", "broken", "no digit"],
)
def test_the_first_python_that_runs_and_is_recent_enough_makes_the_environment(
    pythons: dict[str, tuple[int, int] | None], taken: str, tmp_path: Path
) -> None:
    ended = make(tmp_path, pythons, "setup")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / ".venv" / "made-by").read_text() == f"{taken}\n"


def test_a_python_that_is_named_is_taken_before_all_others(tmp_path: Path) -> None:
    ended = make(tmp_path, {"python3": (3, 11), "mine": (3, 12)}, "setup", "PYTHON=mine", "VENV=elsewhere")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "elsewhere" / "made-by").read_text() == "mine\n"


def test_the_oldest_versions_are_installed_for_the_oldest_python(tmp_path: Path) -> None:
    ended = make(tmp_path, {"python3": (3, 13), "python3.11": (3, 11)}, ".venv-oldest/.lopsided-stamp")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / ".venv-oldest" / "made-by").read_text() == "python3.11\n"


@pytest.mark.parametrize("arguments", [(), ("PYTHON=mine",)], ids=["found", "named"])
def test_without_a_recent_python_one_sentence_says_what_is_needed(arguments: tuple[str, ...], tmp_path: Path) -> None:
    ended = make(tmp_path, {"python3": (3, 10), "mine": (3, 10)}, "setup", *arguments)
    tried = "mine" if arguments else "python3 python3.14 python3.13 python3.12 python3.11 python"
    sentence = f"Python must be 3.11 or newer, got no such program among {tried}. "
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"{sentence}Install one, or name it: make PYTHON=/path/to/python.\n")
    assert ended.stderr.count("\n") == 2  # The second line is make's own.
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("there", "installed"),
    [
        (("chromium", "pdflatex", "strace"), False),
        (("chromium", "strace", "images"), False),
        (("chromium", "pdflatex", "images"), False),
        (("chromium", "pdflatex", "strace", "images"), True),
    ],
    ids=["no images", "no latex", "no strace", "all"],
)
def test_programs_and_images_for_tests_are_installed_if_one_is_missing(
    there: tuple[str, ...], installed: bool, tmp_path: Path
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    scripts = {"id": "echo 0", "apt-get": 'echo "$@" > asked', **dict.fromkeys(("chromium", "pdflatex", "strace"), ":")}
    for name in {"id", "apt-get", *there} & scripts.keys():
        (programs / name).write_text(f"#!/bin/sh\n{scripts[name]}\n")
        (programs / name).chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    images = tmp_path if "images" in there else tmp_path / "missing"
    command = [str(MAKE), "programs", f"FASHION={images}"]
    ended = subprocess.run(command, cwd=tmp_path, env={"PATH": str(programs)}, capture_output=True, check=False)
    assert ended.returncode == 0
    assert (tmp_path / "asked").exists() != installed
    if not installed:
        asked = (tmp_path / "asked").read_text().split()
        assert {"install", "chromium", "texlive-latex-recommended", "dataset-fashion-mnist", "strace"} <= set(asked)


def test_the_images_are_looked_for_where_the_tests_look_for_them() -> None:
    assert f"FASHION = {DEBIAN}\n" in (ROOT / "Makefile").read_text()
