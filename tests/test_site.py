"""The site of docs/ builds without a warning, is complete, needs no network, and shows what the code gives."""

import base64
import os
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

import headwise

pytest.importorskip("mkdocs")
yaml = pytest.importorskip("yaml")
pytest.importorskip("material", reason="needs mkdocs-material")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NUMBER = re.compile(r"\d+\.\d+")
IMAGE = re.compile(r"data:image/png;base64,([\w+/=]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run([*command, "--site-dir", str(folder)], capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stderr
    return folder


def pages(entry):
    """The pages of a nav, in order."""
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    return [page for value in values for page in pages(value)]


def test_every_page_of_docs_is_in_the_nav():
    nav = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert len(nav) == len(set(nav))
    assert {path.name for path in DOCS.glob("*.md")} - set(nav) == set()


def test_every_page_is_built(site):
    nav = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert [page for page in nav if not (site / page).with_suffix(".html").is_file()] == []


class Assets(HTMLParser):
    """What a page loads by itself, as against links to follow."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        loads = tag != "a" and (tag != "link" or given.get("rel") not in ("canonical", "next", "prev"))
        self.found += [given[name] for name in ("src", "href", "srcset", "data") if loads and given.get(name)]


def test_no_page_loads_anything_from_a_network(site):
    for path in site.rglob("*.html"):
        assets = Assets()
        assets.feed(path.read_text(encoding="utf-8"))
        assert assets.found
        assert [asset for asset in assets.found if re.match(r"(\w+:)?//", asset)] == [], path.name


def test_no_style_loads_anything_from_a_network(site):
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert styles
    assert [found for style in styles for found in re.findall(r"(?:url\(|@import)\s*['\"]?(?:\w+:)?//", style)] == []


def test_reference_shows_every_public_name(site):
    shown = set(re.findall(r'id="headwise\.([\w.]+)"', (site / "api.html").read_text(encoding="utf-8")))
    # A function in a module of its own name is shown by its whole name: the short one would show the module.
    known = {name: {name, f"{name}.{name}"} for name in headwise.__all__}
    assert [name for name, spellings in known.items() if not spellings & shown] == []


def test_reference_shows_all_that_can_be_asked_of_a_map(site):
    shown = set(re.findall(r'id="headwise\.AttentionMap\.(\w+)"', (site / "api.html").read_text(encoding="utf-8")))
    ours = {name for kind in headwise.AttentionMap.__mro__[:-1] for name in vars(kind) if name[0] != "_"}
    assert ours - shown == set()


def test_reference_shows_examples_as_code(site):
    text = (site / "api.html").read_text(encoding="utf-8")
    assert '<span class="gp">&gt;&gt;&gt; </span>' in text
    assert "<p>&gt;&gt;&gt;" not in text
    assert "<blockquote>" not in text


def assert_same(written, made, tolerance):
    """The same words, and numbers that differ by no more than machines do."""
    assert NUMBER.sub("#", written) == NUMBER.sub("#", made)
    numbers = zip(NUMBER.findall(written), NUMBER.findall(made), strict=True)
    assert max((abs(float(a) - float(b)) for a, b in numbers), default=0.0) <= tolerance


def test_page_of_the_ten_steps_is_that_of_the_trace():
    import steps_document

    assert_same((DOCS / "steps.md").read_text(encoding="utf-8"), steps_document.page(), 0.0101)
    for name, picture in steps_document.pictures().items():
        assert_same((DOCS / "images" / name).read_text(encoding="utf-8"), picture, 0.0101)


def shades(picture):
    """The shades of the maps in a picture."""
    found = [base64.b64decode(image).split(b"IDAT")[1] for image in IMAGE.findall(picture)]
    return [zlib.decompressobj().decompress(data) for data in found]


def test_page_of_the_heads_is_that_of_the_model():
    pytest.importorskip("tokenizers")
    import heads_document

    model = headwise.load_builtin()
    page = (DOCS / "heads.md").read_text(encoding="utf-8")
    assert_same(page, heads_document.with_table(page, heads_document.table(model)), 0.0101)
    for name, picture in heads_document.pictures(model).items():
        written = (DOCS / "images" / name).read_text(encoding="utf-8")
        assert IMAGE.sub("", written) == IMAGE.sub("", picture)
        for old, new in zip(shades(written), shades(picture), strict=True):
            assert max(abs(a - b) for a, b in zip(old, new, strict=True)) <= 3
