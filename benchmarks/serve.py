"""Measure the response times of `headwise serve`: first picture of a long text, tiles of every level, single weights.

All requests go over a real socket, like those of a browser. Tiles are checked against dense weights before timing.

    python benchmarks/serve.py                              # the built-in model's sizes, 2 of its 7 layers
    python benchmarks/serve.py --tokens 16384 --layers 7
    python benchmarks/serve.py --first                      # only the first picture of the built-in model, and a cancel
"""

import array
import contextlib
import re
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import harness
import httpx
import torch

from headwise.cli.bench.measurement import interleaved
from headwise.models import GPT, GPTConfig, LanguageModel, load_builtin
from headwise.view.pictures import SIDE, levels
from headwise.view.serve.app import WIDE, Server
from headwise.view.serve.models import Models
from headwise.view.serve.requests import Limits
from headwise.view.serve.security import Door
from headwise.view.serve.server import Process, config_of, listening

TOKEN = "a-token-of-the-benchmark"  # noqa: S105
SPREAD = 31  # distance between requested tiles, so that no cache can answer


def model_of(layers: int) -> LanguageModel:
    """An untrained copy of the built-in model, with fewer layers and a longer context."""
    torch.manual_seed(0)
    given = load_builtin()
    sizes = {"d_model": given.gpt.config.d_model, "num_heads": given.gpt.config.num_heads, "num_layers": layers}
    config = GPTConfig(given.gpt.config.vocab_size, context_length=2**17, **sizes)
    return LanguageModel(GPT(config).eval().requires_grad_(False), given.tokenizer)


@contextlib.contextmanager
def serving(model: LanguageModel, tokens: int) -> Iterator[tuple[Server, httpx.Client]]:
    """A server that runs in a thread, and a client."""
    models = Models(["builtin"])
    models.add("long", model)
    with listening("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        server = Server(models, Door(port, TOKEN), Limits(tokens=tokens, memory=2**34))
        process = Process(config_of(server))
        thread = threading.Thread(target=process.run, kwargs={"sockets": [listener]})
        thread.start()
        headers = {"authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=600) as client:
            try:
                yield server, client
            finally:
                process.should_exit = True
                thread.join()


def followed(client: httpx.Client, id: str, stages: tuple[str, ...]) -> tuple[dict, dict[str, float]]:
    """Poll a run until it reaches one of these stages; return its last state and the time it reached each stage."""
    begin, times = time.perf_counter(), {}
    while True:
        told = client.get(f"/api/runs/{id}").json()
        times.setdefault(told["stage"], time.perf_counter() - begin)
        if told["stage"] in stages:
            return told, times
        time.sleep(0.005)


def check(client: httpx.Client, run: str, weights: object, T: int) -> None:
    """Fail if a tile is wrong, before any is timed."""
    deepest = levels(T, T)
    row = 2**deepest // 2
    answer = client.get(f"{run}/tile?layer=1&head=3&level={deepest}&row={row}&col={row - 1}").content
    found = torch.tensor(array.array("f", answer)).view(SIDE, SIDE)
    expected = weights[0, 3, row * SIDE : (row + 1) * SIDE, (row - 1) * SIDE : row * SIDE]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def questions(client: httpx.Client, run: str, T: int) -> dict[str, object]:
    """Requests by name; each call asks for a different place."""
    deepest = levels(T, T)

    def tile(level: int, exact: int) -> object:
        turn = iter(range(10**9))

        def ask() -> None:
            at = next(turn) * SPREAD
            row = at % 2**level
            place = f"level={level}&row={row}&col={(at // 7) % (row + 1)}&exact={exact}"
            client.get(f"{run}/tile?layer={at % 2}&head={at % 8}&{place}").raise_for_status()

        return ask

    found = {tile_name(2 ** (deepest - level)): tile(level, 0) for level in range(deepest, -1, -1)}
    found["tile of the whole map, from all rows"] = tile(0, 1)
    turn = iter(range(10**9))
    for name in ("row?query", "column?key", "cell?key=5&query"):
        path, _, key = name.partition("?")

        def ask(path: str = path, key: str = key) -> None:
            at = next(turn) * 977 % T
            client.get(f"{run}/{path}?layer=0&head={at % 8}&{key}={at}").raise_for_status()

        found[path] = ask
    return found


def tile_name(span: int) -> str:
    """The name of a tile: the weights per pixel, and whether it is first drawn from one query per row of pixels."""
    return f"tile, {span} × {span} weights per pixel" + ("" if span <= WIDE else ", first from 1 row")


def measured(tokens: int, layers: int, seconds: float) -> list[dict[str, object]]:
    """All result rows for one length."""
    model = model_of(layers)
    ids = torch.randint(5, 8000, (tokens,)).tolist()
    rows: list[dict[str, object]] = []
    with serving(model, tokens) as (server, client):
        client.get("/api/models").raise_for_status()
        begun = client.post("/api/runs", json={"ids": ids, "model": "long"}).json()
        told, times = followed(client, begun["id"], ("refining", "finished", "failed"))
        assert told["error"] is None, told
        first = {
            "forward pass": times["measuring"],
            f"first picture, {told['rows'][0]} rows": max(times.values()),
        }
        rows += [{"tokens": tokens, "what": name, "ms": round(1e3 * at, 1)} for name, at in first.items()]
        run = f"/api/runs/{begun['id']}"
        check(client, run, server.runs[begun["id"]].layer(1), tokens)
        with server.runs:  # stops background refinement
            for name, result in interleaved(questions(client, run, tokens), seconds=seconds).items():
                rows.append({"tokens": tokens, "what": name, **result})
        held = server.runs[begun["id"]].memory
        peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 2**10
        rows.append({"tokens": tokens, "what": "queries and keys kept", "MiB": round(held / 2**20)})
        rows.append({"tokens": tokens, "what": "peak memory of the process", "MiB": round(peak / 2**20)})
    return rows


def first_pictures(lengths: Sequence[int] = (100, 1000, 16384)) -> list[dict[str, object]]:
    """From sending a text to having its page, with the built-in model: wall time, and process time in forward passes.

    The last row is the wall time from cancelling a run of the longest text to having the page of a short one.
    """
    model, rows = load_builtin(), []
    with serving(model, max(lengths)) as (server, client):
        for tokens in lengths:
            ids = torch.randint(5, 4000, (tokens,)).tolist()
            found = [first_picture(client, ids) for _ in range(5 if tokens <= 2000 else 1)]
            begin = time.process_time()
            with torch.no_grad():
                model.read(torch.tensor([ids]))
            forward = time.process_time() - begin
            wall, worked = (statistics.median(column) for column in zip(*found, strict=True))
            rows.append({"tokens": tokens, "seconds": round(wall, 3), "forward passes": round(worked / forward, 1)})
        with server.runs:  # stops background refinement
            id = client.post("/api/runs", json={"ids": ids, "model": "long"}).json()["id"]
            time.sleep(1)
            client.delete(f"/api/runs/{id}").raise_for_status()
            wall, _ = first_picture(client, ids[: lengths[0]])
        rows.append({"tokens": lengths[0], "seconds": round(wall, 3), "after a cancel": True})
    return rows


def first_picture(client: httpx.Client, ids: list[int]) -> tuple[float, float]:
    """Wall time and process time from sending a text to having its page."""
    begin, worked = time.perf_counter(), time.process_time()
    id = client.post("/api/runs", json={"ids": ids, "model": "long"}).json()["id"]
    told, _ = followed(client, id, ("refining", "finished", "failed"))
    assert told["error"] is None, told
    client.get(f"/api/runs/{id}/manifest").raise_for_status()
    found = time.perf_counter() - begin, time.process_time() - worked
    client.delete(f"/api/runs/{id}")
    return found


def main() -> None:
    """Measure, then print a table and one JSON line."""
    parser = harness.parser(__doc__)
    parser.add_argument("--first", action="store_true", help="measure only the first picture, with the built-in model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 16384, 32768])
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    if options.first:
        for row in first_pictures():
            print(*(f"{name}: {value}" for name, value in row.items()), sep="  ")
        return
    rows = []
    for tokens in options.tokens:
        found = measured(tokens, options.layers, options.seconds)
        rows += found
        shown = [
            [str(r["what"]), f"{r['ms']:.1f} ms" if "ms" in r else f"{r['MiB']:,} MiB", f"{r.get('spread', 0):.0%}"]
            for r in found
        ]
        harness.table(f"{tokens:,} tokens, {options.layers} layers of 8 heads", shown, ["", "median", "spread"])
    harness.finish("serve", "cpu", [{"layers": options.layers, **row} for row in rows])


if __name__ == "__main__":
    main()
