"""Measure the page, and other viewers, in a browser: file size, time until it is usable, frame rate, memory.

    python benchmarks/page.py [--tokens 32 2048 16384] [--peers 128 512 1024]

Times count from the start of navigation in Chromium, from disk, and are medians of five. "Usable" means that the page
responds to input, "drawn" that one map is on its canvas. Python memory is the additional memory of the process while it
creates the page, without the maps. Other viewers are measured if they are installed.
"""

import importlib.util
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headwise.view import View
from headwise.view.page import document

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from harness import finish, parser, process_kib, table
from shaped_heads import WORDS, shaped, tokens

LAYERS, HEADS = 4, 8
APP = "document.getElementById('headwise').headwise"
MAP = f"{APP}.stage.shown[0]"
DRAWN = f"Boolean({MAP} && {MAP}.reach && {MAP}.tiles.waiting === 0 && {MAP}.drawn)"
ZOOM = f"""async () => {{
    const stage = {APP}.stage, view = stage.view, times = [];
    for (let i = 0; i < 120; i++) {{
        const factor = i < 60 ? 1.07 : 1 / 1.07;
        view.zoom(factor, view.width * (0.3 + 0.004 * (i % 60)), view.height * 0.6);
        stage.moved();
        times.push(await new Promise(requestAnimationFrame));
    }}
    const steps = times.slice(1).map((t, i) => t - times[i]).sort((a, b) => a - b);
    return [1000 * steps.length / (times.at(-1) - times[0]), steps[Math.floor(steps.length * 0.95)]];
}}"""


def chromium() -> str:
    """The path of the browser."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        sys.exit("no Chromium on this machine: apt-get install chromium")
    return found


def rendering_memory() -> float:
    """The MiB of the largest renderer process, which is the one of the page."""
    lines = subprocess.run(["ps", "-eo", "rss,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return max((int(line.split()[0]) for line in lines if "--type=renderer" in line), default=0) / 1024


def waited(page: Any, expression: str, seconds: float = 60) -> None:
    """Wait until an expression is true. It is polled from outside, because our page allows only its own scripts."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        if time.monotonic() > end:
            raise TimeoutError(expression)
        time.sleep(0.005)


def look(browser: Any, path: Path, times: int = 5) -> dict[str, float]:
    """The medians of several runs, because other work on the machine disturbs some of them."""
    looks = [look_once(browser, path) for _ in range(times)]
    return {name: statistics.median(each[name] for each in looks) for name in looks[0]}


def look_once(browser: Any, path: Path) -> dict[str, float]:
    """The milliseconds until the page is usable and until a map is drawn, the frame rate of zooming, and the memory."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(f"file://{path}")
    waited(page, "document.documentElement.dataset.ready === 'true'")
    usable = page.evaluate("performance.getEntriesByName('headwise usable')[0].startTime")
    page.close()
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(f"file://{path}#view=map")
    waited(page, DRAWN)
    drawn = page.evaluate("performance.now()")
    frames, slow = page.evaluate(ZOOM)
    memory = rendering_memory()
    page.close()
    return {"usable ms": usable, "drawn ms": drawn, "frames/s": frames, "slow frame ms": slow, "page MiB": memory}


def made(T: int, folder: Path) -> tuple[View, Path, dict[str, float]]:
    """The page of T tokens, the cost of creating it, and its size."""
    view = shaped(T, LAYERS, HEADS)
    path = folder / f"{T}.html"
    Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak to the current memory use
    before, start = process_kib("VmHWM"), time.perf_counter()
    view.save(path)
    took = time.perf_counter() - start
    return (
        view,
        path,
        {"making s": took, "Python MiB": (process_kib("VmHWM") - before) / 1024, "file MB": path.stat().st_size / 1e6},
    )


PATIENCE = 60_000  # milliseconds to wait for another viewer's page
MARKS = "svg *, canvas, table td"


def peers() -> dict[str, Callable[[Any, list[str]], str]]:
    """Functions that create the pages of other viewers from dense weights (layers of (1, H, T, T)) and words."""

    def head_view(weights: Any, words: list[str]) -> str:
        import bertviz

        return str(bertviz.head_view(weights, words, html_action="return").data)

    def patterns(weights: Any, words: list[str]) -> str:
        import circuitsvis

        return str(circuitsvis.attention.attention_patterns(words, torch.cat(list(weights)).flatten(0, 1)))

    def inspectus(weights: Any, words: list[str]) -> str:
        import inspectus
        from IPython.core.interactiveshell import InteractiveShell
        from IPython.utils.capture import capture_output

        InteractiveShell.instance()  # inspectus displays its output and returns nothing
        with capture_output() as shown:
            inspectus.attention(torch.cat(list(weights)).numpy(), words, words)
        return "".join(each.data.get("text/html", "") for each in shown.outputs)

    return {"bertviz": head_view, "circuitsvis": patterns, "inspectus": inspectus}


def peer(browser: Any, name: str, draw: Callable[[Any, list[str]], str], T: int, folder: Path) -> dict[str, object]:
    """The size and time of another viewer's page, or the reason why there is none."""
    if importlib.util.find_spec(name) is None:
        return {"viewer": name, "tokens": T, "absent": "not installed"}
    view = shaped(T, LAYERS, HEADS)
    path = folder / f"{name}-{T}.html"
    try:
        path.write_text(draw(tuple(x.to_tensor() for x in view.maps), view.tokens), encoding="utf-8")
    except Exception as error:  # an error in another package must not stop our own measurement
        return {"viewer": name, "tokens": T, "absent": f"{type(error).__name__}: {error}"}
    found = {"viewer": name, "tokens": T, "file MB": path.stat().st_size / 1e6}
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    try:
        page.goto(f"file://{path}", wait_until="load", timeout=PATIENCE)
        page.wait_for_function(f"document.querySelectorAll({MARKS!r}).length > 0", timeout=PATIENCE)
        page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
        found["drawn ms"] = page.evaluate("performance.now()")
    except Exception as error:  # it may never draw: it needs a network, or the data is too large
        found["absent"] = f"nothing drawn in {PATIENCE // 1000} s ({type(error).__name__})"
    page.close()
    return found


def main() -> None:
    """Create the pages, open them, and print the results."""
    given = parser(__doc__)
    given.add_argument("--tokens", type=int, nargs="*", default=[32, 2048, 16384])
    given.add_argument("--peers", type=int, nargs="*", default=[128, 512, 1024])
    options = given.parse_args()
    from playwright.sync_api import sync_playwright

    rows: list[dict[str, object]] = [{"page without data KB": len(document([]).encode()) / 1e3}]
    print(f"page without data: {rows[0]['page without data KB']:.0f} KB")
    assert len(WORDS) > int(tokens(8).max())
    with tempfile.TemporaryDirectory() as name, sync_playwright() as running:
        folder = Path(name)
        browser = running.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for T in sorted({*options.tokens, *options.peers}):
            _, path, cost = made(T, folder)
            rows.append({"viewer": "headwise", "tokens": T, **cost, **look(browser, path)})
            print(f"  {T} tokens measured", file=sys.stderr)
        for T in options.peers:
            rows += [peer(browser, who, draw, T, folder) for who, draw in peers().items()]
        browser.close()
    names = ["file MB", "making s", "Python MiB", "usable ms", "drawn ms", "frames/s", "slow frame ms", "page MiB"]
    lines = [[f"{row['viewer']}, {row['tokens']:,}", *(_cell(row, name) for name in names)] for row in rows[1:]]
    table(f"{LAYERS} layers × {HEADS} heads", lines, ["viewer, tokens", *names])
    finish("page", "cpu", rows)


def _cell(row: dict[str, object], name: str) -> str:
    value = row.get(name, "absent" if "absent" in row else "")
    return str(value) if not isinstance(value, float) else f"{value:.3g}" if value < 100 else f"{value:.0f}"


if __name__ == "__main__":
    main()
