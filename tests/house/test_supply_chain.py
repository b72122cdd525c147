"""The lock, the floors and the bill of materials say the same as pyproject.toml."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKED = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^ ;\n]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))


def asked(*extras: str) -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *(x for extra in extras for x in PROJECT["optional-dependencies"][extra])]
    return [r for r in map(Requirement, lines) if r.name != "whence"]


def run(script: str) -> str:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / script], capture_output=True, text=True, check=True
    ).stdout


def test_the_lock_has_every_package_within_what_is_allowed() -> None:
    for requirement in asked("web", "train", "scale", "explain", "plot", "dev", "docs"):
        version = LOCKED[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} and {version}"


def test_ceilings_are_the_next_major_version_after_the_newest_tried() -> None:
    for requirement in asked("web", "train", "scale", "explain", "plot"):
        major = int(LOCKED[canonicalize_name(requirement.name)].split(".")[0])
        ceilings = [one.version for one in requirement.specifier if one.operator == "<"]
        assert ceilings == [str(major + 1)], f"{requirement}, tried with {major}"


def test_the_lowest_versions_are_the_floors() -> None:
    lowest = dict(line.split("==") for line in run("lowest").split())
    for requirement in asked("web", "plot", "explain", "train"):
        if requirement.name != "torch":  # pinned besides
            assert f">={lowest[requirement.name]}" in str(requirement.specifier)


def test_the_bill_of_materials_names_what_is_needed_and_nothing_else() -> None:
    for requirement in asked("web", "train", "scale", "explain", "plot"):
        try:
            distribution(requirement.name)
        except PackageNotFoundError:
            pytest.skip(f"{requirement.name} is not installed here: the bill needs all extras")
    bill = json.loads(run("sbom"))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    versions = {one["name"]: one["version"] for one in bill["components"]}
    assert all(LOCKED[name] == version for name, version in versions.items())
    direct = {canonicalize_name(r.name) for r in asked("web", "train", "scale", "explain", "plot")}
    assert direct <= versions.keys()
    assert not {"pytest", "ruff", "mypy", "playwright", "mkdocs-material"} & versions.keys()  # tools are not materials
    needed = {one["ref"]: one["dependsOn"] for one in bill["dependencies"]}
    assert set(needed["whence"]) == direct
    assert needed.keys() - {"whence"} == versions.keys() == {x for many in needed.values() for x in many}
    assert all(one["purl"] == f"pkg:pypi/{one['name']}@{one['version']}" for one in bill["components"])
