"""A stored response is rebuilt from its token log: while its request ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

import api.background.completion
import api.generation.stored_answers
from api.background.completion import ResponseCompletion
from api.chat.tokens import Vocabulary
from api.generation.seals import Seals
from api.generation.stored_answers import StoredAnswers
from api.observability import Metrics
from api.schemas.response_answers import IncompleteDetails, ResponseObject
from api.schemas.view import View
from control import requests
from control.errors import RequestNotFound
from control.messages import LogEntry
from control.records.responses import StoredResponse
from control.redis.connection import Call
from tests.byte_model import byte_assets
from tests.unit.api.response_fields import response_fields

VIEW = View(endpoint="responses", created=0, model="m", extra_fields=response_fields(background=True, store=True))
RUNNING = {"view": VIEW.encode(), "prompt_tokens": "3", "state": "running"}
STORED = StoredResponse(rid="1" * 32, owner="o", tenant="t", model="m", view=VIEW.encode(), input=[])


response_of = msgspec.json.Decoder(ResponseObject).decode


async def rebuilt(monkeypatch: pytest.MonkeyPatch, *looks: dict[str, str]) -> ResponseObject:
    """The response whose log has its end, where Redis shows one of `looks` after the other as the request's hash."""

    async def pages(*_: Any) -> AsyncIterator[list[LogEntry]]:
        yield [LogEntry(1, 0, 72), LogEntry(2, 0, 105, "length")]

    async def find_in(*_: Any) -> tuple[Any, dict[str, str]]:
        return SimpleNamespace(name="m", vocabulary=Vocabulary(byte_assets())), left.pop(0)

    async def complete(rid: str, owner: str, body: bytes) -> bytes:
        return body

    left = list(looks)
    monkeypatch.setattr(requests, "aread_pages", pages)
    parts: Any = SimpleNamespace(find_in=find_in, complete=complete)
    answers = StoredAnswers(cast(Any, None), parts, parts, Seals(cast(Any, None)))
    return response_of(await answers.current(STORED))


async def test_a_request_that_ends_while_its_log_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hash was read before its end and has no time of it: it is read again."""
    response = await rebuilt(monkeypatch, RUNNING, RUNNING | {"state": "finished", "t_last": "5000"})
    assert (response.status, response.incomplete_details) == ("incomplete", IncompleteDetails("max_output_tokens"))


async def test_a_log_with_all_ends_whose_request_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a failover is repaired: the response has not ended yet."""
    assert (await rebuilt(monkeypatch, RUNNING, RUNNING)).status == "in_progress"


class Farm:
    """A completion whose farm has no vocabulary of the model. `fields`: the request's hash; None once it is gone."""

    def __init__(self, fields: dict[str, str] | None, stored: StoredResponse = STORED) -> None:
        self.fields, self.stored = fields, stored
        self.written: list[Any] = []
        self.dropped: list[str] = []
        parts: Any = self
        self.answers = StoredAnswers(cast(Any, None), parts, parts, Seals(cast(Any, None)))
        self.completion = ResponseCompletion(cast(Any, None), cast(Any, None), parts, parts, self.answers, Metrics())

    async def find_in(self, *_: Any) -> tuple[None, dict[str, str]]:
        if self.fields is None:
            raise RequestNotFound("No request")
        return None, self.fields

    async def complete(self, rid: str, owner: str, body: bytes) -> bytes:
        self.written.append(msgspec.json.decode(body))
        return body

    async def drop(self, rid: str, owner: str) -> None:
        self.dropped.append(rid)


@pytest.fixture
def farm_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Farm]:
    def make(fields: dict[str, str] | None, stored: StoredResponse = STORED) -> Farm:
        farm = Farm(fields, stored)

        async def arun(_: Any, call: Call[Any]) -> Any:
            return [(stored.rid, stored.owner)] if call.script else farm.stored

        monkeypatch.setattr(api.background.completion, "arun", arun)
        monkeypatch.setattr(api.generation.stored_answers, "arun", arun)
        return farm

    return make


async def test_an_answer_whose_vocabulary_is_gone_names_the_cause(farm_of: Callable[..., Farm]) -> None:
    """It is no 503, and nothing is stored: the model may be loaded again while the log is there."""
    waiting = farm_of(RUNNING | {"state": "queued"})
    assert response_of(await waiting.answers.current(STORED)).status == "queued"
    farm = farm_of(RUNNING | {"state": "finished", "t_last": "5000"})
    response = response_of(await farm.answers.current(STORED))
    assert response.status == "failed" and response.error is not None
    assert "model 'm' was unloaded" in response.error.message
    await farm.completion.look_round()
    assert (farm.written, farm.dropped) == ([], [])


def _of_another_version() -> str:
    """A view without a field that a response repeats."""
    fields = {name: value for name, value in VIEW.extra_fields.items() if name != "truncation"}
    return msgspec.structs.replace(VIEW, extra_fields=fields).encode()


@pytest.mark.parametrize("view", ["{", _of_another_version()], ids=["damaged", "of another version"])
async def test_an_unreadable_record_is_dropped_with_its_log(farm_of: Callable[..., Farm], view: str) -> None:
    """A reader gets the cause; while the log is there, a process of another version may still read the record."""
    broken = replace(STORED, view=view)
    farm = farm_of(RUNNING | {"state": "finished", "t_last": "5000"}, broken)
    with pytest.raises(RequestNotFound, match="can't be read, as it was damaged"):
        await farm.answers.current(broken)
    await farm.completion.look_round()
    assert (farm.written, farm.dropped) == ([], [])
    farm.fields = None
    with pytest.raises(RequestNotFound, match="can't be read"):
        await farm.answers.current(broken)
    await farm.completion.look_round()
    assert (farm.written, set(farm.dropped)) == ([], {STORED.rid})
