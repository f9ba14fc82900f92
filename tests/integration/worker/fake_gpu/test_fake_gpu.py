"""The path of a GPU on fake tensors: no tensor on the wrong device, no wrong type, no hidden wait for the device."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
)
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel here")

from control.errors import RankError
from control.messages import Sampling
from tests import models
from tests.integration.worker.engine.script import Job, write
from tests.integration.worker.fake_gpu.device import DEVICE, BadLaunch, HiddenWait, Waits, build_guard, fake_gpu
from worker.collective import Solo
from worker.engine.step import Engine
from worker.kv.stores import store_for
from worker.models.loading import load
from worker.models.torch.kernels import modules as kernels
from worker.sampling.sampler import StepSampler
from worker.scheduling.sequence import Sequence

JOBS = [Job(sid, list(range(5 + 9 * sid)), 16, 4, start=sid) for sid in range(3)]
DENSE = ("llama", "qwen3", "gemma3_text", "gemma2", "mistral")


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: tests/gpu runs on it")
    try:
        return build_guard(tmp_path_factory.mktemp("guard"))
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"a device guard can't be compiled here: {error}")


@pytest.fixture(autouse=True)
def modelling_is_put_back() -> Iterator[None]:
    """Fusing replaces a function of the modelling code."""
    with mock.patch.object(kernels, "_fuse_rotary", _fuse_rotary_for_a_while):
        yield
    for modelling, plain in _replaced:
        setattr(modelling, kernels.ROTARY, plain)
    _replaced.clear()


_replaced: list[tuple[Any, Any]] = []
_fuse_rotary = kernels._fuse_rotary


def _fuse_rotary_for_a_while(modelling: Any, devices: frozenset[str]) -> None:
    _replaced.append((modelling, getattr(modelling, kernels.ROTARY, None)))
    _fuse_rotary(modelling, devices)


def engine_of(folder: Path, dtype: str = "bfloat16", prepared: bool = True) -> Engine:
    model = load(folder, collective=Solo(), dtype=dtype, device=DEVICE)
    engine = Engine(model, store_for(model.cache_layout, 2048, 512, 1), Solo())
    if prepared:
        engine.prepare()
    return engine


def run(engine: Engine, temperature: float = 0.0) -> int:
    """Chunks and decode steps, sampled on the device, the next step launched ahead. Returns how many tensors of
    tokens the device had for it."""
    sampling = Sampling(max_tokens=64, temperature=temperature, seed="0")
    rows = {job.sid: Sequence(rid="", choice=0, prompt=job.prompt, sampling=sampling, sid=job.sid) for job in JOBS}
    sampler, on_device = StepSampler(), 0
    with Waits():
        for command in write(JOBS):
            with engine.step(command) as step:
                forward = step.forward()
                assert forward.logits.dtype == torch.float32
                pending = sampler.begin([rows[sid] for sid in forward.sids], forward)
                if forward.sids:
                    assert pending.on_device is not None and str(pending.on_device.device) == DEVICE
                    on_device += 1
                step.run_ahead(pending.on_device)
                with _disable_current_modes():  # the host's own part
                    step.agree([7] * len(forward.sids))
            for sid in forward.sids:
                rows[sid].output.append(7)
    return on_device


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}
    return lambda family: made.setdefault(family, models.make(family, tmp_path_factory.mktemp(family)))


@pytest.mark.parametrize("family", DENSE)
def test_a_model_runs_without_a_hidden_wait(family: str, guard: ctypes.CDLL, folder: Callable[[str], Path]) -> None:
    """Loading, fused modules, pages, buckets of graphs, sampling on the device and running ahead."""
    path = folder(family)
    with fake_gpu(guard) as launched:
        engine = engine_of(path)
        parts = [*engine.model._module.parameters(), *engine.model._module.buffers()]
        assert {str(part.device) for part in parts} == {DEVICE}
        assert engine.graphs is not None and len(engine.graphs._graphs) == 3
        assert run(engine) > 5
        if family == "llama":
            engine.clear()
            assert run(engine, temperature=0.7) > 5
    assert set(launched) >= {"_decode", "_prefill", "_store", "_rms_norm", "_gated", "_rotary"}


def test_experts_are_known_to_wait(guard: ctypes.CDLL, folder: Callable[[str], Path]) -> None:
    """The loop over experts asks the device which of them were hit: such a model says so, and has no graphs."""
    path = folder("qwen3_moe")
    with fake_gpu(guard):
        engine = engine_of(path, prepared=False)
        assert engine.model.waits_for_device and engine.graphs is None and engine.ahead is None
        with pytest.raises(RankError) as refused:
            run(engine)
    assert isinstance(refused.value.__cause__, DynamicOutputShapeException | DataDependentOutputException)


class WithWait(torch.nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) if inputs.abs().max().item() < 1e9 else inputs


class WithCopy(WithWait):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs.cpu().to(inputs.device, non_blocking=True))


def _weight_left_behind(layer: Any) -> None:
    norm = layer.post_attention_layernorm
    norm.weight = torch.nn.Parameter(torch.ones(norm.weight.shape[0], dtype=norm.weight.dtype), requires_grad=False)


def _product_left_behind(layer: Any) -> None:
    product = layer.self_attn.o_proj
    weight = product.weight
    product.weight = torch.nn.Parameter(torch.ones(weight.shape, dtype=weight.dtype), requires_grad=False)


def _wrong_type(layer: Any) -> None:
    norm = layer.post_attention_layernorm
    norm.weight = torch.nn.Parameter(norm.weight.float(), requires_grad=False)


def _item(layer: Any) -> None:
    layer.mlp = WithWait(layer.mlp)


def _copy(layer: Any) -> None:
    layer.mlp = WithCopy(layer.mlp)


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        (_weight_left_behind, BadLaunch),
        (_product_left_behind, (FakeTensorDeviceMismatchError, RuntimeError)),
        (_wrong_type, BadLaunch),
        (_item, DataDependentOutputException),
        (_copy, HiddenWait),
    ],
)
def test_the_control_finds_what_is_planted(
    planted: Callable[[Any], None], found: Any, guard: ctypes.CDLL, folder: Callable[[str], Path]
) -> None:
    """A tensor on the host, a wrong type, a value that is read and a copy that is waited for."""
    path = folder("llama")
    with fake_gpu(guard):
        engine = engine_of(path)
        planted(engine.model._module.model.layers[1])
        with pytest.raises(RankError) as refused:
            run(engine)
    assert isinstance(refused.value.__cause__, found), refused.value.__cause__
