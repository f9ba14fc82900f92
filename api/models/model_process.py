"""`python -m api.models.model_process`: renders and tokenises with the files of one model; hostile ones harm only this.

The first message is Files; each further one is a Task (`control.confinement`). All are in MessagePack. The kernel ends
the process where a file wants more memory than is allowed, its parent where one takes too long.
"""

from __future__ import annotations

from typing import Any

import msgspec
from tokenizers import Tokenizer

from api.chat.template import PlainTemplate
from api.chat.tokens import OwnEncoder, Tokenized
from control.confinement import answer_messages
from control.errors import TemplateFailed

MEMORY_BYTES = 2 << 30


class Files(msgspec.Struct, frozen=True):
    """A model's chat template, and its tokenizer.json if that encodes here; empty: not needed."""

    template: str = ""
    tokenizer_json: str = ""


class Variables(msgspec.Struct, frozen=True, tag=True):
    """Asks for the variables that the template reads."""


class Render(msgspec.Struct, frozen=True, tag=True):
    context: dict[str, Any]


class Encode(msgspec.Struct, frozen=True, tag=True):
    texts: list[str | tuple[str, str]]
    special: bool


Task = Variables | Render | Encode


class TaskResult(msgspec.Struct, frozen=True):
    """The answer to any task; `refusal` is the template's own, in its words."""

    names: list[str] = []
    text: str = ""
    encoded: list[Tokenized] = []
    refusal: str | None = None


class Worker:
    """Executes requests with the model's files, which are its first message."""

    def __init__(self, files: Files) -> None:
        self._template = PlainTemplate(files.template)
        self._encoder = OwnEncoder(Tokenizer.from_str(files.tokenizer_json)) if files.tokenizer_json else None

    def answer(self, task: Task) -> TaskResult:
        match task:
            case Variables():
                return TaskResult(names=sorted(self._template.variables))
            case Render():
                try:
                    return TaskResult(text=self._template.render(task.context))
                except TemplateFailed as error:
                    return TaskResult(refusal=str(error.__cause__ or error))
            case Encode():
                assert self._encoder is not None
                return TaskResult(encoded=self._encoder.encode(task.texts, task.special))


def main() -> None:
    """Answer until the parent closes the pipe or ends."""
    worker: Worker | None = None
    decode = msgspec.msgpack.Decoder(Task).decode
    encode = msgspec.msgpack.Encoder().encode

    def answer(message: bytes) -> bytes:
        nonlocal worker
        if worker is None:
            worker = Worker(msgspec.msgpack.decode(message, type=Files))
            return b""
        return encode(worker.answer(decode(message)))

    answer_messages(answer, "furrow-model", memory_bytes=MEMORY_BYTES)


if __name__ == "__main__":
    main()
