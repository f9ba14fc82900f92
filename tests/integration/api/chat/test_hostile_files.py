"""A hostile template or tokenizer harms no other model: its requests are refused by its name, and the API serves on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from control.records.api_reports import breaches_of
from control.redis.clients import SyncRedis
from tests.byte_model import TEMPLATE, byte_assets
from tests.integration.api.conftest import ApiProcess
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.unit.api.chat.hostile_templates import HOSTILE

CHOSEN = ("loops", "center", "double")
SOURCE = (
    "".join(f"{{% if messages[0].content == '{name}' %}}{HOSTILE[name]}{{% endif %}}" for name in CHOSEN) + TEMPLATE
)


@pytest.fixture(scope="module")
def leader_of_module(server: Server) -> Iterator[ScriptedLeader]:
    leader = ScriptedLeader(server.url, assets=byte_assets(chat_template=SOURCE))
    leader.start()
    yield leader
    leader.stop()


def chat(http: httpx.Client, content: str) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return http.post("/v1/chat/completions", json=body)


def test_a_hostile_template_holds_nobody_up(
    api: ApiProcess, http: httpx.Client, leader: ScriptedLeader, redis_client: SyncRedis
) -> None:
    """Each is a 422 that names the model, while /health answers and the process lives; operators are told."""
    pid = api.process.pid
    with ThreadPoolExecutor(len(CHOSEN)) as pool:
        waiting = [pool.submit(chat, http, name) for name in CHOSEN]
        answered = 0
        while not all(one.done() for one in waiting):
            assert http.get("/health").status_code == 200
            answered += 1
    for one in waiting:
        answer = one.result()
        assert answer.status_code == 422, answer.text
        error = answer.json()["error"]
        assert error["code"] == "model_file_breach" and "chat template of the model 'tiny'" in error["message"]
    assert answered >= 10, "the first template alone would hold the process for minutes"
    answer = chat(http, "hello")
    assert answer.status_code == 200 and api.process.poll() is None and api.process.pid == pid
    [breach] = breaches_of(redis_client, ["tiny"])["tiny"]
    assert breach.file == "chat template" and breach.deed
