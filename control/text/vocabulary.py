"""The bytes that the tokens of a tokenizer.json stand for, read from the file alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

MOST_TOKENS = 1 << 24
"""Ids are places in a list."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Definition(msgspec.Struct):
    """The fields of a tokenizer.json that are read here."""

    model: _Model = msgspec.field(default_factory=_Model)
    added_tokens: list[_AddedToken] = []
    decoder: Any = None


@dataclass(frozen=True)
class TokenBytes:
    """`texts[i]` are the bytes of token i, b"" where no token has that id. `added` are the ids of added tokens: markers
    such as `<|im_end|>`, whose bytes are their names."""

    texts: list[bytes]
    added: list[int]


def is_byte_level(decoder: Any) -> bool:
    """True if a tokenizer with this `decoder` writes bytes as printable characters."""
    return '"ByteLevel"' in msgspec.json.encode(decoder).decode()


def read_token_bytes(tokenizer_json: str, size: int = 0) -> TokenBytes:
    """Every token's bytes; `texts` has at least `size` entries. Raises msgspec.ValidationError for another format."""
    definition = msgspec.json.decode(tokenizer_json, type=_Definition)
    vocab = definition.model.vocab
    ids = vocab if isinstance(vocab, dict) else {piece: index for index, (piece, _) in enumerate(vocab)}
    byte_level = is_byte_level(definition.decoder)
    highest = max([*ids.values(), *(token.id for token in definition.added_tokens)], default=-1)
    if highest > MOST_TOKENS:
        raise msgspec.ValidationError(f"a token has the id {highest}; the most is {MOST_TOKENS}")
    texts = [b""] * max(size, highest + 1)
    for piece, token in ids.items():
        texts[token] = piece_bytes(piece, byte_level)
    for token in definition.added_tokens:
        texts[token.id] = token.content.encode()
    return TokenBytes(texts, sorted(token.id for token in definition.added_tokens))


def piece_bytes(piece: str, byte_level: bool) -> bytes:
    """The bytes of an entry of the vocabulary that is no added token."""
    if byte_level:
        try:
            return piece.translate(_BYTES).encode("latin-1")
        except UnicodeEncodeError:
            return b"".join(_piece_byte(character) for character in piece)
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


def byte_pieces(byte: int, byte_level: bool) -> list[str]:
    """The entries of a vocabulary that can stand for one byte alone."""
    if byte_level:
        return [_CHARACTERS[byte]]
    plain = ["▁" if byte == 32 else chr(byte)] if byte < 128 else []
    return [*plain, f"<0x{byte:02X}>"]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's table of printable characters that stand for the 256 bytes in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_ALPHABET = _byte_alphabet()
_CHARACTERS = {byte: character for character, byte in _ALPHABET.items()}
# Bytes outside the alphabet map beyond latin-1, so that encoding them fails.
_BYTES = dict.fromkeys(range(256), 0xFFFF) | {ord(character): byte for character, byte in _ALPHABET.items()}


def _piece_byte(character: str) -> bytes:
    byte = _ALPHABET.get(character)
    return character.encode() if byte is None else bytes([byte])
