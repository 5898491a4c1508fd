"""Write constraints-oldest.txt, the oldest versions that pyproject.toml admits: ``make oldest`` tests with them.

    python scripts/oldest.py              # the direct dependencies from pyproject.toml; the rest of the file is kept
    python scripts/oldest.py --brought    # and the rest anew: what the direct ones brought along into this environment
    python scripts/oldest.py --check      # write nothing; exit with 1 when the file and pyproject.toml do not agree

Every requirement has one lower bound, and the bound is a version that exists, so that "the oldest" needs no look at an
index. What the direct dependencies bring along is pinned as it was tested; pyproject.toml says nothing about it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints-oldest.txt"
HEAD = "# The oldest versions that pyproject.toml admits, written by scripts/oldest.py and tested by make oldest."
BROUGHT = "# What these bring along, as it was tested."
# torch names the versions of these itself, and another platform has others or none.
_PLATFORM = re.compile(r"nvidia-|cuda-|triton$")


def direct(pyproject: Path = ROOT / "pyproject.toml") -> dict[str, str]:
    """Map each requirement of the package and of its extras to its lower bound; raise for one that has another form."""
    project = tomllib.loads(pyproject.read_text())["project"]
    found: dict[str, str] = {}
    for text in [
        *project["dependencies"],
        *(line for lines in project["optional-dependencies"].values() for line in lines),
    ]:
        requirement = Requirement(text)
        if requirement.name == project["name"]:
            continue
        bounds = [bound.version for bound in requirement.specifier if bound.operator == ">="]
        if len(bounds) != 1:
            raise ValueError(f"{text} in pyproject.toml must have one lower bound, as numpy>=1.26.0")
        if found.setdefault(requirement.name, bounds[0]) != bounds[0]:
            raise ValueError(f"{requirement.name} in pyproject.toml must have one lower bound, got two")
    return found


def read(text: str) -> dict[str, str]:
    """Map each name of a file of constraints to its version."""
    return dict(line.split("==") for line in text.splitlines() if line and not line.startswith("#"))


def brought_along(names: Iterable[str]) -> dict[str, str]:
    """Versions in this environment of all that the given distributions need, directly or not, without themselves."""
    given = {canonicalize_name(name) for name in names}
    found: dict[str, str] = {}
    left = [(name, frozenset[str]()) for name in given]
    seen = set(left)
    while left:
        name, extras = left.pop()
        distribution = metadata.distribution(name)
        if name not in given and not _PLATFORM.match(name):
            found[name] = distribution.version.partition("+")[0]
        for text in distribution.requires or ():
            requirement = Requirement(text)
            wanted = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}
            )
            step = (canonicalize_name(requirement.name), frozenset(requirement.extras))
            if wanted and step not in seen:
                seen.add(step)
                left.append(step)
    return found


def render(pins: dict[str, str], brought: dict[str, str]) -> str:
    """The whole file, each part in alphabetical order."""
    parts = [[f"{name}=={version}" for name, version in sorted(part.items())] for part in (pins, brought)]
    return "\n".join([HEAD, *parts[0], BROUGHT, *parts[1], ""])


def main() -> int:
    """Write the file, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--brought", action="store_true", help="take the indirect ones from this environment")
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    pins = {canonicalize_name(name): version for name, version in direct().items()}
    old = CONSTRAINTS.read_text() if CONSTRAINTS.exists() else BROUGHT
    kept = {name: version for name, version in read(old.partition(BROUGHT)[2]).items() if name not in pins}
    new = render(pins, brought_along(pins) if arguments.brought else kept)
    if arguments.check:
        if new != old:
            print(
                "constraints-oldest.txt must agree with pyproject.toml. Run python scripts/oldest.py.", file=sys.stderr
            )
        return int(new != old)
    CONSTRAINTS.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
