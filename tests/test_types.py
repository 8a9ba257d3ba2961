"""The README's Python examples pass `mypy --strict`, so the types of the public names are those a user sees."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_python_blocks_of_the_readme_pass_mypy_strict(tmp_path):
    api = pytest.importorskip("mypy.api")
    program = tmp_path / "readme.py"
    program.write_text("\n".join(BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))), encoding="utf-8")
    # The cache of `make types`, with its options: torch alone takes a minute to analyze.
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    said, errors, _ = api.run([*options, "--strict", str(program)])
    assert errors == ""
    assert said.startswith("Success"), said
