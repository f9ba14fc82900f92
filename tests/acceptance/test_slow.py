"""A slow machine is not dead: one that hangs is found; a real farm with layers that take their time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from control.redis.connection import connect
from control.replicas import model_overviews
from tests.farm import Farm, serving_farm
from tests.unit.ops.compose_file import ROOT

pytestmark = pytest.mark.timeout(240)

SPEED_UP = 5
"""The machine computes 50 prompt tokens a second instead of 10, and every deadline is a fifth of the real one."""
FAULT = """
import os, time
if "FURROW_RANK" in os.environ:
    from pathlib import Path
    from worker.rank import heartbeat
    from worker.models.torch.served import TorchModel
    heartbeat.UNKNOWN_STEP_S /= {speed_up}
    heartbeat.PER_TOKEN_S /= {speed_up}
    real = TorchModel.__init__

    def slowed(model, module, *rest, **more):
        real(model, module, *rest, **more)
        layers = module.base_model.layers

        def wait(layer, arguments, output):
            if os.environ["FURROW_RANK"] != "1":
                return
            tokens = arguments[0].shape[1]
            if Path({folder!r}, "slow").exists():
                time.sleep(tokens / (10 * {speed_up}) / len(layers))
            hang = Path({folder!r}, "hang")
            if hang.exists():
                hang.unlink()
                time.sleep(600)

        for layer in layers:
            layer.register_forward_hook(wait)

    TorchModel.__init__ = slowed
"""
LONG = "Count from 1 to 10. " * 60
"""Some 600 tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fault")


@pytest.fixture(scope="module")
def farm(folder: Path) -> Iterator[Farm]:
    """Two ranks, of which the second computes slowly while there is a file `slow`, and hangs where it finds `hang`."""
    (folder / "sitecustomize.py").write_text(FAULT.format(folder=str(folder), speed_up=SPEED_UP))
    # Without a standby: it begins before it knows its rank, so the fault would not be in it.
    settings = {"PYTHONPATH": f"{folder}:{ROOT}", "FURROW_STANDBY": "0"}
    with serving_farm("demo", "--tp", "2", "--devices", "cpu", "--dtype", "float64", **settings) as farm:
        yield farm


def ask(farm: Farm, question: str, max_tokens: int) -> tuple[str, int]:
    """The text, and the tokens of the prompt. No cache of another prompt is used."""
    with openai.OpenAI(base_url=farm.base_url, api_key="none", max_retries=0, timeout=200) as client:
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=max_tokens,
            extra_body={"cache_salt": str(time.monotonic())},
        )
    assert answer.usage is not None
    return answer.choices[0].message.content or "", answer.usage.prompt_tokens


def slow_ranks_until(farm: Farm, done: Callable[[], bool]) -> list[list[int]]:
    """The slow ranks of the replica, looked at twice a second."""
    seen: list[list[int]] = []
    with connect(farm.redis_url) as client:
        while not done():
            seen += [replica.slow for replica in model_overviews.overview(client, "demo").replicas]
            time.sleep(0.5)
    return seen


def poisons(farm: Farm) -> list[dict[str, str]]:
    return [fields for _, fields in farm.redis.xrange("furrow:{demo}:r0:poisons")]


def test_a_long_prompt_on_a_slow_machine_is_answered(farm: Farm, folder: Path) -> None:
    """One rank computes at 10 prompt tokens a second while the other waits for it: no kill, no new epoch, same text. It
    alone is marked as slow."""
    expected, _ = ask(farm, LONG, 8)
    epoch, pids = farm.redis.get("furrow:{demo}:r0:epoch"), [farm.pid("demo", rank) for rank in range(2)]
    before = poisons(farm)  # of a start beside other work
    (folder / "slow").touch()
    try:
        began = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(ask, farm, LONG, 8)
            marked = [one for one in slow_ranks_until(farm, future.done) if one]
            text, prompt_tokens = future.result()
        took = time.monotonic() - began
    finally:
        (folder / "slow").unlink()
    assert prompt_tokens > 500 and took > prompt_tokens / (10 * SPEED_UP), "it must have been slow"
    assert text == expected
    assert marked and all(one == [1] for one in marked)
    assert farm.redis.get("furrow:{demo}:r0:epoch") == epoch and poisons(farm) == before
    assert [farm.pid("demo", rank) for rank in range(2)] == pids


def test_a_rank_that_hangs_while_it_beats_is_found(farm: Farm, folder: Path) -> None:
    """The control: the same farm, and a layer that never ends. The request is answered in the next epoch."""
    expected, _ = ask(farm, "Count from 1 to 10.", 24)
    before = len(poisons(farm))
    began = time.monotonic()
    (folder / "hang").touch()
    text, _ = ask(farm, "Count from 1 to 10.", 24)
    took = time.monotonic() - began
    assert text == expected
    ends = poisons(farm)[before:]
    assert ends[0]["kind"] == "deadline", json.dumps(ends)
    assert took < 60.0
