"""Build the wheel for a package index, whose page shows README.md: there, links must be absolute.

    python scripts/wheel.py dist --home https://host/owner/lopsided     # links, [project.urls]; then build
    python scripts/wheel.py dist                                        # without links that lead nowhere there
    python scripts/wheel.py dist --check ENVIRONMENT                    # and run the start page from an installed copy

The repository has no address of its own, so it is an argument. ``--check`` installs the wheel into a new virtual
environment and runs the commands of docs/start.md there, away from the sources.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def commands() -> list[str]:
    """Return the commands of docs/start.md, in their order, without those that ``demo`` runs itself."""
    page = (ROOT / "docs" / "start.md").read_text("utf-8")
    return re.findall(r"^(?:\$ )?lopsided (?!.*lopsided-demo/)(.+)$", page, flags=re.MULTILINE)


def absolute_links(text: str, home: str | None) -> str:
    """Return Markdown with links to the repository ``home`` instead of relative ones; pictures are raw files.

    Without a home, only the text of a relative link is left, and no picture.
    """

    def link(found: re.Match[str]) -> str:
        if home is None:
            return "" if found[1] else found[2]
        kind = "raw" if found[1] == "!" else "blob"
        return f"{found[1]}[{found[2]}]({home}/{kind}/main/{found[3]})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s]+)\)", link, text)


def build(out: Path, home: str | None) -> Path:
    """Build the wheel from a copy of the sources."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for source in SOURCES:
            path = ROOT / source
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, copy / source)
        readme, project = copy / "README.md", copy / "pyproject.toml"
        readme.write_text(absolute_links(readme.read_text("utf-8"), home), "utf-8")
        if home is not None:
            urls = f'[project.urls]\nRepository = "{home}"\nChangelog = "{home}/blob/main/CHANGELOG.md"'
            project.write_text(project.read_text("utf-8").replace("[project.urls]", urls), "utf-8")
        subprocess.run([sys.executable, "-c", BUILD, out], cwd=copy, check=True, stdout=subprocess.DEVNULL)
    return max(out.glob("lopsided-*.whl"), key=lambda path: path.stat().st_mtime)


def check(wheel: Path, environment: Path) -> None:
    """Install a wheel into a new environment and run the start page from there."""
    venv.create(environment, with_pip=True, clear=True)
    python = environment.resolve() / "bin" / "python"
    constraints = ["--constraint", ROOT / "constraints.txt"]
    # With the sources on the path, pip would say that lopsided is installed already.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([python, "-m", "pip", "install", "--quiet", *constraints, wheel], env=variables, check=True)
    with tempfile.TemporaryDirectory() as folder:
        variables["LOPSIDED_CACHE"] = f"{folder}/cache"
        for command in commands():
            print(f"$ lopsided {command}", flush=True)
            subprocess.run([python, "-m", "lopsided", *command.split()], cwd=folder, env=variables, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--home", help="the address of the repository")
    parser.add_argument("--check", type=Path, metavar="ENVIRONMENT")
    arguments = parser.parse_args()
    made = build(arguments.out, arguments.home)
    print(f"{made} is built")
    if arguments.check is not None:
        check(made, arguments.check)
