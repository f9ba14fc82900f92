"""`python -m tests.published_templates FOLDER`: which chat templates take tools, and whose calls are read back.

A conversation with one call, and one with two, is rendered by each `*.jinja`; what the template wrote is read by
Furrow's reader in the form that it chose. Published templates are not kept here, as their licences differ: llama.cpp
has a collection in `models/templates`, also in the source package of llama-cpp-python.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken

from api.chat.conversation import TOOLS, chat_prompt
from api.chat.forms import Forms, forms_of
from api.chat.piece import Piece
from api.chat.reading.parser import AnswerParser
from api.chat.template import PlainTemplate
from api.chat.tokens import Vocabulary
from api.schemas.chat import parse_chat
from control.errors import FurrowError
from tests.byte_model import byte_assets, byte_tokenizer

TOKENS = ("<|tool_call_start|>", "<|tool_call_end|>")
"""Marks of LFM2's vocabulary, of which some of its templates say nothing."""
CALLS = {"get_weather": {"city": 'Zürich "x"', "days": 2}, "get_time": {"zone": "CET"}}
USER = {"role": "user", "content": "How is the weather?"}


def _tool(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    kinds = {key: "string" if isinstance(value, str) else "integer" for key, value in arguments.items()}
    properties = {key: {"type": kind, "description": key} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"{name[:5]:a<9}".replace("_", "b"), "type": "function", "function": function}


def vocabulary(model: str) -> Vocabulary:
    """Of bytes, with LFM2's marks where the model is one."""
    tokenizer = byte_tokenizer()
    if "LFM2" in model:
        tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in TOKENS])
    return Vocabulary(byte_assets(tokenizer_json=tokenizer.to_str()))


def judged(source: str, known: Vocabulary, count: int) -> str:
    """What comes of `count` calls: "read", or why they are not."""
    template = PlainTemplate(source)
    forms = forms_of(source, known)
    calls = list(CALLS.items())[:count]
    assistant = {"role": "assistant", "content": "", "tool_calls": [_call(*call) for call in calls]}
    try:
        before = _prompt([USER], template, source, known, forms, add_generation_prompt=True)
        after = _prompt([USER, assistant], template, source, known, forms, add_generation_prompt=False)
    except FurrowError as error:
        return f"is not rendered: {str(error)[:160]}"
    if before.reading is None or before.reading.calling is None:
        return "the form is unknown"
    piece = Piece(0, 0)
    parser = AnswerParser(before.reading, "rid", 0)
    parser.push(_answer(before.text, after.text), piece)
    parser.end(piece)
    calls_read = [(call.name, call.arguments) for call in piece.calls]
    try:
        same = [(name, json.loads(arguments)) for name, arguments in calls_read] == calls
    except ValueError:
        same = False
    return "read" if same else f"is read as {calls_read}: {_answer(before.text, after.text)[:160]!r}"


def _prompt(
    messages: list[Any], template: PlainTemplate, source: str, known: Vocabulary, forms: Forms, **fields: Any
) -> Any:
    tools = [_tool(*call) for call in CALLS.items()]
    body = msgspec.json.encode({"messages": messages, "tools": tools, **fields})
    return chat_prompt(parse_chat(body), byte_assets(chat_template=source), template, known, forms)


def _answer(prompt: str, conversation: str) -> str:
    """What the conversation has behind the prompt; where they part within a mark, from the mark's beginning."""
    at = next(
        (at for at, pair in enumerate(zip(prompt, conversation, strict=False)) if len(set(pair)) > 1), len(prompt)
    )
    mark = max(conversation.rfind(sign, 0, at) for sign in "<[")
    inside = mark >= 0 and not {">", "]"} & set(conversation[mark:at])
    return conversation[mark if inside else at :]


def main() -> None:
    """One line for each template, and the sum."""
    sums = dict.fromkeys(("take tools", "read", "take none", "take none, read"), 0)
    for path in sorted(Path(sys.argv[1]).glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        takes = any(name in PlainTemplate(source).variables for name in TOOLS)
        own_vocabulary = vocabulary(path.stem)
        one, two = judged(source, own_vocabulary, 1), judged(source, own_vocabulary, 2)
        name = forms_of(source, own_vocabulary).calls or "plain"
        # Llama 3's template writes one call a message.
        read = one == "read" and (two == "read" or name == "llama3")
        sums["take tools" if takes else "take none"] += 1
        sums["read" if takes else "take none, read"] += read
        print(f"{path.stem}: {name}{'' if takes else ', described'}: {'read' if read else one}")
    print(sums)


if __name__ == "__main__":
    main()
