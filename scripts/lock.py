"""Print the versions that trinity and some of its extras have in this environment, one a line.

    .venv/bin/python scripts/lock.py api gym > requirements/cpu.txt

Only what they need is listed, and what that needs in turn. With ``--report FILE`` the versions are
those that pip chose (`pip install --dry-run --report FILE`), for a machine that is not this one.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def installed(extras: list[str]) -> dict[str, str]:
    """Name and version of all that trinity with ``extras`` needs here."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    optional = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in extras for line in optional[extra])]
    waiting = [Requirement(line) for line in lines]
    found: dict[str, str] = {}
    seen = set()
    while waiting:
        wanted = waiting.pop()
        name, own = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if (name, own) in seen:
            continue
        seen.add((name, own))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            print(f"{name} is not installed here", file=sys.stderr)
            continue
        found[name] = distribution.version
        waiting += _needed(distribution.requires or (), own)
    return found


def _needed(lines: Iterable[str], extras: frozenset[str]) -> Iterator[Requirement]:
    """The requirements that hold here, with those extras of a package."""
    for line in lines:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield requirement


def reported(file: Path) -> dict[str, str]:
    """Name and version of all that pip would install."""
    packages = [entry["metadata"] for entry in json.loads(file.read_text())["install"]]
    return {canonicalize_name(package["name"]): package["version"] for package in packages}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*")
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    found = reported(args.report) if args.report else installed(args.extras)
    for name, version in sorted(found.items()):
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()
