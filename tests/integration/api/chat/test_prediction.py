"""`prediction` of chat completions becomes guesses: passed to the leader as tokens, counted in the usage, refused where
malformed."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.integration.api.calling import ASK
from tests.leader import ScriptedLeader

FILE = "first line\nsecond line\nthird line\n"
EDITED = "first line\nsecond row\nthird line\n"
PREDICTED: Any = {"type": "content", "content": FILE}


def usage(answer: Any) -> tuple[int, int]:
    details = answer.usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


@pytest.fixture
def edits(leader: ScriptedLeader) -> ScriptedLeader:
    leader.reply = lambda _: EDITED
    return leader


def test_the_official_client_predicts_a_file(client: openai.OpenAI, edits: ScriptedLeader) -> None:
    """Streamed and not, as text and as parts, with choices and log probabilities, which OpenAI refuses."""
    ask: dict[str, Any] = {"model": "tiny", "messages": ASK, "prediction": PREDICTED}
    plain = client.chat.completions.create(model="tiny", messages=ASK)
    assert plain.usage is not None and plain.usage.completion_tokens_details is not None
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens is None
    whole = client.chat.completions.create(**ask)
    expected = len(FILE) - len("line"), len("line")
    assert whole.choices[0].message.content == EDITED and usage(whole) == expected
    assert edits.tokenizer.decode(edits.claimed[-1].params.sampling.prediction) == FILE
    *_, last = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    assert usage(last) == expected
    parts = {"type": "content", "content": [{"type": "text", "text": FILE[:9]}, {"type": "text", "text": FILE[9:]}]}
    several = client.chat.completions.create(**ask | {"prediction": parts}, n=2, logprobs=True)
    assert usage(several) == (2 * expected[0], 2 * expected[1])


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        ([], "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "other", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "text": "x"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text"),
    ],
)
def test_a_malformed_prediction_is_refused_by_name(http: httpx.Client, prediction: object, param: str) -> None:
    answer = http.post("/v1/chat/completions", json={"model": "tiny", "messages": ASK, "prediction": prediction})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_predictions_of_no_use(client: openai.OpenAI, http: httpx.Client, edits: ScriptedLeader) -> None:
    """Empty, null, longer than a context; and one sent to an endpoint without it."""
    ask: dict[str, Any] = {"model": "tiny", "messages": ASK}
    for nothing in (None, {"type": "content", "content": ""}, {"type": "content", "content": []}):
        assert http.post("/v1/chat/completions", json=ask | {"prediction": nothing}).status_code == 200
        assert edits.claimed[-1].params.sampling.prediction == []
    context = edits.assets.context_length
    long: Any = {"type": "content", "content": "x" * 12 * context}
    answer = client.chat.completions.create(**ask, prediction=long)
    assert usage(answer) == (0, context) and answer.choices[0].message.content == EDITED
    elsewhere = http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "prediction": PREDICTED})
    assert elsewhere.status_code == 200
