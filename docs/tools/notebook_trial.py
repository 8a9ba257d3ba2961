"""Opens what notebooks show in a real JupyterLab: runs it, saves it, opens it again, exports it.

    python docs/tools/notebook_trial.py --into FOLDER    # pictures, the notebook and its HTML are kept there

It needs jupyterlab, nbconvert, Chromium and playwright, and prints one line for each thing that it tried. A notebook is
opened three times: as it was run, again after it was saved, and as one from somebody else, which Jupyter does not
trust and whose frames it removes. Other viewers remove them too; what is left must be the static picture.
"""

import argparse
import json
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TEXT = "The captain looked at the sea, and the sea looked at the captain."
CELLS = (
    f'import headwise\nimport torch\nmodel = headwise.load_builtin()\ntext = "{TEXT}"',
    "headwise.view(model, text, importance=True)",
    "with torch.no_grad(), headwise.watch(model.gpt) as seen:\n    model.gpt(model.tokens(text))\nseen",
    'seen["blocks.4.attention"]',
    "%load_ext headwise",
    "%%headwise_check\nimport torch\nclass Attention(torch.nn.Module):\n    pass",
)
FRAMES = 3  # outputs that are pages


def notebook(cells: tuple[str, ...] = CELLS) -> dict[str, Any]:
    """A notebook that was not run."""
    made = [
        {
            "cell_type": "code",
            "id": f"cell-{i}",
            "metadata": {},
            "source": source,
            "outputs": [],
            "execution_count": None,
        }
        for i, source in enumerate(cells)
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return {"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


@contextmanager
def jupyter(folder: Path) -> Iterator[str]:
    """The address of a JupyterLab, which serves the folder while this is open; {} is the place of a path."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    token = secrets.token_hex(16)
    options = ["--no-browser", f"--port={port}", f"--IdentityProvider.token={token}", "--allow-root"]
    command = [sys.executable, "-m", "jupyterlab", *options, "--LabApp.collaborative=False", f"--notebook-dir={folder}"]
    log = (folder / "jupyter.log").open("w")
    with log, subprocess.Popen(command, stdout=log, stderr=log, cwd=folder) as process:  # noqa: S603 - our own command
        try:
            until_it_answers(f"http://127.0.0.1:{port}/api?token={token}")
            yield f"http://127.0.0.1:{port}/lab/tree/{{}}?token={token}&reset"
        finally:
            process.terminate()


def until_it_answers(url: str, seconds: float = 60) -> None:
    """Wait for a server."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(url, timeout=2)  # noqa: S310 - this computer
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
        else:
            return
    raise SystemExit(f"{url} did not answer within {seconds:g} seconds.")


class Lab:
    """A notebook that is open in JupyterLab.

    Args:
        browser: of playwright.
        address: of the server, with {} for the path.
        path: the notebook, in the folder of the server.
    """

    def __init__(self, browser: Any, address: str, path: str) -> None:
        self.page = browser.new_page(viewport={"width": 1440, "height": 1000})
        self.page.goto(address.format(path))
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.page.wait_for_timeout(1500)

    def run(self) -> None:
        """Run all cells and save."""
        self.page.click("text=Run >> nth=0")
        self.page.get_by_text("Run All Cells", exact=True).first.click()
        self.page.wait_for_function(
            "Array.from(document.querySelectorAll('.jp-CodeCell .jp-InputPrompt'))"
            f".filter((x) => /\\[\\d+\\]/.test(x.textContent)).length === {len(CELLS)}",
            timeout=120_000,
        )
        self.page.wait_for_timeout(1500)
        self.page.keyboard.press("Control+s")
        self.page.wait_for_timeout(1500)

    def drawn(self) -> list[int]:
        """The number of heads that each frame draws; frames below the window are drawn when they are scrolled to."""
        found = []
        for frame in self.page.query_selector_all(".jp-OutputArea iframe"):
            frame.scroll_into_view_if_needed()
            inner = frame.content_frame()
            inner.wait_for_selector(".head canvas", timeout=30_000)
            found.append(inner.locator(".head").count())
        return found

    def pictures(self) -> int:
        """How many static pictures there are."""
        return int(self.page.locator(".jp-OutputArea img").count())

    def shot(self, path: Path) -> None:
        """A picture of the window at the first output."""
        outputs = self.page.query_selector_all(".jp-OutputArea-output")
        outputs[0].scroll_into_view_if_needed()
        self.page.wait_for_timeout(700)
        self.page.screenshot(path=str(path))


def trial(folder: Path) -> list[str]:
    """Try everything; a line for each thing that was seen."""
    from playwright.sync_api import sync_playwright

    (folder / "heads.ipynb").write_text(json.dumps(notebook()), encoding="utf-8")
    told = []
    with jupyter(folder) as address, sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        lab = Lab(browser, address, "heads.ipynb")
        lab.run()
        told.append(f"run: frames with {lab.drawn()} heads, check said {verdict(lab.page)}")
        lab.shot(folder / "run.png")
        lab.page.close()
        size = (folder / "heads.ipynb").stat().st_size
        told.append(f"saved: {size:,} bytes")
        again = Lab(browser, address, "heads.ipynb")
        told.append(f"opened again: frames with {again.drawn()} heads")
        again.shot(folder / "again.png")
        again.page.close()
        shutil.copy(folder / "heads.ipynb", folder / "strange.ipynb")
        strange = json.loads((folder / "strange.ipynb").read_text(encoding="utf-8"))
        strange["cells"][0]["source"] += "\n# from somebody else"  # so that its signature is unknown
        (folder / "strange.ipynb").write_text(json.dumps(strange), encoding="utf-8")
        other = Lab(browser, address, "strange.ipynb")
        told.append(f"not trusted: {len(other.drawn())} frames, {other.pictures()} static pictures")
        other.shot(folder / "strange.png")
        other.page.close()
        told.append(exported(browser, folder))
        browser.close()
    return told


def verdict(page: Any) -> str:
    """The beginning of what the checker said in the last cell."""
    text = page.locator(".jp-CodeCell").last.locator(".jp-OutputArea").inner_text().strip()
    return repr(" ".join(text.split())[:60])


def exported(browser: Any, folder: Path) -> str:
    """The notebook as HTML, opened from disk."""
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "heads.ipynb"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)  # noqa: S603 - our own command
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    page.goto((folder / "heads.html").as_uri())
    heads = []
    for frame in page.query_selector_all("iframe"):
        frame.scroll_into_view_if_needed()
        inner = frame.content_frame()
        inner.wait_for_selector(".head canvas", timeout=30_000)
        heads.append(inner.locator(".head").count())
    page.screenshot(path=str(folder / "exported.png"))
    page.close()
    return f"exported: frames with {heads} heads"


def main() -> None:
    """Try it and say what was seen; an exit status of 1 if a page was missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True, help="an empty folder for what it makes")
    folder = parser.parse_args().into.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lines = trial(folder)
    print("\n".join(lines))
    if sum(line.count("[56, 56, 8]") for line in lines) != FRAMES:
        raise SystemExit("a page is missing.")


if __name__ == "__main__":
    main()
