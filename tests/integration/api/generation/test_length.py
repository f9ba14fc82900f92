"""A token limit beyond the context is honoured: in every API and with `--strict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.byte_model import CONTEXT
from tests.integration.api.conftest import running_api
from tests.leader import ScriptedLeader
from tests.servers import Server

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": CONTEXT},
    "/v1/completions": {"prompt": "x", "max_tokens": CONTEXT},
    "/v1/responses": {"input": "x", "max_output_tokens": CONTEXT},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": CONTEXT},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_limit_beyond_the_context_is_cut(http: httpx.Client, leader: ScriptedLeader, path: str) -> None:
    """Programs send the largest limit that they know; the answer ends with the context."""
    response = http.post(path, json={"model": "tiny"} | BODIES[path])
    assert response.status_code == 200, response.text
    params = leader.claimed[-1].params
    assert params.sampling.max_tokens == CONTEXT - len(params.prompt)


def test_with_strict_it_is_refused_by_name(server: Server, leader: ScriptedLeader, tmp_path: Path) -> None:
    with running_api(server.url, tmp_path, "--strict") as strict, httpx.Client(base_url=strict.url) as http:
        for path, body in BODIES.items():
            response = http.post(path, json={"model": "tiny"} | body)
            limit = "max_output_tokens" if "max_output_tokens" in body else "max_tokens"
            assert response.status_code == 400 and str(CONTEXT) in response.text, (path, response.text)
            shorter = http.post(path, json={"model": "tiny"} | body | {limit: 5})
            assert shorter.status_code == 200, (path, shorter.text)
    assert all(claimed.params.sampling.max_tokens == 5 for claimed in leader.claimed)
