"""The server's answers: which address gives what. Who may ask is decided in `security.py`."""

import asyncio
import contextlib
import ctypes
import functools
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.view.page import parts, script
from headwise.view.pictures import KINDS, SIDE, cell, levels, pixels, span_at, tile
from headwise.view.serve import requests
from headwise.view.serve.models import Models
from headwise.view.serve.requests import Limits, Refusal
from headwise.view.serve.run import Look
from headwise.view.serve.runs import Looks, tell_place
from headwise.view.serve.security import Door, Guard
from headwise.weights import AttentionMap


class Server:
    """Everything a server knows, and its answers.

    Args:
        models: what can be looked at.
        door: where it is reached, and what opens it.
        limits: how much it takes on.
    """

    def __init__(self, models: Models, door: Door, limits: Limits | None = None) -> None:
        self.limits = Limits() if limits is None else limits
        self.looks, self.door = Looks(models, self.limits), door
        self._tiles = asyncio.Semaphore(self.limits.tiles)
        self._wanted = 0
        self.ended = True  # whether nothing ran on when it was closed

    def app(self) -> Starlette:
        """The application, guarded."""
        routes = [
            Route("/", _told(self.page)),
            Route("/static/{name}", _told(self.static)),
            Route("/api/models", _told(self.models)),
            Route("/api/looks", _told(self.begin), methods=["POST"]),
            Route("/api/looks/{id}", _told(self.look), methods=["GET"]),
            Route("/api/looks/{id}", _told(self.cancel), methods=["DELETE"]),
            Route("/api/looks/{id}/manifest", _told(self.manifest)),
            Route("/api/looks/{id}/tile", _told(self.tile)),
            Route("/api/looks/{id}/row", _told(self.row)),
            Route("/api/looks/{id}/column", _told(self.column)),
            Route("/api/looks/{id}/cell", _told(self.cell)),
        ]
        guard = Middleware(Guard, door=self.door)
        return Starlette(routes=routes, middleware=[guard], lifespan=self._lifespan, exception_handlers=_HANDLERS)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.looks.open()
        yield
        self.ended = await run_in_threadpool(self.looks.close)

    # The page.

    async def page(self, _: Request) -> Response:
        """The page itself, without data."""
        return Response(page(), media_type="text/html; charset=utf-8")

    async def static(self, request: Request) -> Response:
        """A file of the page."""
        found = files().get(request.path_params["name"])
        if found is None:
            raise Refusal(404, "there is no such file.")
        return Response(found.data, media_type=found.kind)

    async def models(self, _: Request) -> Response:
        """Which models there are, and what is allowed."""
        names = self.looks.models.told()
        return JSONResponse({"models": names, "limits": {"body": self.limits.body, "tokens": self.limits.tokens}})

    # Looks.

    async def begin(self, request: Request) -> Response:
        """Take on a look."""
        asked = await requests.asked(request, self.limits)
        look = await run_in_threadpool(self.looks.begin, asked)
        return JSONResponse({"id": look.id, "tokens": look.T}, 201)

    async def look(self, request: Request) -> Response:
        """How a look stands."""
        return JSONResponse(self._look(request).told())

    async def cancel(self, request: Request) -> Response:
        """End a look."""
        return JSONResponse(self.looks.cancel(request.path_params["id"]).told())

    async def manifest(self, request: Request) -> Response:
        """What there is to see of a look."""
        look = self._look(request)
        if look.manifest is None:
            raise Refusal(409, f"there is nothing to see yet: this look is {look.stage}.")
        return Response(look.manifest, media_type="application/json", headers={"X-Version": str(look.version)})

    # Places of a map.

    async def tile(self, request: Request) -> Response:
        """A tile as 65,536 numbers in float32; from how many of its queries is in a header."""
        weights, head = self._map(request)
        deepest = levels(*weights.shape[2:])
        level = _number(request, "level", deepest + 1)
        row, col = (_number(request, name, 2**level) for name in ("row", "col"))
        kind = request.query_params.get("kind", "mass")
        if kind not in KINDS:
            raise Refusal(422, f"kind: expected one of {', '.join(KINDS)}.")
        exact = request.query_params.get("exact", "0") == "1"
        found = await self._computed(request, lambda: square(weights, head, level, row, col, kind, exact=exact))
        headers = {"X-Rows": f"{found.rows}/{found.of}"}
        return Response(found.data, media_type="application/octet-stream", headers=headers)

    async def row(self, request: Request) -> Response:
        """Where a query looks."""
        weights, head = self._map(request)
        query = _number(request, "query", weights.shape[2])
        return JSONResponse(await self._computed(request, lambda: row_of(weights, head, query)))

    async def column(self, request: Request) -> Response:
        """Who looks at a key."""
        weights, head = self._map(request)
        key = _number(request, "key", weights.shape[3])
        return JSONResponse(await self._computed(request, lambda: column_of(weights, head, key)))

    async def cell(self, request: Request) -> Response:
        """One weight."""
        weights, head = self._map(request)
        query, key = _number(request, "query", weights.shape[2]), _number(request, "key", weights.shape[3])
        return JSONResponse(await self._computed(request, lambda: cell_of(weights, head, query, key)))

    def _look(self, request: Request) -> Look:
        return self.looks[request.path_params["id"]]

    def _map(self, request: Request) -> tuple[AttentionMap, int]:
        look = self._look(request)
        if not look.maps:
            raise Refusal(409, f"there is no map: this look is {look.stage}.")
        weights = look.layer(_number(request, "layer", len(look.maps)))
        return weights, _number(request, "head", weights.shape[1])

    async def _computed(self, request: Request, compute: Callable[[], Any]) -> Any:
        """What `compute` gives, in its turn: few at a time, and not for who has gone."""
        if self._wanted >= self.limits.tiles + self.limits.queue:
            raise Refusal(429, f"{self.limits.queue} questions are waiting already, the limit.", after=1)
        self._wanted += 1
        try:
            async with self._tiles:
                if await request.is_disconnected():
                    raise Refusal(400, "the request was broken off.")
                return await run_in_threadpool(self._undisturbed, compute)
        finally:
            self._wanted -= 1

    def _undisturbed(self, compute: Callable[[], Any]) -> Any:
        with self.looks, torch.no_grad():
            return compute()


def _number(request: Request, name: str, size: int) -> int:
    """A whole number of the address, below `size`."""
    given = request.query_params.get(name, "")
    if not (given.isascii() and given.isdigit() and len(given) < 12 and int(given) < size):
        raise Refusal(422, f"{name}: expected a whole number from 0 to {size - 1}.")
    return int(given)


def _told(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """The same, with what it raises put into words; nothing that could hold a part of a text is logged."""

    async def told(request: Request) -> Response:
        try:
            return await answer(request)
        except Refusal as refusal:
            return refusal.response()
        except HeadwiseError as error:
            return Refusal(422, str(error)).response()
        except Exception as error:
            tell_place("an answer", error)
            return Refusal(500, f"an error of headwise itself ({type(error).__name__}).").response()

    return told


async def _not_there(request: Request, error: Exception) -> Response:
    """An address or a method that there is not."""
    status = getattr(error, "status_code", 404)
    return Refusal(status, "there is nothing at this address, or not by this method.").response()


_HANDLERS: Any = {404: _not_there, 405: _not_there}


# The page and its files: the same scripts that a page on disk carries, and those that ask the server.

LIVE = ("connection", "live_source", "outcome", "silent_heads", "memory", "live")


class File(NamedTuple):
    """What is sent."""

    data: bytes
    kind: str


@functools.cache
def files() -> dict[str, File]:
    """All files there are, by name; nothing else can be asked for."""
    live = script(*(_read(f"{name}.js") for name in LIVE))
    return {
        "page.js": File(live.encode(), "text/javascript; charset=utf-8"),
        "page.css": File((parts().style + _read("live.css")).encode(), "text/css; charset=utf-8"),
    }


@functools.cache
def page() -> str:
    """The page without data, whose scripts come from files."""
    return _read("live.html")


def _read(name: str) -> str:
    return (resources.files("headwise.view.serve") / "page" / name).read_text(encoding="utf-8")


# Answers about places of a map: a tile, a row, a column, one weight. All exact, unless a tile says otherwise.

MOST = 256  # entries of a row or column, strongest first
# A pixel of more queries and keys than this is first drawn from one of its queries: at 16,384 tokens a tile of
# 2048 × 2048 weights takes 12 to 26 ms of one core, by kind, one of 4096 × 4096 up to 90, the whole up to 800.
WIDE = 8


class Square(NamedTuple):
    """A tile: its numbers, and how many of its queries they were made from."""

    data: bytes
    rows: int
    of: int


def square(weights: AttentionMap, head: int, level: int, row: int, col: int, kind: str, *, exact: bool) -> Square:
    """256 × 256 numbers, float32, little-endian.

    Args:
        weights: the map of a layer.
        head: which of its heads.
        level: how deep, 0 is the whole.
        row: of tiles.
        col: likewise.
        kind: "mass", "rest", "peak" or "uniform".
        exact: True for all queries of a tile, however many; otherwise one for each row of pixels where they are many.
    """
    T, S = weights.shape[2:]
    span = span_at(level, T, S)
    of = max(0, min(T, (row + 1) * SIDE * span) - row * SIDE * span)
    if exact or span <= WIDE or 0 in (T, S):
        return Square(_bytes(tile(weights, head, level, row, col, kind)), of, of)
    tile_rows = torch.arange(row * SIDE, (row + 1) * SIDE) * span
    rows = (tile_rows[tile_rows < T] + span // 2).clamp(max=T - 1)
    part = weights.select(heads=[head], rows=rows)
    keys = range(col * SIDE * span, max(col * SIDE * span, min(S, (col + 1) * SIDE * span)))
    found = pixels(part, span, keys, kind, tall=1)[0]
    found = F.pad(found, (0, SIDE - found.shape[1], 0, SIDE - found.shape[0]))
    return Square(_bytes(found), len(rows), of)


def row_of(weights: AttentionMap, head: int, query: int) -> dict[str, Any]:
    """Where one query looks, strongest first."""
    return _largest(weights[0, head, query], "keys")


def column_of(weights: AttentionMap, head: int, key: int) -> dict[str, Any]:
    """Who looks at one key, strongest first."""
    return _largest(weights[0, head, :, key], "queries")


def cell_of(weights: AttentionMap, head: int, query: int, key: int) -> dict[str, Any]:
    """One weight: how large, its logit, its rank in its row, how many keys the query sees; JSON knows no infinity."""
    found = cell(weights, head, query, key)
    hidden = {"logit": None, "rank": None} if found.logit == -math.inf else {}
    return found._asdict() | hidden


def _largest(weights: Tensor, name: str) -> dict[str, Any]:
    best = weights.float().topk(min(MOST, len(weights)))
    there = int((best.values > 0).sum())
    whole = len(weights) <= MOST or there < MOST
    return {name: best.indices[:there].tolist(), "weights": best.values[:there].tolist(), "whole": whole}


def _bytes(picture: Tensor) -> bytes:
    data = picture.float().contiguous()
    return ctypes.string_at(data.data_ptr(), data.nbytes)
