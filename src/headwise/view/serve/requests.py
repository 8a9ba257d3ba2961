"""What a request brings: read up to a limit and within a time, and what it means checked."""

import asyncio
import dataclasses
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse


@dataclasses.dataclass(frozen=True)
class Limits:
    """What is refused beyond; every refusal names its number.

    Args:
        body: bytes of one request. A text of 32,768 tokens is about 150,000.
        tokens: tokens of one text.
        looks: looks that are kept, the oldest is forgotten.
        memory: bytes that the queries and keys of all kept looks may take; the newest is kept whatever it takes.
        waiting: looks that wait for their turn; one runs at a time.
        tiles: pictures computed at a time.
        queue: pictures that wait.
        seconds: for a request to arrive.
        heads: heads that one look may switch off.
    """

    body: int = 4 * 2**20
    tokens: int = 32_768
    looks: int = 8
    memory: int = 2 * 2**30
    waiting: int = 4
    tiles: int = 2
    queue: int = 128
    seconds: float = 30.0
    heads: int = 4096


class Refusal(Exception):  # noqa: N818 - it is said to the client, and no error of ours
    """What is wrong with a request, and what would be right.

    Args:
        status: of HTTP.
        words: for whoever sent it.
        after: seconds after which the same may be asked again.
    """

    def __init__(self, status: int, words: str, after: int | None = None) -> None:
        super().__init__(words)
        self.status, self.words, self.after = status, words, after

    def response(self) -> JSONResponse:
        """As it goes out."""
        headers = {} if self.after is None else {"Retry-After": str(self.after)}
        return JSONResponse({"error": self.words}, self.status, headers)


CONTROLS = {chr(code) for code in range(32)} - set("\t\n\v\f\r")  # of which a text has none, and binary files many


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is to be looked at.

    Args:
        text: to be read; None where token ids are given.
        ids: tokens instead of a text.
        model: the name of the model, the first unless given.
        off: layers and heads that are to be silent.
        maps: whether maps are wanted, or the loss and the next token alone.
    """

    text: str | None
    ids: tuple[int, ...] | None = None
    model: str | None = None
    off: tuple[tuple[int, int], ...] = ()
    maps: bool = True


async def read(request: Request, limits: Limits) -> bytes:
    """The body."""
    told = request.headers.get("content-length", "0")
    if not told.isascii() or not told.isdigit() or int(told) > limits.body:
        raise _too_large(limits)
    found = bytearray()
    try:
        async with asyncio.timeout(limits.seconds):
            async for chunk in request.stream():
                found += chunk
                if len(found) > limits.body:
                    raise _too_large(limits)
    except TimeoutError as error:
        raise Refusal(408, f"the request did not arrive within {limits.seconds:g} seconds.") from error
    except ClientDisconnect as error:
        raise Refusal(400, "the request was broken off.") from error
    return bytes(found)


async def asked(request: Request, limits: Limits) -> Asked:
    """What is to be looked at: a JSON object, or a file of text as it is with the rest in the address."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await read(request, limits)
    if kind == "application/json":
        return _checked(_json(body), limits)
    if kind in ("text/plain", "application/octet-stream"):
        return _checked({"text": text_of(body), **_in_address(request)}, limits)
    raise Refusal(415, f"a body of type {kind or 'none'!r}: expected application/json, or text/plain for a file.")


def _in_address(request: Request) -> dict[str, Any]:
    """What comes with a file: model, off as JSON, maps as 0 or 1."""
    given = request.query_params
    off = _json(f'{{"off": {given.get("off", "[]")}}}'.encode())["off"]
    return {"model": given.get("model"), "off": off, "maps": given.get("maps", "1") != "0"}


def text_of(body: bytes) -> str:
    """A file's bytes as text, refused where they are none."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refusal(
            422,
            f"this file is no text in UTF-8: {error.reason} at byte {error.start}. Save it as UTF-8, or bring another.",
        ) from error
    strange = sum(letter in CONTROLS for letter in text)
    if "\0" in text or strange > 0.1 * len(text):
        raise Refusal(422, "this file is binary, no text: it is full of control characters. Bring a file of text.")
    return text


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:  # its own words may hold a part of the text
        raise Refusal(400, "the body is not JSON in UTF-8.") from error
    if not isinstance(found, dict):
        raise Refusal(400, 'the body is JSON but no object; expected such as {"text": "The captain looked."}.')
    return found


def _checked(given: dict[str, Any], limits: Limits) -> Asked:
    unknown = set(given) - {field.name for field in dataclasses.fields(Asked)}
    if unknown:
        raise Refusal(400, f"{len(unknown)} unknown names; expected text or ids, model, off, maps.")
    text, ids, model = given.get("text"), given.get("ids"), given.get("model")
    if (text is None) == (ids is None):
        raise Refusal(400, "expected either text or ids, the tokens of one.")
    if text is not None and (not isinstance(text, str) or not text):
        raise Refusal(422, "the text is empty: type or paste one, at least one character.")
    if text is not None and not _encodes(text):
        raise Refusal(422, "the text holds half of a surrogate pair, which is no character.")
    if ids is not None and not (_whole_numbers(ids) and 0 < len(ids) <= limits.tokens):
        raise Refusal(422, f"ids: expected a list of 1 to {limits.tokens:,} whole numbers from 0 up.")
    if model is not None and not isinstance(model, str):
        raise Refusal(400, "model: expected its name.")
    if not isinstance(given.get("maps", True), bool):
        raise Refusal(400, "maps: expected true or false.")
    off = _off(given.get("off", []), limits)
    return Asked(text, None if ids is None else tuple(ids), model, off, given.get("maps", True))


def _off(given: Any, limits: Limits) -> tuple[tuple[int, int], ...]:
    fits = isinstance(given, list) and len(given) <= limits.heads
    if not fits or not all(_whole_numbers(pair) and len(pair) == 2 for pair in given):
        raise Refusal(422, f"off: expected at most {limits.heads} pairs [layer, head], counted from 0.")
    return tuple(sorted({(layer, head) for layer, head in given}))


def _whole_numbers(given: Any) -> bool:
    return isinstance(given, list) and all(type(x) is int and 0 <= x < 2**31 for x in given)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _too_large(limits: Limits) -> Refusal:
    return Refusal(413, f"the request is larger than {limits.body:,} bytes, the limit. Bring a shorter text.")


# How much a server takes on: of a request, of a text, and at a time.


# Requests that are refused, with the words and the status for it.
