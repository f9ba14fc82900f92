"""The tokenizer of a leader, which decodes only."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Tokenizer, models

from control.text.vocabulary import without_merges


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_it_decodes_as_the_whole_one(kind: str, request: pytest.FixtureRequest) -> None:
    """Any ids, with special tokens and without. The control: it has no merges any more."""
    whole: Tokenizer = request.getfixturevalue(kind)
    text = without_merges(whole.to_str())
    decoder, chosen = Tokenizer.from_str(text), random.Random(1)
    assert json.loads(text)["model"]["merges"] == []
    for _ in range(200):
        ids = [chosen.randrange(whole.get_vocab_size()) for _ in range(12)]
        for skip in (True, False):
            assert decoder.decode(ids, skip_special_tokens=skip) == whole.decode(ids, skip_special_tokens=skip)


def test_a_tokenizer_without_merges_stays_as_it_is() -> None:
    text = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False)).to_str()
    assert without_merges(text) == text
