"""The resuming transport hides deaths of API processes: from the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from control.keys import ModelKeys
from ops.client import AsyncResumingTransport, ResumingTransport
from tests.integration.api.conftest import ApiProcess, running_api
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.waiting import until

ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "äöü " * 5}]}
ANSWER = "you said " + "äöü " * 5


@pytest.fixture
def doomed(server: Server, leader: ScriptedLeader, tmp_path: Path) -> Iterator[ApiProcess]:
    with running_api(server.url, tmp_path) as process:
        yield process


@pytest.fixture
def resuming(doomed: ApiProcess, api: ApiProcess) -> Iterator[openai.OpenAI]:
    """A client of the process that will die, which knows of the other one."""
    transport = ResumingTransport([api.url])
    with openai.OpenAI(
        base_url=f"{doomed.url}/v1",
        api_key="secret",
        max_retries=0,
        http_client=httpx.Client(transport=transport, timeout=40),
    ) as client:
        yield client


def test_a_stream_whose_process_is_killed(
    doomed: ApiProcess, resuming: openai.OpenAI, leader: ScriptedLeader, redis_client: Any
) -> None:
    """kill -9 in mid-answer: the same iterator yields the rest, exactly; no key or policy was given."""
    leader.pause()
    leader.step(4)
    stream = resuming.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    texts, usage = list[str](), None
    for chunk in stream:
        usage = chunk.usage or usage
        texts += [choice.delta.content or "" for choice in chunk.choices]
        if doomed.process.poll() is None:
            leader.step(4)
            if len("".join(texts)) >= 12:
                doomed.process.kill()
                doomed.process.wait()
                leader.resume()
    assert "".join(texts) == ANSWER
    assert usage is not None and usage.completion_tokens == len(ANSWER.encode()) + 1
    assert len(leader.claimed) == 1


async def test_an_asynchronous_stream_whose_process_is_killed(
    doomed: ApiProcess, api: ApiProcess, leader: ScriptedLeader
) -> None:
    """The asynchronous client goes on in the same way."""
    leader.pause()
    leader.step(4)
    http = httpx.AsyncClient(transport=AsyncResumingTransport([api.url]), timeout=40)
    async with openai.AsyncOpenAI(base_url=f"{doomed.url}/v1", api_key="s", max_retries=0, http_client=http) as client:
        stream: AsyncIterator[Any] = await client.chat.completions.create(**ASK, stream=True)
        text = ""
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            if doomed.process.poll() is None:
                leader.step(4)
                if len(text) >= 12:
                    doomed.process.kill()
                    doomed.process.wait()
                    leader.resume()
        assert text == ANSWER
    assert len(leader.claimed) == 1


def test_an_answer_that_is_not_streamed_is_fetched_from_another_process(
    doomed: ApiProcess, resuming: openai.OpenAI, leader: ScriptedLeader
) -> None:
    """Its process is killed while the answer is made: the retry joins the running job, which is made once."""
    from threading import Timer

    leader.pause()
    leader.step(3)

    def strike() -> None:
        until(lambda: leader.claimed)
        doomed.process.kill()
        leader.resume()

    striker = Timer(0, strike)
    striker.start()
    answer = resuming.chat.completions.create(**ASK)
    striker.join()
    assert answer.choices[0].message.content == ANSWER
    assert len(leader.claimed) == 1


def test_leaving_early_frees_the_place_at_once(
    resuming: openai.OpenAI, leader: ScriptedLeader, redis_client: Any
) -> None:
    """A client that breaks off its loop cancels, though a cut connection would have waited for it."""
    leader.pause()
    leader.step(4)
    with resuming.chat.completions.create(**ASK, stream=True) as stream:
        next(stream)
    rid = leader.claimed[0].rid
    until(lambda: redis_client.hget(ModelKeys("tiny").request(rid), "state") == "cancelled")
