"""Prompts have the model's template and one BOS; and tokens as bytes."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from api.chat import tokens as tokens_module
from api.chat.template import MeteredTemplate, render
from api.chat.tokens import OwnEncoder, Tokenized, Vocabulary
from control.errors import TemplateFailed
from control.text.text_stream import Detokenizer
from tests.byte_model import byte_assets, byte_tokenizer

BOS = byte_tokenizer().token_to_id("<s>") or 0
VOCABULARY = Vocabulary(byte_assets())


def post_processed(config: dict[str, object]) -> Vocabulary:
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    return Vocabulary(byte_assets(tokenizer_json=tokenizer.to_str(), tokenizer_config=config))


@pytest.mark.parametrize("text", ["hi", "<s>hi", "<s><s>hi"])
def test_exactly_one_bos(text: str) -> None:
    """However many the template wrote, the prompt has one, and no end-of-sequence token."""
    for vocabulary in (Vocabulary(byte_assets()), post_processed({"bos_token": "<s>"}), post_processed({})):
        ids = vocabulary.encode(text)
        assert (ids[0], ids.count(BOS), len(ids)) == (BOS, 1, 3)


def test_no_bos_where_the_model_has_none() -> None:
    """A tokenizer without one, or told not to add one, leaves the prompt alone."""
    assert Vocabulary(byte_assets(tokenizer_config={"bos_token": None})).encode("hi")[0] != BOS
    assert post_processed({"bos_token": "<s>", "add_bos_token": False}).encode("hi")[0] != BOS
    assert len(post_processed({"bos_token": "<s>", "add_bos_token": False}).encode("hi")) == 2


def test_a_text_far_too_long_is_found_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certain only where the true count is above the limit, whatever the cuts add; nothing past the limit is read."""
    monkeypatch.setattr(tokens_module, "_PIECE_CHARACTERS", 100)
    monkeypatch.setattr(tokens_module, "_CUT_TOKENS", 1)
    vocabulary = Vocabulary(byte_assets(tokenizer_config={"bos_token": None}))
    assert len(vocabulary.encode("a" * 1000)) == 1000
    assert not vocabulary.exceeds("a" * 1000, 980), "it is short enough to be tokenised whole"
    monkeypatch.setattr(tokens_module, "WHOLE_CHARACTERS", 999)
    assert vocabulary.exceeds("a" * 1000, 980)
    assert not vocabulary.exceeds("a" * 1000, 990)
    pieces: list[str] = []
    own = OwnEncoder(vocabulary.tokenizer)

    def counted(texts: list[str], special: bool) -> list[Tokenized]:
        pieces.extend(texts)
        return own.encode(texts, special)

    counting = cast(OwnEncoder, SimpleNamespace(encode=counted))
    vocabulary = Vocabulary(byte_assets(tokenizer_config={"bos_token": None}), counting)
    assert vocabulary.exceeds("a" * 10**6, 150)
    assert len(pieces) == 2


def test_a_long_prompt_lets_other_threads_run() -> None:
    """The event loop goes on while a thread tokenises: its longest pause is a small part of the time that takes."""
    vocabulary, text = Vocabulary(byte_assets()), "ab " * 500_000
    pauses: list[float] = []
    done = threading.Event()

    def tokenise() -> None:
        vocabulary.encode(text)
        done.set()

    began = last = time.perf_counter()
    thread = threading.Thread(target=tokenise)
    thread.start()
    while not done.wait(0.001):
        pauses.append(time.perf_counter() - last)
        last = time.perf_counter()
    thread.join()
    assert max(pauses) < 0.5 * (time.perf_counter() - began)


def test_bytes_of_byte_level_tokens() -> None:
    """Each token is its byte; special tokens are their text."""
    vocabulary = Vocabulary(byte_assets())
    ids = vocabulary.tokenizer.encode("é\n😀", add_special_tokens=False).ids
    assert b"".join(vocabulary.token_bytes(token) for token in ids) == "é\n😀".encode()
    assert vocabulary.token_bytes(BOS) == b"<s>"
    assert vocabulary.token_text(ids[0]) == "bytes:\\xc3"


def test_bytes_of_sentencepiece_tokens() -> None:
    """▁ is a space, and <0xNN> the byte that it names."""
    core = Tokenizer(models.BPE({"<unk>": 0, "▁the": 1, "<0xC3>": 2}, [], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    vocabulary = Vocabulary(byte_assets(tokenizer_json=core.to_str(), tokenizer_config={}))
    assert [vocabulary.token_bytes(token) for token in (1, 2)] == [b" the", b"\xc3"]


def test_templates_as_models_write_them() -> None:
    """Trimmed blocks, loop controls, tojson, strftime_now, generation blocks and the model's special tokens work."""
    source = (
        "{{ bos_token }}{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n{% endfor %}"
        "{{ strftime_now('%Y') | length }}{% if add_generation_prompt %}{{ extra }}{% endif %}"
    )
    config = {"bos_token": {"content": "<s>", "lstrip": False}}
    messages = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "no"}]
    rendered = render(MeteredTemplate(source), messages, config, {"extra": "go"})
    assert rendered == '<s>{"role": "user", "content": "<é>"}4go'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{% if %}",
        "{{ messages[0].content.missing.deeper }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
        None,
    ],
)
def test_a_template_that_fails(source: str | None) -> None:
    """Whatever goes wrong in a template, attempts to leave the sandbox included, is the template's failure."""
    with pytest.raises(TemplateFailed):
        render(MeteredTemplate(source) if source is not None else None, [{"role": "user", "content": "x"}], {}, {})


def test_a_template_can_not_change_the_messages() -> None:
    """The sandbox is immutable."""
    with pytest.raises(TemplateFailed):
        render(MeteredTemplate("{{ messages.append(1) }}"), [{"role": "user", "content": "x"}], {}, {})


@given(ids=st.lists(st.integers(0, 257), max_size=60))
def test_tokens_that_are_whole_alone_give_the_same_text(ids: list[int]) -> None:
    """With the short cut each token has the very text that decoding gives it, broken bytes and special tokens too."""
    plain, short = Detokenizer(VOCABULARY.decode), Detokenizer(VOCABULARY.decode, VOCABULARY.alone)
    assert [plain.push(token) for token in ids] == [short.push(token) for token in ids]
    assert plain.flush() == short.flush()


def test_the_short_cut_is_for_byte_level_decoders_alone() -> None:
    """Where a first token loses its space, or bytes make up characters between tokens, every text is decoded."""
    assert VOCABULARY.alone is not None and VOCABULARY.alone(VOCABULARY.encode("a", bos=False)[0]) == "a"
    assert VOCABULARY.alone(BOS) is None
    tokenizer = byte_tokenizer()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert Vocabulary(byte_assets(tokenizer_json=tokenizer.to_str())).alone is None


def test_a_word_is_spelt_alone_after_a_space_and_inside_a_text() -> None:
    """As vLLM does, and in the middle of a text too, where sentencepiece puts no space in front."""
    pieces = ["<unk>", "\u2581", "\u2581hi", "hi", "<0x0A>", "a", "\u2581a"]
    model = models.Unigram([(piece, -float(index)) for index, piece in enumerate(pieces)], 0, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    sentencepiece = Vocabulary(byte_assets(tokenizer_json=tokenizer.to_str(), tokenizer_config={}))
    assert sentencepiece.spellings(["hi"]) == [[2], [1, 2], [3]]
    space, h, i = byte_tokenizer().encode(" hi").ids
    assert VOCABULARY.spellings(["hi", " hi"]) == [[h, i], [space, h, i]]
    assert VOCABULARY.spellings([" "]) == [[space], [space, space]]
