"""The forms of a model's reasoning and calls: its own response template, else what its chat template shows."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import structlog

from api.chat.reading.form import Form
from api.chat.reading.response_template import FormError, form_of
from api.chat.reading.table import TABLE, reasoning_pairs, rows
from api.chat.tokens import Vocabulary
from api.schemas.view import OWN, CallFormat, ThinkingMarks

log = structlog.stdlib.get_logger(__name__)

PLAIN = "plain"
"""The form of calls that are demanded of a model whose own form is not known."""


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms in which a model writes; None where it has no such thing, or writes it in an unknown form."""

    calls: CallFormat | None = None
    thinking: ThinkingMarks | None = None
    text: CallFormat = ""
    """The form of a text that has channels or marks of its own."""
    own: Any = None
    """The response template of a model that has its own."""
    accepted: dict[str, int] = field(default_factory=dict[str, int], compare=False)
    """The version that the chat template took last, by the kind of conversation (`api.chat.conversation._versions`)."""

    @property
    def writes_text(self) -> bool:
        """True if a text argument stands in a call as it is."""
        form = self.form
        return form is not None and form.calls is not None and form.calls.shape.kind == "parameters"

    @property
    def form(self) -> Form | None:
        """All that an answer may be made of, where it is more than text and reasoning."""
        if self.own is not None:
            return form_of(OWN, self.own)
        return TABLE.get(self.calls or self.text)


def forms_of(template: str | None, vocabulary: Vocabulary, calls: CallFormat | None = None, own: Any = None) -> Forms:
    """The forms in the template, or of marks that only the tokenizer has; `calls`, if given, is that of calls. `own`
    is the model's own response template; one that can't be read is passed over."""
    source = template or ""
    name = calls or _form_name(source, vocabulary)
    form = TABLE.get(name or "")
    # Transformers' form has no words for headers: text between channels would be an answer.
    if own is not None and calls is None and (form is None or form.channels is None):
        try:
            own = _with_line_breaks(own, source, form_of(OWN, own))
            read = form_of(OWN, own)
        except FormError as error:
            log.warning("a response template is passed over", action="response_template", reason=str(error))
        else:
            pair = read.reasoning[0] if read.reasoning else None
            marks = None if pair is None else ThinkingMarks(pair.open.strip(), pair.close.strip())
            thinking = marks or _thinking(source, vocabulary)
            return Forms(OWN if read.calls is not None else None, thinking, _text(read), own)
    understood = None if form is None or form.calls is None else name
    return Forms(understood, _thinking(source, vocabulary, form), "" if form is None else _text(form))


def _with_line_breaks(own: Any, source: str, form: Form) -> Any:
    """The template with the line breaks that the chat template writes inside the marks of calls in JSON: patterns say
    only that they may be there."""
    if form.calls is None or form.calls.shape.kind != "object" or form.calls.shape.listed or not form.calls.close:
        return own
    opened = form.calls.open[0].rstrip()
    closed = form.calls.close[0].strip()
    lines = source.replace("\\n", "\n")
    marks = {"open": opened + "\n" * (opened + "\n" in lines), "close": "\n" * ("\n" + closed in lines) + closed}
    field = {key: value for key, value in own["fields"]["tool_calls"].items() if not key.endswith("_pattern")}
    return {**own, "fields": {**own["fields"], "tool_calls": {**field, **marks}}}


def _text(form: Form) -> str:
    """The name of a form that also says how texts without calls are read."""
    plain = form.channels is None and not form.content and not any(pair.anywhere for pair in form.reasoning)
    return "" if plain else form.name


def _form_name(source: str, vocabulary: Vocabulary) -> str | None:
    """The first form in the table whose signs the template and the vocabulary have."""
    plain = re.sub(r"\\(?=[\"'])", "", source)
    for name, row in rows().items():
        for signs in row.signs:
            if all(text in plain for text in signs.template) and all(vocabulary.knows(text) for text in signs.tokens):
                return name
    return None


def _thinking(source: str, vocabulary: Vocabulary, form: Form | None = None) -> ThinkingMarks | None:
    for pair in [*(form.reasoning if form is not None else ()), *reasoning_pairs()]:
        opened = pair.open.strip()
        closed = pair.close.strip()
        closes = closed in source and closed.startswith(("</", "[/"))
        if opened in source or closes or (vocabulary.knows(opened) and vocabulary.knows(closed)):
            return ThinkingMarks(pair.open if form is not None and form.channels else opened, closed)
    return None
