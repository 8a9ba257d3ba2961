"""The HTTP interface: which URL returns what. `security` decides who may use it."""

import asyncio
import contextlib
import ctypes
import functools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import torch
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.view.carried import MEASURES, Carried
from headwise.view.data import shares, signed
from headwise.view.page import page_file, script
from headwise.view.pictures import KINDS, SIDE, cell, levels, span_at, tile
from headwise.view.result import spread
from headwise.view.serve.models import Models, continued
from headwise.view.serve.requests import Limits, Refusal, run_request
from headwise.view.serve.runs import FIRST, LONG, Run, Runs, log_place
from headwise.view.serve.security import Door, Guard
from headwise.weights import AttentionMap

SCRIPTS = ("connection", "live_source", "outcome", "silent_heads", "memory", "live")
CONTINUED = 16  # tokens that a request for a continuation gets
MOST = 256  # entries of a row or column, largest first
# A pixel of more queries and keys than this is first drawn from one of its queries: at 16,384 tokens a tile of
# 2048 × 2048 weights takes 12 to 26 ms of one core, depending on its kind, one of 4096 × 4096 up to 90, the whole map
# up to 800.
WIDE = 8

_read = functools.partial(page_file, package="headwise.view.serve")


class Server:
    """The state of a server, and its responses.

    Args:
        models: the models to offer.
        door: its address and its token.
        limits: how much it accepts.
    """

    def __init__(self, models: Models, door: Door, limits: Limits | None = None) -> None:
        self.limits = Limits() if limits is None else limits
        self.runs, self.door = Runs(models, self.limits), door
        self._tiles = asyncio.Semaphore(self.limits.tiles)
        self._wanted = 0
        self.ended = True  # whether all work had ended when it was closed

    def app(self) -> Starlette:
        """The application, behind its guard."""
        routes = [
            Route("/", _guarded(self.page)),
            Route("/static/{name}", _guarded(self.static)),
            Route("/api/models", _guarded(self.models)),
            Route("/api/runs", _guarded(self.begin), methods=["POST"]),
            Route("/api/runs/{id}", _guarded(self.run), methods=["GET"]),
            Route("/api/runs/{id}", _guarded(self.cancel), methods=["DELETE"]),
            Route("/api/runs/{id}/manifest", _guarded(self.manifest)),
            Route("/api/runs/{id}/tile", _guarded(self.tile)),
            Route("/api/runs/{id}/row", _guarded(self.row)),
            Route("/api/runs/{id}/column", _guarded(self.column)),
            Route("/api/runs/{id}/cell", _guarded(self.cell)),
            Route("/api/runs/{id}/ranking", _guarded(self.ranking)),
            Route("/api/runs/{id}/thumbnails", _guarded(self.thumbnails)),
            Route("/api/runs/{id}/losses", _guarded(self.losses)),
            Route("/api/continuation", _guarded(self.continuation), methods=["POST"]),
        ]
        guard = Middleware(Guard, door=self.door)
        return Starlette(routes=routes, middleware=[guard], lifespan=self._lifespan, exception_handlers=_HANDLERS)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.runs.open()
        yield
        self.ended = await run_in_threadpool(self.runs.close)

    async def page(self, _: Request) -> Response:
        return Response(_read("live.html"), media_type="text/html; charset=utf-8")

    async def static(self, request: Request) -> Response:
        found = page_files().get(request.path_params["name"])
        if found is None:
            raise Refusal(404, "there is no such file.")
        text, media_type = found
        return Response(text, media_type=media_type)

    async def models(self, _: Request) -> Response:
        models = self.runs.models.to_dicts()
        return JSONResponse({"models": models, "limits": {"body": self.limits.body, "tokens": self.limits.tokens}})

    async def begin(self, request: Request) -> Response:
        wanted = await run_request(request, self.limits)
        run = await run_in_threadpool(self.runs.begin, wanted)
        return JSONResponse({"id": run.id, "tokens": run.T}, 201)

    async def run(self, request: Request) -> Response:
        return JSONResponse(self._run(request).to_dict())

    async def cancel(self, request: Request) -> Response:
        return JSONResponse(self.runs.cancel(request.path_params["id"]).to_dict())

    async def manifest(self, request: Request) -> Response:
        run = self._run(request)
        if run.manifest is None:
            raise Refusal(409, f"there is nothing to show yet: this run is {run.stage}.")
        return Response(run.manifest, media_type="application/json", headers={"X-Version": str(run.version)})

    async def tile(self, request: Request) -> Response:
        """A tile as 65,536 numbers in float32; a header says from how many of its queries it was made."""
        weights, head = self._map(request)
        deepest = levels(*weights.shape[2:])
        level = _number(request, "level", deepest + 1)
        row, col = (_number(request, name, 2**level) for name in ("row", "col"))
        kind = request.query_params.get("kind", "mass")
        if kind not in KINDS:
            raise Refusal(422, f"kind: expected one of {', '.join(KINDS)}.")
        exact = request.query_params.get("exact", "0") == "1"
        shown = self._shown(request)
        if shown.measure == "contribution" and kind != "mass":
            raise Refusal(422, "kind: contributions, which may be negative, have the kind mass only.")
        wanted = TileWanted(head, level, row, col, kind, exact)
        found = await self._computed(request, lambda: tile_data(weights, wanted, shown))
        headers = {"X-Rows": f"{found.rows}/{found.of}"}
        return Response(found.data, media_type="application/octet-stream", headers=headers)

    async def row(self, request: Request) -> Response:
        weights, head = self._map(request)
        query, shown = _number(request, "query", weights.shape[2]), self._shown(request)
        return JSONResponse(await self._computed(request, lambda: largest_of(shown.row(weights, head, query), "keys")))

    async def column(self, request: Request) -> Response:
        weights, head = self._map(request)
        key, shown = _number(request, "key", weights.shape[3]), self._shown(request)
        found = await self._computed(request, lambda: largest_of(shown.column(weights, head, key), "queries"))
        return JSONResponse(found)

    async def cell(self, request: Request) -> Response:
        weights, head = self._map(request)
        query, key = _number(request, "query", weights.shape[2]), _number(request, "key", weights.shape[3])
        shown = self._shown(request)
        return JSONResponse(await self._computed(request, lambda: cell_of(weights, head, query, key, shown)))

    async def ranking(self, request: Request) -> Response:
        """What each head attends to most from one query, besides the first token."""
        run = self._run(request)
        if not run.maps:
            raise Refusal(409, f"there is no map: this run is {run.stage}.")
        query = _number(request, "query", run.T)
        shown = [self._shown(request, layer) for layer in range(len(run.maps))]
        return JSONResponse(await self._computed(request, lambda: ranking_of(list(run.maps.values()), query, shown)))

    async def thumbnails(self, request: Request) -> Response:
        """Small pictures of the heads of a layer, of what its weights carry."""
        run, (measure, carried) = self._run(request), self._shown(request)
        if carried is None:
            raise Refusal(422, "measure: expected value or contribution; the manifest has the pictures of weights.")
        without = request.query_params.get("without", "0") == "1"
        queries = spread(run.T, FIRST if run.T > LONG else None)
        found = await self._computed(request, lambda: carried.thumbnails(measure, queries, without_first=without))
        return JSONResponse((signed(found) if measure == "contribution" else shares(found)).to_dict())

    async def losses(self, request: Request) -> Response:
        """The loss of every token."""
        found = self._run(request).outcome
        return JSONResponse([] if found is None else [None if x is None else round(x, 3) for x in found.losses])

    async def continuation(self, request: Request) -> Response:
        """What the model writes after a text."""
        wanted = await run_request(request, self.limits)
        if wanted.text is None:
            raise Refusal(400, "text: expected the text to continue.")
        text, name = wanted.text, self.runs.models.name_of(wanted.model)
        found = await self._computed(request, lambda: continued(self.runs.models[name], text, CONTINUED, wanted.target))
        return JSONResponse({"text": found})

    def _run(self, request: Request) -> Run:
        return self.runs[request.path_params["id"]]

    def _map(self, request: Request) -> tuple[AttentionMap, int]:
        run = self._run(request)
        if not run.maps:
            raise Refusal(409, f"there is no map: this run is {run.stage}.")
        weights = run.layer(_number(request, "layer", len(run.maps)))
        return weights, _number(request, "head", weights.shape[1])

    def _shown(self, request: Request, layer: int | None = None) -> "Shown":
        """What is asked for of a layer: weights, or what they carry."""
        run, measure = self._run(request), request.query_params.get("measure", MEASURES[0])
        if measure not in MEASURES:
            raise Refusal(422, f"measure: expected one of {', '.join(MEASURES)}.")
        if measure == MEASURES[0]:
            return Shown(measure, None)
        if run.carried is None:
            raise Refusal(422, "the values of this model are not known, so there are only weights.")
        return Shown(measure, run.carried[_number(request, "layer", len(run.maps)) if layer is None else layer])

    async def _computed(self, request: Request, compute: Callable[[], Any]) -> Any:
        """The result of `compute`, a few at a time, unless the client has disconnected meanwhile."""
        if self._wanted >= self.limits.tiles + self.limits.queue:
            raise Refusal(429, f"{self.limits.queue} requests are already waiting, the limit.", after=1)
        self._wanted += 1
        try:
            async with self._tiles:
                if await request.is_disconnected():
                    raise Refusal(400, "the client disconnected.")
                return await run_in_threadpool(self._undisturbed, compute)
        finally:
            self._wanted -= 1

    def _undisturbed(self, compute: Callable[[], Any]) -> Any:
        with self.runs, torch.no_grad():
            return compute()


def _number(request: Request, name: str, size: int) -> int:
    """An integer of the URL, below `size`."""
    given = request.query_params.get(name, "")
    if not (given.isascii() and given.isdigit() and len(given) < 12 and int(given) < size):
        raise Refusal(422, f"{name}: expected an integer from 0 to {size - 1}.")
    return int(given)


def _guarded(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Turns exceptions into responses; nothing that could quote a text is logged."""

    async def guarded(request: Request) -> Response:
        try:
            return await answer(request)
        except Refusal as refusal:
            return refusal.response()
        except HeadwiseError as error:
            return Refusal(422, str(error)).response()
        except Exception as error:
            log_place("a request", error)
            return Refusal(500, f"an internal error of headwise ({type(error).__name__}).").response()

    return guarded


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return Refusal(status, "this URL does not exist, or does not accept this method.").response()


_HANDLERS: Any = {404: _not_found, 405: _not_found}


@functools.cache
def page_files() -> dict[str, tuple[str, str]]:
    """The text and media type of every file by name; nothing else is served."""
    live = script(*(_read(f"{name}.js") for name in SCRIPTS))
    return {
        "page.js": (live, "text/javascript; charset=utf-8"),
        "page.css": (page_file("page.css") + _read("live.css"), "text/css; charset=utf-8"),
    }


class TileData(NamedTuple):
    """The numbers of a tile, and how many of its queries they were made from."""

    data: bytes
    rows: int
    of: int


class TileWanted(NamedTuple):
    """A tile that is asked for.

    head: which head of its layer.
    level: the zoom level; 0 is the whole map.
    row: the row of the tile.
    col: the column of the tile.
    kind: "mass", "rest", "peak" or "uniform".
    exact: use all queries of the tile; otherwise one per row of pixels if there are many.
    """

    head: int
    level: int
    row: int
    col: int
    kind: str
    exact: bool


class Shown(NamedTuple):
    """What is shown of a layer: weights, or one measure of what they carry."""

    measure: str
    carried: Carried | None

    def row(self, weights: AttentionMap, head: int, query: int) -> Tensor:
        return weights[0, head, query] if self.carried is None else self.carried.row(self.measure, head, query)

    def rows(self, weights: AttentionMap, query: int) -> Tensor:
        return weights[0, :, query] if self.carried is None else self.carried.rows(self.measure, query)

    def column(self, weights: AttentionMap, head: int, key: int) -> Tensor:
        return weights[0, head, :, key] if self.carried is None else self.carried.column(self.measure, head, key)

    def tile(self, weights: AttentionMap, wanted: TileWanted, queries: Tensor | None) -> Tensor:
        if self.carried is not None and self.measure == "contribution":
            return self.carried.tile(*wanted[:4], queries)
        return tile(weights if self.carried is None else self.carried.by_value, *wanted[:5], queries)


def tile_data(weights: AttentionMap, wanted: TileWanted, shown: Shown) -> TileData:
    """256 × 256 numbers, float32, little-endian."""
    T, S = weights.shape[2:]
    span = span_at(wanted.level, T, S)
    covered = range(T)[wanted.row * SIDE * span : (wanted.row + 1) * SIDE * span]
    queries = None
    if not (wanted.exact or span <= WIDE or 0 in (T, S)):
        queries = (torch.tensor(covered[::span], dtype=torch.int64) + span // 2).clamp(max=T - 1)
    data = shown.tile(weights, wanted, queries).float().contiguous()
    rows = len(covered if queries is None else queries)
    return TileData(ctypes.string_at(data.data_ptr(), data.nbytes), rows, len(covered))


def cell_of(weights: AttentionMap, head: int, query: int, key: int, shown: Shown) -> dict[str, Any]:
    """One weight, its logit, its rank in the row, and how many keys the query sees; JSON has no infinity.

    If what it carries is asked for, that is its weight, and the attention weight is `plain`.
    """
    found = cell(weights, head, query, key)
    hidden = {"logit": None, "rank": None} if found.logit == -math.inf else {}
    if shown.carried is None:
        return found._asdict() | hidden
    return found._asdict() | hidden | {"weight": float(shown.row(weights, head, query)[key]), "plain": found.weight}


def ranking_of(maps: Sequence[AttentionMap], query: int, shown: Sequence[Shown]) -> list[dict[str, Any]]:
    """The head, the key other than the first and the weight, for the largest weight of every head, largest first."""
    found = []
    for layer, (weights, part) in enumerate(zip(maps, shown, strict=True)):
        rows = part.rows(weights, query).float()
        rows[:, 0] = 0
        best = rows.max(-1)
        for head, (weight, key) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            found.append({"place": f"{layer}.{head}", "key": key, "weight": weight, "span": 1})
    return sorted((one for one in found if one["weight"] > 0), key=lambda one: -one["weight"])


def largest_of(weights: Tensor, name: str) -> dict[str, Any]:
    """The largest weights of a row or column by size, largest first, and their places as `name`."""
    places = weights.float().abs().topk(min(MOST, len(weights))).indices
    values = weights[places].float()
    there = int((values != 0).sum())
    whole = len(weights) <= MOST or there < MOST
    return {name: places[:there].tolist(), "weights": values[:there].tolist(), "whole": whole}
