"""What is published: wheel and source build, are small and complete, and the wheel works with torch alone."""

import contextlib
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="needs hatchling, which builds the package")

ROOT = Path(__file__).parent.parent
LARGEST = 25 * 10**6  # bytes
BUILD = "import sys, hatchling.build as b; sys.stdout.write(getattr(b, sys.argv[1])(sys.argv[2]))"
ALONE = ("torch", "numpy")  # torch warns without numpy, and warnings are errors

SMOKE = """
import contextlib, importlib.util, io, sys
sys.path[:0] = sys.argv[1:]
import torch
import headwise
from headwise.check.templates import write
from headwise.cli import main

assert headwise.__file__.startswith(sys.argv[1]), headwise.__file__
layer = headwise.MultiHeadAttention(24, 3, causal=True, position=headwise.rotary())
x = torch.randn(2, 7, 24)
output, weights = layer(x, mask=headwise.window(3), return_weights=True)
torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 7))
assert len(weights.summary()) == 3
names = {}
exec(write("separate", "scale-d_model"), names)
assert headwise.check(names["MultiHeadAttention"]).cause == "scale-d_model"
with contextlib.redirect_stdout(io.StringIO()) as out:
    assert main(["steps", "--json"]) == 0
assert '"steps"' in out.getvalue()
for name in ("tokenizers", "safetensors", "rich", "transformers", "pyarrow"):
    assert importlib.util.find_spec(name) is None, name
try:
    headwise.load_builtin()
except headwise.MissingExtraError as error:
    assert "[builtin]'" in str(error), error
else:
    raise AssertionError("the built-in model needs packages that are not there")
print("works")
"""


def build(kind, folder, root=ROOT):
    made = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(folder)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return folder / made.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return build("sdist", tmp_path_factory.mktemp("source"))


def package_files():
    folder = ROOT / "src"
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts}


def test_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name for name in names if not name.startswith("headwise-")}
    assert inside == package_files()
    assert {"headwise/py.typed", "headwise/models/builtin/weights.safetensors"} <= inside


def test_wheel_holds_licence_command_and_torch_as_its_one_dependency(wheel):
    files = zipfile.ZipFile(wheel)
    (folder,) = {name.split("/")[0] for name in files.namelist() if name.startswith("headwise-")}
    assert (ROOT / "LICENSE").read_bytes() == files.read(f"{folder}/licenses/LICENSE")
    assert b"headwise = headwise.cli:main" in files.read(f"{folder}/entry_points.txt")
    needed = re.findall(r"^Requires-Dist: (.*)$", files.read(f"{folder}/METADATA").decode(), re.MULTILINE)
    assert [name for name in needed if "extra ==" not in name] == ["torch>=2.11"]


def test_wheel_and_source_are_small(wheel, source):
    assert wheel.stat().st_size < LARGEST
    assert source.stat().st_size < LARGEST


def test_source_builds_the_same_wheel(wheel, source, tmp_path):
    with tarfile.open(source) as files:
        files.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    there = {
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "CITATION.cff",
        "Makefile",
        "constraints.txt",
        "mkdocs.yml",
        "tests",
    }
    assert there <= {path.name for path in root.iterdir()}
    again = build("wheel", tmp_path, root)
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def needed_by(names):
    """Distributions that are installed and needed by these, these among them."""
    found = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        with contextlib.suppress(metadata.PackageNotFoundError):  # for another system or an extra
            found[name] = metadata.distribution(name)
            needed = [need for need in found[name].requires or [] if "extra ==" not in need]
            waiting += {re.match(r"[\w.-]+", need)[0] for need in needed} - found.keys()
    return found.values()


def link(folder, distributions):
    """An environment that holds these alone."""
    for distribution in distributions:
        for name in {file.parts[0] for file in distribution.files if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / name).exists():
                (folder / name).symlink_to(distribution.locate_file(name))


def test_wheel_works_with_torch_alone(wheel, tmp_path):
    package, packages = tmp_path / "package", tmp_path / "packages"
    zipfile.ZipFile(wheel).extractall(package)  # noqa: S202 - we have just built it
    packages.mkdir()
    link(packages, needed_by(ALONE))
    command = [sys.executable, "-I", "-S", "-W", "error", "-c", SMOKE, str(package), str(packages)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ran.stdout == "works\n", ran.stderr
