"""The leader's tokenizer only decodes."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Tokenizer

from control.text.tokenizer_check import decoding_only


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_it_decodes_as_the_whole_one(kind: str, request: pytest.FixtureRequest) -> None:
    """Any ids, with special tokens and without. The control: no part of it works on texts any more."""
    whole: Tokenizer = request.getfixturevalue(kind)
    text = decoding_only(whole.to_str())
    decoder, chosen = Tokenizer.from_str(text), random.Random(1)
    definition = json.loads(text)
    assert definition["model"]["merges"] == [] and definition["pre_tokenizer"] is definition["normalizer"] is None
    for _ in range(200):
        ids = [chosen.randrange(whole.get_vocab_size()) for _ in range(12)]
        for skip in (True, False):
            assert decoder.decode(ids, skip_special_tokens=skip) == whole.decode(ids, skip_special_tokens=skip)
