"""Write locks/run.txt and locks/dev.txt: what `make run` and `make test` install, with versions and hashes.

    python release/lock.py            lock what is installed in this environment, with the hashes from pip's index
    python release/lock.py --check    list packages whose installed version differs from the locks

Wheels for Python 3.11 and newer are locked, or the source if there is no wheel. Torch, and the packages that only its
CUDA builds need, are left out. A build of torch depends on the machine (CPU, or a version of CUDA), and each build has
different hashes, so the Makefile installs torch last, by version, and checks only that.
"""

import argparse
import html.parser
import os
import re
import ssl
import sys
import tomllib
import urllib.request
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCKS = ROOT / "locks"
HEAD = """# Written by `python release/lock.py`: do not edit. Versions and SHA-256 of {what}.
# Torch is not here: its builds differ between machines. The Makefile installs it by version.
"""
WHAT = {"run": "what `make run` installs", "dev": "what `make test` installs as well"}
BUILD = ("pip", "editables")  # what an editable installation needs besides the build backend
# Torch, and what its builds bring along.
UNLOCKED = re.compile(r"torch|nvidia-.*|cuda-.*|headwise")
WHEEL = re.compile(r"-(?:py3|py2\.py3|cp3(?:1[1-9])|cp3\d+-abi3)[^/]*\.whl$")
ELSEWHERE = ("musllinux", "pyodide", "ppc64le", "s390x", "armv7l", "riscv64", "i686", "win32", "android", "ios_")


def project() -> dict:
    """What pyproject.toml says."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def roots() -> dict[str, list[str]]:
    """For each lock, the requirements that pyproject.toml names."""
    about = project()
    extras, groups = about["project"]["optional-dependencies"], about["dependency-groups"]
    run = [*about["project"]["dependencies"], *about["build-system"]["requires"], *BUILD, "numpy"]
    run += [name for extra in ("builtin", "terminal", "save") for name in extras[extra]]
    return {"run": run, "dev": groups["dev"]}


def needed(names: list[str]) -> dict[str, str]:
    """All installed packages that these need, themselves among them: name and version."""
    found: dict[str, str] = {}
    waiting = [(Requirement(name), "") for name in names]
    while waiting:
        need, extra = waiting.pop()
        if need.marker is not None and not need.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(need.name)
        is_new = name not in found
        installed = metadata.distribution(name)
        found[name] = installed.version
        if is_new or need.extras:
            waiting += [(Requirement(text), one) for text in installed.requires or () for one in (need.extras or {""})]
    return dict(sorted((name, version) for name, version in found.items() if not UNLOCKED.fullmatch(name)))


class Links(html.parser.HTMLParser):
    """The files that an index lists for a package: name and SHA-256."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, str] = {}

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Keep a link that has a hash."""
        link = dict(attributes).get("href") or ""
        if tag == "a" and (found := re.search(r"([^/#]+)#sha256=([0-9a-f]{64})$", link)):
            self.files[found[1].replace("%2B", "+")] = found[2]


def hashes(name: str, version: str) -> list[str]:
    """The SHA-256 of every wheel of a release that can be installed, or of its source."""
    from pip._internal.models.index import PyPI

    index = os.environ.get("PIP_INDEX_URL") or PyPI.simple_url
    request = urllib.request.Request(f"{index.rstrip('/')}/{name}/", headers={"Accept": "text/html"})  # noqa: S310
    trusted = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    with urllib.request.urlopen(request, timeout=60, context=trusted) as answer:  # noqa: S310
        links = Links()
        links.feed(answer.read().decode())
    begins = re.compile(rf"{re.sub('[-_.]+', '[-_.]+', name)}-{re.escape(version)}(?:-|\.tar|\.zip)", re.IGNORECASE)
    files = {file: digest for file, digest in links.files.items() if begins.match(file)}
    wheels = [x for file, x in files.items() if WHEEL.search(file) and not any(word in file for word in ELSEWHERE)]
    found = wheels or [x for file, x in files.items() if file.endswith((".tar.gz", ".zip"))]
    if not found:
        sys.exit(f"{name}=={version}: the index lists no file of this version with a hash")
    return sorted(found)


def locked(lock: str) -> dict[str, tuple[str, list[str]]]:
    """What a lock says: for each package, its version and its hashes."""
    text = (LOCKS / f"{lock}.txt").read_text(encoding="utf-8").replace("\\\n", "")
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            package, *digests = re.split(r"\s+--hash=sha256:", line.strip())
            name, _, version = package.partition(" ;")[0].strip().partition("==")
            found[name] = (version, digests)
    return found


def packages() -> dict[str, dict[str, str]]:
    """What belongs in each lock; a package is in one of them."""
    named = roots()
    run, dev = needed(named["run"]), needed(named["dev"])
    return {"run": run, "dev": {name: version for name, version in dev.items() if name not in run}}


def main() -> int:
    """Write or check the locks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the locks with what is installed")
    check = parser.parse_args().check
    wrong = 0
    for lock, found in packages().items():
        if check:
            there = {name: version for name, (version, _) in locked(lock).items()}
            for name in sorted({*found, *there}):
                if found.get(name) != there.get(name):
                    wrong += 1
                    print(f"{lock}: {name} is {there.get(name)} in the lock and {found.get(name)} here")
            continue
        LOCKS.mkdir(exist_ok=True)
        only = {canonicalize_name(x.name): f" ; {x.marker}" for x in map(Requirement, roots()[lock]) if x.marker}
        parts = []
        for name, version in found.items():
            files = [f"--hash=sha256:{digest}" for digest in hashes(name, version)]
            parts.append(" \\\n    ".join([f"{name}=={version}{only.get(name, '')}", *files]))
        (LOCKS / f"{lock}.txt").write_text(HEAD.format(what=WHAT[lock]) + "\n".join(parts) + "\n", encoding="utf-8")
        print(f"locks/{lock}.txt: {len(found)} packages", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
