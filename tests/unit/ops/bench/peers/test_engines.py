"""Engines that are absent or break, and unknown rows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from control.errors import SettingsError
from ops.bench.peers.compare import row_of, setting
from ops.bench.peers.engine import Failed, Row, Setup, Unavailable
from ops.bench.peers.hosted import Hosted
from ops.bench.peers.runner import DEFAULT_ROWS, ENGINES, Peers
from ops.bench.peers.served import LlamaServer, complete_all
from ops.bench.peers.weights import of_furrow, of_transformers
from ops.harness import alphabet
from ops.harness.client import Base

SETUP = Setup(Path("nowhere"), "f32")
PROMPT = [alphabet.FIRST + 1, alphabet.FIRST + 2]


def test_rows_have_names_and_unknown_ones_are_refused() -> None:
    """An engine alone has float32 weights; what is unknown is refused by name with what there is."""
    assert row_of("furrow-farm") == Row("furrow-farm", "f32")
    assert str(row_of("llama.cpp:q8_0")) == "llama.cpp:q8_0"
    assert {row_of(name).engine for name in DEFAULT_ROWS} <= set(ENGINES)
    with pytest.raises(SettingsError, match=r"no engine 'vllm'; use one of furrow-loop"):
        row_of("vllm:f32")
    with pytest.raises(SettingsError, match=r"no weights 'q2_k'; use one of"):
        row_of("llama.cpp:q2_k")
    with pytest.raises(SettingsError, match="NAME=VALUE"):
        setting("OMP_WAIT_POLICY")


def test_weights_in_the_words_of_each_engine() -> None:
    """float16 and int8 are kinds of quantisation on a CPU; what an engine has no word for is unavailable."""
    assert of_furrow("f32", "cpu") == ("float32", None)
    assert of_furrow("f16", "cpu") == ("float32", "f16")
    assert of_furrow("f16", "cuda:0") == ("float16", None)
    assert of_furrow("int8", "cuda:0") == ("bfloat16", "int8")
    assert of_furrow("q4k", "cpu") == ("float32", "q4k")
    with pytest.raises(Unavailable, match="q9"):
        of_furrow("q9", "cpu")
    with pytest.raises(Unavailable, match="int8"):
        of_transformers("int8")


def test_peers_keep_their_own_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings for Furrow's threads are not set for a peer's, unless they are asked for."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert "OMP_WAIT_POLICY" not in Peers().environment(2)
    assert Peers(settings={"OMP_WAIT_POLICY": "active"}).environment(2)["OMP_WAIT_POLICY"] == "active"
    assert Peers().environment(2)["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("engine", "error", "words"),
    [
        (Hosted("furrow_loop", SETUP, "/nowhere/python"), Unavailable, "/nowhere/python can't be started"),
        (Hosted("furrow_loop", SETUP, "/bin/false"), Failed, "ended with status 1"),
        (Hosted("no_such_loop", SETUP), Unavailable, "No module named 'ops.bench.peers.loops.no_such_loop'"),
        (LlamaServer(SETUP, None), Unavailable, "--llama-server"),
        (LlamaServer(SETUP, "/nowhere/llama"), Unavailable, "/nowhere/llama can't be started"),
        (LlamaServer(SETUP, "/bin/false"), Failed, "ended with status 1"),
    ],
)
def test_an_engine_that_does_not_start(engine: Hosted | LlamaServer, error: type[Exception], words: str) -> None:
    """Absent is unavailable, broken is failed, and both are stopped without harm."""
    with pytest.raises(error, match=words):
        engine.start()
    engine.stop()


@asynccontextmanager
async def answering(*events: str, status: int = 200) -> AsyncIterator[Base]:
    """A server that answers every request with these events."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = "".join(f"data: {event}\n\n" for event in events).encode()
        writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield Base("127.0.0.1", server.sockets[0].getsockname()[1])


def chunk(text: str, **more: object) -> str:
    return json.dumps({"choices": [{"text": text}], **more})


async def test_tokens_are_the_characters_of_a_completion() -> None:
    """However many come in one event; each has that event's time."""
    async with answering(chunk("一丁"), chunk("七", usage={"prompt_tokens": 2}), "[DONE]") as base:
        streams = await complete_all(base, {}, [PROMPT, PROMPT], 3)
    assert [alphabet.text_of(stream.tokens) for stream in streams] == ["一丁七"] * 2
    assert all(stream.sent <= stream.stamps[0] == stream.stamps[1] <= stream.stamps[2] for stream in streams)


@pytest.mark.parametrize(
    ("event", "status", "words"),
    [
        (chunk("", usage={"prompt_tokens": 5}), 200, "counts 5 tokens in a prompt of 2"),
        (json.dumps({"error": "out of memory"}), 200, "out of memory"),
        ("no", 503, "503"),
    ],
)
async def test_a_completion_that_is_none(event: str, status: int, words: str) -> None:
    """Another prompt than was sent, an error in the stream and a refusal fail the run."""
    async with answering(event, status=status) as base:
        with pytest.raises(Failed, match=words):
            await complete_all(base, {}, [PROMPT], 3)
