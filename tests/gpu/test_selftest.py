"""Trials of kernels on a GPU; and a whole farm that serves on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import openai
import pytest
import torch

from ops.cli.tables import echo_table
from tests.farm import serving_farm
from tests.gpu.conftest import DEVICE
from tests.models import make
from worker.selftest import choice, report, switches
from worker.selftest.shapes import DEFAULT

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(switches, "_off", {})


def test_every_kernel_works() -> None:
    """On the shapes of three models; the table shows rates. Norm and gate reach a tenth of what a copy reaches."""
    made = report.selftest(DEVICE, DEFAULT)
    echo_table(report.rows_of(made))
    assert made.off == {}
    assert {result.kernel for result in made.results if result.verdict == "ok"} >= {*choice.KERNELS["cuda"]}
    for result in made.results:
        if result.kernel in ("triton.norm", "triton.gate") and result.shape.startswith("2048"):
            assert result.gigabytes / result.seconds > made.limits.gigabytes_per_s / 10, result


def test_a_first_load_tries_and_a_second_one_reads() -> None:
    """The record says that nothing is off, and the second choice runs no child process."""
    config = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1, "model_type": "llama"}
    told: list[int] = []
    choice.choose(config, "bfloat16", DEVICE, 1, lambda: told.append(1))
    assert len(told) >= len(choice.KERNELS["cuda"])
    assert switches.reason_off(*choice.KERNELS["cuda"]) is None
    before = len(told)
    choice.choose(config, "bfloat16", DEVICE, 1, lambda: told.append(1))
    assert len(told) == before


@pytest.mark.parametrize("off", ["", "graphs", "triton.decode,triton.norm,triton.rotary"])
def test_a_farm_on_the_gpu_answers_as_on_the_cpu(off: str, tmp_path: Path, make_tokens: Callable[..., str]) -> None:
    """With kernels switched off by hand as well."""
    folder = str(make("llama", tmp_path / "tiny"))
    assert make_tokens(folder, DEVICE, off) == make_tokens(folder, "cpu", "")


def test_a_stream_goes_on_after_the_death_of_its_rank(tmp_path: Path) -> None:
    """The rank is killed in the middle of an answer, which then has the tokens of an undisturbed one."""
    folder = str(make("llama", tmp_path / "tiny"))
    with serving_farm(folder, "--devices", DEVICE, "--dtype", "float32") as farm:
        with openai.OpenAI(base_url=farm.base_url, api_key="none", timeout=120) as client:
            name = client.models.list().data[0].id
            ask = {"model": name, "prompt": "abc", "max_tokens": 200, "temperature": 0, "stream": True}
            undisturbed = [chunk.choices[0].text for chunk in client.completions.create(**ask)]
            disturbed: list[str] = []
            for chunk in client.completions.create(**ask, extra_body={"cache_salt": "2"}):
                disturbed.append(chunk.choices[0].text)
                if len(disturbed) == 5:
                    farm.kill(name, 0)
            assert "".join(disturbed) == "".join(undisturbed)
        assert farm.stop() == 0


@pytest.fixture
def make_tokens() -> Callable[..., str]:
    """Serve a model on a device with kernels switched off, and complete a prompt greedily."""

    def answer(folder: str, device: str, off: str) -> str:
        options = ["--devices", device, "--dtype", "float32"]
        with serving_farm(folder, *options, FURROW_STANDBY="0", FURROW_DISABLE=off) as farm:
            with openai.OpenAI(base_url=farm.base_url, api_key="none") as client:
                name = client.models.list().data[0].id
                done = client.completions.create(model=name, prompt="abc", max_tokens=16, temperature=0)
            assert farm.stop() == 0
        return done.choices[0].text

    assert torch.cuda.is_available()
    return answer
