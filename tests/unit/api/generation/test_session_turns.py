"""Answers with log probabilities yield to others: in turns of the event loop, counted in tokens, not in
milliseconds."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import msgspec
import pytest

import api.generation.session
from api.chat.tokens import Vocabulary
from api.generation.chunks import StreamRenderer, token_logprobs
from api.generation.client_request import Caller
from api.generation.follow import Feed, Feeds
from api.generation.session import TURN_ENTRIES, TURN_PROMPTS, TURN_SCORED, Session, ShutdownState, events, renderer_of
from api.observability import Metrics, RequestLog
from api.schemas.view import View
from api.settings import ApiSettings
from control.messages import LogEntry, PromptToken, TokenLogprobs
from tests.byte_model import byte_assets
from tests.unit.api.response_fields import response_fields

VOCABULARY = Vocabulary(byte_assets())
TOP = TokenLogprobs(-0.5, [(65 + place, -1.0 - place) for place in range(20)])
STEPS = 4
STORED = response_fields(store=True)


def entries(n: int, scored: bool, steps: int = STEPS) -> list[LogEntry]:
    """`steps` tokens of each choice, as the leader emits them, and the ends."""
    scores = TOP if scored else None
    log = [LogEntry(step * n + choice + 1, choice, 65, logprobs=scores) for step in range(steps) for choice in range(n)]
    return log + [LogEntry(steps * n + choice + 1, choice, 66, "length", None, scores) for choice in range(n)]


class Turns:
    """An answer of which everything is ready at once, and what each turn of the event loop renders of it."""

    def __init__(self, view: View, log: list[LogEntry], *, members: int = 1) -> None:
        self.rendered: list[int] = [0]
        self.renderer = renderer_of("r", view, VOCABULARY, 3)
        self._count(self.renderer)
        feeds = Feeds(cast(Any, _Follower()), "m", "t", "r")
        for member in range(members):
            feeds.open(f"r-{member}").offer(log, 0.0, whole=True)
        request_log = RequestLog(Metrics(), path="/", client_request_id=None)
        nothing: Any = None
        self.session = Session(
            feeds=feeds,
            renderer=self.renderer,
            caller=Caller(request_log=request_log),
            settings=ApiSettings(redis_url="redis://none"),
            shutdown=ShutdownState(),
            complete=nothing,
            load_stage=lambda: None,
        )

    def _count(self, renderer: StreamRenderer) -> None:
        for answer in renderer.answers:
            feed = answer.feed

            def counted(entry: LogEntry, feed: Any = feed) -> Any:
                self.rendered[-1] += 1
                return feed(entry)

            answer.feed = counted  # type: ignore[method-assign]

    async def watched(self, work: Any) -> Any:
        """The result of `work`, while another task has its turn whenever there is one."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.sleep(0)
            self.rendered.append(0)
        return task.result()


class _Follower:
    def open(self, model: str, rid: str, tenant: str, wake: asyncio.Event) -> Feed:
        return Feed(model, rid, tenant, wake, 0.0)

    def leave(self, *_: Any) -> None:
        """Nothing follows it."""


async def streamed(session: Session) -> bytes:
    return b"".join([data async for data in events(session)])


def view(n: int = 1, members: int = 1, logprobs: int | None = None, endpoint: str = "chat") -> View:
    return View(endpoint=cast(Any, endpoint), created=0, model="m", n=n, members=members, logprobs=logprobs)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("way", ["stream", "whole"])
@pytest.mark.parametrize("logprobs", [None, 20])
async def test_a_turn_renders_a_bounded_part_of_many_choices(endpoint: str, way: str, logprobs: int | None) -> None:
    """128 choices with twenty log probabilities for each token; without them more at a time, of a longer log."""
    scored = logprobs is not None
    log = entries(128, scored, steps=STEPS if scored else 40)
    turns = Turns(view(128, logprobs=logprobs, endpoint=endpoint), log)
    await turns.watched(streamed(turns.session) if way == "stream" else turns.session.collect())
    assert sum(turns.rendered) == len(log)
    assert max(turns.rendered) == (TURN_SCORED if scored else TURN_ENTRIES)


async def test_an_entry_of_a_prompt_has_a_turn_of_its_own() -> None:
    """It tells up to 64 tokens of it."""
    prompt_tokens = [PromptToken(65, -0.5, 1, TOP.top)] * 64
    log = [LogEntry(seq, 0, None, prompt=prompt_tokens) for seq in range(1, 9)] + [
        LogEntry(9, 0, 66, "length", None, TOP)
    ]
    asked = msgspec.structs.replace(view(logprobs=20, endpoint="completions"), prompt_logprobs=20, echo=["A" * 512])
    turns = Turns(asked, log)
    pieces = await turns.watched(turns.session.collect())
    assert max(turns.rendered) == TURN_PROMPTS
    [choice] = msgspec.json.decode(turns.renderer.whole(pieces))["choices"]
    assert len(choice["prompt_logprobs"]) == 512 and len(choice["logprobs"]["tokens"]) == 513


async def test_the_members_of_a_request_share_a_turn() -> None:
    """A list of prompts is one answer."""
    turns = Turns(view(4, 16, 20, "completions"), entries(4, True), members=16)
    await turns.watched(streamed(turns.session))
    assert sum(turns.rendered) == 16 * len(entries(4, True)) and max(turns.rendered) == TURN_SCORED


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_a_whole_answer_encodes_no_token_at_its_end(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token was encoded when it came; the body is put together from that, and says the same."""
    turns = Turns(view(128, logprobs=20, endpoint=endpoint), entries(128, True))
    pieces = await turns.watched(turns.session.collect())
    looked_up: list[int] = []

    def looked(_: Vocabulary, token: int) -> Any:
        looked_up.append(token)

    monkeypatch.setattr(Vocabulary, "token_text", looked)
    monkeypatch.setattr(Vocabulary, "token_bytes", looked)
    choices = msgspec.json.decode(turns.renderer.whole(pieces))["choices"]
    assert looked_up == [] and len(choices) == 128
    for choice in choices:
        shown = choice["logprobs"]
        if endpoint == "chat":
            assert len(shown["content"]) == STEPS + 1
            assert [len(token["top_logprobs"]) for token in shown["content"]] == [20] * (STEPS + 1)
        else:
            assert shown["token_logprobs"] == [-0.5] * (STEPS + 1) and shown["text_offset"] == list(range(STEPS + 1))
            assert all(len(top) >= 20 for top in shown["top_logprobs"])


@pytest.mark.parametrize(("logprobs", "off"), [(None, False), (20, True)])
@pytest.mark.parametrize("endpoint", ["chat", "responses"])
async def test_a_large_answer_is_stored_off_the_event_loop(
    logprobs: int | None, off: bool, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its body, and the token log of a chat: forty tokens are large with twenty log probabilities each."""
    shown = msgspec.structs.replace(view(logprobs=logprobs, endpoint=endpoint), extra_fields=STORED)
    turns = Turns(shown, entries(1, off, steps=40))
    stored, threads = list[bytes](), list[bool]()

    def told(work: Any) -> Any:
        def call(*args: Any) -> Any:
            threads.append(threading.current_thread() is not threading.main_thread())
            return work(*args)

        return call

    async def complete(body: bytes, log: bytes) -> None:
        stored.extend((body, log))

    turns.session.complete = complete
    renderer = type(turns.renderer)
    monkeypatch.setattr(renderer, "to_store", property(told(renderer.to_store.fget)))
    monkeypatch.setattr(api.generation.session, "encode", told(api.generation.session.encode))
    await streamed(turns.session)
    assert threads == [off] * (2 if endpoint == "chat" else 1)
    assert msgspec.json.decode(stored[0])["store"] is True
    assert len(msgspec.json.decode(stored[1] or b"[]")) == (41 if endpoint == "chat" else 0)


def test_a_score_is_encoded_once_and_shown_often() -> None:
    """The last four events of /v1/responses repeat all of them."""
    answer = Turns(view(logprobs=20), entries(1, True))
    piece = answer.renderer.answers[0].feed(entries(1, True)[0])
    [score] = token_logprobs(VOCABULARY, VOCABULARY.token_text, piece.scored)
    assert isinstance(score, msgspec.Raw) and msgspec.json.decode(score)["token"] == "b"
