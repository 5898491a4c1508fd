"""What the package declares, against what it is: dependencies, their bounds, and the content of the wheel."""

from __future__ import annotations

import ast
import configparser
import contextlib
import email
import functools
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

import lopsided
from lopsided.cli.doctor import EXTRAS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "lopsided"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {
    "ipython": "IPython",
    "mlflow-skinny": "mlflow",
    "pillow": "PIL",
    "scikit-learn": "sklearn",
    "umap-learn": "umap",
}
"""The module of a distribution, where its name is not the distribution's with underscores."""
DEVELOPMENT = {"dev", "docs"}
"""Extras that the package itself never imports."""

BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def module_of(requirement: str) -> str:
    name = Requirement(requirement).name
    return MODULES.get(name, name.replace("-", "_"))


def imported(tree: ast.AST) -> Iterator[str]:
    """Top modules that a file imports, late imports and ``import_module("name")`` among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("import_module", "importlib.import_module", "__import__")
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value).partition(".")[0]


@functools.cache
def imports_by_file() -> dict[str, set[str]]:
    """What each file imports that is neither of the standard library nor of this package."""
    known = sys.stdlib_module_names | {"lopsided"}
    files = sorted(SOURCE.rglob("*.py"))
    return {path.relative_to(SOURCE).as_posix(): set(imported(ast.parse(path.read_text()))) - known for path in files}


def mentions(module: str) -> bool:
    """Whether a string of the source is the name of a module, as those are that only another package imports."""
    return any(re.search(rf'"{module}"', path.read_text()) for path in SOURCE.rglob("*.py"))


def extras() -> dict[str, list[str]]:
    found: dict[str, list[str]] = PROJECT["optional-dependencies"]
    return found


@pytest.mark.slow
def test_every_import_of_the_package_is_declared() -> None:
    optional = [line for name, lines in extras().items() if name not in DEVELOPMENT for line in lines]
    declared = {module_of(line) for line in PROJECT["dependencies"] + optional}
    undeclared = {file: names - declared for file, names in imports_by_file().items() if names - declared}
    assert undeclared == {}


def test_every_dependency_is_imported_and_every_extra_is_asked_for() -> None:
    used = set().union(*imports_by_file().values())
    assert {module_of(line) for line in PROJECT["dependencies"]} - used == set()
    optional = {module_of(line) for name, lines in extras().items() if name not in DEVELOPMENT for line in lines}
    assert {name for name in optional - used if not mentions(name)} == set()


def test_doctor_looks_for_every_extra_that_a_user_may_install() -> None:
    assert {name: set(modules) for name, (modules, _) in EXTRAS.items()} == {
        name: {module_of(line) for line in lines} for name, lines in extras().items() if name not in DEVELOPMENT
    }


def test_an_optional_package_is_imported_only_where_it_is_needed_not_when_the_module_is() -> None:
    optional = {module_of(line) for name, lines in extras().items() if name not in DEVELOPMENT for line in lines}
    for path in SOURCE.rglob("*.py"):
        if path.is_relative_to(SOURCE / "serve"):
            continue  # This room needs its extra; the command imports it when it serves.
        at_top = {
            name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in imported(node)
        }
        assert at_top & optional == set(), path.name


def test_the_page_on_dependencies_tells_of_each_and_names_only_files_that_import_it() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.-]+)` \| ([^|]*) \|", page, flags=re.MULTILINE))
    lines = PROJECT["dependencies"] + [line for lines in extras().values() for line in lines]
    names = {Requirement(line).name for line in lines} - {"lopsided"}
    assert names - rows.keys() == set()
    files = imports_by_file()
    for line in PROJECT["dependencies"]:
        name, module = Requirement(line).name, module_of(line)
        named = re.findall(r"`([\w/]+\.py)`", rows[name])
        assert named, name
        assert [file for file in named if module not in files[file]] == [], name


def test_the_page_on_dependencies_has_the_licences_and_releases_of_its_record() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    cells = re.findall(r"^\| `([\w.-]+)` \| [^|]* \| ([^|]*) \| ([^|]*) \|", page, flags=re.MULTILINE)
    record = json.loads((ROOT / "docs" / "dependencies.json").read_text())["newest"]
    found = {name: (licence, newest) for name, licence, newest in cells}
    assert found == {
        name: (entry["licence"], f"{entry['version']}, {entry['built'] or 'not told'}")
        for name, entry in record.items()
    }


def test_the_oldest_versions_are_those_that_the_package_admits() -> None:
    check = subprocess.run(
        [sys.executable, ROOT / "scripts" / "oldest.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (check.returncode, check.stderr) == (0, "")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel of a copy of the repository, because the build leaves folders beside the source."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    built = subprocess.run(
        [sys.executable, "-c", BUILD, copy / "dist"], cwd=copy, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    (path,) = (copy / "dist").glob("lopsided-*-py3-none-any.whl")
    with zipfile.ZipFile(path) as content:
        yield content


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_with_its_bytes_and_no_other(wheel: zipfile.ZipFile) -> None:
    files = {
        f"lopsided/{path.relative_to(SOURCE).as_posix()}": path.read_bytes()
        for path in SOURCE.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    found = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    assert found.keys() == files.keys()
    assert [name for name in files if files[name] != found[name]] == []
    kinds = {Path(name).suffix for name in found}
    assert {".py", ".typed", ".toml", ".png", ".txt", ".j2", ".css", ".js"} <= kinds


@pytest.mark.slow
def test_the_wheel_says_what_the_project_says(wheel: zipfile.ZipFile) -> None:
    (info,) = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    card = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert (card["Name"], card["Version"]) == ("lopsided", lopsided.__version__)
    assert (card["License-Expression"], card["Requires-Python"]) == ("MIT AND Apache-2.0", PROJECT["requires-python"])
    assert set(card.get_all("License-File", [])) == {
        "LICENSE",
        "src/lopsided/data/assets/LICENSE-eggs.txt",
        "src/lopsided/data/assets/LICENSE-fashion-mnist.txt",
        "src/lopsided/models/embedded/LICENSE-efficientnet-lite.txt",
    }
    licences = {name for name in wheel.namelist() if name.startswith(f"{info}/licenses/")}
    assert licences == {f"{info}/licenses/{name}" for name in card.get_all("License-File", [])}
    needed = {Requirement(line) for line in card.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert needed == {Requirement(line) for line in PROJECT["dependencies"]}
    assert set(card.get_all("Provides-Extra", [])) == set(extras())
    assert card.get_payload(decode=True) == (ROOT / "README.md").read_bytes()
    commands = configparser.ConfigParser()
    commands.read_string(wheel.read(f"{info}/entry_points.txt").decode())
    assert dict(commands["console_scripts"]) == {"lopsided": "lopsided.cli:main"}


def test_the_page_of_the_citation_has_the_version_and_licence_of_the_package() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {lopsided.__version__}\n" in citation
    code, weights = PROJECT["license"].split(" AND ")
    assert f"\nlicense: {code}\n" in citation, "A list would mean that a user may choose one of the licences."
    (abstract,) = re.findall(r"^abstract: >-\n((?:  .*\n)+)", citation, flags=re.MULTILINE)
    words = f"The code is under the licence {code}, the embedded weights of the encoder are under {weights}."
    assert " ".join(abstract.split()).endswith(words)


def test_no_two_conftest_modules_have_one_name() -> None:
    # Doctests import each of them as a module. Outside of a package, the name of the module is `conftest`.
    folders = [path.parent for path in (ROOT / "tests").glob("*/conftest.py")]
    assert [folder.name for folder in folders if not (folder / "__init__.py").exists()] == []


def torch_needs() -> set[str]:
    """All distributions that torch needs, directly or not."""
    found, left = set(), ["torch"]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        with contextlib.suppress(metadata.PackageNotFoundError):
            lines = [Requirement(line) for line in metadata.requires(name) or []]
            left += [line.name.lower() for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.slow
def test_the_losses_work_where_torch_alone_is_installed() -> None:
    allowed = {module_of(name) for name in torch_needs()} | {
        "torch",
        "functorch",
        "torchgen",
        "lopsided",
        "typing_extensions",
    }
    code = f"""
import importlib.abc, importlib.machinery, sys
class Alone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top in {allowed!r} or top.startswith("_"):
            return None
        raise ModuleNotFoundError(f"{{name}} is not installed", name=name)
sys.meta_path.insert(0, Alone())
import torch
from lopsided import losses
z, y = torch.eye(4), torch.tensor([0, 0, 1, 1])
for name in losses.__all__:
    getattr(losses, name)
print(float(losses.ContrastiveLoss()(z, y)), "numpy" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent), "PYTHONWARNINGS": "ignore"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    value, with_numpy = ended.stdout.split()
    assert float(value) == pytest.approx(math.log(3))
    assert with_numpy == "False"


def test_the_list_of_components_names_every_dependency_with_its_version(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / "sbom.py", tmp_path / "sbom.json"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(SOURCE.parent)})
    content = json.loads((tmp_path / "sbom.json").read_text())
    assert (content["bomFormat"], content["specVersion"]) == ("CycloneDX", "1.6")
    assert content["metadata"]["component"]["version"] == lopsided.__version__
    versions = {entry["name"]: entry["version"] for entry in content["components"]}
    for line in PROJECT["dependencies"]:
        name = Requirement(line).name
        assert versions[name] == metadata.version(name)
    assert "pytest" not in versions
    refs = {entry["bom-ref"] for entry in content["components"]}
    assert all(entry["purl"] == f"pkg:pypi/{entry['name']}@{entry['version']}" for entry in content["components"])
    depended = {ref for entry in content["dependencies"] for ref in entry["dependsOn"]}
    assert depended <= refs


def wheel_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wheel", ROOT / "scripts" / "wheel.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_wheel_is_checked_by_all_commands_of_the_start_page() -> None:
    commands = wheel_script().commands()
    page = (ROOT / "docs" / "start.md").read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    said = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    typed = [line for line in said if line.startswith("lopsided ") and "lopsided-demo/" not in line]
    assert [f"lopsided {command}" for command in commands] == typed
    verbs = {command.split()[0] for command in commands}
    assert verbs >= {"demo", "data", "fit", "report", "predict", "evaluate", "export"}


def test_the_page_of_the_package_index_has_no_relative_link() -> None:
    text = wheel_script().absolute_links((ROOT / "README.md").read_text(), "https://example.org/lopsided")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert "](https://example.org/lopsided/raw/main/docs/figures/report.png)" in text
    for link in links:
        if link.startswith("https://example.org/"):
            path = re.sub(r"^https://example.org/lopsided/(blob|raw)/main/", "", link).partition("#")[0]
            assert (ROOT / path).exists(), link


def test_without_an_address_the_page_of_the_package_index_has_no_dead_link() -> None:
    text = wheel_script().absolute_links("![A picture](docs/a.png)\n[guide](docs/b.md), [paper](https://c.org)\n", None)
    assert text == "\nguide, [paper](https://c.org)\n"
    text = wheel_script().absolute_links((ROOT / "README.md").read_text(), None)
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", text) == []
