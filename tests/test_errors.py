"""What an error says of a package that is missing: what needs it, and a command that installs it here."""

import importlib.metadata
import json
from pathlib import Path

import pytest

from headwise import MissingExtraError, errors
from headwise.cli import main
from headwise.errors import install_command, need

ROOT = Path(__file__).parents[1]


def installed(monkeypatch, tmp_path, origin):
    """Pretend that headwise is installed outside a clone, and that pip remembers this of where it came from."""
    site = tmp_path / "lib" / "site-packages" / "headwise"
    monkeypatch.setattr(errors, "__file__", str(site / "errors.py"))
    told = type("Distribution", (), {"read_text": lambda self, name: origin})
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: told())


def test_in_a_clone_an_extra_is_installed_from_it(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert install_command("serve") == "pip install '.[serve]'"
    monkeypatch.chdir(tmp_path)
    assert install_command("serve") == f"pip install '{ROOT}[serve]'"


@pytest.mark.parametrize("name", ["clone", "headwise-0.1.0-py3-none-any.whl", "a folder"])
def test_an_extra_is_installed_from_where_pip_found_headwise(name, monkeypatch, tmp_path):
    place = tmp_path / name
    installed(monkeypatch, tmp_path, json.dumps({"url": place.as_uri(), "dir_info": {"editable": True}}))
    assert install_command("save") == "pip install 'headwise[save]'", "it is no longer there"
    place.mkdir()
    assert install_command("save") == f"pip install '{place}[save]'"


@pytest.mark.parametrize("origin", [None, json.dumps({"url": "https://example.org/headwise.git", "vcs_info": {}})])
def test_elsewhere_an_extra_is_installed_by_name(origin, monkeypatch, tmp_path):
    installed(monkeypatch, tmp_path, origin)
    assert install_command("plot") == "pip install 'headwise[plot]'"


def test_what_needs_a_package_agrees_with_its_verb(monkeypatch, capsys):
    for package in ("starlette", "matplotlib"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
    assert main(["serve"]) == 2
    assert "the server needs starlette. Install it with: " in " ".join(capsys.readouterr().err.split())
    with pytest.raises(MissingExtraError, match="^plots need matplotlib. Install it with: "):
        need("matplotlib", "plot", "plots")
