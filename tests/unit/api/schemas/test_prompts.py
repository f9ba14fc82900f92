"""Echoed prompts: their text, and where each token lies in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from api.chat.answer import PieceDecoder, PromptAlignment, prompt_text
from api.chat.tokens import Vocabulary
from api.schemas.view import View
from control.messages import LogEntry, PromptToken, TokenLogprobs
from tests.byte_model import byte_assets
from tests.unit.api.chat.test_answer import EOS, VOCABULARY

BOS = EOS - 1


def places(vocabulary: Vocabulary, text: str, tokens: list[int]) -> list[str]:
    """The text of each token."""
    walk = PromptAlignment(vocabulary, text)
    prompt_tokens = [walk.push(token) for token in tokens]
    assert all(text[start:end] == piece for start, end, piece in prompt_tokens)
    assert walk.take_rest() == "" == walk.take_rest()
    return [piece for _, _, piece in prompt_tokens]


@given(st.text(max_size=20))
def test_the_tokens_make_up_the_text(text: str) -> None:
    """Whatever the characters, with the token in front that the text has not."""
    tokens = VOCABULARY.encode(text)
    assert "".join(places(VOCABULARY, text, tokens)) == text
    assert prompt_text(VOCABULARY, tokens[1:]) == text


@pytest.mark.parametrize(
    ("text", "tokens", "pieces"),
    [
        ("é!", [BOS, 127, 102, 0], ["", "", "é", "!"]),
        ("<s>a", [BOS, 64], ["<s>", "a"]),
        ("a</s>", [BOS, 64, EOS], ["", "a", "</s>"]),
    ],
)
def test_special_and_split_tokens(text: str, tokens: list[int], pieces: list[str]) -> None:
    """A special token counts where the text spells it out, a character with its last token."""
    assert places(VOCABULARY, text, tokens) == pieces


def sentencepiece() -> Vocabulary:
    """Words that begin with a space of the vocabulary's own."""
    words = Tokenizer(models.WordLevel({"▁big": 0, "▁dog": 1, "<s>": 2}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    words.add_special_tokens(["<s>"])
    return Vocabulary(byte_assets(tokenizer_json=words.to_str()))


def test_a_space_of_the_vocabulary() -> None:
    """It is no part of a text that begins without one."""
    assert places(sentencepiece(), "big dog", [2, 0, 1]) == ["", "big", " dog"]


def test_a_text_that_the_tokenizer_changed() -> None:
    """Places stay within the text, and what no token covers comes before the answer."""
    walk = PromptAlignment(VOCABULARY, "ab cd")
    assert [walk.push(token)[:2] for token in (64, 65)] == [(0, 1), (1, 2)]
    assert walk.take_rest() == " cd"
    short = PromptAlignment(VOCABULARY, "a")
    assert [short.push(token)[:2] for token in (64, 65)] == [(0, 1), (1, 1)]


def view(**changes: object) -> View:
    return View(endpoint="completions", created=0, model="m", stop_ids=[EOS], **changes)  # type: ignore[arg-type]


def test_echo_with_log_probabilities() -> None:
    """The prompt's tokens come with their text, the first without a value; the answer's places go on after them."""
    answer = PieceDecoder(VOCABULARY, view(echo=["ab"], logprobs=1), echo="ab")
    prompt_tokens = [PromptToken(BOS), PromptToken(64, -1.0, 2, [(65, -0.5), (64, -1.0)])]
    scored = TokenLogprobs(-0.25, [(66, -0.25)])
    first = answer.feed(LogEntry(1, 0, None, prompt=prompt_tokens))
    second = answer.feed(LogEntry(2, 0, None, prompt=[PromptToken(65, -2.0, 1, [(65, -2.0)])]))
    last = answer.feed(LogEntry(3, 0, 66, "length", None, scored))
    assert [first.text, second.text, last.text] == ["a", "b", "c"]
    shown = [token for piece in (first, second, last) for token in piece.scored]
    assert [(token.start, token.end) for token in shown] == [(0, 0), (0, 1), (1, 2), (2, 3)]
    assert shown[0].logprobs is None and shown[1].logprobs == TokenLogprobs(-1.0, [(65, -0.5)])
    assert answer.completion_tokens == 1


def test_the_end_of_a_stop_string_is_shown_where_wanted() -> None:
    """Up to the stop string's own end, and not what its token holds beyond."""
    tokens = VOCABULARY.tokenizer.encode("so END", add_special_tokens=False).ids
    answer = PieceDecoder(VOCABULARY, view(stop=["END"], include_stop=True))
    texts = [answer.feed(LogEntry(seq, 0, token)).text for seq, token in enumerate(tokens[:-1], 1)]
    last = answer.feed(LogEntry(len(tokens), 0, tokens[-1], "stop", "END"))
    assert "".join(texts) + last.text == "so END"


def test_special_tokens_are_shown_where_wanted() -> None:
    """In the middle of an answer; the one that ends it only with include_stop_str_in_output."""
    log = [LogEntry(1, 0, 64), LogEntry(2, 0, BOS), LogEntry(3, 0, EOS, "stop", "token")]
    for changes, text in (({}, "a"), ({"special_tokens": True}, "a<s>")):
        answer = PieceDecoder(VOCABULARY, view(**changes))
        assert "".join(answer.feed(entry).text for entry in log) == text
    both = PieceDecoder(VOCABULARY, view(special_tokens=True, include_stop=True))
    assert "".join(both.feed(entry).text for entry in log) == "a<s></s>"
