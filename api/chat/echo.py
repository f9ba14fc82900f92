"""A prompt as it is shown back: its text, and where each of its tokens lies in it."""

from __future__ import annotations

import codecs

from api.chat.piece import Piece, ScoredToken
from api.chat.tokens import Vocabulary
from api.schemas.view import View
from control.messages import LogEntry, PromptToken, TokenLogprobs


def prompt_text(vocabulary: Vocabulary, tokens: list[int]) -> str:
    """The text of a prompt that was sent as token ids, special tokens written out."""
    return b"".join(map(vocabulary.token_bytes, tokens)).decode(errors="replace")


class Prompt:
    """The prompt of one choice as a client is shown it: before the answer, beside it, or not at all.

    With `echo` its text comes with the log probabilities of its tokens; without these, the choice's opening shows it.
    """

    def __init__(self, vocabulary: Vocabulary, view: View, echo: str) -> None:
        self._text = PromptText(vocabulary, echo) if echo and view.logprobs is not None else None
        self._view = view

    def push(self, entry: LogEntry, tokens: list[PromptToken]) -> Piece:
        """The next tokens, which `entry` tells."""
        piece = Piece(entry.seq, entry.choice)
        if self._view.prompt_logprobs is not None:
            piece.prompt = tokens
        if self._text is None:
            return piece
        for token in tokens:
            start, end, text = self._text.push(token.token)
            known = None if token.logprob is None else TokenLogprobs(token.logprob, token.top[: self._view.logprobs])
            piece.scored.append(ScoredToken(token.token, known, start, end))
            piece.text += text
        return piece

    def take_rest(self) -> str:
        """The rest of the prompt that is shown before the answer."""
        return "" if self._text is None else self._text.take_rest()


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
        """The first piece as it is in the text, which may lack its beginning."""
        if self._text.startswith(piece):
            self._begun = bool(piece)
            return piece
        if token == self._vocabulary.bos:
            return ""
        self._begun = True
        return piece.removeprefix(" ")
