"""Text out of a growing row of tokens: incremental detokenising and stop strings, for the leader and the API alike.

Both must cut a text at the same place, so both build one `TextStream` per choice from the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens skipped."""

REPLACEMENT = "\ufffd"
"""The character that a decoder writes for bytes that are not, or not yet, a character."""

_CHARACTER_BYTES = 4
"""UTF-8's longest character; a token holds at least one byte, so no more tokens than that share one character."""
_SILENT_TOKENS = 8
"""Tokens without text that are kept in the window; a first one can matter to a decoder that strips a leading space."""
_WINDOW = 32
"""Tokens in a window that never met a border between characters, before it is shortened."""


class Detokenizer:
    """Turns one choice's tokens into text as they come; each push costs a decode of a few tokens.

    For every decoder whose text only grows (byte-level BPE, and sentencepiece on well-formed bytes), all pushes and the
    flush together are `decode(all tokens)`. Text that was handed out never changes.
    """

    def __init__(self, decode: Decode, alone: Callable[[int], str | None] | None = None) -> None:
        """`alone` gives the text of a token that is whole characters wherever it stands, None for any other. Only for
        decoders whose text is that of their tokens one after the other; it changes nothing but the time."""
        self._decode = decode
        self._alone = alone
        # The window: the tokens since the border before last. The older part is context only, because a decoder may
        # treat the first token of its input differently.
        self._tokens: list[int] = []
        self._border = 0
        """Tokens of the window that lie before the last border between characters."""
        self._emitted = ""
        """The window's text that was handed out."""
        self._unfinished = 0
        """Tokens in a row after which the text ended inside a character."""

    def push(self, token: int) -> str:
        """The text that became certain with `token`; a character split over tokens comes whole with its last one."""
        if self._alone is not None and not self._unfinished and (whole := self._alone(token)) is not None:
            self._tokens.clear()
            self._border = 0
            self._emitted = ""
            return whole
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if not text.endswith(REPLACEMENT):
            self._unfinished = 0
            return self._reach_border(text)
        self._unfinished += 1
        uncertain = len(text) - len(text.rstrip(REPLACEMENT))
        if self._unfinished > _CHARACTER_BYTES:
            uncertain = 1  # bytes that old are broken for good; only the last mark can still turn into a character
        certain = text[: len(text) - uncertain]
        fresh = certain[len(self._emitted) :]
        if fresh:
            self._emitted = certain
        if len(self._tokens) > _WINDOW:
            self._shorten(text)
        return fresh

    def flush(self) -> str:
        """The text that was still held back, broken bytes as U+FFFD; nothing may be pushed afterwards."""
        text = self._decode(self._tokens)
        if text.startswith(self._emitted):
            return text[len(self._emitted) :]
        # A byte-fallback decoder gives up a whole run of bytes for one broken end; what was handed out stays as it is.
        return self._decode(self._tokens[self._border :])

    def _reach_border(self, text: str) -> str:
        fresh = text[len(self._emitted) :]
        if fresh:
            del self._tokens[: self._border]
            self._border = len(self._tokens)
            self._emitted = self._decode(self._tokens)
        elif len(self._tokens) - self._border > _SILENT_TOKENS:
            self._tokens.pop()
        return fresh

    def _shorten(self, text: str) -> None:
        """Keep the last tokens only. UTF-8 synchronises itself: a character cut at the front never changes the end."""
        waiting = len(text) - len(self._emitted)
        del self._tokens[: -2 * _CHARACTER_BYTES]
        rest = self._decode(self._tokens)
        self._border = 0
        self._emitted = rest[: max(0, len(rest) - waiting)]


def partial_match_length(text: str, strings: Sequence[str]) -> int:
    """Length of the longest end of `text` that is a beginning of one of the strings, and not all of it."""
    longest = max((len(string) for string in strings), default=0)
    for length in range(min(len(text), longest - 1), 0, -1):
        tail = text[-length:]
        if any(string.startswith(tail) and len(string) > length for string in strings):
            return length
    return 0


class StopStrings:
    """Finds the first stop string in a text that comes in pieces, however it is cut.

    The match that ends first wins, of two that end together the longer: so the outcome is the same for one piece and
    for single characters.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._pending = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is surely before any stop string, and the one that was met; after it nothing may be pushed."""
        if not self._stops:
            return text, None
        text = self._pending + text
        met = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if met:
            _, start, stop = min(met)
            self._pending = ""
            return text[:start], stop
        cut = len(text) - partial_match_length(text, self._stops)
        self._pending = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """The text held back because it might have begun a stop string."""
        text = self._pending
        self._pending = ""
        return text


class TextStream:
    """One choice's text, cut at its stop strings. Text of the first `min_tokens` tokens is not searched."""

    def __init__(self, decode: Decode, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stops)
        self._unsearched = min_tokens

    def push(self, token: int) -> tuple[str, str | None]:
        """The text that is certain and before any stop string, and the stop string that `token` completed."""
        text = self._detokenizer.push(token)
        if self._unsearched > 0:
            self._unsearched -= 1
            return text, None
        return self._stops.push(text)

    def flush(self) -> str:
        """The rest of the text, at an end that no stop string caused."""
        text, _ = self._stops.push(self._detokenizer.flush())
        return text + self._stops.flush()
