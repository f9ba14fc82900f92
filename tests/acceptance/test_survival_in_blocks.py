"""Streams of models in GGUF blocks survive kills: experts among the weights, two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests import gguf_models
from tests.acceptance.streams import Received, open_stream, receive
from tests.farm import Farm, serving_farm
from tests.waiting import until
from worker.native.library import load_library

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(load_library() is None, reason="no C++ compiler: blocks are computed in C++ only"),
]

SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 96, "swiglu_limit": 7.0}
"""An expert's width has three blocks: the shares of two ranks differ."""


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    folder = tmp_path_factory.mktemp("blocks")
    file, _ = gguf_models.make("gpt_oss", folder, ["mxfp4", "q8_0"], size=0.3, **SHAPE)
    with serving_farm(str(file.rename(folder / "mixture.gguf")), "--tp", "2", "--devices", "cpu") as farm:
        yield farm


def answer(farm: Farm, kills: bool) -> Received:
    """The answer, during which the leader is killed."""
    body: dict[str, Any] = {"model": "mixture", "temperature": 0, "max_tokens": 400, "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": "Blocks of 32"}]
    received, left = Received(), kills
    for now in receive(open_stream(farm.address, body), received):
        if left and len(now.text) > 20 and now.finish is None:
            left = False
            farm.kill("mixture", 0)
    assert not left and received.finish == "length" and received.errors == []
    return received


def test_an_answer_of_experts_in_blocks_outlives_the_leader(farm: Farm) -> None:
    """It is killed in the middle of an answer, whose text is that of the undisturbed run."""
    until(farm.ready)
    expected, epoch = answer(farm, kills=False), farm.redis.get("furrow:{mixture}:r0:epoch")
    assert len(set(expected.text)) > 3
    assert answer(farm, kills=True).text == expected.text
    assert farm.redis.get("furrow:{mixture}:r0:epoch") != epoch, "the fault had no effect"
