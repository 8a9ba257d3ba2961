"""Write release/sbom.cdx.json, the software bill of materials that is part of the wheel (CycloneDX 1.6, PEP 770).

    python release/sbom.py            write it
    python release/sbom.py --check    exit with 1 if it is out of date

It lists what the wheel contains besides code (the built-in model) and what it can be installed with: torch, and the
packages of the extras in the versions and with the hashes of the locks. It has no date, so equal inputs give an equal
file.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import lock
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FILE = lock.ROOT / "release" / "sbom.cdx.json"
MODEL = lock.ROOT / "src" / "headwise" / "models" / "builtin"


def bill() -> dict[str, object]:
    """The bill as plain data."""
    about = lock.project()["project"]
    reference = f"pkg:pypi/{about['name']}@{about['version']}"
    libraries = list(map(component, requirements(about)))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": reference,
                "name": about["name"],
                "version": about["version"],
                "description": about["description"],
                "licenses": [{"license": {"id": about["license"]}}],
                "purl": reference,
            }
        },
        "components": [*libraries, model_component(about["version"])],
        "dependencies": [
            {"ref": reference, "dependsOn": [each["bom-ref"] for each in libraries]},
            *({"ref": each["bom-ref"]} for each in libraries),
        ],
    }


def requirements(about: dict) -> list[tuple[Requirement, str | None]]:
    """Every direct dependency once, and the first extra that brings it."""
    found: dict[str, tuple[Requirement, str | None]] = {}
    named = {None: about["dependencies"], **about["optional-dependencies"]}
    for extra, texts in named.items():
        for need in map(Requirement, texts):
            if need.name != about["name"]:
                found.setdefault(canonicalize_name(need.name), (need, extra))
    return [found[name] for name in sorted(found)]


def component(named: tuple[Requirement, str | None]) -> dict[str, object]:
    """A package that the wheel can be installed with."""
    need, extra = named
    name = canonicalize_name(need.name)
    version, digests = {**lock.locked("run"), **lock.locked("dev"), **unlocked()}[name]
    made = {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}@{version}",
        "name": name,
        "version": version,
        "scope": "required" if extra is None else "optional",
        "purl": f"pkg:pypi/{name}@{version}",
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in digests],
        "properties": [
            {"name": "headwise:allowed", "value": str(need.specifier)},
            {"name": "headwise:extra", "value": extra or "none"},
        ],
    }
    return {name: value for name, value in made.items() if value}


def unlocked() -> dict[str, tuple[str, list[str]]]:
    """Torch, see lock.py, and FlashAttention, which is for GPUs: they have a version and no hash."""
    lines = (lock.ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    versions = dict(line.split("==") for line in lines if "==" in line)
    return {name: (versions[name], []) for name in ("torch", "flash-attn-4")}


def model_component(version: str) -> dict[str, object]:
    """The model in the package."""
    files = sorted(MODEL.glob("*.*"))
    parts = [
        {"type": "file", "name": path.name, "hashes": [{"alg": "SHA-256", "content": digest_of(path)}]}
        for path in files
    ]
    return {
        "type": "machine-learning-model",
        "bom-ref": "headwise-builtin-model",
        "name": "headwise built-in model",
        "version": version,
        "description": "A GPT of 7.6 million parameters, trained on public-domain books; headwise/models/CARD.md "
        "describes it and headwise/models/BOOKS.md lists the books.",
        "licenses": [{"license": {"id": "MIT"}}],
        "components": parts,
    }


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> int:
    """Write or check the bill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    text = json.dumps(bill(), indent=1) + "\n"
    if parser.parse_args().check:
        same = FILE.is_file() and FILE.read_text(encoding="utf-8") == text
        print("up to date" if same else "out of date: run python release/sbom.py")
        return int(not same)
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
