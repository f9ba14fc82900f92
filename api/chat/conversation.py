"""From a chat request to the prompt's text, and how the answer to it is to be read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from api.chat.enforcement import answer_grammar
from api.chat.forms import PLAIN, Forms
from api.chat.reading.arguments import may_be_text
from api.chat.reading.calls import call_id
from api.chat.reading.form import CallForm, Form, Ids
from api.chat.reading.table import TABLE
from api.chat.reading.writing import written_calls
from api.chat.template import Template, render
from api.chat.tokens import Vocabulary
from api.schemas.chat import EFFORTS, ChatRequest, Offer, template_messages
from api.schemas.decoding import refusal
from api.schemas.generation import RequestedGrammar, grammar_of, only_one
from api.schemas.image_parts import ImageSource
from api.schemas.view import Calling, Reading, ThinkingMarks
from control.errors import RequestError, TemplateFailed
from control.messages import Grammar, ModelAssets
from control.text.grammar import as_lark

Messages = list[dict[str, Any]]

TOOLS = ("tools", "xml_tools", "functions")
"""Variables by which templates take tools; `functions` is JSON text (FireFunction 2)."""
_RESERVED = ("messages", *TOOLS)
"""Variables of a template that have a field of their own in the request."""
_NOT_UNDERSTOOD = (
    "'tools': calls of this model are not understood, what it writes is text. Name their form with `furrow api "
    "--tool-parser` or `--response-template`."
)
_PLAIN_CALLS = (
    "'tools': calls of this model are not understood, the demanded call is plain JSON. Name their form with "
    "`furrow api --tool-parser` or `--response-template`."
)
_DESCRIBED = (
    "'tools': the chat template of this model takes no tools. The prompt describes them, and calls are read in the "
    "form '{form}'."
)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    text: str
    reading: Reading | None
    constraint: RequestedGrammar | None = None
    """The grammar of the answer, where it is not free."""
    images: list[ImageSource] = field(default_factory=list[ImageSource])
    """In the order of their placeholders in the text."""
    warnings: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """The parts of the request without their whole effect, each with its parameter."""


def chat_prompt(
    request: ChatRequest, assets: ModelAssets, template: Template | None, vocabulary: Vocabulary, forms: Forms
) -> ChatPrompt:
    """Render the conversation. Raises TemplateFailed, and RequestError for what this model's template can't say; and
    NeedsProcess where the template can't be rendered in this process."""
    offer = request.offer
    variable = _tools_variable(template)
    variables = _variables(request, assets, template, forms.form, offer, variable)
    images = None if assets.images is None else list[ImageSource]()
    messages = template_messages(request.messages, images)
    config = assets.tokenizer_config
    images = images or []
    warnings: list[tuple[str, str]] = []
    if offer is not None and forms.calls is None:
        if variable is not None:
            warnings.append((_PLAIN_CALLS if offer.must else _NOT_UNDERSTOOD, "tools"))
        if variable is None or offer.must:
            forms = replace(forms, calls=PLAIN, own=None)
        else:
            offer = None
    form = forms.form
    messages = fitted(messages, form, assets.chat_template or "", variable is not None)
    if template is not None and not _switch(True, template.variables):
        say_switch(messages, request.thinks, assets.chat_template or "")
    calling = _calling(offer, forms, form)

    write = render_continued if request.continue_final_message else render

    def rendered(messages: Messages) -> str:
        return rendered_version(messages, forms.accepted, lambda version: write(template, version, config, variables))

    if offer is not None and variable is None:
        warnings.append((_DESCRIBED.format(form=forms.calls), "tools"))
        text = rendered_with_tools(messages, described_tools(offer, form), forms.accepted, rendered)
    else:
        text = rendered(messages)
    if request.continue_final_message:
        content = messages[-1]["content"]
        thinking = continued_thinking(_with_hidden(forms.thinking, request), text, content)
        open_thinking = thinking is not None and thinking.begun
        calling = calling if open_thinking else continued_calling(calling, form, content)
    else:
        thinking = _with_begun(_with_hidden(forms.thinking, request), text)
    over = thinking is not None and text.rstrip().endswith(thinking.close)
    prompted = form.prompted if form is not None else ""
    if request.continue_final_message or not text.endswith(prompted):
        prompted = ""
    constraint, thinks = _constraint(request, offer, form, None if over else thinking, vocabulary, prompted)
    if constraint is not None and calling is not None and calling.begun:
        raise RequestError(
            f"'{constraint.param}' constrains the answer, but the last message ends within a call, which no "
            "constraint can continue. End the message before the call, or remove the constraint.",
            param=constraint.param,
        )
    thinking = thinking if thinks else None
    if thinking is None and calling is None and not forms.text:
        return ChatPrompt(text, None, constraint, images, warnings)
    reading = Reading(
        thinking,
        calling,
        _marks(thinking, form, vocabulary),
        forms.text,
        forms.own,
        prompted,
        hidden=bool(forms.text) and request.include_reasoning is False,
    )
    return ChatPrompt(text, reading, constraint, images, warnings)


def _constraint(
    request: ChatRequest,
    offer: Offer | None,
    form: Form | None,
    thinking: ThinkingMarks | None,
    vocabulary: Vocabulary,
    prompted: str,
) -> tuple[RequestedGrammar | None, bool]:
    """The grammar of the answer, and True if reasoning may come before it.

    Raises RequestError where a call is demanded and something else as well.
    """
    constraint = grammar_of(request)
    if constraint is not None and offer is not None and offer.must:
        only_one(["tool_choice", constraint.param])
    if constraint is None and offer is None:
        return None, True
    answer = as_lark(constraint.grammar) if constraint is not None else None
    if constraint is not None and answer is None:
        if offer is not None:
            only_one(["tools", constraint.param])
        return constraint, False
    marked = form is not None and any(form.answer)
    if constraint is not None and offer is None and thinking is None and not marked:
        return constraint, True
    text = answer_grammar(offer, form, thinking, vocabulary, answer, prompted)
    if text is None:
        return None, True
    return RequestedGrammar(Grammar("lark", text), "tools" if constraint is None else constraint.param), True


def _variables(
    request: ChatRequest,
    assets: ModelAssets,
    template: Template | None,
    form: Form | None,
    offer: Offer | None,
    tools_variable: str | None,
) -> dict[str, Any]:
    template_kwargs = request.chat_template_kwargs or {}
    for name in _RESERVED:
        if name in template_kwargs:
            raise RequestError(
                f"'chat_template_kwargs.{name}' is not taken; use the request's own field '{name}'.",
                param=f"chat_template_kwargs.{name}",
            )
    if template is None:
        return template_kwargs  # the rendering refuses it
    names = template.variables
    efforts = form.efforts if form is not None else {}
    variables = _effort(request.reasoning_effort, names, efforts) | _switch(request.thinks, names) | template_kwargs
    if request.add_generation_prompt is not None:
        variables["add_generation_prompt"] = request.add_generation_prompt
    functions = [] if offer is None else offer.for_template
    if tools_variable == "functions":
        variables["functions"] = json.dumps([function["function"] for function in functions], indent=4)
    elif functions and tools_variable is not None:
        variables[tools_variable] = functions
    if "datetime" in names:
        variables.setdefault("datetime", datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S %Z"))
    return variables


def _tools_variable(template: Template | None) -> str | None:
    """The variable by which the template takes tools."""
    names = frozenset[str]() if template is None else template.variables
    return next((name for name in TOOLS if name in names), None)


def _effort(effort: str | None, names: frozenset[str], efforts: Mapping[str, str]) -> dict[str, Any]:
    """`reasoning_effort` in the words of the template, which may know a few only (`efforts`); "none" asks for no
    reasoning. Without any it is only a hint."""
    if not effort:
        return {}
    variables = {name: efforts.get(effort, effort) for name in ("reasoning_effort",) if name in names} | _switch(
        effort != "none", names
    )
    if variables and effort not in EFFORTS:
        raise RequestError(
            f"Invalid value for 'reasoning_effort': {effort[:80]!r}; use one of "
            f"{', '.join(repr(name) for name in EFFORTS)}.",
            param="reasoning_effort",
        )
    return variables


def _switch(thinks: bool | None, names: frozenset[str]) -> dict[str, Any]:
    """The variables by which templates switch reasoning on and off, where this one knows them."""
    return {} if thinks is None else {name: thinks for name in ("enable_thinking", "thinking") if name in names}


def _with_hidden(thinking: ThinkingMarks | None, request: ChatRequest) -> ThinkingMarks | None:
    """The marks, with `hidden` as the client wants it."""
    return thinking and msgspec.structs.replace(thinking, hidden=request.include_reasoning is False)


def _with_begun(thinking: ThinkingMarks | None, prompt: str) -> ThinkingMarks | None:
    """The marks, with `begun` true where the prompt ends after an opening one."""
    return thinking and msgspec.structs.replace(thinking, begun=prompt.rstrip().endswith(thinking.open))


def _calling(offer: Offer | None, forms: Forms, form: Form | None) -> Calling | None:
    if offer is None or forms.calls is None or form is None or form.calls is None:
        return None
    shapes = form.calls.shapes
    names = any(shape.bare or shape.known for shape in shapes) or forms.thinking is not None
    parameters = any(shape.kind == "parameters" for shape in shapes)
    return Calling(
        format=forms.calls,
        names=[function.name for function in offer.functions] if names else [],
        literal=_literal(offer) if parameters else {},
        single=offer.single,
        named=offer.named,
    )


def _literal(offer: Offer) -> dict[str, list[str]]:
    """The parameters of each function that are no text."""
    parameters: dict[str, list[str]] = {}
    for function in offer.functions:
        properties: Any = (function.parameters or {}).get("properties")
        if isinstance(properties, dict):
            names = [str(name) for name, schema in properties.items() if not may_be_text(schema)]  # type: ignore[misc]
            if names:
                parameters[function.name] = names
    return parameters


def _marks(thinking: ThinkingMarks | None, form: Form | None, vocabulary: Vocabulary) -> dict[int, str]:
    """The special tokens of the form, by id."""
    texts = [*((thinking.open, thinking.close) if thinking else ()), *(form.marks if form is not None else ())]
    return vocabulary.hidden_in(texts)


_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""The blank at its end is lost where a template trims a message."""


def render_continued(
    template: Template | None,
    messages: list[dict[str, Any]],
    tokenizer_config: dict[str, Any],
    variables: dict[str, Any],
) -> str:
    """The prompt up to the end of the last message's content, as transformers' `continue_final_message` cuts it.

    Raises TemplateFailed, and RequestError for a last message that can't be continued.
    """
    last = messages[-1]
    at = f"messages[{len(messages) - 1}]"
    if last["role"] != "assistant":
        raise RequestError(
            f"'continue_final_message' continues an assistant's message, but the last one has the role "
            f"{last['role']!r}. End 'messages' with one of role 'assistant', or leave the parameter out.",
            param="continue_final_message",
        )
    if last.get("tool_calls"):
        raise refusal(f"{at}.tool_calls", "A message with calls can't be continued; send their results after it.")
    marked = [*messages[:-1], last | {"content": last["content"] + _TAG}]
    text = render(template, marked, tokenizer_config, variables | {"add_generation_prompt": False})
    cut = text.rfind(_TAG.rstrip())
    if cut < 0:
        raise TemplateFailed(
            f"The model's chat template leaves out the end of '{at}.content', so that it can't be continued.",
            param=f"{at}.content",
            code="template_failed",
        )
    return text[:cut] if text.startswith(_TAG, cut) else text[:cut].rstrip()


def continued_thinking(thinking: ThinkingMarks | None, prompt: str, content: str) -> ThinkingMarks | None:
    """The marks of a reasoning that the continuation of `content` may begin with, or is inside of; else None."""
    if thinking is None:
        return None
    begun = prompt.removesuffix(content).removesuffix(content.rstrip()).rstrip().endswith(thinking.open)
    start = content.lstrip()
    if begun or start.startswith(thinking.open):
        start = start.removeprefix(thinking.open)
        if thinking.close in start:
            return None
        return msgspec.structs.replace(thinking, begun=True, continued=bool(start.strip()))
    return None if start or prompt.rstrip().endswith(thinking.close) else thinking


def continued_calling(calling: Calling | None, form: Form | None, content: str) -> Calling | None:
    """As `calling`, for the continuation of `content`: a call that this has begun is read from its beginning."""
    if calling is None or form is None or form.calls is None:
        return calling
    text = content.strip()
    begun = ""
    for opened, closed in _pairs(form.calls):
        at = content.rfind(opened)
        if at >= 0 and closed not in content[at + len(opened) :]:
            begun = content[at:]
            break
    if not begun and form.calls.shape.bare and text.startswith("{"):
        begun = content
    return msgspec.structs.replace(calling, begun=begun, continued=bool(text))


def _pairs(calls: CallForm) -> list[tuple[str, str]]:
    """The marks that open and end a call."""
    closes = [close.strip() for close in calls.close] or [calls.open[0].strip() if calls.open else "\0"]
    pairs = [(opened.strip(), closes[0]) for opened in calls.open]
    return pairs + [(start, shape.tail.strip() or closes[0]) for shape in calls.shapes for start in shape.starts]


_NINE = re.compile(r"[A-Za-z0-9]{9}")
_NONE = re.compile(r"\bcontent(?:['\"]\])? is (?:not )?none")
"""The test by which a template recognises a message without content, as one with calls alone is."""
_REASONING = ("thinking", "thought", "tool_plan")
"""Names under which templates read the reasoning, besides `reasoning_content`."""


_TOOLS_PLACE = "described tools"
_IN_SYSTEM = 0
_IN_USER = 1
_TOOL_ROLE = re.compile(r"['\"]tool['\"]")
_DESCRIPTION = """\
You can call these functions. Their parameters are JSON schemas.

{functions}

To call a function, answer with the call alone, in this form, with a name from the list and without a code block:
{call}
{several} The next message then has the result. Where no function is needed, answer in plain text."""
_ONE_CALL = "Call one function at a time."
_SEVERAL_CALLS = "Several calls are written like this:\n{calls}\n"
_EXAMPLE = ("NAME", {"PARAMETER": "VALUE"})


def fitted(messages: Messages, form: Form | None, source: str, takes_tools: bool) -> Messages:
    """The messages for a template with this source; they are changed in place. `takes_tools`: the template has a
    variable for tools."""
    _name_reasoning(messages, source)
    if "tool_calls" in source and _NONE.search(source):
        for message in messages:
            message["content"] = message["content"] or (None if message.get("tool_calls") else message["content"])
    if form is not None and form.ids != "any":
        _fit_ids(messages, form.ids)
    if "tool_calls" not in source:
        _write_calls(messages, _calls_in_text(form))
        if not takes_tools and _TOOL_ROLE.search(source) is None:
            messages = _results_of_user(messages)
    elif form is not None and form.calls is not None and form.calls.alone:
        messages = _one_call_each(messages)
    if form is not None and form.channels is not None:
        _join_thoughts(messages)
    return messages


def described_tools(offer: Offer, form: Form | None) -> str:
    """A description of the tools, and of how a call is written, for a model whose template takes none."""
    calls = _calls_in_text(form)
    functions = [_described(tool["function"]) for tool in offer.for_template]
    several = _ONE_CALL
    if not (offer.single or calls.alone):
        several = _SEVERAL_CALLS.format(calls=written_calls(calls, [_EXAMPLE, _EXAMPLE]))
    call = written_calls(calls, [_EXAMPLE])
    return _DESCRIPTION.format(functions="\n\n".join(functions), call=call, several=several)


def _described(function: dict[str, Any]) -> str:
    """A function under a headline, not as JSON with its name: a model that repeats it would make a call."""
    lines = [f"### {function['name']}"]
    if function.get("description"):
        lines.append(f"Description: {function['description']}")
    lines.append(f"Parameters: {json.dumps(function.get('parameters') or {}, ensure_ascii=False)}")
    return "\n".join(lines)


def rendered_with_tools(
    messages: Messages, tools: str, accepted: dict[str, int], render: Callable[[Messages], str]
) -> str:
    """The prompt with a description of the tools: in the system message, or in the user's first one where the template
    refuses system messages or leaves them out. The place that was taken is noted in `accepted`. Raises
    TemplateFailed."""
    if accepted.get(_TOOLS_PLACE) != _IN_USER:
        try:
            text = render(with_tools(messages, tools, "system"))
        except TemplateFailed:
            if _TOOLS_PLACE in accepted:
                raise
        else:
            if tools in text:
                accepted[_TOOLS_PLACE] = _IN_SYSTEM
                return text
    text = render(with_tools(messages, tools, "user"))
    accepted[_TOOLS_PLACE] = _IN_USER
    return text


def with_tools(messages: Messages, tools: str, role: str) -> Messages:
    """The messages with a description of tools: at the end of the system message, which is added where there is none,
    or, of role "user", before the text of the first message of the user."""
    if role == "system":
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        rest = messages if system is None else messages[1:]
        return [{"role": "system", "content": _joined(system, tools) if system else tools}, *rest]
    at = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        return [*messages, {"role": "user", "content": tools}]
    first = messages[at] | {"content": _joined(tools, messages[at]["content"])}
    return [*messages[:at], first, *messages[at + 1 :]]


def say_switch(messages: Messages, thinks: bool | None, source: str) -> None:
    """Switch reasoning on or off by a word of the system prompt, where a template reads one."""
    word = "/think" if thinks else "/no_think"
    if thinks is None or word not in source:
        return
    if not messages or messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": word})
    elif isinstance(messages[0]["content"], str) and word not in messages[0]["content"]:
        messages[0]["content"] += f" {word}"


def rendered_version(messages: Messages, accepted: dict[str, int], render: Callable[[Messages], str]) -> str:
    """The prompt that `render` makes of the messages, or of the first version of them that it takes. The version is
    noted in `accepted` by the kind of conversation; a later one of that kind is tried with it and with one more, so
    that a template that fails costs two attempts. Raises the TemplateFailed of the first one."""
    kind, versions = _versions(messages)
    last = accepted.get(kind)
    order = list(range(len(versions))) if last is None else [last, int(last == 0)][: len(versions)]
    failure: TemplateFailed | None = None
    for version in order:
        try:
            text = render(versions[version]())
        except TemplateFailed as error:
            failure = failure or error
        else:
            if last != 0:  # one conversation that needs another version does not change it for the others
                accepted[kind] = version
            return text
    assert failure is not None
    raise failure


def _versions(messages: Messages) -> tuple[str, list[Callable[[], Messages]]]:
    """The kind of the conversation, and how to make its versions for templates that fail on some: as it is, with
    arguments as JSON text (DeepSeek R1, Functionary 3.2), and with text for a content that is None (Ministral 3)."""
    versions: list[Callable[[], Messages]] = [lambda: messages]
    calling = [message for message in messages if message.get("tool_calls")]
    if not calling:
        return "text", versions
    versions.append(lambda: [_with_text_arguments(message) for message in messages])
    if all(message["content"] is not None for message in calling):
        return "calls", versions
    versions.append(lambda: [message | {"content": message["content"] or ""} for message in messages])
    return "calls without content", versions


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": text}})
    return message | {"tool_calls": calls}


def _calls_in_text(form: Form | None) -> CallForm:
    """The form of calls that no template writes: the model's own, else plain JSON."""
    calls = form.calls if form is not None else None
    plain = TABLE[PLAIN].calls
    assert plain is not None
    return calls or plain


def _name_reasoning(messages: Messages, source: str) -> None:
    names = [name for name in _REASONING if re.search(rf"\.{name}\b(?!\()|\[.{name}.\]", source)]
    for message in messages if names else []:
        if message.get("reasoning_content"):
            for name in names:
                message.setdefault(name, message["reasoning_content"])


def _fit_ids(messages: Messages, ids: Ids) -> None:
    """Give calls and results ids in the form that the template demands; calls keep those that fit."""
    fitting: dict[str, str] = {}
    number = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            own = call["id"]
            fits = ids == "nine" and _NINE.fullmatch(own) is not None
            fitting[own] = own if fits else call_id(ids, own, call["function"]["name"], number)
            call["id"] = fitting[own]
            number += 1
        if "tool_call_id" in message:
            own = message["tool_call_id"]
            fits = ids == "nine" and _NINE.fullmatch(own) is not None
            message["tool_call_id"] = fitting.get(own, own if fits else call_id(ids, own, message.get("name", ""), 0))


def _write_calls(messages: Messages, form: CallForm) -> None:
    """A template that leaves calls out gets them as the text that the model wrote."""
    number = 0
    for message in messages:
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        if not calls or not isinstance(message["content"], str):
            continue
        text = written_calls(form, calls, number)
        message["content"] = f"{message['content']}\n{text}" if message["content"] else text
        number += len(calls)


def _results_of_user(messages: Messages) -> Messages:
    """Results as messages of the user, for a template that knows no role of tools. Many such templates demand that user
    and assistant take turns: results that stand together, and what the user says after them, are one message."""
    fitting: Messages = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            name = f" of {message['name']}" if message.get("name") else ""
            message = {"role": "user", "content": _joined(f"Result{name}:", message["content"], "\n")}
        if after_result and message["role"] == "user":
            fitting[-1]["content"] = _joined(fitting[-1]["content"], message["content"])
        else:
            fitting.append(message)
        after_result = is_result
    return fitting


def _joined(first: Any, second: Any, between: str = "\n\n") -> Any:
    """Two contents as one: text, or a list of parts where one of them is such a list."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _one_call_each(messages: Messages) -> Messages:
    """Calls that were made together, one after the other: each is followed by its results."""
    fitting: Messages = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            fitting.append(message)
            continue
        results: Messages = []
        while place < len(messages) and messages[place]["role"] == "tool":
            results.append(messages[place])
            place += 1
        for number, call in enumerate(calls):
            call_message = message if number == 0 else {"role": message["role"], "content": ""}
            own = [result for result in results if result.get("tool_call_id") == call["id"]]
            fitting += [call_message | {"tool_calls": [call]}, *own]
        ids = {call["id"] for call in calls}
        fitting += [result for result in results if result.get("tool_call_id") not in ids]
    return fitting


def _join_thoughts(messages: Messages) -> None:
    """Harmony's template takes text or reasoning beside a call, not both."""
    for message in messages:
        if message.get("tool_calls") and message["content"] and message.get("thinking"):
            message["thinking"] = f"{message['thinking']}\n\n{message['content']}"
            message["content"] = ""
