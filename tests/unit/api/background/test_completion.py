"""A stored response that is rebuilt from its token log while its request ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from api.access.seals import Seals
from api.background.completion import ResponseCompletion
from api.chat.tokens import Vocabulary
from api.observability.metrics import Metrics
from api.schemas.view import View
from control import requests
from control.messages import LogEntry
from control.records.responses import StoredResponse
from tests.byte_model import byte_assets

TOLD = {"background": True, "store": True, "include": [], "reasoning": {"summary": None}}
VIEW = View(endpoint="responses", created=0, model="m", told=TOLD)
RUNNING = {"view": VIEW.encode(), "prompt_tokens": "3", "state": "running"}
STORED = StoredResponse(rid="1" * 32, owner="o", tenant="t", model="m", view=VIEW.encode(), input=[])


async def rebuilt(monkeypatch: pytest.MonkeyPatch, *looks: dict[str, str]) -> dict[str, Any]:
    """The response whose log has its end, where Redis shows one of `looks` after the other as the request's hash."""

    async def pages(*_: Any) -> AsyncIterator[list[LogEntry]]:
        yield [LogEntry(1, 0, 72), LogEntry(2, 0, 105, "length")]

    async def find(*_: Any) -> tuple[Any, dict[str, str]]:
        return SimpleNamespace(name="m", vocabulary=Vocabulary(byte_assets())), left.pop(0)

    async def complete(rid: str, owner: str, body: bytes) -> bytes:
        return body

    left = list(looks)
    monkeypatch.setattr(requests, "aread_pages", pages)
    parts: Any = SimpleNamespace(find=find, complete=complete)
    completion = ResponseCompletion(cast(Any, None), cast(Any, None), parts, parts, Seals(cast(Any, None)), Metrics())
    return msgspec.json.decode(msgspec.json.encode(await completion.current(STORED)))


async def test_a_request_that_ends_while_its_log_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hash was read before its end and has no time of it: it is read again."""
    response = await rebuilt(monkeypatch, RUNNING, RUNNING | {"state": "finished", "t_last": "5000"})
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_a_log_with_all_ends_whose_request_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a failover is repaired: the response has not ended yet."""
    assert (await rebuilt(monkeypatch, RUNNING, RUNNING))["status"] == "in_progress"
