"""Small tokenizers, built here so that no test needs a download."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "the farm runs and the leader claims a request, then the ranks step together",
    "naïve café Ünïcödé 東京タワー は 高い 한국어 текст 👩‍👩‍👧‍👦 😀😀 🇩🇪 e\u0301 \u200d",
] * 4


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """A byte-level BPE whose merges cross the borders of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """A sentencepiece-like BPE: words begin with ▁, unknown characters are bytes, one leading space is stripped."""
    words = ["▁", "▁the", "▁farm", "a", "b", "▁a", "."]
    vocabulary = {
        token: index for index, token in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words])
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer
