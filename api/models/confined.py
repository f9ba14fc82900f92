"""A model's template and tokenizer in a process of their own, where this process is not to run them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import msgspec
import structlog

from api.chat.template import refused
from api.chat.tokens import Tokenized
from api.http.turns import Turns
from api.models.model_process import Encode, Files, Render, Task, TaskResult, Variables
from control.confinement import ConfinedFailure, ConfinedProcess, TooLarge, TooSlow
from control.errors import ModelFileBreach, TemplateFailed

log = structlog.stdlib.get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

DEADLINE_S = 2.0
"""Of one task on a short text."""
CHARACTERS_PER_S = 1 << 18
"""A longer text has a second more for each so many characters."""
MOST_ANSWER_BYTES = 16 << 20

FileKind = Literal["chat template", "tokenizer"]
Report = Callable[[FileKind, str], None]
"""Called in the thread of `run` with a file that broke its bounds, and what it did."""

_decode = msgspec.msgpack.Decoder(TaskResult).decode
_encode = msgspec.msgpack.Encoder().encode


class ConfinedFiles:
    """The process of one model. It is started when it is needed first, does one task after another, and ends when
    nobody refers to this any more."""

    def __init__(self, model: str, files: Files, report: Report | None = None) -> None:
        self._model = model
        self._report = report
        self.process = ConfinedProcess(
            "api.models.model_process",
            deadline_s=DEADLINE_S,
            greeting=_encode(files),
            most_answer_bytes=MOST_ANSWER_BYTES,
        )
        weakref.finalize(self, self.process.close)
        self._turns = Turns()
        self._variables: frozenset[str] | None = None

    async def run(self, tenant: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work(…)` in the thread that may use this, when it is the tenant's turn."""
        async with self._turns.turn(tenant):
            return await self.process.run(work, *args, **kwargs)

    @property
    def pid(self) -> int | None:
        """The process that runs now."""
        return self.process.pid

    # Template and Encoder: in the thread of `run` only.

    @property
    def variables(self) -> frozenset[str]:
        if self._variables is None:
            self._variables = frozenset(self._ask("chat template", Variables(), 0).names)
        return self._variables

    def render(self, context: dict[str, Any]) -> str:
        """Raises TemplateFailed, ModelFileBreach."""
        answer = self._ask("chat template", Render(context), 0)
        if answer.refusal is not None:
            raise refused(answer.refusal)
        return answer.text

    def encode(self, texts: Sequence[str | tuple[str, str]], special: bool) -> list[Tokenized]:
        """Raises ModelFileBreach."""
        return self._ask("tokenizer", Encode(list(texts), special), sum(map(_characters, texts))).encoded

    def _ask(self, file: FileKind, task: Task, characters: int) -> TaskResult:
        try:
            message = _encode(task)
        except OverflowError as error:  # a number of more than 64 bits
            raise TemplateFailed(str(error), param="messages", code="template_failed") from error
        deadline_s = DEADLINE_S + max(len(message), characters) / CHARACTERS_PER_S
        try:
            return _decode(self.process.ask(message, deadline_s))
        except ConfinedFailure as error:
            deed = _deed(error, deadline_s)
            log.warning("a model's file broke its bounds", action="confine", model=self._model, file=file, deed=deed)
            if self._report is not None:
                self._report(file, deed)
            raise ModelFileBreach(self._model, file, deed) from error


def _characters(text: str | tuple[str, str]) -> int:
    return len(text) if isinstance(text, str) else sum(map(len, text))


def _deed(error: ConfinedFailure, deadline_s: float) -> str:
    if isinstance(error, TooSlow):
        return f"took more than {deadline_s:.1f} s"
    if isinstance(error, TooLarge):
        return f"made more than {MOST_ANSWER_BYTES >> 20} MiB of text"
    return "took more memory than it may, or ended its process"
