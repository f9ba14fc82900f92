"""A form: how a family of models writes reasoning, text and calls; transformers' `response_template`, and more.

The data is the inverse of a chat template: `fields`, each with the marks around it. Furrow's extensions are the content
`calls` of `tool_calls`, which says what a call looks like (`CallShape`), `channels` for texts whose headers say what
they are, `answer` and `ids`. Decision 30 names them.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Literal

import msgspec

Kind = Literal["object", "json", "parameters", "relaxed", "python"]
"""The form of a call's arguments: `object`, a JSON object that has the name as well; `json`, a JSON object after the
name; `parameters`, each between marks of its own; `relaxed`, JSON with bare keys and its own quotes; `python`, a call
of Python."""
Ids = Literal["any", "nine", "numbered"]
"""Ids of calls that a template demands: `nine` letters and digits, or `numbered`, `functions.NAME:0`."""

WORD = r"[^\s<>\[\](){}\"'`|｜,;]"
"""A character of names, which marks and white space end."""
WORD_CHARACTERS = 256


class CallShape(msgspec.Struct, frozen=True, dict=True, omit_defaults=True, forbid_unknown_fields=True):
    """The shape of one call, a text with holes, and the texts around several calls.

    White space is written as it stands here, and may be any when it is read.
    """

    kind: Kind
    call: str
    """One call: `{name}`, `{id}`, `{index}`, and `{arguments}` or `{parameters}` where the arguments are."""
    parameter: str = ""
    """One of the parameters: `{key}`, `{value}`, and where the form says what is text `{text}`, true or false, or
    `{type}`, `string` for a text."""
    verbatim: list[str] = []
    """The two marks that may stand around the value of a parameter, such as XML's `<![CDATA[` and `]]>`."""
    optional: str = ""
    """The part of `call` that may be missing; it is not written."""
    between: str = ""
    """The separator of calls in one pair of marks; empty: each call has a pair of its own."""
    apart: str = "\n"
    """The separator of pairs of marks."""
    listed: bool = False
    """True if the calls are a list in brackets."""
    keyed: bool = False
    """True if an object has the name for its only key: `{"NAME": {…}}`."""
    starts: list[str] = []
    """Beginnings of a call that open one without the marks."""
    bare: bool = False
    """True if a call may begin without a mark at the answer's beginning; then its name must be a known one."""
    known: bool = False
    """True if only a known name makes a call."""
    quote: str = ""
    """The mark around texts in `relaxed` arguments."""
    skips: bool = False
    """True if a short text between the arguments and the mark that closes is passed over."""

    @cached_property
    def head(self) -> str:
        """The text before the arguments."""
        return re.split(r"\{(?:arguments|parameters)\}", self.call)[0]

    @cached_property
    def tail(self) -> str:
        return re.split(r"\{(?:arguments|parameters)\}", self.call)[1]


class CallForm(msgspec.Struct, frozen=True, dict=True, omit_defaults=True, forbid_unknown_fields=True):
    """The marks around calls, and their shapes; the first of each is the one that is written."""

    open: list[str]
    close: list[str]
    shapes: list[CallShape]
    alone: bool = False
    """True if the template takes one call in a message."""

    @property
    def shape(self) -> CallShape:
        return self.shapes[0]

    @cached_property
    def triggers(self) -> tuple[str, ...]:
        """The marks that open a call."""
        starts = [start for shape in self.shapes for start in shape.starts]
        return tuple(dict.fromkeys(text.strip() for text in [*self.open, *starts] if text.strip()))


class Pair(msgspec.Struct, frozen=True, dict=True, omit_defaults=True, forbid_unknown_fields=True):
    """The marks around reasoning."""

    open: str
    close: str
    anywhere: bool = False
    """True if it may begin anywhere; else at the answer's beginning and after a call."""


class Channels(msgspec.Struct, frozen=True, dict=True, omit_defaults=True, forbid_unknown_fields=True):
    """Texts with headers, as in OpenAI's harmony: `<|channel|>NAME …<|message|>text<|end|>`."""

    opens: list[str]
    """The marks that begin a header."""
    message: str
    """The mark that ends a header."""
    closes: list[str]
    """The marks that end a text: the first where another text follows, the second after a call, the third at last."""
    reasoning: list[str]
    """Names of channels whose texts are reasoning; others are content."""
    following: str
    """The text before the header of a text that follows another."""
    recipient: str
    """The word before the name of a call's function."""


class Form(msgspec.Struct, frozen=True, dict=True, omit_defaults=True, forbid_unknown_fields=True):
    """The parts of an answer, and the marks around each."""

    name: str
    reasoning: list[Pair] = []
    calls: CallForm | None = None
    content: list[str] = []
    """Marks around the text, which are not part of it."""
    answer: tuple[str, str] = ("", "")
    """The marks that are written around an answer in a demanded format."""
    prompted: str = ""
    """The beginning of the first mark, with which the prompt ends."""
    channels: Channels | None = None
    efforts: dict[str, str] = {}
    """Words of `reasoning_effort` that the model was not trained on, and those that stand for them."""
    ids: Ids = "any"

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """All texts in which a control token may stand."""
        texts = [mark for pair in self.reasoning for mark in (pair.open, pair.close)]
        texts += self.content
        if self.channels is not None:
            texts += [*self.channels.opens, self.channels.message, *self.channels.closes, self.channels.following]
        if self.calls is not None:
            texts += [*self.calls.open, *self.calls.close]
            for shape in self.calls.shapes:
                texts += [shape.call, shape.optional, shape.parameter, shape.quote]
        return tuple(dict.fromkeys(text for text in texts if text))
