"""Measure the page, and other viewers, in a browser: file size, time until it is usable, frame rate, memory.

    python benchmarks/page.py [--tokens 32 2048 16384] [--peers 128 512 1024 --python ENV/bin/python --assets FOLDER]

Times count from the start of navigation in Chromium, from disk, and are medians of five. "Usable" means that the page
responds to input, "drawn" that one map is on its canvas. Python memory is the additional memory of the process while it
creates the page, without the maps.

Other viewers are measured if ENV has them (pip install bertviz circuitsvis inspectus ipython torch). BertViz loads
require.min.js, d3.min.js (5.7) and jquery.min.js (2.x) from a network: put them into FOLDER, and they are served from
there. A peer has drawn when its page has an SVG element, canvas or table cell with a size and nothing changes for half
a second. The pages of all viewers show the same weights, and each has two minutes.
"""

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
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
    before, start, worked = process_kib("VmHWM"), time.perf_counter(), time.process_time()
    view.save(path)
    cost = {"making s": time.perf_counter() - start, "making CPU s": time.process_time() - worked}
    cost |= {"Python MiB": (process_kib("VmHWM") - before) / 1024, "file MB": path.stat().st_size / 1e6}
    return view, path, cost


PATIENCE = 120  # seconds to wait for another viewer's page
PEERS = ("bertviz", "circuitsvis", "inspectus")
# How many marks a page has drawn: lines, cells and painted canvases.
MARKS = """Array.from(document.querySelectorAll('svg line, svg path, svg rect, canvas, td'))
    .filter((one) => one.getBoundingClientRect().width > 0).length"""


def peer(browser: Any, name: str, T: int, folder: Path, python: str, assets: Path | None) -> dict[str, object]:
    """The size and time of another viewer's page, or the reason why there is none."""
    view = shaped(T, LAYERS, HEADS)
    weights, path = folder / "weights.pt", folder / f"{name}-{T}.html"
    dense = torch.cat([each.to_tensor() for each in view.maps]).float()
    torch.save({"weights": dense, "words": view.tokens}, weights)
    start = time.perf_counter()
    command = [python, str(Path(__file__).with_name("peer_page.py")), name, str(weights), str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        return {"viewer": name, "tokens": T, "absent": (ended.stderr.strip().splitlines() or ["failed"])[-1]}
    found = {"viewer": name, "tokens": T, "making s": time.perf_counter() - start}
    found["file MB"] = path.stat().st_size / 1e6
    return found | opened(browser, path, assets)


def opened(browser: Any, path: Path, assets: Path | None) -> dict[str, object]:
    """When another viewer's page was drawn, and the memory it takes."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.route("http*://**/*", lambda route: serve_asset(route, assets))
    try:
        start = time.monotonic()
        page.goto(f"file://{path}", wait_until="load", timeout=1000 * PATIENCE)
        seen, since = 0, start
        while time.monotonic() < start + PATIENCE:
            marks = page.evaluate(MARKS)
            if marks != seen:
                seen, since = marks, time.monotonic()
            elif seen and time.monotonic() > since + 0.5:
                return {"drawn ms": 1000 * (since - start), "page MiB": rendering_memory()}
            time.sleep(0.05)
    except Exception as error:  # too large for the browser, or a crash: that is the result
        return {"absent": f"nothing drawn ({type(error).__name__})"}
    finally:
        context.close()
    return {"absent": f"nothing drawn in {PATIENCE} s"}


def serve_asset(route: Any, assets: Path | None) -> None:
    """Answer a request for a script from a folder instead of the network."""
    name = Path(route.request.url.partition("?")[0]).name
    if assets is not None and (assets / name).is_file():
        route.fulfill(path=str(assets / name))
    else:
        route.abort()


def main() -> None:
    """Create the pages, open them, and print the results."""
    given = parser(__doc__)
    given.add_argument("--tokens", type=int, nargs="*", default=[32, 2048, 16384])
    given.add_argument("--peers", type=int, nargs="*", default=[128, 512, 1024])
    given.add_argument("--python", default=sys.executable, help="the interpreter of the environment with other viewers")
    given.add_argument("--assets", type=Path, help="a folder with the scripts that they load from a network")
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
            for who in PEERS:
                rows.append(peer(browser, who, T, folder, options.python, options.assets))
                print(f"  {who} with {T} tokens measured", file=sys.stderr)
        browser.close()
    names = [
        "file MB",
        "making s",
        "making CPU s",
        "Python MiB",
        "usable ms",
        "drawn ms",
        "frames/s",
        "slow frame ms",
        "page MiB",
    ]
    lines = [[f"{row['viewer']}, {row['tokens']:,}", *(_cell(row, name) for name in names)] for row in rows[1:]]
    table(f"{LAYERS} layers × {HEADS} heads", lines, ["viewer, tokens", *names])
    finish("page", "cpu", rows)


def _cell(row: dict[str, object], name: str) -> str:
    value = row.get(name, "absent" if "absent" in row else "")
    return str(value) if not isinstance(value, float) else f"{value:.3g}" if value < 100 else f"{value:.0f}"


if __name__ == "__main__":
    main()
