"""Takes the pictures of the page, the terminal and the server that the documentation shows.

    python docs/tools/screenshots.py                                  # into docs/images
    python docs/tools/screenshots.py --page old.html --into FOLDER    # the same views of a page that exists

It needs Chromium, playwright and Pillow, which reduces the pictures to 96 colors.
"""

import argparse
import io
import json
import shutil
import subprocess
import sys
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
SIZE = {"width": 1280, "height": 800}
VIEWS = {"heads": "", "text": "#view=words&head=4.2", "map": "#view=map&head=4.2"}
SURVEYED = ("design.md", "heads.md", "learn.md", "looking.md")
HOVERED = '.word[data-i="11"]'


def pages(browser: Any, page: Path, into: Path) -> None:
    """Every view of a page in both themes, and the ranking of heads for a word."""
    for theme in ("light", "dark"):
        for name, fragment in VIEWS.items():
            shot(browser, f"{page.as_uri()}{fragment}", into / f"{name}_{theme}.png", theme)
    shot(browser, page.as_uri(), into / "word_dark.png", "dark", hovered=HOVERED)


def surveys(browser: Any, into: Path, folder: Path) -> None:
    """The page of a survey of some of this documentation, in both themes."""
    with chdir(IMAGES.parent):
        found = headwise.survey(headwise.load_builtin(), SURVEYED, context=256)
    page = folder / "survey.html"
    page.write_text(found.to_html(), encoding="utf-8")
    for theme in ("light", "dark"):
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
    """The server's page after a sweep over all heads."""
    page = browser.new_page(viewport=SIZE, color_scheme="light")
    page.goto(address)
    page.wait_for_selector("#headwise .head")
    page.click(".sweep")
    page.get_by_text("Bars: what switching").wait_for(timeout=120_000)
    page.get_by_label("color words by their loss").check()
    page.wait_for_timeout(500)
    small(into / "live_light.png", page.screenshot())
    page.close()


def shot(browser: Any, url: str, path: Path, theme: str, hovered: str | None = None) -> None:
    """One picture of a page in one theme."""
    page = browser.new_page(viewport=SIZE, color_scheme=theme, reduced_motion="reduce")
    page.goto(url)
    page.wait_for_timeout(700)
    if hovered:
        page.hover(hovered)
        page.wait_for_timeout(500)
    small(path, page.screenshot())
    page.close()


def small(path: Path, picture: bytes) -> None:
    """Write a picture with few colors."""
    reduced = Image.open(io.BytesIO(picture)).convert("RGB").quantize(96, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)


@contextmanager
def server() -> Iterator[str]:
    """The address of a server in a process of its own."""
    command = [sys.executable, "-m", "headwise", "serve", "--port", "0", "--no-open", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own command
        try:
            line = process.stdout.readline() if process.stdout else "{}"
            yield json.loads(line)["address"]
        finally:
            process.terminate()


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="a page to take pictures of, instead of a new one")
    parser.add_argument("--into", type=Path, default=IMAGES, help="the folder of the pictures")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as name, sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        if options.page is not None:
            pages(browser, options.page.resolve(), options.into)
        else:
            view = headwise.view(headwise.load_builtin(), TEXT)
            pages(browser, view.save(Path(name) / "heads.html"), options.into)
            terminals(browser, view, options.into, Path(name))
            surveys(browser, options.into, Path(name))
            with server() as address:
                live(browser, address, options.into)
        browser.close()


if __name__ == "__main__":
    main()
