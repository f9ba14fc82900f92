"""A request that kills ranks is buried alone: whenever it is prefilled, on a real farm."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.farm import Farm, serving_farm
from tests.unit.ops.compose_file import ROOT

pytestmark = pytest.mark.timeout(240)

FAULT = """
import os
if "FURROW_RANK" in os.environ:
    from worker.engine.step import Step
    real = Step.forward

    def forward(step, *how):
        ends = [row.offset + len(row.tokens) for row in step.command.change.rows]
        if step.rank == {rank} and any(end > {bearable} for end in ends):
            os.kill(os.getpid(), {signum})
        return real(step, *how)

    Step.forward = forward
"""
BEARABLE = 300
"""Tokens; a longer prompt kills the rank."""
QUESTIONS = [f"Count from {start} to {start + 9}." for start in (1, 20, 30)]
UNBEARABLE = "Count from 1 to 10. " * 40


@pytest.fixture(
    params=[(0, signal.SIGSEGV), (1, signal.SIGKILL)], ids=["leader by a fault", "rank as if by the memory killer"]
)
def frail(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Farm]:
    """A farm of which one rank can't bear long prompts; Python runs sitecustomize before anything else."""
    rank, signum = request.param
    (tmp_path / "sitecustomize.py").write_text(FAULT.format(rank=rank, bearable=BEARABLE, signum=int(signum)))
    # Without a standby: it begins before it knows its rank, so the fault would not be in it.
    settings = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "FURROW_STANDBY": "0"}
    with serving_farm("demo", "--tp", "2", "--devices", "cpu", "--dtype", "float64", **settings) as farm:
        yield farm


def ask(farm: Farm, question: str) -> str:
    with openai.OpenAI(base_url=farm.base_url, api_key="none", max_retries=0, timeout=200) as client:
        answer = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=64
        )
    return answer.choices[0].message.content or ""


def test_its_neighbours_are_answered_and_it_is_told_why_it_failed(frail: Farm) -> None:
    """Exact answers, one dead letter, and no restart more than the search for it takes."""
    expected = [ask(frail, question) for question in QUESTIONS]
    with ThreadPoolExecutor(4) as clients:
        crasher = clients.submit(ask, frail, UNBEARABLE)
        answers = list(clients.map(lambda question: ask(frail, question), QUESTIONS))
        refusal = crasher.exception()
    assert answers == expected
    assert isinstance(refusal, openai.APIStatusError) and "also when it ran alone" in str(refusal)
    letters = frail.furrow("dead", "list", "demo").stdout.splitlines()
    assert len(letters) == 1, letters
    rid = letters[0].split()[1]
    assert len(json.loads(frail.furrow("dead", "show", "demo", rid).stdout)["params"]["prompt"]) > BEARABLE
    restarts = frail.redis.xlen("furrow:{demo}:r0:poisons")
    assert 2 <= restarts <= 2 + 2 + (2 if "SIGKILL" in letters[0] else 0), "a kill must come three times"
