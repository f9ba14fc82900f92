"""Log entries become text: characters whole, stop strings cut, log probabilities in step with the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.chat.answer import PieceDecoder
from api.chat.piece import Piece
from api.chat.tokens import Vocabulary
from api.schemas.view import Calling, Reading, ThinkingMarks, View
from control.messages import FinishReason, LogEntry, TokenLogprobs
from tests.byte_model import byte_assets, byte_tokenizer

VOCABULARY = Vocabulary(byte_assets())
EOS = byte_assets().eos_ids[0]


def view(**changes: object) -> View:
    return View(endpoint="chat", created=0, model="m", stop_ids=[EOS], **changes)  # type: ignore[arg-type]


def entries(text: str, finish: FinishReason = "stop", cause: str = "token", scored: bool = False) -> list[LogEntry]:
    """A log that says `text`; ended by the end-of-sequence token where the cause is a token."""
    tokens = VOCABULARY.tokenizer.encode(text, add_special_tokens=False).ids
    if finish == "stop" and cause == "token":
        tokens.append(EOS)
    logprobs = TokenLogprobs(-1.0) if scored else None
    log = [LogEntry(seq, 0, token, logprobs=logprobs) for seq, token in enumerate(tokens, 1)]
    last = log[-1]
    return [*log[:-1], LogEntry(last.seq, 0, last.token, finish, cause, logprobs)]


def said(answer: PieceDecoder, log: list[LogEntry]) -> str:
    return "".join(answer.feed(entry).text for entry in log)


@given(st.text(max_size=30))
def test_the_pieces_of_an_answer_are_its_text(text: str) -> None:
    """Whatever the characters, the pieces together are the text, and no piece holds half a character."""
    answer = PieceDecoder(VOCABULARY, view())
    pieces = [answer.feed(entry).text for entry in entries(text)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert answer.finished and answer.completion_tokens == len(text.encode()) + 1


@pytest.mark.parametrize(
    ("stop", "text", "cause"),
    [
        (["END"], "EN and END", "END"),
        (["END", "EN"], "E and EN", "EN"),
        (["😀"], "E😁 and 😀", "😀"),
        (["d END", "no"], "and END", "d END"),
    ],
)
def test_a_stop_string_is_never_sent(stop: list[str], text: str, cause: str) -> None:
    """Nothing of a stop string goes out at any moment; what only began like one does."""
    answer = PieceDecoder(VOCABULARY, view(stop=stop))
    assert said(answer, entries(text, "stop", cause)) == text.removesuffix(cause)


def test_a_stop_string_called_token() -> None:
    """A stop string that reads like the word for a stop id is still a stop string."""
    *log, last = entries("one token", "length")
    ended = LogEntry(last.seq, 0, last.token, "stop", "token")
    assert said(PieceDecoder(VOCABULARY, view(stop=["token"])), [*log, ended]) == "one "


def test_before_min_tokens_a_stop_string_is_text() -> None:
    """Text of the first min_tokens tokens is not searched, as the leader does not."""
    answer = PieceDecoder(VOCABULARY, view(stop=["ab"], min_tokens=3))
    assert said(answer, entries("abxab", "stop", "ab")) == "abx"


def test_logprobs_follow_the_text() -> None:
    """Tokens of a stop string are not shown, and no log probability goes out before its text."""
    answer = PieceDecoder(VOCABULARY, view(stop=["END"], logprobs=0))
    shown: list[int] = []
    sent = 0
    for entry in entries("aE bEND", "stop", "END", scored=True):
        piece = answer.feed(entry)
        sent += len(piece.text)
        assert all(token.end <= sent for token in piece.scored)
        shown += [token.start for token in piece.scored]
    assert shown == [0, 1, 2, 3]


def test_an_end_from_outside_is_a_failure() -> None:
    """Cancelled, expired, unavailable and error are no finish reasons: they become the answer's failure."""
    for finish, code in (
        ("cancelled", "request_cancelled"),
        ("expired", "deadline_exceeded"),
        ("unavailable", "model_unavailable"),
        ("error", "generation_failed"),
    ):
        answer = PieceDecoder(VOCABULARY, view())
        answer.feed(LogEntry(1, 0, None, finish, "because"))  # type: ignore[arg-type]
        assert answer.failure is not None
        assert (answer.failure.code, str(answer.failure)) == (code, "because")


def test_a_gap_is_refused() -> None:
    """An entry out of order can't be rendered silently."""
    answer = PieceDecoder(VOCABULARY, view())
    with pytest.raises(ValueError, match="entry 2"):
        answer.feed(LogEntry(2, 0, 65))


def test_marks_are_seen_in_their_place_and_never_shown() -> None:
    """Special tokens open reasoning and calls where they stand in the text, also while a stop string may have begun."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<think>", "</think>", "<|python_tag|>"])
    vocabulary = Vocabulary(byte_assets(tokenizer_json=tokenizer.to_str()))
    marks = {tokenizer.token_to_id(text) or 0: text for text in ("<think>", "</think>", "<|python_tag|>")}
    reading = Reading(ThinkingMarks(), Calling("llama3", ["f"]), marks)
    said = '<think>so</think>Well. ST<|python_tag|>{"name": "f", "parameters": {"a": 1}}'
    tokens = tokenizer.encode(said, add_special_tokens=False).ids
    log = [LogEntry(seq, 0, token) for seq, token in enumerate(tokens, 1)]
    log.append(LogEntry(len(log) + 1, 0, EOS, "stop", "token"))
    answer, whole = PieceDecoder(vocabulary, view(stop=["STOP"], reading=reading)), Piece(0, 0)
    for entry in log:
        whole.collect(answer.feed(entry))
    assert (whole.reasoning, whole.text, whole.finish) == ("so", "Well. ST", "tool_calls")
    assert [(call.name, call.arguments) for call in whole.calls] == [("f", '{"a": 1}')]
    assert answer.reasoning_tokens == len("so") + 2


def test_a_named_call_ends_as_a_stop() -> None:
    """Where the client named the function the finish reason stays what it was, and a call that is cut off is length."""
    said = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    named = PieceDecoder(VOCABULARY, view(reading=Reading(calling=Calling("hermes", named=True))))
    assert [named.feed(entry).finish for entry in entries(said)][-1] == "stop"
    free = PieceDecoder(VOCABULARY, view(reading=Reading(calling=Calling("hermes"))))
    assert [free.feed(entry).finish for entry in entries(said, "length", "max_tokens")][-1] == "length"
