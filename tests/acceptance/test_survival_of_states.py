"""Streams of recurrent models survive kills: begun at a copy of a state, with rank or leader killed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests import models
from tests.acceptance.streams import Received, open_stream, receive
from tests.farm import Farm, serving_farm
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

INSTRUCTIONS = "An instruction that each request repeats. " * 10
TYPES = ("lfm2", "qwen3_5_text")


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    """A model of each type, of two ranks."""
    folder = tmp_path_factory.mktemp("states")
    made = [str(models.make(family, folder / family, max_position_embeddings=800)) for family in TYPES]
    with serving_farm(*made, "--tp", "2", "--devices", "cpu", "--dtype", "float32") as farm:
        yield farm


def answer(farm: Farm, model: str, salt: str, kill: int | None = None) -> tuple[Received, int]:
    """The answer, and how many tokens of its prompt were cached; `kill` is a rank that dies in the middle."""
    body: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 1_000, "ignore_eos": True}
    body |= {"cache_salt": salt, "messages": [{"role": "user", "content": INSTRUCTIONS + "Say something."}]}
    received, left = Received(), kill
    for now in receive(open_stream(farm.address, body), received):
        if left is not None and len(now.text) > 20 and now.finish is None:
            farm.kill(model, left)
            left = None
    assert left is None and received.finish == "length" and received.errors == []
    rid = received.last_id.rsplit(":", 1)[0]
    return received, int(farm.redis.hget(f"furrow:{{{model}}}:req:{rid}", "cached_tokens") or 0)


@pytest.mark.parametrize("model", TYPES)
def test_an_answer_begun_at_a_copy_of_a_state_outlives_leader_and_rank(farm: Farm, model: str) -> None:
    """Each is killed in the middle of an answer that began with what the one before it left; the text is that of the
    undisturbed answer, which began with nothing."""
    until(farm.ready)
    expected, none = answer(farm, model, "apart")
    assert none == 0 and len(set(expected.text)) > 3
    for rank in (1, 0):
        until(farm.ready)
        assert answer(farm, model, "together")[0].text == expected.text
        epoch = farm.redis.get(f"furrow:{{{model}}}:r0:epoch")
        received, cached = answer(farm, model, "together", kill=rank)
        assert received.text == expected.text
        assert cached > 300
        assert farm.redis.get(f"furrow:{{{model}}}:r0:epoch") != epoch, "the fault had no effect"
