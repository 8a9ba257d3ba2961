"""A model together with its tokenizer: what `view`, `serve` and `survey` work with."""

import dataclasses
import hashlib
import inspect
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import OptionError, ShapeError

UNKNOWN = "\ufffd"  # what a part of a character is decoded to
MOST_PARTS = 8  # tokens to try: a character has at most four bytes, and two may share a token
JOINER = "\u200d"
CONTINUING = {JOINER, *(chr(code) for code in range(0x1F3FB, 0x1F400))}  # the latter are skin tones
PROBE = "The captain looked at the sea, and the sea (42 of them) looked back."


def spoken(name: str) -> str:
    """How a sentence names a model.

    >>> spoken("builtin"), spoken("gpt2")
    ('the built-in model', 'gpt2')
    """
    return "the built-in model" if name == "builtin" else name


@dataclasses.dataclass(frozen=True, eq=False)
class TokenCodec:
    """Text to token ids and back.

    Args:
        encode: the token ids of a text, without the tokens that every text begins or ends with.
        decode: the text of one token.
        before: tokens that every text begins with.
        after: tokens that every text ends with.
        join: the text of several tokens; by default, that of each, one after the other.
        piece: how the vocabulary spells a token, if that is known.
    """

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[int], str] = str
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    join: Callable[[Sequence[int]], str] | None = None
    piece: Callable[[int], str | None] | None = None

    @classmethod
    def of(cls, tokenizer: Any) -> "TokenCodec":
        """The codec of a transformers tokenizer, of a `tokenizers.Tokenizer`, or of a function from text to ids."""

        def join(tokens: Sequence[int]) -> str:
            return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

        def decode(token: int) -> str:
            # In a text: alone, a token of a WordPiece or SentencePiece tokenizer would have no space before it.
            start, text = join(context), join([*context, token])
            return text.removeprefix(start) if context and text.startswith(start) else join([token])

        def encode(text: str, special: bool = False) -> list[int]:
            if hasattr(tokenizer, "all_special_ids"):
                return list(tokenizer(text, add_special_tokens=special, verbose=False).input_ids)
            return list(tokenizer.encode(text, add_special_tokens=special).ids)

        if not hasattr(tokenizer, "all_special_ids") and not hasattr(tokenizer, "encode_batch"):
            return cls(tokenizer)
        context = encode(PROBE)[:1]
        piece = getattr(tokenizer, "convert_ids_to_tokens", None) or getattr(tokenizer, "id_to_token", None)
        return cls(encode, decode, *_frame(encode(PROBE, True), encode(PROBE)), join, piece)

    def label(self, token: int) -> str:
        """The text of a token; of a part of a character its bytes, such as ‹E6 9D›, or its id if they are not known."""
        text = self.decode(token)
        if UNKNOWN not in text:
            return text
        data = _bytes_of(None if self.piece is None else self.piece(token))
        return f"#{token}" if data is None else f"‹{data.hex(' ').upper()}›"

    def characters(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """The text of each token, and the place of the first token that has a part of the same character.

        A character may take several tokens: byte by byte, or with its accents and joiners. Each of them gets its text.
        """
        groups: list[tuple[str, int, int]] = []
        for text, start, stop in self._whole(tokens):
            if groups and _continues(groups[-1][0], text):
                before, start, _ = groups.pop()
                text = before + text
            groups.append((text, start, stop))
        return [(text, start) for text, start, stop in groups for _ in range(start, stop)]

    def once(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token, which join to the whole text: that of a character is with the first of its tokens."""
        return [text if start == place else "" for place, (text, start) in enumerate(self.characters(tokens))]

    def _whole(self, tokens: Sequence[int]) -> Iterator[tuple[str, int, int]]:
        """Runs of tokens without parts of characters: their text, where they start and stop."""
        start = 0
        while start < len(tokens):
            text, stop = self.decode(tokens[start]), start + 1
            if start == 0 and self.join is not None:
                text = self.join(tokens[:1])
            if UNKNOWN in text and self.join is not None:
                longer = range(start + 2, min(len(tokens), start + MOST_PARTS) + 1)
                whole = ((self.join(tokens[start:end]), end) for end in longer)
                text, stop = next(((found, end) for found, end in whole if UNKNOWN not in found), (text, stop))
            yield text, start, stop
            start = stop


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level vocabularies write for bytes: those that can be seen stand for themselves."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(unseen)}


BYTE_LETTERS = _byte_letters()


def _bytes_of(piece: str | None) -> bytes | None:
    """The bytes of a token that its vocabulary spells like this; None if it is not known how.

    >>> _bytes_of("<0xE6>"), _bytes_of("æĿ")
    (b'\\xe6', b'\\xe6\\x9d')
    """
    if piece is None:
        return None
    named = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
    if named is not None:
        return bytes.fromhex(named[1])
    return bytes(map(BYTE_LETTERS.__getitem__, piece)) if BYTE_LETTERS.keys() >= set(piece) else None


def _continues(before: str, after: str) -> bool:
    """Whether a text goes on with an accent, a joiner, or what a joiner joins."""
    if not before.strip() or not after:
        return False
    return before[-1] == JOINER or after[0] in CONTINUING or unicodedata.category(after[0]) in ("Mn", "Me")


def _frame(whole: list[int], inner: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens of `whole` before and after those of `inner`."""
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return tuple(whole[:start]), tuple(whole[start + len(inner) :])
    return (), ()


class TextModel:
    """A model and its tokenizer; `headwise.watch(model.module)` sees its attention heads. `open_model` makes it.

    Args:
        name: what reports call it.
        module: takes token ids (B, T).
        codec: text to token ids and back.
        trained: how many tokens it was trained on at a time, if known.
        limit: the most tokens it can read; None for any number.
        start: of an encoder–decoder model, the token that the text of its decoder begins with; None for other models.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        codec: TokenCodec,
        trained: int | None = None,
        limit: int | None = None,
        start: int | None = None,
    ) -> None:
        self.name, self.module, self.codec, self.trained, self.limit = name, module, codec, trained, limit
        self.start = start

    @property
    def context(self) -> int | None:
        """How many tokens it should read at a time: what it can read, or what it was trained on, if known."""
        return self.trained if self.limit is None else self.limit

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next((x.device for x in self.module.parameters()), torch.device("cpu"))

    def tokens(self, text: str, *, most: int | None = None) -> Tensor:
        """The token ids of a text (1, T), with the tokens that every text begins and ends with.

        Args:
            text: at least one character.
            most: the most tokens there may be; `context` by default.
        """
        if not isinstance(text, str) or not text:
            raise OptionError(f"text={text!r}: expected a text of at least one character.")
        ids = [*self.codec.before, *self.codec.encode(text), *self.codec.after]
        if not ids:
            raise OptionError(f"text={text!r}: the tokenizer produces no tokens for it.")
        most = self.context if most is None else most
        if most is not None and len(ids) > most:
            raise ShapeError(
                f"the text is {len(ids)} tokens long and the model was trained on {self.context}. Shorten it, or pass "
                f"most={len(ids)} to read it anyway."
            )
        return torch.tensor([ids])

    def pieces(self, tokens: Tensor) -> list[str]:
        """The text of each of the `tokens`; those that make up one character all have its text."""
        return [text for text, _ in self.codec.characters(tokens.flatten().tolist())]

    def decoder_tokens(self, tokens: Tensor) -> Tensor:
        """What the decoder of an encoder–decoder model reads while its encoder reads `tokens` (B, T).

        It is the same text behind the start token, without its last token: what the model sees while it repeats the
        text, token by token.
        """
        if self.start is None:
            raise OptionError(f"{self.name} is not an encoder–decoder model: it reads one text.")
        return torch.cat([torch.full_like(tokens[:, :1], self.start), tokens[:, :-1]], 1)

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        """The keyword arguments with which an encoder–decoder model reads `tokens` (B, T)."""
        return {"input_ids": tokens, "decoder_input_ids": self.decoder_tokens(tokens)}

    def read(self, tokens: Tensor) -> None:
        """Run the model over `tokens` (B, T) so that its attention can be watched. No logits are computed."""
        body: Any = getattr(self.module, "base_model", self.module)
        cached = "use_cache" in inspect.signature(body.forward).parameters
        options: dict[str, Any] = {"use_cache": False} if cached else {}
        try:
            if self.start is None:
                body(tokens, **options)
            else:
                body(**self.inputs(tokens), **options)
        except IndexError as error:
            raise ShapeError(
                f"{type(self.module).__name__} cannot read these {tokens.shape[1]} tokens ({error}): a token or a "
                f"position is beyond its tables. Shorten the text, and check that the tokenizer belongs to the model."
            ) from error

    def fingerprint(self) -> str:
        """A short digest that changes with the weights or the tokenizer; it samples every tensor."""
        codec = self.codec
        digest = hashlib.sha256(json.dumps([list(codec.encode(PROBE)), codec.before, codec.after]).encode())
        for name, tensor in self.module.state_dict().items():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            flat = tensor.detach().flatten()
            some = flat[:: max(1, len(flat) // 64)].double().cpu()
            digest.update(json.dumps(some.tolist()).encode())
        return digest.hexdigest()[:16]

    def __repr__(self) -> str:
        return f"TextModel({self.name!r}, {type(self.module).__name__}, context {self.context})"
