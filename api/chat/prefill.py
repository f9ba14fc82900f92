"""An answer that continues the conversation's last message: its prompt, and how the reading of it begins."""

from __future__ import annotations

from typing import Any

import msgspec

from api.chat.reading.hermes import CLOSE, OPEN
from api.chat.reading.llama3 import PYTHON_TAG
from api.chat.reading.qwen_xml import END_FUNCTION, FUNCTION
from api.chat.template import Template, render
from api.schemas.how import CallFormat, Calling, Thinking
from api.schemas.refusals import refusal
from control.errors import RequestError, TemplateFailed

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""The blank at its end is lost where a template trims a message."""
_PAIRS: dict[CallFormat, tuple[tuple[str, str], ...]] = {
    "hermes": ((OPEN, CLOSE),),
    "qwen_xml": ((OPEN, CLOSE), (FUNCTION, END_FUNCTION)),
    "llama3": ((PYTHON_TAG, PYTHON_TAG),),
}


def render_continued(
    template: Template | None,
    messages: list[dict[str, Any]],
    tokenizer_config: dict[str, Any],
    variables: dict[str, Any],
) -> str:
    """The prompt up to the end of the last message's content, as transformers' `continue_final_message` cuts it.

    Raises TemplateFailed, and RequestError for a last message that can't be continued.
    """
    last, at = messages[-1], f"messages[{len(messages) - 1}]"
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


def continued_thinking(thinking: Thinking | None, prompt: str, content: str) -> Thinking | None:
    """The marks of a reasoning that the continuation of `content` may begin with, or is inside of; else None."""
    if thinking is None:
        return None
    begun = prompt.removesuffix(content).removesuffix(content.rstrip()).rstrip().endswith(thinking.open)
    said = content.lstrip()
    if begun or said.startswith(thinking.open):
        said = said.removeprefix(thinking.open)
        if thinking.close in said:
            return None
        return msgspec.structs.replace(thinking, begun=True, continued=bool(said.strip()))
    return None if said or prompt.rstrip().endswith(thinking.close) else thinking


def continued_calling(calling: Calling | None, content: str) -> Calling | None:
    """As `calling`, for the continuation of `content`: a call that this has begun is read from its beginning."""
    if calling is None:
        return None
    said = content.strip()
    begun = ""
    for opened, closed in _PAIRS[calling.format]:
        at = content.rfind(opened)
        if at >= 0 and closed not in content[at + len(opened) :]:
            begun = content[at:]
            break
    if not begun and calling.format == "llama3" and said.startswith("{"):
        begun = content
    return msgspec.structs.replace(calling, begun=begun, continued=bool(said))
