"""A prompt as it is shown back: its text, and where each of its tokens lies in it."""

from __future__ import annotations

import codecs

from api.chat.tokens import Vocabulary


def prompt_text(vocabulary: Vocabulary, tokens: list[int]) -> str:
    """The text of a prompt that was sent as token ids, special tokens written out."""
    return b"".join(map(vocabulary.token_bytes, tokens)).decode(errors="replace")


class PromptText:
    """Walks over the tokens of a prompt's text; characters that are split over tokens begin and end with the last one.

    What stands between text and tokens is allowed for: a beginning-of-sequence token that the text has not, and a
    space that the vocabulary puts in front. Where a tokenizer changes its text otherwise, the places are near.
    """

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        self._vocabulary, self._text = vocabulary, text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at, self._begun = 0, False

    def take_rest(self) -> str:
        """The text after the tokens that were walked over, once."""
        rest, self._at = self._text[self._at :], len(self._text)
        return rest

    def push(self, token: int) -> tuple[int, int, str]:
        """Start and end of the next token, in characters, and its text."""
        start, piece = self._at, self._decoder.decode(self._vocabulary.token_bytes(token))
        if not self._begun:
            piece = self._first(token, piece)
        self._at = min(start + len(piece), len(self._text))
        return start, self._at, self._text[start : self._at]

    def _first(self, token: int, piece: str) -> str:
        """What the first piece is of the text, which may lack its beginning."""
        if self._text.startswith(piece):
            self._begun = bool(piece)
            return piece
        if token == self._vocabulary.bos:
            return ""
        self._begun = True
        return piece.removeprefix(" ")
