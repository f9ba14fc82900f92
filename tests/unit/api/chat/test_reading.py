"""An answer's text becomes reasoning, text and calls: how it is cut does not matter, and nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.chat.piece import CallDelta, Piece
from api.chat.reading.parser import AnswerParser
from api.schemas.view import CallFormat, Calling, Reading, ThinkingMarks

NAMES = ["weather", "add"]
LITERAL = {"add": ["a", "b", "on"]}


@dataclass
class Read:
    """All that a text turned out to be."""

    text: str
    reasoning: str
    calls: list[tuple[str | None, str]]


def reading(format_: CallFormat | None, begun: bool = False, single: bool = False) -> Reading:
    calling = Calling(format_, NAMES, LITERAL, single) if format_ is not None else None
    return Reading(ThinkingMarks(begun=begun), calling)


def pieces(how: Reading, texts: list[str], marks: tuple[str, ...] = ()) -> list[Piece]:
    """One piece per text and one for the end; a text that is one of the marks comes as a special token."""
    parser = AnswerParser(how, "rid", 0)
    all_pieces = [Piece(seq, 0) for seq in range(len(texts) + 1)]
    for piece, text in zip(all_pieces, texts, strict=False):
        parser.mark(text, piece) if text in marks else parser.push(text, piece)
    parser.end(all_pieces[-1])
    return all_pieces


def total(piece_list: list[Piece]) -> Read:
    whole = Piece(0, 0)
    for piece in piece_list:
        whole.collect(piece)
    return Read(whole.text, whole.reasoning, [(call.name, call.arguments) for call in whole.calls])


def read(how: Reading, *texts: str, marks: tuple[str, ...] = ()) -> Read:
    return total(pieces(how, list(texts), marks))


WEATHER = '{"city": "Paris", "days": [1, 2], "note": "a } \\" </tool_call> {"}'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=on>\nTrue\n</parameter>\n"
    '<parameter=note>\nline "one"\n</param>\nline 😀\n</parameter>\n</function>\n</tool_call>'
)
XML_CALL = ("add", '{"a": 3, "on": true, "note": "line \\"one\\"\\n</param>\\nline 😀"}')
LLAMA = f'{{"name": "weather", "parameters": {WEATHER}}}'
PLAIN = f'{{"name": "weather", "arguments": {WEATHER}}}'


@pytest.mark.parametrize(
    ("format_", "said", "expected"),
    [
        ("hermes", HERMES, Read("", "", [("weather", WEATHER)])),
        ("hermes", f"I look.\n\n{HERMES}\n", Read("I look.", "", [("weather", WEATHER)])),
        ("hermes", f"{HERMES}\n{HERMES}\ndone ", Read("done ", "", [("weather", WEATHER)] * 2)),
        ("hermes", f"<think>\nLet me\nsee.\n</think>\n\n{HERMES}", Read("", "Let me\nsee.", [("weather", WEATHER)])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n{"name": "g"}',
         Read("", "", [("f", "{}"), ("g", "{}")])),
        (
            "hermes",
            '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
            Read("", "", [("f", '{"a": 1}')]),
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
            Read("", "", [("f", '{"a": 1}')]),
        ),
        (
            "hermes",
            '<tool_call>{"type": "function", "name": "f", "arguments": {"a": 1}, "id": "x}"}</tool_call> ok',
            Read("ok", "", [("f", '{"a": 1}')]),
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', Read("", "", [("f", '{"a": 1}')])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', Read("", "", [("f", '{"a": 1')])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', Read("", "", [("f", '{"a": "b')])),
        ("qwen_xml", XML, Read("", "", [XML_CALL])),
        ("qwen_xml", f"Well.\n{XML}\n{XML}", Read("Well.", "", [XML_CALL] * 2)),
        ("qwen_xml", "<function=weather></function> and", Read("and", "", [("weather", "{}")])),
        ("qwen_xml", "<function=add><parameter=a>x</parameter><parameter=b>NaN</parameter>", Read(
            "", "", [("add", '{"a": "x", "b": "NaN"')]
        )),
        ("llama3", LLAMA, Read("", "", [("weather", WEATHER)])),
        ("llama3", f"\n{LLAMA}; {LLAMA}", Read("", "", [("weather", WEATHER)] * 2)),
        ("llama3", '<|python_tag|>{"name": "other", "parameters": {}}', Read("", "", [("other", "{}")])),
        ("llama3", '{"type": "function", "name": "add", "parameters": {}} so', Read("so", "", [("add", "{}")])),
        ("plain", PLAIN, Read("", "", [("weather", WEATHER)])),
        ("plain", f"{PLAIN}\n{PLAIN}", Read("", "", [("weather", WEATHER)] * 2)),
        ("plain", f"I ask.\n```json\n{PLAIN}\n```\nSo.", Read("I ask.So.", "", [("weather", WEATHER)])),
        ("plain", f"```json\n{PLAIN}\n{PLAIN}\n```", Read("", "", [("weather", WEATHER)] * 2)),
    ],
)  # fmt: skip
def test_calls_are_found(format_: CallFormat, said: str, expected: Read) -> None:
    """Each format's calls, in one piece and character by character."""
    assert read(reading(format_), said) == read(reading(format_), *said) == expected


@pytest.mark.parametrize(
    ("format_", "said"),
    [
        ("hermes", "a <b> <tool_cal"),
        ("hermes", "<tool_call>not JSON</tool_call> x\n"),
        ("hermes", '<tool_call>{"weather": {"city": "Paris"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arg'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>{broken}</tool_call>"),
        ("qwen_xml", "<tool_call>\nnothing</tool_call>"),
        ("qwen_xml", "<tool_call>\n<function=a b></function>"),
        ("qwen_xml", "<tool_call> <function=weath"),
        ("llama3", '{"city": "Paris"}'),
        ("llama3", '{"name": "Bob", "parameters": {}}'),
        ("llama3", f"Like this: {LLAMA}"),
        ("llama3", '{"name": "weather", "par'),
        ("llama3", "{}; {}"),
        ("plain", 'This:\n```json\n{"city": "Paris"}\n```\nand ```json\n{"name": "Bob", "arguments": {}}\n``` too'),
        ("plain", "```python\nprint({})\n``` and ```json\n[1, 2]\n```"),
        ("plain", f"Like this: {PLAIN}"),
    ],
)
def test_what_is_no_call_stays_text(format_: CallFormat, said: str) -> None:
    """Broken, unknown and unfinished calls are text to the last character."""
    assert read(reading(format_), said) == read(reading(format_), *said) == Read(said, "", [])


PARTS = [
    HERMES, XML, LLAMA, "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=add>", "<parameter=a>",
    "</parameter>", "</function>", '{"name": "weather", "arguments": ', '{"a": 1}', "}", ",", '"', "\\", "\n", " ", ";",
    "text", "<|python_tag|>", "<", "😀",
]  # fmt: skip


@given(
    st.sampled_from(["hermes", "qwen_xml", "llama3", None]),
    st.booleans(),
    st.lists(st.sampled_from(PARTS), max_size=8).map("".join),
    st.lists(st.integers(0, 300), max_size=12),
)
def test_cuts_do_not_matter(format_: CallFormat | None, begun: bool, said: str, cuts: list[int]) -> None:
    """Whatever is said and wherever it is cut, the sum is the same."""
    at = sorted({0, len(said), *(cut for cut in cuts if cut < len(said))})
    texts = [said[start:end] for start, end in pairwise(at)]
    how = reading(format_, begun)
    assert read(how, *texts) == read(how, said) == read(how, *said)


@given(st.lists(st.sampled_from([*PARTS[3:], "a", "b"]), max_size=8).map("".join))
def test_nothing_is_lost_where_no_call_is_made(said: str) -> None:
    """An answer without a call is said as it came, but for the marks of the reasoning and the space around them."""
    for format_ in ("hermes", "llama3"):
        read_pieces = read(reading(format_), said)
        if not read_pieces.calls and not read_pieces.reasoning and "think>" not in said:
            assert read_pieces.text == said


def test_arguments_come_as_they_are_said() -> None:
    """A call is announced before its arguments, and those are passed on before they are complete."""
    all_pieces = pieces(
        reading("hermes"), ['<tool_call>{"name": "f", "arguments": {', '"a": ', '"bc', 'd"}}</tool_call>']
    )
    assert [[(call.name, call.arguments) for call in piece.calls] for piece in all_pieces] == [
        [("f", "{")],
        [(None, '"a": ')],
        [(None, '"bc')],
        [(None, 'd"}')],
        [],
    ]
    [first, *others] = {call.id for piece in all_pieces for call in piece.calls}
    assert first.startswith("call_") and not others
    all_pieces = pieces(reading("qwen_xml"), ["<function=weather><parameter=city>Par", "is</par", "ameter></function>"])
    assert [[call.arguments for call in piece.calls] for piece in all_pieces] == [['{"city": "Par'], ["is"], ['"}'], []]


def test_ids_follow_from_the_request() -> None:
    """The same request gives the same ids, each call of it another one."""

    def ids(rid: str, choice: int) -> list[str]:
        parser, piece = AnswerParser(reading("hermes"), rid, choice), Piece(0, choice)
        parser.push(HERMES * 2, piece)
        return [call.id for call in piece.calls]

    assert ids("a", 0) == ids("a", 0)
    assert len({*ids("a", 0), *ids("a", 1), *ids("b", 0)}) == 6


def test_a_single_call_is_kept() -> None:
    """Where calls in parallel are not wanted the first one counts, and the others are no text either."""
    assert read(reading("hermes", single=True), HERMES + HERMES + "x") == Read("x", "", [("weather", WEATHER)])


@pytest.mark.parametrize(
    ("begun", "said", "reasoning", "text"),
    [
        (False, "<think>\nso\n\nthen\n</think>\n\nYes. ", "so\n\nthen", "Yes. "),
        (True, "so\n</think>\nYes.", "so", "Yes."),
        (True, "\n<think>so</think>Yes.", "so", "Yes."),
        (True, "so far </thin", "so far </thin", ""),
        (False, " Yes. <think>no</think>", "", " Yes. <think>no</think>"),
        (False, "<think></think>Yes.", "", "Yes."),
        (False, "<thin", "", "<thin"),
        (False, "", "", ""),
    ],
)
def test_reasoning_is_told_from_the_answer(begun: bool, said: str, reasoning: str, text: str) -> None:
    """Marks at the beginning of the answer, or one that the prompt has opened already, set the reasoning apart."""
    how = Reading(ThinkingMarks(begun=begun))
    assert read(how, said) == read(how, *said) == Read(text, reasoning, [])


def test_marks_that_are_special_tokens() -> None:
    """A special token opens a call as its text would; it is never said, though what follows was no call."""
    marks = ("<|python_tag|>",)
    how = Reading(calling=Calling("llama3", NAMES))
    assert read(how, "So. ", *marks, LLAMA, marks=marks) == Read("So.", "", [("weather", WEATHER)])
    assert read(how, *marks, "print(1)", marks=marks) == Read("print(1)", "", [])
    think = ("[THINK]", "[/THINK]")
    how = Reading(ThinkingMarks(*think))
    assert read(how, "[THINK]", " so", "[/THINK]", " Yes", marks=think) == Read("Yes", "so", [])


def test_joining_keeps_the_order() -> None:
    """Text after a call can't be joined with what came before it, nor reasoning after text."""
    call = CallDelta(0, "c", "f", "{}")
    assert not Piece(1, 0, calls=[call]).join(Piece(2, 0, text="x"))
    assert not Piece(1, 0, text="x").join(Piece(2, 0, reasoning="y"))
    whole = Piece(1, 0, reasoning="y")
    assert whole.join(Piece(2, 0, text="x", calls=[call])) and whole.join(Piece(3, 0, calls=[CallDelta(0, "c")]))
    assert (len(whole.calls), whole.text, whole.reasoning) == (1, "x", "y")
