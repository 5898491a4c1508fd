"""Write the components of an installation as a CycloneDX list: lopsided and all that it needs here.

    python scripts/sbom.py sbom.json

The versions, licences and requirements are those of this environment. Packages that only extras or development need are
left out.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lopsided

ROOT = Path(__file__).parents[1]


def needed(lines: Iterable[str]) -> set[str]:
    """Return the distributions that requirements name for this machine, without extras."""
    requirements = map(Requirement, lines)
    return {
        canonicalize_name(line.name)
        for line in requirements
        if line.marker is None or line.marker.evaluate({"extra": ""})
    }


def closure(names: Iterable[str]) -> dict[str, set[str]]:
    """Return each installed distribution that is needed, directly or not, with what it needs itself."""
    found: dict[str, set[str]] = {}
    left = list(names)
    while left:
        name = left.pop()
        if name not in found:
            try:
                found[name] = needed(metadata.requires(name) or ())
            except metadata.PackageNotFoundError:  # For another platform.
                continue
            left += found[name]
    return {name: {each for each in others if each in found} for name, others in found.items()}


def component(name: str) -> dict[str, Any]:
    """Return the entry of an installed distribution."""
    about = metadata.metadata(name)
    version = metadata.version(name)
    purl = f"pkg:pypi/{name}@{version}"
    licence = about.get("License-Expression") or (about.get("License") or "").strip().partition("\n")[0]
    entry: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    return entry | ({"licenses": [{"license": {"name": licence}}]} if licence else {})


def components() -> dict[str, Any]:
    """Return the whole list."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    direct = needed(project["dependencies"])
    everything = closure(direct)
    parts = {name: component(name) for name in sorted(everything)}
    own = f"pkg:pypi/lopsided@{lopsided.__version__}"
    graph = [{"ref": own, "dependsOn": sorted(parts[name]["bom-ref"] for name in direct if name in parts)}]
    graph += [
        {"ref": parts[name]["bom-ref"], "dependsOn": sorted(parts[each]["bom-ref"] for each in others)}
        for name, others in sorted(everything.items())
    ]
    about = {"type": "library", "bom-ref": own, "name": "lopsided", "version": lopsided.__version__, "purl": own}
    licences = [{"expression": project["license"]}]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": {**about, "licenses": licences},
        },
        "components": list(parts.values()),
        "dependencies": graph,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    content = components()
    out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"{len(content['components'])} components are in {out}")
