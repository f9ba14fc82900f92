"""Tokenizers are judged by their parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from control.text.tokenizer_check import GPT4O, LLAMA3, QWEN2, Judgement, judge, longest_piece, wrong_id
from tests.byte_model import byte_tokenizer


def with_parts(**parts: Any) -> str:
    tokenizer: Any = byte_tokenizer()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer.to_str()


def split(pattern: str) -> Any:
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


LLAMA2 = with_parts(
    normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    decoder=decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    pre_tokenizer=None,
)
USUAL = [
    byte_tokenizer().to_str(),
    LLAMA2,
    *(with_parts(pre_tokenizer=split(pattern)) for pattern in (LLAMA3, QWEN2, GPT4O)),
    with_parts(normalizer=normalizers.NFKC()),
    with_parts(normalizer=normalizers.BertNormalizer(), pre_tokenizer=pre_tokenizers.BertPreTokenizer()),
    Path("ops/demo/model/tokenizer.json").read_text(),
]


@pytest.mark.parametrize("text", USUAL)
def test_usual_ones_work_in_any_process(text: str) -> None:
    assert judge(text) == Judgement()


def replaces(*pairs: tuple[Any, str]) -> Any:
    return normalizers.Sequence([normalizers.Replace(old, new) for old, new in pairs])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"normalizer": replaces(*[("a", "a" * 64)] * 6)}, "274877906944"),
        ({"normalizer": replaces(("a", "b" * 65))}, "long text"),
        ({"normalizer": replaces(("", "b" * 40), ("b", "cccc"))}, "656 characters"),
        ({"normalizer": replaces((Regex("(a+)+$"), "b"))}, "pattern that is not known"),
        ({"normalizer": normalizers.Sequence([normalizers.Prepend("▁")] * 9)}, "2048"),
        ({"normalizer": normalizers.Sequence([normalizers.NFC()] * 100)}, "more than 64 parts"),
        ({"pre_tokenizer": split("(a|a)+$")}, "pattern that is not known"),
        ({"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 4)}, "256"),
    ],
)
def test_strange_ones_get_a_process(parts: dict[str, Any], words: str) -> None:
    judgement = judge(with_parts(**parts))
    assert words in judgement.encoding and not judgement.decoding


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        (decoders.Sequence([decoders.Replace("a", "a" * 8)] * 4), "4096 characters"),
        (decoders.Replace(Regex("(a+)+$"), ""), "pattern that is not known"),
        (decoders.CTC(), "CTC"),
    ],
)
def test_decoders_that_could_harm_others_are_refused(decoder: Any, words: str) -> None:
    assert words in judge(with_parts(decoder=decoder)).decoding


@pytest.mark.parametrize("text", ["", "[]", '{"model": 1}', "[" * 100_000])
def test_what_is_no_tokenizer_is_refused(text: str) -> None:
    assert judge(text).decoding


def nested(parts_name: str, part: object, depth: int) -> object:
    for _ in range(depth):
        part = {"type": "Sequence", parts_name: [part]}
    return part


@pytest.mark.parametrize(
    ("name", "parts_name"),
    [
        ("normalizer", "normalizers"),
        ("pre_tokenizer", "pretokenizers"),
        ("post_processor", "processors"),
        ("decoder", "decoders"),
    ],
)
def test_parts_that_are_nested_deeper_than_the_library_reads_are_refused(name: str, parts_name: str) -> None:
    """The control: the library reads the depth below, and not the one above."""
    definition = json.loads(byte_tokenizer().to_str())
    part = {"type": "NFC"} if name == "normalizer" else definition["decoder"]
    allowed = json.dumps(definition | {name: nested(parts_name, part, 31)})
    assert judge(allowed) == Judgement() and isinstance(Tokenizer.from_str(allowed), Tokenizer)
    deep = json.dumps(definition | {name: nested(parts_name, part, 200)})
    assert judge(deep).decoding == f"its {name} has parts inside each other at more than 64 levels"
    with pytest.raises(Exception, match="recursion limit"):
        Tokenizer.from_str(deep)


@pytest.mark.parametrize("number", [-1, 2**32, 10**30, "5", 5.5, None, True, [], {}])
def test_an_id_that_is_none_is_refused_by_name(number: object) -> None:
    """Of a piece, and of an added token. The control: the library takes none of them."""
    definition = json.loads(byte_tokenizer().to_str())
    vocab = definition["model"]["vocab"] | {"spoilt": number}
    pieces = json.dumps(definition | {"model": definition["model"] | {"vocab": vocab}})
    assert f"its piece 'spoilt' has the id {str(number)!r}; a whole number from 0" in wrong_id(pieces)
    token = definition["added_tokens"][0] | {"id": number}
    tokens = json.dumps(definition | {"added_tokens": [token]})
    assert "$.added_tokens[0].id" in judge(tokens).decoding
    for text in (pieces, tokens):
        with pytest.raises(Exception, match="expected u32"):
            Tokenizer.from_str(text)


def test_a_model_that_takes_long_words_gets_a_process() -> None:
    definition = json.loads(byte_tokenizer().to_str())
    definition["model"] = {"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 10**6, "unk_token": "a"}
    assert "1000000" in judge(json.dumps(definition)).encoding
    assert isinstance(Tokenizer.from_str(byte_tokenizer().to_str()), Tokenizer), "the control: others load"


@pytest.mark.parametrize(
    ("vocab", "byte_level", "longest"),
    [
        ({"a": 0, "Ġhello": 1}, True, 6),
        ({"a": 0, "日本": 1}, False, 6),
        ([["<unk>", 0], ["▁a", -1.5]], False, 5),
        ({}, False, 1),
        (None, False, 1),
    ],
)
def test_the_longest_piece_of_a_vocabulary(vocab: object, byte_level: bool, longest: int) -> None:
    """Letters of a byte-level piece are bytes; a Unigram model has pairs."""
    model = {"type": "BPE"} | ({} if vocab is None else {"vocab": vocab})
    text = json.dumps({"model": model, "added_tokens": [{"id": 9, "content": "<|a_marker_that_is_long|>"}]})
    assert longest_piece(text, byte_level) == longest
    with pytest.raises(msgspec.MsgspecError):
        longest_piece('{"model": {"vocab": 3}}', byte_level)


def added(*contents: str) -> dict[str, Any]:
    return {"added_tokens": [{"id": 300 + place, "content": one} for place, one in enumerate(contents)]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (added("x" * 2**20), "an added token of 1048576 bytes; at most 16384"),
        (added(*("x" * 16_000 + str(place) for place in range(300))), "its added tokens have 4800790 bytes"),
        ({"model": {"type": "BPE", "vocab": {f"t{place}": place for place in range(2**20 + 1)}}}, "has 1048577 pieces"),
        ({"model": {"type": "Unigram", "vocab": [["t", 0.0]] * (2**20 + 1)}}, "has 1048577 pieces"),
    ],
    ids=["long token", "many tokens", "words", "pieces"],
)
def test_one_that_takes_seconds_to_make_is_refused(changes: dict[str, Any], words: str) -> None:
    """Long added tokens and large vocabularies. The control: ones that contain each other, and marks in pieces."""
    definition = json.loads(byte_tokenizer().to_str())
    assert words in judge(json.dumps(definition | changes)).decoding
    assert judge(json.dumps(definition | added("<a", "<a>", "a>", "x" * 16_000))) == Judgement()
    marks = {"type": "BPE", "vocab": {":" * 2**20: 0, "[" * 2**20: 1}, "merges": []}
    assert judge(json.dumps(definition | {"model": marks})) == Judgement()
