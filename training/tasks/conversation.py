"""A conversation that ends with a question, and its text as the chat template renders it, in pieces to learn or not."""

import json
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Piece = tuple[str, bool]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Chat messages that end with a question or a tool's result, and the answers that count as right."""

    task: str
    messages: tuple[Message, ...]
    answers: tuple[str, ...]
    tools: tuple[dict[str, Any], ...] = ()

    def completed(self) -> list[Message]:
        """The messages with the first right answer appended, as the trainer sees them."""
        return [*self.messages, {"role": "assistant", "content": self.answers[0]}]


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A call as the model writes it: Hermes's form."""
    shown = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {shown}}}\n</tool_call>'


def conversation_pieces(conversation: Conversation) -> list[Piece]:
    """The chat template's text in pieces, each with whether it is learned: answers are, with the end of the turn."""
    messages = conversation.completed()
    pieces: list[Piece] = []
    if conversation.tools:
        system = [messages.pop(0)["content"] + "\n\n"] if messages[0]["role"] == "system" else []
        shown = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in conversation.tools)
        pieces = [("<|im_start|>system\n" + "".join(system) + f"<tools>\n{shown}</tools><|im_end|>\n", False)]
    for message in messages:
        pieces += [
            (f"<|im_start|>{message['role']}\n", False),
            (_said(message) + "<|im_end|>", message["role"] == "assistant"),
            ("\n", False),
        ]
    return pieces


def _said(message: Message) -> str:
    if message["role"] == "tool":
        return f"<tool_response>\n{message['content']}\n</tool_response>"
    calls = [call_text(**call["function"]) for call in message.get("tool_calls", [])]
    return "\n".join([*([message["content"]] if message["content"] else []), *calls]) if calls else message["content"]
