"""An answer as /v1/responses tells it: output items, the events in which they grow, and the response around them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, ClassVar, Literal, cast

from msgspec import UNSET, UnsetType, structs

from api.chat.piece import CallDelta, Piece, ScoredToken
from api.chat.text_argument import TextArgument
from api.chat.tokens import Vocabulary
from api.generation.chunks import token_logprobs
from api.generation.seals import Seal
from api.http.errors import GenerationFailed, problem
from api.schemas.answers import TokenCounts, TokenLogprob
from api.schemas.response_answers import (
    ApplyPatchCallItem,
    CallArgumentsDelta,
    CallArgumentsDone,
    CompactedResponse,
    Compacting,
    CompactionItem,
    ContentPartAdded,
    ContentPartDone,
    CustomInputDelta,
    CustomInputDone,
    CustomToolCallItem,
    ErrorEvent,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    LocalEnvironment,
    LocalShellAction,
    LocalShellCallItem,
    MessageItem,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    OutputTokensDetails,
    PatchOperation,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseFailure,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseObject,
    ResponseQueued,
    ResponseUsage,
    ShellAction,
    ShellCallItem,
    ShellCommandAdded,
    ShellCommandDelta,
    ShellCommandDone,
    Status,
    SummaryPartAdded,
    SummaryPartDone,
    SummaryText,
    SummaryTextDelta,
    SummaryTextDone,
)
from api.schemas.response_tools import OfferedTool, read_tools
from api.schemas.view import COMPACTION, SEALED, View, answer_id
from control.messages import FinishReason

_INCOMPLETE: dict[str | None, Literal["max_output_tokens", "content_filter"]] = {
    "length": "max_output_tokens",
    "content_filter": "content_filter",
}


class GrowingItem(ABC):
    """One output item while it grows. `at` is its place in the output."""

    kind: ClassVar[str]

    def __init__(self, identity: str, at: int) -> None:
        self.identity = identity
        self.at = at
        self.status: ItemStatus = "in_progress"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def item(self, empty: bool = False) -> OutputItem:
        """The item as it is now; `empty`: as it began."""

    def open(self) -> list[ResponseEvent]:
        return [OutputItemAdded(self.at, self.item(empty=True))]

    def grow(self, text: str, logprobs: list[TokenLogprob] | None = None) -> list[ResponseEvent]:
        self._texts.append(text)
        return self._delta(text, logprobs or [])

    def close(self, status: ItemStatus) -> list[ResponseEvent]:
        self.status = status
        return [*self._closing(), OutputItemDone(self.at, self.item())]

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> list[ResponseEvent]:
        return []

    def _closing(self) -> list[ResponseEvent]:
        return []


class GrowingMessage(GrowingItem):
    kind = "message"

    def __init__(self, identity: str, at: int) -> None:
        super().__init__(identity, at)
        self._logprobs: list[TokenLogprob] = []

    def item(self, empty: bool = False) -> MessageItem:
        return MessageItem(id=self.identity, status=self.status, content=[] if empty else [self._part()])

    def open(self) -> list[ResponseEvent]:
        part = OutputText(logprobs=[], text="")
        return [*super().open(), ContentPartAdded(self.identity, self.at, 0, part)]

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> list[ResponseEvent]:
        self._logprobs += logprobs
        return [OutputTextDelta(self.identity, self.at, 0, text, logprobs)]

    def _closing(self) -> list[ResponseEvent]:
        return [
            OutputTextDone(self.identity, self.at, 0, self.text, self._logprobs),
            ContentPartDone(self.identity, self.at, 0, self._part()),
        ]

    def _part(self) -> OutputText:
        return OutputText(logprobs=self._logprobs, text=self.text)


class GrowingCompaction(GrowingItem):
    """A summary of the conversation, sealed once it is whole."""

    kind = "compaction"

    def __init__(self, identity: str, at: int, seal: Seal) -> None:
        super().__init__(identity, at)
        self._seal = seal

    def item(self, empty: bool = False) -> CompactionItem:
        return CompactionItem(self.identity, "" if empty else self._seal(self.kind, self.text))

    def open(self) -> list[ResponseEvent]:
        return [*super().open(), Compacting(self.identity, self.at)]


class GrowingReasoning(GrowingItem):
    """Thoughts: as reasoning text, or, where the request asks for summaries, whole as the summary's only part."""

    kind = "reasoning"

    def __init__(self, identity: str, at: int, *, as_summary: bool, seal: Seal | None) -> None:
        super().__init__(identity, at)
        self._as_summary = as_summary
        self._seal = seal

    def item(self, empty: bool = False) -> ReasoningItem:
        summary = [] if empty or not self._as_summary else [SummaryText(self.text)]
        content = [] if empty or self._as_summary else [ReasoningText(self.text)]
        sealed = self._seal(self.kind, self.text) if self._seal is not None and not empty else None
        return ReasoningItem(self.identity, self.status, summary, content, sealed)

    def open(self) -> list[ResponseEvent]:
        if self._as_summary:
            return [*super().open(), SummaryPartAdded(self.identity, self.at, 0, SummaryText(""))]
        return [*super().open(), ContentPartAdded(self.identity, self.at, 0, ReasoningText(""))]

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> list[ResponseEvent]:
        kind = SummaryTextDelta if self._as_summary else ReasoningTextDelta
        return [kind(self.identity, self.at, 0, text)]

    def _closing(self) -> list[ResponseEvent]:
        text = self.text
        if self._as_summary:
            part = SummaryText(text)
            return [SummaryTextDone(self.identity, self.at, 0, text), SummaryPartDone(self.identity, self.at, 0, part)]
        part = ReasoningText(text)
        return [ReasoningTextDone(self.identity, self.at, 0, text), ContentPartDone(self.identity, self.at, 0, part)]


class GrowingCall(GrowingItem):
    """The call of a function; its arguments are JSON text."""

    kind = "function_call"
    prefix: ClassVar[str] = "fc"

    def __init__(self, name: str, at: int, call_id: str, function: str, tool: OfferedTool | None) -> None:
        super().__init__(f"{self.prefix}_{name}", at)
        self._call_id = call_id
        self._name = tool.own if tool is not None else function
        self._namespace: str | UnsetType = (tool.namespace or UNSET) if tool is not None else UNSET

    def item(self, empty: bool = False) -> OutputItem:
        arguments = "" if empty else self.text
        return FunctionCallItem(
            self.identity, self.status, self._call_id, self._name, arguments, namespace=self._namespace
        )

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> list[ResponseEvent]:
        return [CallArgumentsDelta(self.identity, self.at, text)]

    def _closing(self) -> list[ResponseEvent]:
        return [CallArgumentsDone(self.identity, self.at, self._name, self.text)]


class GrowingCustomCall(GrowingCall):
    """The call of a custom tool: the text of its one argument, as it comes."""

    kind = "custom_tool_call"
    prefix = "ctc"

    def __init__(self, name: str, at: int, call_id: str, function: str, tool: OfferedTool | None) -> None:
        super().__init__(name, at, call_id, function, tool)
        self._input = TextArgument("input")

    def item(self, empty: bool = False) -> CustomToolCallItem:
        text = "" if empty else self._input.text
        return CustomToolCallItem(
            self.identity, self.status, self._call_id, self._name, text, namespace=self._namespace
        )

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> list[ResponseEvent]:
        return self._grown(self._input.push(text))

    def _closing(self) -> list[ResponseEvent]:
        rest = self._grown(self._input.end())
        return [*rest, CustomInputDone(self.identity, self.at, self._input.text)]

    def _grown(self, text: str) -> list[ResponseEvent]:
        return [CustomInputDelta(self.identity, self.at, text)] if text else []


class GrowingAction(GrowingCall):
    """A call whose item has an object: it is sent once it is complete."""

    def open(self) -> list[ResponseEvent]:
        return []

    def close(self, status: ItemStatus) -> list[ResponseEvent]:
        opened = super().open()
        return [*opened, *super().close(status)]

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> list[ResponseEvent]:
        return []

    def _closing(self) -> list[ResponseEvent]:
        return []

    def _arguments(self) -> dict[str, Any]:
        try:
            argument = json.loads(self.text)
        except (ValueError, RecursionError):
            return {}
        return cast("dict[str, Any]", argument) if isinstance(argument, dict) else {}

    def _strings(self, name: str) -> list[str]:
        """A list of texts; a model may write one text in its place."""
        argument = self._arguments().get(name)
        if isinstance(argument, list):
            return [
                element if isinstance(element, str) else json.dumps(element) for element in cast("list[Any]", argument)
            ]
        return [argument] if isinstance(argument, str) else []

    def _whole_number(self, name: str) -> int | None:
        argument = self._arguments().get(name)
        return argument if isinstance(argument, int) and not isinstance(argument, bool) else None


class GrowingLocalShellCall(GrowingAction):
    kind = "local_shell_call"
    prefix = "lsh"

    def item(self, empty: bool = False) -> LocalShellCallItem:
        command = self._strings("command")
        directory = self._arguments().get("working_directory")
        action = LocalShellAction(
            command=["bash", "-lc", *command] if isinstance(self._arguments().get("command"), str) else command,
            timeout_ms=self._whole_number("timeout_ms"),
            working_directory=directory if isinstance(directory, str) else None,
        )
        return LocalShellCallItem(self.identity, self.status, self._call_id, action)


class GrowingShellCall(GrowingAction):
    kind = "shell_call"
    prefix = "sh"

    def item(self, empty: bool = False) -> ShellCallItem:
        action = ShellAction(self._strings("commands"), self._whole_number("timeout_ms"))
        return ShellCallItem(self.identity, self.status, self._call_id, action, LocalEnvironment())

    def _closing(self) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        for index, command in enumerate(self._strings("commands")):
            events += [
                ShellCommandAdded(self.at, "", index),
                ShellCommandDelta(self.at, command, index),
                ShellCommandDone(self.at, command, index),
            ]
        return events


class GrowingPatchCall(GrowingAction):
    kind = "apply_patch_call"
    prefix = "apc"

    def item(self, empty: bool = False) -> ApplyPatchCallItem:
        argument = self._arguments()
        kind, path, diff = (argument.get(name) for name in ("type", "path", "diff"))
        operation = PatchOperation(
            kind if kind in ("create_file", "delete_file") else "update_file", path if isinstance(path, str) else ""
        )
        if kind != "delete_file":
            operation.diff = diff if isinstance(diff, str) else ""
        return ApplyPatchCallItem(self.identity, self.status, self._call_id, operation)


_CALLS: dict[str, type[GrowingCall]] = {
    "function": GrowingCall,
    "custom": GrowingCustomCall,
    "local_shell": GrowingLocalShellCall,
    "shell": GrowingShellCall,
    "apply_patch": GrowingPatchCall,
}


class ResponseEventBuilder:
    """One response, as a pure state machine. Ids of items follow from the request's: a resumed stream has the same."""

    def __init__(self, rid: str, view: View, vocabulary: Vocabulary, seal: Seal | None = None) -> None:
        self._rid = rid
        self._view = view
        self._vocabulary = vocabulary
        self._seal = seal
        self._items: list[GrowingItem] = []
        self._open: GrowingItem | None = None
        self._call = -1
        self._unshown: list[ScoredToken] = []
        self._begun = False
        self._finish: FinishReason | None = None
        self._response = response_object(rid, view, "in_progress")
        """All but its output, which is that of the items."""

    def begin(self) -> list[ResponseEvent]:
        """Events that are sent before the first token."""
        if self._view.extra_fields["background"]:
            queued = structs.replace(self._snapshot(), status="queued")
            return [ResponseCreated(queued), ResponseQueued(queued)]
        response = self._snapshot()
        return [ResponseCreated(response), ResponseInProgress(response)]

    def tell(self, piece: Piece, counts: TokenCounts) -> list[ResponseEvent]:
        """Events of one entry of the token log; `counts` are those up to it."""
        events: list[ResponseEvent] = []
        if not self._begun and self._view.extra_fields["background"]:
            events.append(ResponseInProgress(self._snapshot()))
        self._begun = True
        calls = list(piece.calls)
        if calls and calls[0].continues and calls[0].index == self._call and isinstance(self._open, GrowingCall):
            events += self._open.grow(calls.pop(0).arguments)  # a token may end a call and begin a text
        if piece.reasoning:
            events += self._turn_to("reasoning")
            events += self._grow(piece.reasoning)
        events += self._say(piece)
        for call in calls:
            if call.index != self._call or not isinstance(self._open, GrowingCall):
                self._call = call.index
                events += self._begin_item(self._called(call))
            if call.arguments:
                events += self._grow(call.arguments)
        if piece.finish is not None:
            self._finish = piece.finish
            events += self._close("completed" if piece.finish in ("stop", "tool_calls") else "incomplete")
        return events

    def end(self, counts: TokenCounts, failure: BaseException | None, now_s: float) -> list[ResponseEvent]:
        """Events that end the answer, at `now_s` in Unix seconds; called once."""
        events: list[ResponseEvent] = []
        if COMPACTION in self._view.extra_fields and not self._items:
            events += self._turn_to("compaction")
        events += self._close("incomplete")
        response = self._response
        response.usage = _usage(counts)
        if isinstance(failure, GenerationFailed) and failure.code == "request_cancelled":
            response.status = "cancelled"
        elif failure is not None:
            response.status = "failed"
            response.error = ResponseFailure(message=problem(failure).body.error.message)
        elif self._finish in _INCOMPLETE:
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails(_INCOMPLETE[self._finish])
        else:
            response.status = "completed"
            response.completed_at = int(now_s)
        if failure is not None:
            last = ResponseFailed
        else:
            last = ResponseIncomplete if response.status == "incomplete" else ResponseCompleted
        return [*events, last(cast(ResponseObject, self.whole()))]

    def whole(self) -> ResponseObject | CompactedResponse:
        """The answer so far as one body."""
        response = self._snapshot()
        messages = self._view.extra_fields.get(COMPACTION)
        if messages is None:
            return response
        return CompactedResponse(
            id=response.id,
            created_at=response.created_at,
            usage=cast(ResponseUsage, response.usage),
            output=[*messages, *cast("list[CompactionItem]", response.output)],
        )

    def interrupted(self, error: BaseException) -> ResponseEvent:
        """The event for a process that stops while the answer goes on in another one."""
        detail = problem(error).body.error
        return ErrorEvent(detail.code, detail.message, detail.param)

    def _say(self, piece: Piece) -> list[ResponseEvent]:
        """The piece's text and its scores; a score without text waits for the message that it belongs to."""
        self._unshown = [] if piece.reasoning or piece.calls else self._unshown + piece.scored
        if not piece.text and not (self._unshown and isinstance(self._open, GrowingMessage)):
            return []
        scored = self._unshown
        self._unshown = []
        events = self._turn_to("compaction" if COMPACTION in self._view.extra_fields else "message")
        return [*events, *self._grow(piece.text, self._logprobs(scored))]

    def _called(self, call: CallDelta) -> GrowingCall:
        """The item of the kind of tool that the call names; a function that is not among the tools is called as one."""
        name = call.name or ""
        at = len(self._items)
        tool = self._tools.get(name)
        kind = _CALLS[tool.kind if tool is not None else "function"]
        return kind(f"{self._rid}_{at}", at, call.id, name, tool)

    @cached_property
    def _tools(self) -> dict[str, OfferedTool]:
        return {tool.name: tool for tool in read_tools(self._view.extra_fields["tools"]).offered}

    def _begin_item(self, item: GrowingItem) -> list[ResponseEvent]:
        events = self._close("completed")
        self._open = item
        self._items.append(item)
        return events + item.open()

    def _turn_to(self, kind: str) -> list[ResponseEvent]:
        """The open item is of this kind from here on."""
        if self._open is not None and self._open.kind == kind:
            return []
        at = len(self._items)
        if kind == "message":
            return self._begin_item(GrowingMessage(f"msg_{self._rid}_{at}", at))
        if kind == "compaction":
            assert self._seal is not None
            return self._begin_item(GrowingCompaction(f"cmp_{self._rid}_{at}", at, self._seal))
        as_summary = self._view.extra_fields["reasoning"]["summary"] is not None
        seal = self._seal if SEALED in self._view.extra_fields["include"] else None
        return self._begin_item(GrowingReasoning(f"rs_{self._rid}_{at}", at, as_summary=as_summary, seal=seal))

    def _grow(self, text: str, logprobs: list[TokenLogprob] | None = None) -> list[ResponseEvent]:
        assert self._open is not None
        return self._open.grow(text, logprobs)

    def _close(self, status: ItemStatus) -> list[ResponseEvent]:
        item = self._open
        self._open = None
        return [] if item is None else item.close(status)

    def _logprobs(self, tokens: list[ScoredToken]) -> list[TokenLogprob]:
        if self._view.logprobs is None:
            return []
        return token_logprobs(self._vocabulary, self._vocabulary.token_text, tokens)

    def _snapshot(self) -> ResponseObject:
        return structs.replace(self._response, output=[item.item() for item in self._items])


_OF_THE_ANSWER = {"id", "created_at", "status", "model", "output", "user", "metadata"}
REPEATED = frozenset(field.name for field in structs.fields(ResponseObject) if field.required) - _OF_THE_ANSWER
"""Fields of a request that its response repeats: each view of a response has them."""


def response_object(rid: str, view: View, status: Status) -> ResponseObject:
    """A response without output that has not ended. Of the view's fields it has those that a response repeats."""
    repeated = {name: value for name, value in view.extra_fields.items() if name in ResponseObject.__struct_fields__}
    return ResponseObject(
        id=answer_id(rid, view),
        created_at=view.created,
        status=status,
        model=view.model,
        output=[],
        user=view.user,
        metadata=view.metadata,
        **repeated,
    )


def _usage(counts: TokenCounts) -> ResponseUsage:
    return ResponseUsage(
        counts.prompt_tokens,
        InputTokensDetails(counts.cached_tokens),
        counts.completion_tokens,
        OutputTokensDetails(counts.reasoning_tokens),
        counts.prompt_tokens + counts.completion_tokens,
    )
