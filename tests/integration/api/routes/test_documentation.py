"""The snippets of docs/clients.md run."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import openai
import pytest

from tests.integration.api.conftest import ApiProcess
from tests.leader import ScriptedLeader

CLIENTS = Path(__file__).parents[4] / "docs" / "clients.md"


def snippet(containing: str, url: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", CLIENTS.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if containing in block]
    return block.replace("http://127.0.0.1:8000", url).replace('model="demo"', 'model="tiny"')


def test_the_snippet_for_the_official_client_prints_its_answers(
    api: ApiProcess, leader: ScriptedLeader, capsys: pytest.CaptureFixture[str]
) -> None:
    """The snippet for the official client prints both answers."""
    scope: dict[str, object] = {}
    exec(snippet("from openai import OpenAI", api.url), scope)
    assert capsys.readouterr().out == "you said What is a poisoned replica?\nyou said Count to five."
    scope["client"].close()  # type: ignore[attr-defined]


def test_a_conversation_that_the_farm_stores(
    api: ApiProcess, leader: ScriptedLeader, capsys: pytest.CaptureFixture[str]
) -> None:
    """The snippet for the Responses API prints both turns, the second upon the first."""
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="anything") as client:
        exec(snippet("previous_response_id", api.url), {"client": client})
    assert capsys.readouterr().out == "you said What is a poisoned replica?\nyou said What is 2 + 3?\n"
    assert "poisoned" in leader.tokenizer.decode(leader.claimed[1].params.prompt)


def test_the_snippet_for_anthropics_client_prints_its_answer(
    api: ApiProcess, leader: ScriptedLeader, capsys: pytest.CaptureFixture[str]
) -> None:
    """The snippet for the Messages API prints its answer."""
    pytest.importorskip("anthropic", reason="the anthropic package is not installed")
    scope: dict[str, object] = {}
    exec(snippet("from anthropic import Anthropic", api.url), scope)
    assert capsys.readouterr().out == "you said Count to five."
    scope["claude"].close()  # type: ignore[attr-defined]


def test_the_transport_that_resumes(
    api: ApiProcess, leader: ScriptedLeader, capsys: pytest.CaptureFixture[str]
) -> None:
    """The snippet for the resuming transport prints the answer."""
    scope: dict[str, object] = {}
    exec(snippet("ResumingTransport", api.url), scope)
    assert capsys.readouterr().out == "you said Count to thirty."
    scope["client"].close()  # type: ignore[attr-defined]


def test_the_client_that_resumes(
    api: ApiProcess, leader: ScriptedLeader, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its connection broken again and again, the snippet still prints the whole answer once."""
    lines = httpx.Response.iter_lines
    broken: list[str] = []

    def breaking(response: httpx.Response):  # type: ignore[no-untyped-def]
        if len(broken) < 3:
            leader.step(7)
        else:
            leader.resume()
        for line in lines(response):
            yield line
            if len(broken) < 3 and '"content":' in line and '"content":""' not in line:
                broken.append(line)
                raise httpx.ReadError("cut")

    monkeypatch.setattr(httpx.Response, "iter_lines", breaking)
    leader.pause()
    leader.reply = lambda _: "".join(f"{number} " for number in range(1, 21))
    exec(snippet("Last-Event-ID", api.url), {})
    assert len(broken) == 3
    assert capsys.readouterr().out == "".join(f"{number} " for number in range(1, 21))
    assert len(leader.claimed) == 1
