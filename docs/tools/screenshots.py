"""Takes the pictures of the page, the terminal and the server that the documentation shows.

    python docs/tools/screenshots.py                    # into docs/images
    python docs/tools/screenshots.py --before COMMIT    # the same views of an earlier commit, into images/before

It needs Chromium, playwright and Pillow, which reduces the pictures to 256 colors.
"""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import terminal_page
from PIL import Image

import headwise
from headwise.view import View
from headwise.view.color import Palette
from headwise.view.terminal import drawn

TEXT = "The captain looked at the sea, and the sea looked at the captain. Then the captain laughed."
IMAGES = Path(__file__).parent.parent / "images"
SIZE = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 780}
VIEWS = {"heads": "", "text": "#view=words&head=4.2", "map": "#view=map&head=4.2", "table": "#view=table"}
CARRIED = {"contributions": "#what=contribution&color=importance", "carried": "#view=map&head=5.4&what=value&without="}
SURVEYED = ("design.md", "heads.md", "learn.md", "looking.md")
HOVERED = '.word[data-i="11"]'
BEFORE = ("heads", "map", "table")  # what the first page had
SAVED = "import sys, headwise; headwise.view(headwise.load_builtin(), sys.argv[1]).save(sys.argv[2])"
THEMES = ("light", "dark")


def pages(browser: Any, page: Path, into: Path, views: dict[str, str]) -> None:
    """Views of a page in both themes, the ranking of heads for a word, and a phone."""
    for theme in THEMES:
        for name, fragment in views.items():
            shot(browser, f"{page.as_uri()}{fragment}", into / f"{name}_{theme}.png", theme)
        shot(browser, page.as_uri(), into / f"word_{theme}.png", theme, hovered=HOVERED)
        shot(browser, f"{page.as_uri()}{VIEWS['map']}", into / f"phone_{theme}.png", theme, size=PHONE)


def surveys(browser: Any, into: Path, folder: Path) -> None:
    """The page of a survey of some of this documentation, in both themes."""
    with chdir(IMAGES.parent):
        found = headwise.survey(headwise.load_builtin(), SURVEYED, context=256)
    page = folder / "survey.html"
    page.write_text(found.to_html(), encoding="utf-8")
    for theme in THEMES:
        shot(browser, page.as_uri(), into / f"survey_{theme}.png", theme)


def terminals(browser: Any, view: View, into: Path, folder: Path) -> None:
    """The view in a terminal of 80 and of 160 columns."""
    for width, height in ((80, 24), (160, 40)):
        page = folder / f"terminal{width}.html"
        page.write_text(terminal_page.html(drawn(view, width, Palette(24), height)), encoding="utf-8")
        opened = browser.new_page(viewport={"width": 10 * width, "height": 18 * height})
        opened.goto(page.as_uri())
        small(into / f"terminal_{width}.png", opened.locator("pre").screenshot())
        opened.close()


def live(browser: Any, address: str, into: Path) -> None:
    """The server's page after a sweep over all heads, where it has one."""
    for theme in THEMES:
        page = browser.new_page(viewport=SIZE, color_scheme=theme)
        page.goto(address)
        page.wait_for_selector(".ask-text")
        if not page.locator(".sweep, .write").count():  # an earlier page, which waits for a text
            page.fill(".ask-text", TEXT)
            page.click(".go")
        page.wait_for_selector("#headwise .head", timeout=60_000)
        if page.locator(".sweep").count():
            page.click(".sweep")
            page.get_by_text("Bars: what removing").first.wait_for(timeout=120_000)
            page.get_by_label("color words by their loss").check()
        rest(page)
        small(into / f"live_{theme}.png", page.screenshot())
        page.close()


def before(browser: Any, commit: str, into: Path, folder: Path) -> None:
    """The same views, as the code of an earlier commit draws them."""
    git = shutil.which("git") or "git"
    archive = subprocess.run([git, "archive", commit, "src"], check=True, capture_output=True).stdout  # noqa: S603
    with tarfile.open(fileobj=io.BytesIO(archive)) as held:
        held.extractall(folder / "old", filter="data")
    environment = {**os.environ, "PYTHONPATH": str(folder / "old" / "src")}
    page = folder / "old.html"
    subprocess.run([sys.executable, "-c", SAVED, TEXT, str(page)], check=True, env=environment)  # noqa: S603
    pages(browser, page, into, {name: VIEWS[name] for name in BEFORE})
    with server(environment) as address:
        live(browser, address, into)


def shot(
    browser: Any, url: str, path: Path, theme: str, hovered: str | None = None, size: dict[str, int] = SIZE
) -> None:
    """One picture of a page in one theme."""
    page = browser.new_page(viewport=size, color_scheme=theme, reduced_motion="reduce")
    page.goto(url)
    rest(page)
    if hovered:
        page.hover(hovered)
        rest(page)
    small(path, page.screenshot())
    page.close()


def rest(page: Any) -> None:
    """Wait until everything is drawn; pages of earlier commits do not say so, and get a second."""
    page.wait_for_timeout(1000)
    while page.evaluate("document.getElementById('headwise')?.headwise?.resting === false"):
        page.wait_for_timeout(50)


def small(path: Path, picture: bytes) -> None:
    """Write a picture with 256 colors, chosen so that the color map of a legend keeps most of its own."""
    colors, plain = Image.Quantize.MAXCOVERAGE, Image.Dither.NONE
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256, colors, dither=plain).save(path, optimize=True)


@contextmanager
def server(environment: dict[str, str] | None = None) -> Iterator[str]:
    """The address of a server in a process of its own."""
    command = [sys.executable, "-m", "headwise", "serve", "--port", "0", "--no-open", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:  # noqa: S603
        try:
            line = process.stdout.readline() if process.stdout else "{}"
            yield json.loads(line)["address"]
        finally:
            process.terminate()


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="COMMIT", help="take the pictures of an earlier commit instead")
    parser.add_argument("--into", type=Path, help="the folder of the pictures")
    options = parser.parse_args()
    into = options.into or (IMAGES / "before" if options.before else IMAGES)
    into.mkdir(parents=True, exist_ok=True)
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as name, sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        if options.before:
            before(browser, options.before, into, Path(name))
        else:
            view = headwise.view(headwise.load_builtin(), TEXT)
            pages(browser, view.save(Path(name) / "heads.html"), into, VIEWS)
            worth = headwise.view(headwise.load_builtin(), TEXT, importance=True).save(Path(name) / "worth.html")
            for theme in THEMES:
                for shown, fragment in CARRIED.items():
                    shot(browser, f"{worth.as_uri()}{fragment}", into / f"{shown}_{theme}.png", theme)
            terminals(browser, view, into, Path(name))
            surveys(browser, into, Path(name))
            with server() as address:
                live(browser, address, into)
        browser.close()


if __name__ == "__main__":
    main()
