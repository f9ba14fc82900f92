"""Mamba layers equal their formula: in float64; the forms of the type, and what becomes of a state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from tests import models
from tests.integration.worker.engine.parity import assert_close, assert_identical, engine_of, generated, mixed
from tests.integration.worker.engine.ranks import RankGroup, play
from tests.integration.worker.engine.script import Job, write
from tests.integration.worker.engine.test_native import PROMPT, Running, conversation, loaded
from worker.collective import Solo
from worker.kv.base import Extent
from worker.kv.slabs import SlabStore
from worker.models.loading import load
from worker.models.served import Row
from worker.models.torch.recurrent import MambaLayer
from worker.native.library import load_library

compiled = pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")

FORMS: dict[str, dict[str, Any]] = {
    "groups": {"mamba_n_groups": 2, "mamba_proj_bias": True, "position_embedding_type": "rope", "mamba_d_conv": 3},
    "no experts": {"num_local_experts": 0, "num_experts_per_tok": 0, "mamba_conv_bias": False},
    "attention alone": {
        "layer_types": ["attention"] * 3,
        "position_embedding_type": "rope",
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "tie_word_embeddings": True,
    },
}
"""Beside the one of the parity tests: groups of heads with B and C of their own, and dense models as granite-4.0-h-1b
and granite-4.0-1b are."""

WIDTHS: dict[str, dict[str, Any]] = {
    "narrow": {"mamba_n_heads": 2, "mamba_d_head": 80, "hidden_size": 80, "mamba_d_state": 24, "mamba_n_groups": 2},
    "real": {"mamba_n_heads": 2, "mamba_d_head": 64, "mamba_d_state": 128},
    "too narrow": {"mamba_n_heads": 16, "mamba_d_head": 8},
}


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny checkpoint of a form, made once. Its configuration has the names of published files."""

    def made(name: str) -> Path:
        folder = models.make("granitemoehybrid", tmp_path_factory.mktemp("form"), **(FORMS | WIDTHS).get(name, {}))
        file = folder / "config.json"
        file.write_text(file.read_text().replace("linear_attention", "mamba").replace("full_attention", "attention"))
        return folder

    return functools.cache(made)


def formula(layer: Any, config: Any, hidden: Tensor) -> Tensor:
    """A layer of transformers over one sequence (T, hidden) in float64: the formula of the paper, one head and token
    after the other."""
    layer = layer.double()
    heads, width, states, groups = layer.num_heads, layer.head_dim, layer.ssm_state_size, layer.n_groups
    inner = heads * width
    gate, inputs, rates = layer.in_proj(hidden).split([inner, inner + 2 * groups * states, heads], -1)
    taps = layer.conv1d.weight[:, 0].t()
    padded = torch.cat([inputs.new_zeros(len(taps) - 1, inputs.shape[1]), inputs])
    mixed = sum((padded[at : at + len(inputs)] * tap for at, tap in enumerate(taps)), torch.zeros(()))
    mixed = functional.silu(mixed if layer.conv1d.bias is None else mixed + layer.conv1d.bias)
    out = torch.empty(len(hidden), inner, dtype=torch.float64)
    for head in range(heads):
        first, matrix = inner + head // (heads // groups) * states, torch.zeros(width, states, dtype=torch.float64)
        for token, row in enumerate(mixed):
            x, step = (
                row[head * width : (head + 1) * width],
                functional.softplus(rates[token, head] + layer.dt_bias[head]),
            )
            into, out_of = row[first : first + states], row[first + groups * states : first + (groups + 1) * states]
            matrix = torch.exp(-layer.A_log[head].exp() * step) * matrix + step * torch.outer(x, into)
            out[token, head * width : (head + 1) * width] = matrix @ out_of + layer.D[head] * x
    gated = (out * functional.silu(gate)).view(len(hidden), groups, -1)
    normed = gated / (gated.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
    return layer.out_proj(normed.flatten(1) * layer.norm.weight)


@torch.no_grad()
@pytest.mark.parametrize("name", ["plain", "groups"])
def test_a_layer_is_the_paper_s_formula(name: str, form: Callable[[str], Path]) -> None:
    """In float64, in chunks and token by token, a layer differs from the formula by less than 1e-9; transformers' own,
    which rounds to float32, by more. Without its state it differs much: what is kept matters after 16 tokens."""
    folder = form(name)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    hidden = torch.randn(40, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    layer = theirs.model.layers[0].mamba
    expected = formula(layer, theirs.config, hidden)
    assert (layer(hidden[None])[0] - expected).abs().max() > 1e-9
    ours = load(folder, collective=Solo(), dtype="float64")
    layers = [part for part in ours.parts() if isinstance(part, MambaLayer)]
    assert [one.layer for one in layers] == [0, 1]
    store, found = SlabStore(ours.cache_layout, 4096), []
    for offset, count in [(0, 1), (1, 16), (17, 2), (19, 20), (39, 1)]:
        extents = [Extent(1, offset, count)]
        found.append(layers[0](hidden[None, offset : offset + count], cache_step=store.begin(extents).attention)[0])
        store.commit(extents)
    assert (torch.cat(found) - expected).abs().max() < 1e-9
    step = store.begin([Extent(2, 0, 20)])
    begun_late = layers[0](hidden[None, 20:], cache_step=step.attention)[0]
    assert (begun_late[16:] - expected[36:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", sorted(FORMS))
def test_other_forms_equal_generate(name: str, form: Callable[[str], Path]) -> None:
    """Groups of heads, biases and rotary positions; models without experts; models without Mamba layers: greedy
    float64 tokens are generate's, among nine, in chunks of every size. Layers and states are those of the form."""
    folder, jobs = form(name), mixed()
    engine = engine_of(folder, "float64")
    parts = [type(part).__name__ for part in engine.model.parts()]
    layout = engine.model.cache_layout
    assert parts.count("MambaLayer") == (0 if name == "attention alone" else 2)
    assert len(layout.layers) == 3 - parts.count("MambaLayer")
    assert (layout.state is None) == (name == "attention alone")
    assert parts.count("GraniteMoeHybridMoE") == (3 if name == "groups" else 0)
    assert_identical(folder, jobs, play(engine, write(jobs)))
    assert len({tuple(generated(folder, length)) for length in (5, 21, 37)}) == 3


@compiled
@pytest.mark.parametrize("name", sorted(FORMS))
def test_other_forms_in_cpp(name: str, form: Callable[[str], Path]) -> None:
    """Their float32 logits in C++, in chunks and company, are within 1e-4 of transformers' forward."""
    folder, jobs = form(name), mixed()
    engine = engine_of(folder, "float32")
    assert engine.model.is_native
    assert_close(folder, jobs, play(engine, write(jobs)))


@compiled
@pytest.mark.parametrize("name", ["narrow", "real"])
def test_heads_of_other_widths(name: str, form: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ is near torch for heads of 80 columns and 24 rows, and of the published 64 and 128."""
    ours, theirs = (conversation(loaded(form(name), None, monkeypatch, native)) for native in (True, False))
    assert (ours - theirs).abs().max() < 1e-4


def test_other_widths_are_left_to_torch(form: Callable[[str], Path]) -> None:
    """Heads of 8 numbers fill no vector."""
    model = load(form("too narrow"), collective=Solo(), dtype="float32")
    assert not model.is_native
    assert Running(model).step(Row(0, PROMPT, 0, True)).isfinite().all()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("name", "size"), [("groups", 2), ("groups", 4), ("attention alone", 2)])
def test_ranks_share_groups(name: str, size: int, form: Callable[[str], Path], ranks: RankGroup) -> None:
    """Two ranks have a group each, four share two groups and sum the squares of their norms; the tokens stay. Logits of
    the C++ forward are within 1e-4 of transformers'."""
    folder, jobs = form(name), mixed()
    ranks.form(size)
    for dtype in ("float64", "float32"):
        ranks.ask("load", folder, dtype)
        outcomes = ranks.ask("play", write(jobs))
        if dtype == "float64":
            assert_identical(folder, jobs, outcomes[0])
        else:
            assert_close(folder, jobs, outcomes[0])
            assert load_library() is None or all(outcome.is_native for outcome in outcomes)
        assert len({tuple(outcome.checksums) for outcome in outcomes}) == 1
        assert len({outcome.collectives for outcome in outcomes}) == 1


@compiled
@pytest.mark.parametrize("name", ["groups", "real"])
def test_a_state_does_not_depend_on_chunks(name: str, form: Callable[[str], Path]) -> None:
    """Logits and state are equal to the bit, whatever chunks a prompt comes in: tokens pass a matrix one by one."""
    running = Running(load(form(name), collective=Solo(), dtype="float32"))
    found: list[tuple[NDArray[Any], NDArray[Any]]] = []
    for sid, chunk in enumerate((33, 8, 3, 1)):
        for at in range(0, 33, chunk):
            logits = running.step(Row(sid, PROMPT[at : min(at + chunk, 33)], at, True))
        found.append((logits.numpy(), running.store.begin([Extent(sid, 33, 1)]).states[0].memory.copy()))
    assert all(np.array_equal(one, other) for pair in found[1:] for one, other in zip(pair, found[0], strict=True))
    assert all(np.count_nonzero(one) > one.size / 2 for one in found[0])


def test_a_snapshot_continues_as_the_sequence_did(form: Callable[[str], Path]) -> None:
    """A sequence that begins at a copy of another's state gets the tokens of one that computes all."""
    folder = form("groups")
    prompt = [number * 7 % 120 for number in range(50)]
    jobs = [
        Job(1, prompt, 16, 20, stays=True, states=(20, 33)),
        Job(2, [*prompt[:33], 5, 6], 16, 20, start=6, donor=1, shared=33),
        Job(3, [*prompt[:33], 5, 6], 16, 20),
    ]
    outcome = play(engine_of(folder, "float64"), write(jobs))
    assert outcome.tokens[2] == outcome.tokens[3] != outcome.tokens[1]
