"""All engines count the same tokens: a vocabulary of characters."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from ops.harness import alphabet


def test_text_and_tokens_are_one(tmp_path: Path) -> None:
    """The tokenizer that is written agrees with the arithmetic, over the whole vocabulary."""
    alphabet.write_tokenizer(tmp_path, 30_000)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = list(range(len(alphabet.SPECIAL), 30_000, 7))
    text = alphabet.text_of(ids)
    assert len(text) == len(ids)
    assert tokenizer.encode(text).ids == ids == alphabet.ids_of(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_to_id("</s>") == alphabet.EOS


def test_english_letters_have_one_token_each(tmp_path: Path) -> None:
    """One per character, white space included."""
    alphabet.write_tokenizer(tmp_path, 128)
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("Hello, you!\n").ids
    assert len(ids) == 12
    assert max(ids) < alphabet.FIRST


def test_the_largest_vocabulary_has_distinct_letters() -> None:
    """Every letter is another one, none is half of a pair, and one more is refused by name."""
    letters = alphabet.characters(alphabet.LARGEST)
    assert len(set(letters)) == alphabet.LARGEST > 152_000
    "".join(letters).encode()
    with pytest.raises(ValueError, match=str(alphabet.LARGEST + 1)):
        alphabet.characters(alphabet.LARGEST + 1)


def test_what_is_no_token_is_refused() -> None:
    """A special token has no text, and a strange character no token."""
    with pytest.raises(ValueError, match="no text"):
        alphabet.text_of([alphabet.EOS])
    with pytest.raises(ValueError, match=r"U\+00E9"):
        alphabet.ids_of("é")
