"""Recurrent layers equal their formula: in float64; the layers of the models, and what becomes of a state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from control.commands import Prefix, StepRow
from control.errors import RankError
from tests import models
from tests.integration.worker.engine.stepping import command as step
from tests.integration.worker.engine.stepping import rows, run, tensor_of
from tests.integration.worker.engine.test_native import PROMPT, Running, conversation, loaded
from worker.collective import Solo
from worker.engine.step import Engine
from worker.kv.base import CacheLayout, Extent
from worker.kv.slabs import SlabStore
from worker.models.loading import load
from worker.models.native import forward
from worker.models.native.plan import Plan
from worker.models.served import Row
from worker.models.torch.recurrent import GatedConvolution, GatedDelta
from worker.native.library import load_library

Checkpoint = Callable[[str], Path]
TYPES = ["granitemoehybrid", "lfm2", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"]
compiled = pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")


def recurrence(layer: Any, config: Any, hidden: Tensor) -> Tensor:
    """A layer of transformers over one sequence (T, hidden) in float64: the formula of the paper, one token and head
    after the other."""
    layer = layer.double()
    ratio = config.linear_num_value_heads // config.linear_num_key_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    if hasattr(layer, "in_proj_qkvz"):
        joined, both = layer.in_proj_qkvz(hidden)[None], layer.in_proj_ba(hidden)[None]
        query, key, value, gate, learning, rate = (part[0] for part in layer.fix_query_key_value_ordering(joined, both))
        mixed = torch.cat([part.flatten(1) for part in (query, key, value)], 1)
    else:
        mixed, gate = layer.in_proj_qkv(hidden), layer.in_proj_z(hidden)
        learning, rate = layer.in_proj_b(hidden), layer.in_proj_a(hidden)
    taps = layer.conv1d.weight[:, 0].t()
    padded = torch.cat([mixed.new_zeros(len(taps) - 1, mixed.shape[1]), mixed])
    mixed = functional.silu(sum((padded[at : at + len(mixed)] * tap for at, tap in enumerate(taps)), torch.zeros(())))
    wide = config.linear_num_key_heads * key_dim
    out = []
    for head in range(config.linear_num_value_heads):
        first, state = head // ratio * key_dim, torch.zeros(key_dim, value_dim, dtype=torch.float64)
        kept = torch.exp(-layer.A_log[head].exp() * functional.softplus(rate[:, head] + layer.dt_bias[head]))
        values = []
        for token in range(len(hidden)):
            query, key = (mixed[token, at + first : at + first + key_dim] for at in (0, wide))
            query, key = (one / (one.square().sum() + 1e-6).sqrt() for one in (query, key))
            begin = 2 * wide + head * value_dim
            state = kept[token] * state
            change = torch.sigmoid(learning[token, head]) * (mixed[token, begin : begin + value_dim] - state.t() @ key)
            state = state + torch.outer(key, change)
            values.append(state.t() @ query / key_dim**0.5)
        normed = torch.stack(values)
        normed = normed / (normed.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * layer.norm.weight
        out.append(normed * functional.silu(gate.reshape(len(hidden), -1, value_dim)[:, head]))
    return layer.out_proj(torch.cat(out, -1))


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_a_layer_is_the_paper_s_formula(family: str, checkpoint: Checkpoint) -> None:
    """In float64, in chunks and token by token, a layer differs from the formula by less than 1e-9; transformers' own,
    which rounds to float32, by more."""
    folder = checkpoint(family)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).model.layers[0].linear_attn
    hidden = torch.randn(40, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = recurrence(theirs, AutoConfig.from_pretrained(folder), hidden)
    assert (theirs(hidden[None])[0] - expected).abs().max() > 1e-9
    ours = load(folder, collective=Solo(), dtype="float64")
    layer = next(part for part in ours.parts() if isinstance(part, GatedDelta))
    assert (in_chunks(layer, ours.cache_layout, hidden) - expected).abs().max() < 1e-9


@torch.no_grad()
def test_a_short_convolution_is_its_formula(checkpoint: Checkpoint) -> None:
    """In float64, in chunks and token by token, a layer of lfm2 is C · convolution(B · x), with its biases."""
    folder = checkpoint("lfm2")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).model.layers[0].conv
    hidden = torch.randn(40, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    before, after, values = theirs.in_proj(hidden).split(64, 1)
    inputs, taps = torch.cat([hidden.new_zeros(2, 64), before * values]), theirs.conv.weight[:, 0].t()
    mixed = inputs[:-2] * taps[0] + inputs[1:-1] * taps[1] + inputs[2:] * taps[2] + theirs.conv.bias
    expected = theirs.out_proj(after * mixed)
    ours = load(folder, collective=Solo(), dtype="float64")
    layer = next(part for part in ours.parts() if isinstance(part, GatedConvolution))
    assert (in_chunks(layer, ours.cache_layout, hidden) - expected).abs().max() < 1e-9


def in_chunks(layer: Any, layout: CacheLayout, hidden: Tensor) -> Tensor:
    """The output of `layer` for 40 rows of one sequence."""
    store, found = SlabStore(layout, 4096), []
    for offset, count in [(0, 1), (1, 16), (17, 2), (19, 20), (39, 1)]:
        extents = [Extent(1, offset, count)]
        found.append(layer(hidden[None, offset : offset + count], cache_step=store.begin(extents).attention)[0])
        store.commit(extents)
    return torch.cat(found)


@compiled
@pytest.mark.parametrize("family", TYPES)
def test_the_models_have_recurrent_layers_in_cpp(
    family: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers are recurrent and one attends, with keys and values for that one alone."""
    plans: list[Plan] = []

    def noted(model: Any, layout: CacheLayout) -> Plan:
        plans.append(Plan(model, layout))
        return plans[-1]

    monkeypatch.setattr(forward, "Plan", noted)
    served = load(checkpoint(family), collective=Solo(), dtype="float32")
    (plan,) = plans
    assert [layer.recurrent for layer in plan._layers] == [0, -1, 1]
    assert (plan.model.recurrent_count, plan.model.output_gate) == (2, int("qwen" in family))
    assert len(served.cache_layout.layers) == 1
    assert served.cache_layout.state_tokens > 0


@compiled
def test_recurrent_layers_of_a_real_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 128 numbers, three value heads to a key head and a convolution of three inputs: C++ is near torch."""
    shape = {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 144,
        "linear_conv_kernel_dim": 3,
    }
    folder = models.make("qwen3_5_text", tmp_path, **shape)
    ours, theirs = (conversation(loaded(folder, None, monkeypatch, native)) for native in (True, False))
    assert (ours - theirs).abs().max() < 1e-4


@pytest.fixture
def engine(checkpoint: Checkpoint) -> Engine:
    """An engine whose sequence 1 has fed 3 tokens."""
    model = load(checkpoint("qwen3_5_text"), collective=Solo())
    engine = Engine(model, SlabStore(model.cache_layout, 100), Solo())
    run(engine, step(1, **rows((1, [1, 2, 3], 0))))
    return engine


def failing(engine: Engine, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    """Run `command`, whose forward fails once it has changed the states."""
    whole = engine.model.forward

    def broken(*given: Any) -> Tensor:
        whole(*given)
        raise RuntimeError("torn")

    monkeypatch.setattr(engine.model, "forward", broken)
    with pytest.raises(RankError, match="torn"):
        run(engine, command)
    monkeypatch.setattr(engine.model, "forward", whole)


def test_a_state_is_not_used_after_a_failed_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that failed in the middle may have changed the state: the sequence can't go on, a new one begins
    anew, and gets the logits of one that nothing happened to."""
    logits = Running(engine.model).step(Row(1, [4, 5], 0, True))
    failing(engine, monkeypatch, step(2, **rows((2, [4, 5], 0)), paused=[1]))
    with engine.step(step(3, **rows((2, [4, 5], 0)), paused=[1])) as again:
        assert torch.equal(tensor_of(again.forward().logits), logits)
        again.agree([7])
    failing(engine, monkeypatch, step(4, **rows((1, [4], 3)), left=[2]))
    with pytest.raises(RankError, match="recurrent state of sequence 1 was lost in a step that failed"):
        run(engine, step(5, **rows((1, [4], 3))))


def test_states_are_counted_as_memory(engine: Engine) -> None:
    """A sequence takes its positions and its state; a step that would exceed both is refused."""
    state = engine.store.cost.state_tokens
    layout = engine.model.cache_layout
    assert layout.state is not None
    assert state == -(-4 * layout.state.numbers // layout.bytes_per_token) == 44
    assert engine.store.used_tokens == 3 + state
    with pytest.raises(RankError, match=f"needs {3 + 10 + 2 * state} cached tokens, but there is room for 100"):
        run(engine, step(2, **rows((2, [5] * 10, 0)), paused=[1]))
    run(engine, step(3, **rows((2, [5] * 10, 0)), left=[1]))
    assert engine.store.used_tokens == 10 + state


def test_a_beginning_is_shared_where_a_state_was_kept(checkpoint: Checkpoint) -> None:
    """A sequence begins at a snapshot of another, at its end, or takes its memory over, and gets the bits of one that
    computes all; anywhere else it is refused. A snapshot takes the memory of a state until its sequence leaves."""
    model = load(checkpoint("qwen3_5_text"), collective=Solo())
    logits = Running(model).step(Row(1, PROMPT, 0, True))
    engine = Engine(model, SlabStore(model.cache_layout, 1000), Solo())
    state = engine.store.cost.state_tokens
    run(engine, step(1, rows=[StepRow(1, PROMPT[:20], 0, False, snapshot=True)]))
    assert engine.store.used_tokens == 20 + 2 * state
    run(engine, step(2, rows=[StepRow(1, PROMPT[20:30], 20, False)]))
    with pytest.raises(RankError, match="begin with 21 tokens of sequence 1: its recurrent state, or what"):
        run(engine, step(3, **begun(2, 1, 21)))
    for seq, (sid, count, left) in enumerate([(2, 20, []), (3, 30, []), (4, 20, [1])], start=4):
        paused = [one for one in (2, 3) if engine.store.length(one) is not None]
        with engine.step(step(seq, **begun(sid, 1, count), paused=paused, left=left)) as running:
            assert torch.equal(tensor_of(running.forward().logits), logits) or load_library() is None
            running.agree([5])
    assert engine.store.used_tokens == 3 * (len(PROMPT) + state)


def begun(sid: int, donor: int, count: int) -> dict[str, Any]:
    """Fields of a row with the rest of the prompt, after the first `count` tokens of `donor`."""
    return rows((sid, PROMPT[count:], count)) | {"prefixes": [Prefix(sid, donor, count)]}


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """Experts of a layer that are stored in two tensors, as Qwen3.5-MoE is published, are those stored one by one."""
    folder = models.make("qwen3_5_moe_text", tmp_path)
    apart = Running(load(folder, collective=Solo())).step(Row(0, PROMPT, 0, True))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    stems = [name.removesuffix("0.gate_proj.weight") for name in tensors if ".experts.0.gate_proj" in name]
    assert len(stems) == 3
    for stem in stems:
        gate, up, down = (
            torch.stack([tensors.pop(f"{stem}{expert}.{part}_proj.weight") for expert in range(8)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{stem}gate_up_proj": torch.cat([gate, up], 1), f"{stem}down_proj": down}
    save_file(tensors, file, metadata={"format": "pt"})
    assert torch.equal(Running(load(folder, collective=Solo())).step(Row(0, PROMPT, 0, True)), apart)


def test_heads_of_a_prediction_layer_are_left_out(tmp_path: Path) -> None:
    """Weights of a layer that predicts further tokens (mtp) change nothing; an unknown weight of a layer is refused."""
    folder = models.make("qwen3_5_text", tmp_path)
    plain = Running(load(folder, collective=Solo())).step(Row(0, PROMPT, 0, True))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    extra = {"mtp.layers.0.mlp.up_proj.weight": torch.ones(4, 4), "mtp.norm.weight": torch.ones(4)}
    save_file(tensors | extra, file, metadata={"format": "pt"})
    assert torch.equal(Running(load(folder, collective=Solo())).step(Row(0, PROMPT, 0, True)), plain)
    save_file(tensors | {"model.layers.0.linear_attn.odd.weight": torch.ones(4)}, file, metadata={"format": "pt"})
    with pytest.raises(Exception, match=r"odd\.weight"):
        load(folder, collective=Solo())
