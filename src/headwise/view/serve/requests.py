"""Requests: how much is accepted, how bodies are read and checked, and how a request is refused."""

import asyncio
import dataclasses
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

CONTROLS = {chr(code) for code in range(32)} - set("\t\n\v\f\r")  # rare in text, common in binary files


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much a server accepts; every refusal names the limit.

    Args:
        body: bytes of one request. A text of 32,768 tokens is about 150,000.
        tokens: tokens of one text.
        runs: runs that are kept; the oldest is dropped first.
        memory: bytes that the queries and keys of all kept runs may take; the newest run is always kept.
        waiting: runs that wait for their turn; one is executed at a time.
        tiles: pictures computed at a time.
        queue: pictures that wait.
        seconds: the time in which a request must arrive.
        heads: heads that one run may switch off.
        threads: threads at a time, of which some may be finishing an operation of a cancelled run.
    """

    body: int = 4 * 2**20
    tokens: int = 32_768
    runs: int = 8
    memory: int = 2 * 2**30
    waiting: int = 4
    tiles: int = 2
    queue: int = 128
    seconds: float = 30.0
    heads: int = 4096
    threads: int = 6


class Refusal(Exception):  # noqa: N818 - it is an answer to the client, not an error of ours
    """Why a request is refused, and what would be accepted.

    Args:
        status: the HTTP status.
        message: for the client.
        after: seconds after which the client may try again.
    """

    def __init__(self, status: int, message: str, after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.after = status, message, after

    def response(self) -> JSONResponse:
        headers = {} if self.after is None else {"Retry-After": str(self.after)}
        return JSONResponse({"error": self.message}, self.status, headers)


@dataclasses.dataclass(frozen=True)
class RunRequest:
    """What to run.

    Args:
        text: the text; None if token ids are given.
        ids: token ids instead of a text.
        model: the name of the model, the first by default.
        off: pairs of layer and head to switch off.
        maps: whether to collect attention maps, or only the loss and the next token.
        sweep: whether to switch off every head, one at a time, and report what that does to the loss.
        target: the text of the decoder of an encoder–decoder model; what the model writes by default.
        part: which part of such a model to show; the encoder by default.
    """

    text: str | None
    ids: tuple[int, ...] | None = None
    model: str | None = None
    off: tuple[tuple[int, int], ...] = ()
    maps: bool = True
    sweep: bool = False
    target: str = ""
    part: str | None = None


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body, refused if it is too large or too slow."""
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or int(length) > limits.body:
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
        raise Refusal(400, "the client disconnected.") from error
    return bytes(found)


async def run_request(request: Request, limits: Limits) -> RunRequest:
    """The run that is requested: a JSON object, or a text file with the other fields in the URL."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await read_body(request, limits)
    if kind == "application/json":
        return _checked(_json(body), limits)
    if kind in ("text/plain", "application/octet-stream"):
        return _checked({"text": text_of(body), **_url_fields(request)}, limits)
    raise Refusal(415, f"a body of type {kind or 'none'!r}: expected application/json, or text/plain for a file.")


def _url_fields(request: Request) -> dict[str, Any]:
    """The fields that accompany a file: model, target and part, off as JSON, maps and sweep as 0 or 1."""
    given = request.query_params
    off = _json(f'{{"off": {given.get("off", "[]")}}}'.encode())["off"]
    chosen = {name: given.get(name, usual) != "0" for name, usual in (("maps", "1"), ("sweep", "0"))}
    return {
        "model": given.get("model"),
        "off": off,
        "target": given.get("target", ""),
        "part": given.get("part"),
        **chosen,
    }


def text_of(body: bytes) -> str:
    """The bytes of a file as text; binary files are refused."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refusal(
            422,
            f"this file is not UTF-8 text: {error.reason} at byte {error.start}. Save it as UTF-8, or choose another.",
        ) from error
    controls = sum(letter in CONTROLS for letter in text)
    if "\0" in text or controls > 0.1 * len(text):
        raise Refusal(422, "this file is binary: it is full of control characters. Choose a text file.")
    return text


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:  # its message may quote the text
        raise Refusal(400, "the body is not JSON in UTF-8.") from error
    if not isinstance(found, dict):
        raise Refusal(400, 'the body is JSON but not an object; expected e.g. {"text": "The captain looked."}.')
    return found


def _checked(given: dict[str, Any], limits: Limits) -> RunRequest:
    unknown = set(given) - {field.name for field in dataclasses.fields(RunRequest)}
    if unknown:
        raise Refusal(
            400, f"{len(unknown)} unknown fields; expected text or ids, model, off, maps, sweep, target, part."
        )
    text, ids, model, maps = given.get("text"), given.get("ids"), given.get("model"), given.get("maps", True)
    if (text is None) == (ids is None):
        raise Refusal(400, "expected either text or ids (its tokens), not both.")
    if text is not None and (not isinstance(text, str) or not text):
        raise Refusal(422, "the text is empty: type or paste at least one character.")
    target, part = given.get("target", ""), given.get("part")
    if not isinstance(target, str) or not (part is None or isinstance(part, str)):
        raise Refusal(400, "target, part: expected text.")
    if not _encodes(target) or (text is not None and not _encodes(text)):
        raise Refusal(422, "the text contains half of a surrogate pair, which is not a character.")
    if ids is not None and not (_whole_numbers(ids) and 0 < len(ids) <= limits.tokens):
        raise Refusal(422, f"ids: expected a list of 1 to {limits.tokens:,} non-negative integers.")
    if model is not None and not isinstance(model, str):
        raise Refusal(400, "model: expected its name.")
    sweep = given.get("sweep", False)
    if not isinstance(maps, bool) or not isinstance(sweep, bool):
        raise Refusal(400, "maps, sweep: expected true or false.")
    off = _off(given.get("off", []), limits)
    return RunRequest(text, None if ids is None else tuple(ids), model, off, maps and not sweep, sweep, target, part)


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
    return Refusal(413, f"the request is larger than the limit of {limits.body:,} bytes. Use a shorter text.")
