"""A vocabulary in which each token is one character: every engine that is measured counts the same tokens.

A prompt of n characters has n tokens for whoever tokenises it, and each token of an answer can be seen, and named, in
its text. Ids 0 to 2 are the unknown, the begin and the end, which the random models never sample.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

SPECIAL = ("<unk>", "<s>", "</s>")
BOS = 1
EOS = 2
_RANGES = (
    range(0x0A, 0x0B),  # the line feed, then printable ASCII: any English text has tokens
    range(0x20, 0x7F),
    # Letters that no tokeniser folds, joins or strips: ideographs and Hangul, without what is no character.
    range(0x4E00, 0xA000),
    range(0xAC00, 0xD7A4),
    range(0x20000, 0x2FFFE),
    range(0x30000, 0x3FFFE),
)
FIRST = len(SPECIAL) + len(_RANGES[0]) + len(_RANGES[1])
"""The first id that prompts are made of: no white space, which some tokenisers rewrite."""


LARGEST = len(SPECIAL) + sum(map(len, _RANGES))


@lru_cache(maxsize=4)
def characters(size: int) -> tuple[str, ...]:
    """The text of each id of a vocabulary of `size` tokens. Raises ValueError where there are not so many letters."""
    if not FIRST < size <= LARGEST:
        raise ValueError(f"a vocabulary of {size} tokens can't be made of characters; use {FIRST + 1} to {LARGEST}")
    letters = (chr(point) for points in _RANGES for point in points)
    return (*SPECIAL, *islice(letters, size - len(SPECIAL)))


def text_of(ids: Sequence[int]) -> str:
    """The text that is these tokens. Raises ValueError for a special one, which has none."""
    if any(token < len(SPECIAL) for token in ids):
        raise ValueError(f"ids below {len(SPECIAL)} have no text")
    letters = characters(LARGEST)
    return "".join(letters[token] for token in ids)


def ids_of(text: str) -> list[int]:
    """The tokens of a text. Raises ValueError for a character that is none."""
    return [_id(ord(character)) for character in text]


def _id(point: int) -> int:
    first = len(SPECIAL)
    for points in _RANGES:
        if point in points:
            return first + points.index(point)
        first += len(points)
    raise ValueError(f"the character U+{point:04X} is no token of the alphabet")


def write_tokenizer(folder: Path, size: int) -> None:
    """Put the tokenizer's files beside a model, with a chat template that adds nothing."""
    letters = characters(size)
    special = [
        {"id": index, "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for index, text in enumerate(SPECIAL)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": SPECIAL[0],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: index for index, letter in enumerate(letters)},
            "merges": [],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "unk_token": SPECIAL[0],
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "pad_token": SPECIAL[EOS],
        "model_max_length": 10**6,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
