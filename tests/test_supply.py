"""What is installed is known: lower bounds, locks with hashes, a bill of materials in the wheel, the model's books."""

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("packaging")

import lock
import matrix
import sbom
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from test_wheel import build

ROOT = Path(__file__).parent.parent


def named():
    """Every requirement in pyproject.toml, except on the package itself."""
    about = lock.project()
    lists = [about["build-system"]["requires"], about["project"]["dependencies"]]
    lists += [*about["project"]["optional-dependencies"].values(), *about["dependency-groups"].values()]
    return [need for texts in lists for need in map(Requirement, texts) if need.name != "headwise"]


def constrained():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(x.split("==")[0]): x.split("==")[1] for x in lines if "==" in x}


def test_every_dependency_has_a_lower_bound_that_the_tested_version_fulfils():
    versions = constrained()
    for need in named():
        assert any(part.operator == ">=" for part in need.specifier), need
        assert need.specifier.contains(Version(versions[canonicalize_name(need.name)])), need


def test_every_package_is_locked_with_hashes_and_in_the_version_of_the_constraints():
    locks = {name: lock.locked(name) for name in lock.WHAT}
    assert not {*locks["run"]} & {*locks["dev"]}
    everything = {**locks["run"], **locks["dev"]}
    assert len(everything) > 100
    for name, (version, digests) in everything.items():
        assert constrained().get(name, version) == version
        assert digests, name
        assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in digests)
    wanted = {canonicalize_name(Requirement(text).name) for texts in lock.roots().values() for text in texts}
    assert wanted - everything.keys() == {"torch"}


def test_the_makefile_installs_by_hash_and_torch_alone_by_version():
    text = (ROOT / "Makefile").read_text()
    assert "LOCKED := $(PIP) --require-hashes --no-deps" in text
    installs = [line.strip() for line in text.splitlines() if line.startswith(("\t$(PIP)", "\t$(LOCKED)", "\tpip"))]
    assert installs == [
        "$(LOCKED) --requirement locks/run.txt",
        "$(PIP) --constraint constraints.txt torch",
        "$(PIP) --no-deps --no-build-isolation --editable .",
        "$(LOCKED) --requirement locks/dev.txt",
    ]


def test_no_file_of_the_supply_names_a_host():
    files = [ROOT / "Makefile", ROOT / "constraints.txt", *(ROOT / "locks").iterdir(), *(ROOT / "release").glob("*.*")]
    for path in files:
        assert "://" not in path.read_text(), path


def test_the_locks_hold_what_the_packages_need():
    pytest.importorskip("editables", reason="needs an environment that was made from the locks")
    for name, found in lock.packages().items():
        assert {*found} == {*lock.locked(name)}, name


def test_the_bill_of_materials_is_up_to_date_and_in_the_wheel(tmp_path):
    pytest.importorskip("hatchling")
    assert json.loads(sbom.FILE.read_text()) == sbom.bill(), "run python release/sbom.py"
    files = zipfile.ZipFile(build("wheel", tmp_path))
    (name,) = [name for name in files.namelist() if ".dist-info/sboms/" in name]
    assert name.endswith("/sbom.cdx.json")
    bill = json.loads(files.read(name))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    libraries = {each["name"]: each for each in bill["components"] if each["type"] == "library"}
    about = lock.project()["project"]
    needed = [*about["dependencies"], *(x for texts in about["optional-dependencies"].values() for x in texts)]
    assert {*libraries} == {canonicalize_name(Requirement(x).name) for x in needed} - {"headwise"}
    assert libraries["torch"]["scope"] == "required"
    assert {name for name, each in libraries.items() if "hashes" not in each} == {"torch", "flash-attn-4"}
    references = [bill["metadata"]["component"]["bom-ref"], *(each["bom-ref"] for each in bill["components"])]
    assert len({*references}) == len(references)
    assert {each["ref"] for each in bill["dependencies"]} <= {*references}
    (model,) = [each for each in bill["components"] if each["type"] == "machine-learning-model"]
    for part in model["components"]:
        inside = files.read(f"headwise/models/builtin/{part['name']}")
        assert part["hashes"][0]["content"] == hashlib.sha256(inside).hexdigest()


def test_the_books_of_the_model_are_listed_in_its_card():
    books = (ROOT / "src/headwise/models/BOOKS.md").read_text()
    card = (ROOT / "src/headwise/models/CARD.md").read_text()
    training, held_out = books.split("## Held out")
    counts = [len(re.findall(r"^- .+ \(-?\d+\)$", part, re.MULTILINE)) for part in (training, held_out)]
    assert counts == [359, 8]
    assert "359 books (listed in `BOOKS.md`)" in card
    assert max(int(year) for year in re.findall(r"\((-?\d+)\)$", books, re.MULTILINE)) <= 1920


def test_the_matrix_says_what_it_skips():
    assert matrix.find_python("2.99") is None
    assert matrix.oldest_torch() == "2.11"
    command = [sys.executable, str(ROOT / "release/matrix.py"), "--python", "2.99", "--torch", "2.11", "newest"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("skipped") == 2
    assert "there is no Python 2.99 on this machine" in ran.stdout
