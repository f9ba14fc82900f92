"""Stop strings are found across pieces of text: against searching the whole text."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from control.text.text_stream import StopStrings, TextStream

letters = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4)


def search_whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: read by characters, stop where the first stop string is complete, at the longest of equals."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            return text[: end - len(stop)], stop
    return text, None


def search_pieces(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher, safe = StopStrings(stops), ""
    for piece in pieces:
        text, met = matcher.push(piece)
        safe += text
        if met is not None:
            return safe, met
    return safe + matcher.flush(), None


@given(text=letters, stops=stop_lists, cuts=st.lists(st.integers(0, 30)))
@settings(max_examples=500)
def test_stop_strings_do_not_depend_on_the_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    """The text before the stop string and the string met do not depend on how the text was cut."""
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[left:right] for left, right in itertools.pairwise(borders)]
    assert search_pieces(pieces, stops) == search_whole(text, stops)


@given(text=letters, stops=stop_lists)
def test_nothing_is_held_back_without_need(text: str, stops: list[str]) -> None:
    """The text that is held back could begin a stop string, and is no longer than that."""
    matcher = StopStrings(stops)
    safe, met = matcher.push(text)
    if met is None:
        held = matcher.flush()
        assert safe + held == text
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_the_first_complete_stop_string_ends_the_text() -> None:
    """A stop string that is complete while a longer one is only begun ends the text."""
    assert StopStrings(["abcd", "bc"]).push("abcd") == ("a", "bc")


def test_stop_string_across_tokens(byte_level: Tokenizer) -> None:
    """A stop string that begins in one token and ends in another is found, and its beginning is never shown."""
    ids = byte_level.encode("the farm 😀 and the leader").ids
    stream, shown = TextStream(byte_level.decode, ["😀 an"]), ""
    for token in ids:
        text, met = stream.push(token)
        shown += text
        if met:
            break
    assert (shown, met) == ("the farm ", "😀 an")


def test_text_of_the_first_tokens_is_not_searched(byte_level: Tokenizer) -> None:
    """With min_tokens a stop string counts only in what comes after."""
    a = byte_level.token_to_id("a")
    stream = TextStream(byte_level.decode, ["a"], min_tokens=2)
    assert [stream.push(a) for _ in range(3)] == [("a", None), ("a", None), ("", "a")]


@given(text=st.text(max_size=20))
def test_stream_without_stops_is_the_text(byte_level: Tokenizer, text: str) -> None:
    """A stream with no stop string hands out every character."""
    stream = TextStream(byte_level.decode)
    pushed = "".join(stream.push(token)[0] for token in byte_level.encode(text).ids)
    assert pushed + stream.flush() == text
