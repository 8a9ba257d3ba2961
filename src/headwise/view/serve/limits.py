"""How much a server takes on: of a request, of a text, and at a time."""

import dataclasses


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
