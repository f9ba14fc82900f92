"""The incremental detokenizer equals decoding at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from control.text.text_stream import REPLACEMENT, Detokenizer

pieces = st.lists(
    st.one_of(
        st.sampled_from(
            ["the farm", " ", "👩‍👩‍👧‍👦", "😀", "🇩🇪", "e\u0301", "東京", "한", "\ufffd", "\x00", "naïve ", "\n"]
        ),
        st.text(max_size=4),
    ),
    max_size=12,
).map("".join)


def stream(decode: Callable[[list[int]], str], ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@given(text=pieces)
def test_pushes_and_flush_are_the_text(byte_level: Tokenizer, text: str) -> None:
    """Whatever a byte-level tokenizer can encode comes back exactly."""
    assert "".join(stream(byte_level.decode, byte_level.encode(text).ids)) == text


@given(text=pieces, cut=st.integers(0, 40))
def test_cut_inside_a_character(byte_level: Tokenizer, text: str, cut: int) -> None:
    """A stream that ends in the middle of a character equals decoding the same tokens at once."""
    ids = byte_level.encode(text).ids[:cut]
    assert "".join(stream(byte_level.decode, ids)) == byte_level.decode(ids)


@given(ids=st.lists(st.integers(0, 419), max_size=120))
@settings(max_examples=300)
def test_any_tokens_at_all(byte_level: Tokenizer, ids: list[int]) -> None:
    """Broken bytes, special tokens and long rows of both equal decoding at once, too."""
    ids = [token % byte_level.get_vocab_size() for token in ids]
    assert "".join(stream(byte_level.decode, ids)) == byte_level.decode(ids)


@given(text=pieces)
def test_characters_come_whole(byte_level: Tokenizer, text: str) -> None:
    """Before the flush no replacement mark is shown that is not in the final text."""
    text = text.replace(REPLACEMENT, "")
    ids = byte_level.encode(text).ids
    assert REPLACEMENT not in "".join(stream(byte_level.decode, ids)[:-1])


def test_emoji_byte_by_byte(byte_level: Tokenizer) -> None:
    """An emoji of four single-byte tokens appears with the fourth."""
    from tokenizers import pre_tokenizers

    ((mapped, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("🦀")
    ids = [byte_level.token_to_id(character) for character in mapped]
    assert stream(byte_level.decode, ids) == ["", "", "", "🦀", ""]


def fallback_ids(tokenizer: Tokenizer, words: list[str]) -> list[int]:
    """Ids of vocabulary words; anything else becomes byte tokens."""
    ids: list[int] = []
    for word in words:
        token_id = tokenizer.token_to_id(word)
        ids += (
            [token_id] if token_id is not None else [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in word.encode()]
        )
    return ids


@given(words=st.lists(st.sampled_from(["▁", "▁the", "▁farm", "a", "▁a", ".", "é", "😀", "東", "</s>"]), max_size=30))
def test_byte_fallback_gives_the_same_text_in_pieces(byte_fallback: Tokenizer, words: list[str]) -> None:
    """A decoder that strips a leading space and spells characters as byte tokens gives the same text in pieces."""
    ids = fallback_ids(byte_fallback, words)
    assert "".join(stream(byte_fallback.decode, ids)) == byte_fallback.decode(ids)


def test_silent_tokens_before_a_character(byte_fallback: Tokenizer) -> None:
    """Tokens without text just before an emoji don't make its first bytes look broken."""
    ids = fallback_ids(byte_fallback, ["▁", "</s>", "</s>", "😀"])
    assert "".join(stream(byte_fallback.decode, ids)) == "😀"


def test_byte_fallback_cut_after_a_character(byte_fallback: Tokenizer) -> None:
    """A character that was handed out stays, though the decoder would spoil the whole run for its broken end."""
    ids = fallback_ids(byte_fallback, ["▁the", "é", "😀"])[:-1]
    assert "".join(stream(byte_fallback.decode, ids)) == "theé" + REPLACEMENT * 3


@pytest.mark.parametrize("repeated", ["<|end|>", "broken", "a", "chain"])
def test_cost_per_token_is_bounded(byte_level: Tokenizer, repeated: str) -> None:
    """Endless special tokens, broken bytes, plain text or tokens ending inside a character never grow the window."""
    longest = count = 0
    # In the byte-level alphabet "Ģ" is 0x80, a byte that can't begin a character.
    token = byte_level.token_to_id({"broken": "Ģ", "chain": "a"}.get(repeated, repeated))

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        if repeated == "chain":  # the first token begins a euro sign, each further one ends one and begins the next
            first = b"\xe2" if len(ids) == count else b"\x82\xac\xe2"
            return (first + b"\x82\xac\xe2" * (len(ids) - 1)).decode(errors="replace")
        return byte_level.decode(ids)

    detokenizer, pushed = Detokenizer(decode), ""
    for count in range(1, 2001):  # noqa: B007 - decode reads it
        pushed += detokenizer.push(token)
    assert longest <= 33
    expected = {"<|end|>": "", "broken": REPLACEMENT * 2000, "a": "a" * 2000, "chain": "€" * 1999 + REPLACEMENT}
    assert pushed + detokenizer.flush() == expected[repeated]
