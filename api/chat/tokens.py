"""A model's tokenizer.json: text to token ids with one beginning-of-sequence token, and single tokens to bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import msgspec
from tokenizers import Tokenizer

from api.chat.template import special_tokens
from control.messages import ModelAssets
from control.text.text_stream import REPLACEMENT
from control.text.tokenizer_check import decoding_only, longest_piece
from control.text.vocabulary import byte_pieces, is_byte_level, piece_bytes

SURELY_CHARACTERS = 8
"""Characters per token of what fits: a longer text is measured before it is tokenised whole."""
WHOLE_CHARACTERS = 1 << 20
"""A longer text is measured in any case: tokenising it takes two hundred times its size."""
_PIECE_CHARACTERS = 65_536
_CUT_TOKENS = 1024
"""Tokens that cutting a text may add at the two ends of a piece; far more than it does in practice."""
_MARK = re.compile(r"[<>\[\]|｜]")
"""The characters by which a mark differs from a word or white space that was added to a vocabulary."""


class _AddedToken(msgspec.Struct):
    id: int
    special: bool = False


class _Definition(msgspec.Struct):
    """The fields of tokenizer.json that are read here; the rest, hundreds of thousands of entries, is not kept."""

    added_tokens: list[_AddedToken] = []
    decoder: Any = None


class Tokenized(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a text, or of a pair, whose second text begins at `second`; 0 for one text alone."""

    ids: list[int]
    second: int = 0


class Encoder(Protocol):
    """Texts to tokens."""

    def encode(self, texts: Sequence[str | tuple[str, str]], special: bool) -> list[Tokenized]:
        """Texts, or pairs of them; `special`: with the tokens that the tokenizer puts around each."""
        ...


class OwnEncoder:
    """The encoder of a whole tokenizer in this process."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # A truncation or padding stored in the file belongs to training; here it would change prompts silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()

    def encode(self, texts: Sequence[str | tuple[str, str]], special: bool) -> list[Tokenized]:
        # Of the tokenizer's calls only those for a batch let other threads run meanwhile.
        if any(isinstance(text, tuple) for text in texts):
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=special)
            return [
                Tokenized(encoding.ids, encoding.type_ids.index(1) if 1 in encoding.type_ids else 0)
                for encoding in encodings
            ]
        return [
            Tokenized(encoding.ids)
            for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
        ]


class NoEncoder:
    """The encoder of a process that never tokenises texts."""

    def encode(self, texts: Sequence[str | tuple[str, str]], special: bool) -> list[Tokenized]:
        raise NotImplementedError


class Vocabulary:
    """A model's tokenizer and what the API derives from it; immutable, and shared by all requests."""

    def __init__(self, assets: ModelAssets, encoder: Encoder | None = None) -> None:
        """`encoder`: of a tokenizer that is not to work on texts in this process."""
        if encoder is None:
            self.tokenizer = Tokenizer.from_str(assets.tokenizer_json)
            encoder = OwnEncoder(self.tokenizer)
        else:
            self.tokenizer = Tokenizer.from_str(decoding_only(assets.tokenizer_json))
        self._encoder = encoder
        self.prepared = False
        """True once what is encoded once is there."""
        self._config = assets.tokenizer_config
        definition = msgspec.json.decode(assets.tokenizer_json, type=_Definition)
        self._special = {token.id for token in definition.added_tokens}
        self._hidden = {token.id for token in definition.added_tokens if token.special}
        kind = definition.decoder.get("type") if isinstance(definition.decoder, dict) else None
        self.alone = self._whole_text if kind == "ByteLevel" else None
        """The text of a token that means the same in any place, None for others; None for decoders without any."""
        self._whole: dict[int, str | None] = {}
        self._byte_level = is_byte_level(definition.decoder)
        self.longest_bytes = longest_piece(assets.tokenizer_json, self._byte_level)
        """Bytes of the longest token that is not a marker, at most."""

    @cached_property
    def bos(self) -> int | None:
        """Id of the beginning-of-sequence token if prompts of this model start with one, else None.

        `add_bos_token` of the tokenizer's config decides where it is set; else what the tokenizer itself puts in front.
        """
        text = special_tokens(self._config).get("bos_token")
        token = self.tokenizer.token_to_id(text) if text else None
        adds_bos = self._config.get("add_bos_token")
        if adds_bos is not None:
            return token if adds_bos else None
        plain = self._plain("a")
        full = self.encode_all(["a"])[0].ids
        leading = full[: len(full) - len(plain)] if full[-len(plain) :] == plain else full[:1]
        if not leading or leading == plain[:1]:
            return None
        return token if token in leading else leading[0]

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Ids of a prompt, with exactly one BOS if `bos`. Special tokens that the text spells out are special."""
        ids = self._plain(text)
        return self._with_one_bos(ids) if bos else ids

    def encode_all(self, texts: Sequence[str | tuple[str, str]], *, special: bool = True) -> list[Tokenized]:
        """Texts, or pairs of them; `special`: with the tokens that the tokenizer puts around each."""
        return self._encoder.encode(texts, special)

    def _plain(self, text: str) -> list[int]:
        [encoded] = self.encode_all([text], special=False)
        return encoded.ids

    def encode_pieces(self, pieces: list[str], *, inside: bool) -> list[int]:
        """Ids of the pieces of one text, each tokenised for itself, without a space that sentencepiece puts in front.
        The first one has it, unless it is `inside` of a text too."""
        plain = pieces if not self._spaces else pieces[: 0 if inside else 1]
        texts = [*plain, *("\n" + piece for piece in pieces[len(plain) :])]
        encodings = self.encode_all(texts, special=False)
        ids: list[int] = []
        for place, encoding in enumerate(encodings):
            after_line = place >= len(plain) and encoding.ids[: len(self._line)] == self._line
            ids += encoding.ids[len(self._line) :] if after_line else encoding.ids
        return ids

    def spellings(self, words: list[str]) -> list[list[int]]:
        """The token sequences that write each word: alone, after a space, and in the middle of a text, where
        sentencepiece puts no space in front."""
        bare = [word.lstrip() or word for word in words]
        texts = [*bare, *(" " + word for word in bare)]
        encodings = self.encode_all(texts, special=False)
        sequences = [tuple(encoding.ids) for encoding in encodings]
        if self._spaces:
            sequences += [tuple(self.encode_pieces([word], inside=True)) for word in bare]
        return [list(ids) for ids in dict.fromkeys(sequences) if ids]

    @cached_property
    def _line(self) -> list[int]:
        """The ids of a new line at the beginning of a text."""
        return self._plain("\n")

    @cached_property
    def _spaces(self) -> bool:
        """True if the tokenizer puts a space in front of a text, as sentencepiece does."""
        alone = self._plain("a")
        after = self._plain("\na")
        return after[: len(self._line)] == self._line and after[len(self._line) :] != alone

    def exceeds(self, text: str, tokens: int) -> bool:
        """True if `text` is certainly longer than `tokens`, found in pieces: time and memory follow `tokens`.

        False says only that `encode` is cheap enough to tell.
        """
        if len(text) <= min(SURELY_CHARACTERS * tokens, WHOLE_CHARACTERS):
            return False
        least = 0
        for start in range(0, len(text), _PIECE_CHARACTERS):
            if least > tokens:
                return True
            piece = text[start : start + _PIECE_CHARACTERS]
            least += max(0, len(self._plain(piece)) - _CUT_TOKENS)
        return least > tokens

    def prepare(self) -> None:
        """Encode what is encoded once, while the caller may wait."""
        _ = self.bos, self._line, self._spaces
        self.prepared = True

    def decode(self, ids: list[int]) -> str:
        """Text of a run of tokens, special tokens skipped."""
        return self.tokenizer.decode(ids)

    def _whole_text(self, token: int) -> str | None:
        if token not in self._whole:
            raw = b"" if token in self._special else self.token_bytes(token)
            text = raw.decode(errors="replace")
            self._whole[token] = text if text and REPLACEMENT not in text else None
        return self._whole[token]

    def decode_all(self, ids: list[int]) -> str:
        """Text of a run of tokens, special tokens written out."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def knows(self, text: str) -> bool:
        """True if the text is a token of its own that was added to the vocabulary."""
        return self.tokenizer.token_to_id(text) in self._special

    def added(self, text: str) -> int | None:
        """The token whose text this is, if it was added to the vocabulary."""
        return self.tokenizer.token_to_id(text) if self.knows(text) else None

    def added_in(self, text: str) -> list[tuple[int, int, int]]:
        """The added tokens in a text that are marks: start, end and id of each; of two at a place the longer."""
        marks = [(mark, self.tokenizer.token_to_id(mark[0])) for mark in self._marks.finditer(text)]
        return [(mark.start(), mark.end(), token) for mark, token in marks if token is not None]

    def hidden_in(self, texts: Sequence[str]) -> dict[int, str]:
        """The special tokens that stand in the texts, by id: their texts are skipped when tokens are decoded."""
        whole = [self.hidden(text) for text in texts]
        ids = {token for text in texts for _, _, token in self.added_in(text)}
        ids |= {token for token in whole if token is not None}
        return {token: self.tokenizer.id_to_token(token) or "" for token in sorted(ids & self._hidden)}

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        """Finds the added tokens that are no plain words or white space."""
        names = [self.tokenizer.id_to_token(token) or "" for token in self._special]
        marks = sorted((name for name in names if _MARK.search(name)), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, marks)) or r"(?!)")

    def special_texts(self) -> list[str]:
        """The texts of all tokens that mean something else than they spell."""
        return [text for token in self._hidden if (text := self.tokenizer.id_to_token(token))]

    def hidden(self, text: str) -> int | None:
        """The token whose text this is, if it is a special one: its text is then skipped when tokens are decoded."""
        token = self.tokenizer.token_to_id(text)
        return token if token in self._hidden else None

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        bos = self.bos
        if bos is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == bos:
            start += 1
        return [bos, *ids[start:]]

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; several tokens may be needed for one character."""
        piece = self.tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if token in self._special:
            return piece.encode()
        return piece_bytes(piece, self._byte_level)

    def added_tokens(self) -> dict[int, str]:
        """Id and name of every marker such as `<|im_end|>`."""
        return {token: self.tokenizer.id_to_token(token) or "" for token in sorted(self._special)}

    def single_bytes(self) -> dict[int, bytes]:
        """Id and byte of every token of one byte."""
        pieces = [piece for byte in range(256) for piece in byte_pieces(byte, self._byte_level)]
        ids = [self.tokenizer.token_to_id(piece) for piece in pieces]
        return {token: self.token_bytes(token) for token in ids if token is not None}

    def token_text(self, token: int) -> str:
        """A token as logprobs show it: its text, or `bytes:\\xf0\\x9f` where it is a part of a character."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
