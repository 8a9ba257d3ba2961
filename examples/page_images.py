"""Write the screenshots of pages in docs/images: the atlas and the steps on words, each in light and dark mode.

    python examples/page_images.py

This needs Chromium and playwright.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import headwise
from headwise.learn import word_steps, words_page

TEXT = (
    "The captain looked at the sea, and the sea looked at the captain. Where is the boy? said the captain. The boy "
    "was in the boat, and the boat was on the sea. The captain looked at the boy."
)
FOLDER = Path(__file__).parent.parent / "docs" / "images"
VIEWS = {"page_light.png": ("light", ""), "page_dark.png": ("dark", "#view=map&head=2.1&word=20")}

# The screen position of the weight from "captain" to "?".
PLACE = """(() => {
    const [map] = document.getElementById('headwise').headwise.stage.shown;
    const box = map.canvas.getBoundingClientRect();
    return [box.left + map.pads.left + 20.5 * map.view.scale, box.top + map.pads.top + 23.5 * map.view.scale];
})()"""


def main() -> None:
    """Save the page, open it, and take the screenshots."""
    browser_path = shutil.which("chromium") or sys.exit("no Chromium on this machine: apt-get install chromium")
    view = headwise.view(headwise.load_builtin(), TEXT)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        path = view.save(Path(folder) / "heads.html")
        browser = running.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for name, (scheme, fragment) in VIEWS.items():
            page = browser.new_page(viewport={"width": 1060, "height": 560}, color_scheme=scheme)
            page.goto(f"file://{path}{fragment}")
            page.wait_for_timeout(1500)
            if fragment:
                page.mouse.move(*page.evaluate(PLACE))
            page.wait_for_timeout(500)
            page.screenshot(path=FOLDER / name)
            print(f"{FOLDER / name}: {(FOLDER / name).stat().st_size / 1e3:.0f} KB")
        words = Path(folder) / "words.html"
        words.write_text(words_page(word_steps("The quick brown fox")), encoding="utf-8")
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1240, "height": 760}, color_scheme=scheme)
            page.goto(f"file://{words}#7")
            page.locator("table").nth(2).locator("tbody tr").nth(3).locator("td").nth(2).hover()
            page.screenshot(path=FOLDER / f"words_{scheme}.png")
        browser.close()


if __name__ == "__main__":
    main()
