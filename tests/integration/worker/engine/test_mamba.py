"""Mamba layers: their formula in float64, the forms of the type, and what becomes of a state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from tests import models
from tests.integration.worker.engine.parity import assert_identical, engine_of, generated, mixed
from tests.integration.worker.engine.ranks import RankGroup, play
from tests.integration.worker.engine.script import Job, write
from tests.integration.worker.scheduling.test_with_a_model import generate, requests
from worker.collective import Solo
from worker.kv.base import Extent
from worker.kv.slabs import SlabStore
from worker.models.loading import load
from worker.models.recurrent.mamba import MambaLayer

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


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny checkpoint of a form, made once. Its configuration has the names of published files."""

    def made(name: str) -> Path:
        folder = models.make("granitemoehybrid", tmp_path_factory.mktemp("form"), **FORMS.get(name, {}))
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
        found.append(layers[0](hidden[None, offset : offset + count], cache_step=store.begin(extents))[0])
        store.commit(extents)
    assert (torch.cat(found) - expected).abs().max() < 1e-9
    step = store.begin([Extent(2, 0, 20)])
    begun_late = layers[0](hidden[None, 20:], cache_step=step)[0]
    assert (begun_late[16:] - expected[36:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", sorted(FORMS))
def test_other_forms_equal_generate(name: str, form: Callable[[str], Path]) -> None:
    """Groups of heads, biases and rotary positions; models without experts; models without Mamba layers: greedy
    float64 tokens are generate's, among nine, in chunks of every size. Layers and states are those of the form."""
    folder, jobs = form(name), mixed()
    engine = engine_of(folder, "float64")
    parts = [type(part).__name__ for part in engine.model.parts()]
    kept = engine.model.cache_layout
    assert parts.count("MambaLayer") == (0 if name == "attention alone" else 2)
    assert len(kept.layers) == 3 - parts.count("MambaLayer")
    assert (kept.state is None) == (name == "attention alone")
    assert parts.count("GraniteMoeHybridMoE") == (3 if name == "groups" else 0)
    assert_identical(folder, jobs, play(engine, write(jobs)))
    assert len({tuple(generated(folder, length)) for length in (5, 21, 37)}) == 3


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("name", "size"), [("groups", 2), ("groups", 4), ("attention alone", 2)])
def test_ranks_share_groups(name: str, size: int, form: Callable[[str], Path], ranks: RankGroup) -> None:
    """Two ranks have a group each, four share two groups and sum the squares of their norms; the tokens stay."""
    folder, jobs = form(name), mixed()
    ranks.form(size)
    ranks.ask("load", folder, "float64")
    outcomes = ranks.ask("play", write(jobs))
    assert_identical(folder, jobs, outcomes[0])
    assert len({tuple(outcome.checksums) for outcome in outcomes}) == 1
    assert len({outcome.collectives for outcome in outcomes}) == 1


@torch.inference_mode()
def test_a_state_does_not_depend_on_chunks(form: Callable[[str], Path]) -> None:
    """Outputs and state are equal to the bit, whatever chunks the same inputs come in: tokens pass a matrix one by
    one."""
    model = load(form("plain"), collective=Solo(), dtype="float32")
    layer = next(part for part in model.parts() if isinstance(part, MambaLayer))
    numbers = torch.Generator().manual_seed(3)
    inputs, steps = torch.randn(33, 144, generator=numbers), torch.rand(33, 8, generator=numbers)
    found: list[tuple[Tensor, Tensor]] = []
    for chunk in (33, 8, 1):
        store, out = SlabStore(model.cache_layout, 4096), torch.empty(33, 128)
        (state,) = store.begin([Extent(1, 0, 33)]).states
        for at in range(0, 33, chunk):
            rows = slice(at, at + chunk)
            layer._advance(state, inputs[rows], steps[rows], out[rows])
        found.append((out, state.memory))
    assert all(torch.equal(one, other) for pair in found[1:] for one, other in zip(pair, found[0], strict=True))
    assert found[0][0].abs().max() > 1e-3


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


def test_preemption_and_company_change_nothing(form: Callable[[str], Path]) -> None:
    """Requests that together outgrow the memory, states counted, are computed anew, and get the tokens they get
    alone."""
    model = load(form("plain"), collective=Solo(), dtype="float64")
    struck = requests()
    assert generate(model, struck, kv_tokens=130, token_budget=16) > 0
    for index in (0, 3):
        alone = requests()[index]
        generate(model, [alone], kv_tokens=130, token_budget=200)
        assert struck[index].output == alone.output
