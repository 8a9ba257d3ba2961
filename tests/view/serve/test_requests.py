"""What a request brings is bounded and checked, and every refusal names the number or the mistake."""

import dataclasses
import json

import pytest
from starlette.requests import Request

from headwise.view.serve import requests
from headwise.view.serve.requests import Limits, Refusal
from serving import TEXT, begun, looked, refused, until

SMALL = dataclasses.replace(Limits(), body=200, tokens=30)


def test_a_body_beyond_the_limit_is_refused_before_it_is_read(client_of):
    client = client_of(SMALL)
    assert refused(client.post("/api/runs", json={"text": "x" * 300}), 413, "larger than the limit of 200 bytes")


def test_a_body_that_does_not_tell_its_length_is_cut_off_at_the_limit(client_of):
    client = client_of(SMALL)
    sent = []

    def endless():
        for _ in range(1000):
            sent.append(1)
            yield b"x" * 100

    answer = client.post("/api/runs", content=endless(), headers={"content-type": "text/plain"})
    assert refused(answer, 413, "larger than the limit of 200 bytes")


def test_a_length_that_is_no_number_is_refused(client):
    answer = client.post("/api/runs", content=b"{}", headers={"content-length": "-5", "content-type": "text/plain"})
    assert answer.status_code == 413


@pytest.mark.anyio
async def test_a_body_that_does_not_arrive_is_not_waited_for():
    import asyncio

    async def receive():
        await asyncio.sleep(60)

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(Refusal, match="did not arrive within 0.05 seconds"):
        await requests.read_body(request, dataclasses.replace(SMALL, seconds=0.05))


@pytest.fixture
def anyio_backend():
    return "asyncio"


def test_too_many_tokens_are_refused_with_both_numbers(client_of):
    client = client_of(SMALL)
    answer = client.post("/api/runs", json={"text": "sea " * 40, "model": "small"})
    assert refused(answer, 413, "tokens long, and the limit is 30")
    answer = client.post("/api/runs", json={"ids": [1] * 31, "model": "small"})
    assert refused(answer, 422, "1 to 30 non-negative integers")


@pytest.mark.parametrize(
    ("given", "status", "words"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"\xff{}", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b"[]", 400, "not an object"),
        (b"{}", 400, "either text or ids"),
        ({"text": "a", "ids": [1]}, 400, "either text or ids"),
        ({"text": ""}, 422, "the text is empty"),
        ({"text": 5}, 422, "the text is empty"),
        ({"text": "\ud800"}, 422, "surrogate"),
        ({"ids": []}, 422, "non-negative integers"),
        ({"ids": [1.5]}, 422, "non-negative integers"),
        ({"ids": [-1]}, 422, "non-negative integers"),
        ({"ids": [True]}, 422, "non-negative integers"),
        ({"ids": [10**30]}, 422, "non-negative integers"),
        ({"ids": [2_000_000]}, 422, "token 2000000: this model has"),
        ({"text": "a", "model": 3}, 400, "expected its name"),
        ({"text": "a", "model": "../../etc"}, 404, "no model with this name; the models are builtin, small"),
        ({"text": "a", "maps": "yes"}, 400, "true or false"),
        ({"text": "a", "off": {}}, 422, "pairs [layer, head]"),
        ({"text": "a", "off": [[0]]}, 422, "pairs [layer, head]"),
        ({"text": "a", "off": [[0, -1]]}, 422, "pairs [layer, head]"),
        ({"text": "a", "off": [[0, 0]] * 5000}, 422, "at most 4096"),
        ({"text": "a", "off": [[99, 0]]}, 422, "layer 99: this model has 7"),
        ({"text": "a", "off": [[0, 99]]}, 422, "head 0.99: this layer has 8 heads"),
        ({"text": "a", "surprise": 1}, 400, "unknown fields"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_means_nothing_is_refused_in_words(client, given, status, words):
    body = given if isinstance(given, bytes) else json.dumps(given).encode()
    answer = client.post("/api/runs", content=body, headers={"content-type": "application/json"})
    assert refused(answer, status, words)


def test_a_file_of_text_is_read_as_it_is(client):
    file = ("\ufeff" + TEXT).encode()
    answer = client.post("/api/runs", content=file, headers={"content-type": "text/plain"})
    assert answer.status_code == 201
    assert answer.json()["tokens"] == looked(client)["tokens"]
    for address, status, words in (
        ("model=nowhere", 404, "no model with this name"),
        ("off=[[99,0]]", 422, "layer 99"),
        ("off=nonsense", 400, "not JSON"),
    ):
        answer = client.post(f"/api/runs?{address}", content=file, headers={"content-type": "text/plain"})
        assert refused(answer, status, words)


def test_a_file_is_looked_at_with_heads_switched_off(client):
    address = "/api/runs?model=small&off=[[1,2]]&maps=0"
    id = client.post(address, content=TEXT.encode(), headers={"content-type": "text/plain"}).json()["id"]
    told = until(client, id, ("finished", "failed"))
    assert (told["model"], told["off"], told["version"]) == ("small", [[1, 2]], 0)
    assert told["outcome"]["loss"] == looked(client, model="small", off=[[1, 2]])["outcome"]["loss"]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "not UTF-8 text: invalid start byte at byte 0"),
        ("Grüße".encode("latin-1"), "not UTF-8 text"),
        ("The sea".encode("utf-16-le"), "this file is binary"),
        (b"\x01\x02\x03\x04abc", "this file is binary"),
        (b"", "the text is empty"),
    ],
    ids=["picture", "latin-1", "utf-16", "controls", "empty"],
)
def test_a_file_that_is_no_text_is_refused_in_clear_words(client, file, words):
    answer = client.post("/api/runs", content=file, headers={"content-type": "application/octet-stream"})
    assert refused(answer, 422, words)


@pytest.mark.parametrize("kind", ["", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"])
def test_forms_are_refused(client, kind):
    answer = client.post("/api/runs", content=b"text=x", headers={"content-type": kind})
    assert refused(answer, 415, "expected application/json")


def test_any_characters_are_a_text(client):
    text = "<script>alert(1)</script> <s> \u202eRTL \U0001f600 a\u200bb \x07 </textarea>"
    told = looked(client, text, model="small")
    manifest = client.get(f"/api/runs/{told['id']}/manifest").json()["manifest"]
    assert "".join(manifest["tokens"][1:]).count("script") == 2
    assert begun(client, "x")
