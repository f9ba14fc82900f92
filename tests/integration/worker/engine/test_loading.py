"""Loading checks types, files and groups."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from control.errors import ModelFilesError, RankError, SettingsError, UnsupportedArchitecture
from tests.integration.worker.engine.conftest import narrow
from tests.integration.worker.engine.ranks import play
from tests.integration.worker.engine.script import Job, write
from worker.collective import Solo
from worker.engine.step import Engine
from worker.kv.slabs import SlabStore
from worker.models import loading
from worker.models.loading import load, resolve_dtype
from worker.models.native import forward
from worker.models.native.module import NotNative
from worker.native.host import SWITCH
from worker.native.library import KindMissing, load_library, threads_here
from worker.repository.files import ModelFiles, inspect

Checkpoint = Callable[[str], Path]


class Membership(Solo):
    """A group of which only rank and size are known: enough to load."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_types_of_16_bits_are_those_of_stored_matrices(
    family: str, dtype: str, native: bool, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU logits are those of transformers in float32 with rounded matrices; in C++ they take 16 bits."""
    monkeypatch.setenv(SWITCH, str(int(native)))
    folder, job = checkpoint(family), Job(1, list(range(3, 40)), 512, 1)
    model = load(folder, collective=Solo(), dtype=dtype)
    ours = play(Engine(model, SlabStore(model.cache_layout, 512), Solo()), write([job])).logits[1][0]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole = sum(parameter.nbytes for parameter in reference.parameters())
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() == 2:
                parameter.copy_(parameter.to(getattr(torch, dtype)))
        theirs = reference(torch.tensor([job.prompt])).logits[0, -1]
    assert (ours - theirs).abs().max() < 1e-4
    if native and load_library() is not None:
        assert model.is_native and model.weight_bytes < 0.6 * whole


@pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")
def test_a_model_that_its_plan_refuses_is_loaded_again(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """With transformers' modules, in the layers of which torch's forward can be seen to go on."""
    monkeypatch.setattr(forward, "Plan", Mock(side_effect=NotNative("it is refused")))
    with capture_logs() as logs:
        model = load(checkpoint("gemma3_text"), collective=Solo(), dtype="float32")
    assert [entry["event"] for entry in logs if entry["action"] == "load_again"] == ["loading again with transformers"]
    tokens = play(Engine(model, SlabStore(model.cache_layout, 512), Solo()), write([Job(1, [3, 4, 5], 512, 1)]))
    assert tokens.logits[1][0].isfinite().all()
    assert model.progress == len(model.cache_layout.layers)


def test_auto_is_float32_on_a_cpu() -> None:
    """Elsewhere auto is the checkpoint's own type; an unknown name is refused with what is known."""
    assert resolve_dtype("auto", "cpu").name == "float32"
    assert resolve_dtype("auto", "cuda").name == "bfloat16"
    with pytest.raises(SettingsError, match=r"Unknown dtype 'int3'\. Use auto, float64, float32, bfloat16, float16"):
        resolve_dtype("int3", "cpu")


def test_sharded_checkpoints_are_read_as_one(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Weights spread over files give the model that one file gives, also when they come by command."""
    whole = checkpoint("qwen3_moe")
    spread = shutil.copytree(whole, tmp_path / "spread")
    tensors = load_file(spread / "model.safetensors")
    (spread / "model.safetensors").unlink()
    names = sorted(tensors)
    paths = [spread / f"part-{number}.safetensors" for number in range(3)]
    for number, path in enumerate(paths):
        save_file({name: tensors[name] for name in names[number::3]}, path)
    config = (whole / "config.json").read_text()
    files = ModelFiles.of_command(config, [str(path) for path in paths])
    one, other = load(whole, collective=Solo()), load(files, collective=Solo())
    assert one.weight_bytes == other.weight_bytes
    steps = write([Job(1, [1, 2, 3], 8, 4)])
    first, second = (play(Engine(each, SlabStore(each.cache_layout, 64), Solo()), steps) for each in (one, other))
    assert torch.equal(torch.stack(first.logits[1]), torch.stack(second.logits[1]))


def test_a_tensor_that_is_missing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A checkpoint without a tensor of its configuration is refused by the tensor's name."""
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "short")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFilesError, match=r"have no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder, collective=Solo())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_tensor_of_another_shape(world_size: int, dtype: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A tensor that is smaller than its configuration says is refused by name and shapes, sharded or not."""
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "narrow")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:, :48].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFilesError, match=r"layers\.1\.mlp\.up_proj\.weight has the shape \[\d+, 48\], but .* 64"):
        load(folder, collective=Membership(0, world_size), dtype=dtype)


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_a_tensor_that_the_model_lacks(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A bias that config.json does not tell of would be left out silently: it is refused by name, in C++ and torch. A
    layer behind the last one, as for speculation, does no harm."""
    folder = shutil.copytree(checkpoint(family), tmp_path / "more")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.self_attn.q_proj.weight"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors")
    load(folder, collective=Solo())
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.ones(64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ModelFilesError, match=r"holds model\.layers\.1\.self_attn\.q_proj\.bias, which .* does not have"
    ):
        load(folder, collective=Solo())


def test_keys_of_a_layer_that_has_none_of_its_own(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Files of Gemma 4 have them for layers that attend to those of an earlier one. They are not read, no memory is
    kept for them, and a bias there is refused as elsewhere."""
    folder = shutil.copytree(checkpoint("gemma4_text"), tmp_path / "more")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.4.self_attn.k_proj.weight"] = torch.ones(32, 64)
    save_file(tensors, folder / "model.safetensors")
    layout = load(folder, collective=Solo()).cache_layout
    assert [layer.source for layer in layout.layers] == [None, None, None, 1, 2]
    assert layout.bytes_per_token == 2 * (2 * 2 * 16 + 1 * 32) * 4
    for rank in (0, 1):
        layers = load(folder, collective=Membership(rank, 2)).cache_layout.layers
        assert [(layer.kv_heads, layer.head_dim) for layer in layers] == [(1, 16), (1, 16), (1, 32), (1, 16), (1, 32)]
    tensors["model.layers.4.self_attn.q_proj.bias"] = torch.ones(128)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFilesError, match=r"holds model\.layers\.4\.self_attn\.q_proj\.bias"):
        load(folder, collective=Solo())


def test_a_kind_of_weights_that_was_not_foreseen(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is loaded again, with a C++ library for all kinds, and serves."""

    def no_kinds(*_: object) -> frozenset[str]:
        return frozenset()

    monkeypatch.setattr(loading, "threads_here", narrow(KindMissing))
    monkeypatch.setattr(loading, "kinds_of", no_kinds)
    with capture_logs() as logs:
        model = load(checkpoint("qwen3"), collective=Solo(), quant="int8")
    if threads_here() is None:
        pytest.skip("no C++ compiler, or a processor without AVX2")
    assert model.is_native
    assert [line["reason"] for line in logs if line["action"] == "load_again"] == ["int8 is not among ['float32']"]


def test_the_gates_hold_in_a_rank_too(checkpoint: Checkpoint) -> None:
    """A rank that is told to load what can't be sharded refuses before it reads a weight."""
    with pytest.raises(UnsupportedArchitecture, match="divided among 3 ranks"):
        load(inspect(checkpoint("llama")), collective=Membership(0, 3))


def test_joining_as_somebody_else(checkpoint: Checkpoint) -> None:
    """A shard can't serve as another rank, or in a group of another size."""
    model = load(checkpoint("llama"), collective=Membership(1, 2))
    model.join(Membership(1, 2))
    for member in (Membership(0, 2), Membership(1, 4)):
        with pytest.raises(RankError, match="loaded as rank 1 of 2"):
            model.join(member)
