"""Quantized checkpoints are checked before torch: what config.json and file headers are refused for, by name."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from control.errors import FurrowError, ModelFilesError, SettingsError, UnsupportedArchitecture
from tests.quantized import FP8_TOKENS, GPTQ, KINDS, TOKENS, compressed
from tests.unit.worker.repository.test_validation import LLAMA
from worker.repository import quantized, validation
from worker.weights.formats import SAFETENSORS_TYPES, StoredTensor
from worker.weights.quantized_layers import borders, layers
from worker.weights.safetensors_header import read_headers
from worker.weights.schemes import Scheme, scheme_of

AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FOUR: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": 32}
CHANNEL: dict[str, Any] = {"strategy": "channel"}


def check(quantization: object, **options: Any) -> None:
    validation.check(LLAMA | {"quantization_config": quantization}, 1, **options)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_served_formats_pass(kind: str) -> None:
    """Each config passes the gate, but not with --quant."""
    check(KINDS[kind][0])
    with pytest.raises(UnsupportedArchitecture, match=r"--quant int8 .*quantized already.*Leave --quant out"):
        check(KINDS[kind][0], quant="int8")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes' of 4 bits, which is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt'.*unquantized checkpoint"),
        ({"bits": 4}, "quant_method is ''"),
        (FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2'"),
        (FP8 | {"scale_fmt": "ue8m0"}, "scale_fmt = 'ue8m0'"),
        (AWQ | {"bits": 8}, "bits = 8, which is not supported \\(served: 4\\)"),
        (AWQ | {"version": "gemv"}, "version = 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point = False"),
        (GPTQ | {"desc_act": True}, "desc_act = True.*order of activations"),
        (GPTQ | {"bits": 3}, "bits = 3"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "dynamic = "),
        (GPTQ | {"lm_head": True}, "lm_head = True"),
        (compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}), "format = 'nvfp4-pack-quantized'"),
        (compressed("marlin-24", FOUR), "format = 'marlin-24'"),
        (compressed("pack-quantized", FOUR | {"num_bits": 3}), "weights.num_bits = 3"),
        (compressed("pack-quantized", {"num_bits": 8}), "8 bits in the format 'pack-quantized'"),
        (compressed("pack-quantized", FOUR | {"type": "float"}), "weights.type = 'float'"),
        (compressed("pack-quantized", FOUR | {"actorder": "group"}), "actorder = 'group'.*order of activations"),
        (compressed("pack-quantized", FOUR, TOKENS), "input_activations = "),
        (compressed("int-quantized", CHANNEL, TOKENS | {"dynamic": False}), "dynamic = False.*fixed scale"),
        (compressed("int-quantized", CHANNEL, TOKENS | {"strategy": "tensor"}), "strategy = 'tensor'"),
        (compressed("int-quantized", CHANNEL | {"symmetric": False}, TOKENS), "symmetric = False"),
        (compressed("float-quantized", {"type": "float", "strategy": "group"}, FP8_TOKENS), "strategy = 'group'"),
        (compressed("pack-quantized", FOUR) | {"sparsity_config": {"format": "sparse-24"}}, "'sparse-24'.*Sparse"),
        (compressed("pack-quantized", FOUR) | {"transform_config": {"config_groups": {}}}, "transform_config"),
        (compressed("pack-quantized", FOUR) | {"quantization_status": "frozen"}, "quantization_status = 'frozen'"),
    ],
)
def test_other_formats_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    """The message has the field and its value, and ends with a remedy."""
    with pytest.raises(UnsupportedArchitecture, match=message) as refused:
        check(given)
    assert "Use the unquantized checkpoint" in str(refused.value) or "else use the unquantized" in str(refused.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1], "quantization_config must be an object, not \\[1\\]"),
        ({"quant_method": 4}, "quant_method = 4; needed is a text"),
        (GPTQ | {"group_size": 0}, "group_size = 0; needed is a positive multiple of 8, or -1"),
        (GPTQ | {"group_size": -2}, "group_size = -2"),
        (GPTQ | {"group_size": 10**30}, "group_size = 10{30}"),
        (GPTQ | {"group_size": True}, "group_size = True"),
        (AWQ | {"group_size": None}, "group_size = None"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size = \\[128\\]; needed is 2 positive"),
        (FP8 | {"weight_block_size": [0, 128]}, "weight_block_size = \\[0, 128\\]"),
        (compressed("pack-quantized", FOUR) | {"config_groups": {}}, "config_groups = {}; needed"),
        (compressed("pack-quantized", FOUR) | {"config_groups": {"a": 1}}, "config_groups.a must be an object"),
    ],
)
def test_values_that_are_none(given: object, message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        check(given)


def test_any_change_of_a_config_is_served_or_refused() -> None:
    """Thousands of configs with values exchanged or dropped raise Furrow's own errors only."""
    generator = random.Random(3)
    values: list[Any] = [None, 0, -1, 4, 8, 10**40, True, "", "x", [], [1, "2"], {}, {"format": 3}, 0.5, "group"]

    def spoil(given: dict[str, Any]) -> dict[str, Any]:
        spoilt = {}
        for name, value in given.items():
            if isinstance(value, dict) and generator.random() < 0.8:
                spoilt[name] = spoil(value)
            else:
                spoilt[name] = generator.choice(values) if generator.random() < 0.15 else value
        return spoilt

    refused = 0
    for config, _ in list(KINDS.values()) * 200:
        try:
            check(spoil(config))
        except FurrowError:
            refused += 1
    assert 500 < refused < 200 * len(KINDS)


def written(folder: Path, entries: dict[str, tuple[str, list[int]]]) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file with these types and shapes, whose numbers are zero."""
    described, end = dict[str, Any](), 0
    for name, (kind, shape) in entries.items():
        begin, end = end, end + SAFETENSORS_TYPES[kind].bytes_of(tuple(shape))
        described[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(described).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)
    return read_headers([path])


GPTQ_DOWN: dict[str, tuple[str, list[int]]] = {
    "a.down_proj.qweight": ("I32", [12, 64]),
    "a.down_proj.qzeros": ("I32", [3, 8]),
    "a.down_proj.scales": ("F16", [3, 64]),
}
FP8_DOWN: dict[str, tuple[str, list[int]]] = {
    "a.down_proj.weight": ("F8_E4M3", [64, 90]),
    "a.down_proj.weight_scale_inv": ("F32", [1, 1]),
}


def gate(folder: Path, config: dict[str, Any], entries: dict[str, tuple[str, list[int]]], tp: int = 1) -> None:
    config = {"quantization_config": config}
    quantized.check(config, written(folder, entries), tp, ["cpu"])


def test_tensors_that_fit_pass(tmp_path: Path) -> None:
    gate(tmp_path, GPTQ, GPTQ_DOWN, 3)
    gate(tmp_path, FP8, FP8_DOWN)


@pytest.mark.parametrize(
    ("config", "entries", "message"),
    [
        (GPTQ, {"a.down_proj.weight": ("F16", [64, 96])}, "no tensor's name ends in .qweight"),
        (GPTQ, GPTQ_DOWN | {"a.down_proj.qweight": ("I64", [12, 64])}, "a.down_proj.qweight as I64.*needed is I32"),
        (
            GPTQ,
            GPTQ_DOWN | {"a.down_proj.qzeros": ("I32", [3, 64])},
            "qzeros of shape \\[3, 64\\]; needed is \\[3, 8\\]",
        ),
        (GPTQ, GPTQ_DOWN | {"a.down_proj.scales": ("F16", [6, 64])}, "scales of shape"),
        (GPTQ, GPTQ_DOWN | {"a.down_proj.qweight": ("I32", [12])}, "qweight of shape \\[12\\]; needed is a matrix"),
        (GPTQ | {"group_size": 64}, GPTQ_DOWN, "64 x 96 weights can't be packed by eight in groups of 64"),
        (GPTQ, {"a.down_proj.qweight": ("I32", [12, 64])}, "no tensor a.down_proj.scales"),
        (FP8, FP8_DOWN | {"a.down_proj.weight_scale_inv": ("F32", [2, 1])}, "weight_scale_inv of shape \\[2, 1\\]"),
        (FP8, {"a.down_proj.weight_scale_inv": ("F32", [1, 1])}, "no tensor a.down_proj.weight,"),
        (FP8, FP8_DOWN | {"a.down_proj.weight": ("I8", [64, 90])}, "as int8, which config.json.*e4m3"),
        (
            compressed("pack-quantized", FOUR),
            {"a.up_proj.weight_packed": ("I32", [4, 12]), "a.up_proj.weight_scale": ("F32", [4, 5])},
            "weight_scale of shape \\[4, 5\\]",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    config: dict[str, Any], entries: dict[str, tuple[str, list[int]]], message: str, tmp_path: Path
) -> None:
    """A missing tensor, another type, another shape: the message names the tensor."""
    with pytest.raises(ModelFilesError, match=message):
        gate(tmp_path, config, entries)


@pytest.mark.parametrize(
    ("config", "name", "message"),
    [
        (compressed("pack-quantized", FOUR), "a.up_proj.weight_g_idx", "order of activations"),
        (compressed("pack-quantized", FOUR), "a.up_proj.bitmask", "sparse"),
        (compressed("pack-quantized", FOUR), "a.up_proj.weight_global_scale", "NVFP4"),
    ],
)
def test_tensors_of_other_formats(config: dict[str, Any], name: str, message: str, tmp_path: Path) -> None:
    """The tensors' names tell more than config.json does."""
    with pytest.raises(UnsupportedArchitecture, match=f"{name}.*{message}"):
        gate(tmp_path, config, {name: ("I32", [1])})


def test_a_quantized_vocabulary(tmp_path: Path) -> None:
    entries = {name.replace("a.down_proj", "lm_head"): entry for name, entry in GPTQ_DOWN.items()}
    with pytest.raises(UnsupportedArchitecture, match=r"lm_head.qweight: a quantized vocabulary"):
        gate(tmp_path, GPTQ, entries)


def test_ranks_share_whole_groups(tmp_path: Path) -> None:
    """A feed-forward layer of three groups is shared by two ranks and by three, not by four. Heads are shared evenly:
    an attention's three groups are not shared by two. The message has what fits."""
    gate(tmp_path, GPTQ, GPTQ_DOWN, 2)
    with pytest.raises(UnsupportedArchitecture, match=r"96 inputs in units of 32, which 4 ranks.*--tp 1, 2, 3\."):
        gate(tmp_path, GPTQ, GPTQ_DOWN, 4)
    attention = {name.replace("down_proj", "o_proj"): entry for name, entry in GPTQ_DOWN.items()}
    with pytest.raises(UnsupportedArchitecture, match=r"96 inputs in units of 32, which 2 ranks.*--tp 1, 3\."):
        gate(tmp_path, GPTQ, attention, 2)
    gate(tmp_path, GPTQ, {name.replace("down", "up"): entry for name, entry in GPTQ_DOWN.items()}, 4)


def test_another_model_s_tensors(tmp_path: Path) -> None:
    """Sizes are compared with config.json's."""
    config = LLAMA | {"quantization_config": GPTQ}
    with pytest.raises(ModelFilesError, match=r"a.down_proj.qweight has .* 96 inputs; config.json says 64 of 90"):
        quantized.check(config, written(tmp_path, GPTQ_DOWN), 1, ["cpu"])


def test_devices(tmp_path: Path) -> None:
    """A GPU is refused."""
    with pytest.raises(SettingsError, match="are for CPUs, not for cuda:0: use --devices cpu"):
        quantized.check({"quantization_config": GPTQ}, written(tmp_path, GPTQ_DOWN), 1, ["cuda:0"])


def test_experts_are_checked_with_their_own_width(tmp_path: Path) -> None:
    config = LLAMA | {"moe_intermediate_size": 96, "quantization_config": GPTQ}
    entries = {name.replace("a.down", "a.mlp.experts.3.down"): entry for name, entry in GPTQ_DOWN.items()}
    quantized.check(config, written(tmp_path, entries), 3, ["cpu"])
    config["moe_intermediate_size"] = 32
    with pytest.raises(ModelFilesError, match=r"experts.3.down_proj.qweight .* config.json says 64 of 32"):
        quantized.check(config, written(tmp_path, entries), 1, ["cpu"])


@pytest.mark.parametrize(
    ("name", "kind"), [("mlp.experts.gate_up_proj", "F8_E4M3"), ("block_sparse_moe.input_linear.weight", "BF16")]
)
def test_experts_in_one_tensor_of_a_quantized_checkpoint(name: str, kind: str, tmp_path: Path) -> None:
    """They would be read as plain numbers, without their scales, or be looked for one by one."""
    together = {f"model.language_model.layers.0.{name}": (kind, [8, 64, 64])}
    with pytest.raises(UnsupportedArchitecture, match=rf"{name}: experts of a layer in one tensor are not"):
        gate(tmp_path, FP8, FP8_DOWN | together)


@pytest.mark.parametrize("module", ["a.down_proj", "a.o_proj"])
def test_ranks_share_whole_numbers_of_eight_weights(module: str, tmp_path: Path) -> None:
    """Weights of 4 bits with one scale for all inputs: a number of the file holds eight inputs. Of 88 a feed-forward
    layer has 11 such for the ranks, heads are shared evenly. 8 bits have none."""
    whole = {
        f"{module}.qweight": ("I32", [11, 64]),
        f"{module}.qzeros": ("I32", [1, 8]),
        f"{module}.scales": ("F16", [1, 64]),
    }
    is_attention = module.endswith("o_proj")
    gate(tmp_path, GPTQ | {"group_size": -1}, whole, 11)
    for tp in (2, 12) if is_attention else (12,):
        with pytest.raises(UnsupportedArchitecture, match=rf"88 inputs in units of 8, which {tp} ranks.*--tp 1, "):
            gate(tmp_path, GPTQ | {"group_size": -1}, whole, tp)
    linears = layers(Scheme("gptq", frozenset({"int4"}), group=-1, zero_offset=1), written(tmp_path, whole))
    assert borders(linears) == (() if is_attention else (8,))
    eight = {f"{module}.weight": ("F8_E4M3", [64, 90]), f"{module}.weight_scale": ("F32", [64])}
    gate(tmp_path, {"quant_method": "fp8"}, eight, 4)


def test_a_damaged_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for content in (
        b"",
        struct.pack("<Q", 2**60),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 12) + b'{"a": [1, 2]',
    ):
        path.write_bytes(content)
        with pytest.raises(ModelFilesError, match="is not a safetensors file"):
            read_headers([path])


def test_a_scheme_is_read_once() -> None:
    """GPTQ's zero points are stored less one, but not in its second format."""
    for config, offset in ((GPTQ, 1), (GPTQ | {"checkpoint_format": "gptq_v2"}, 0)):
        scheme = scheme_of({"quantization_config": config})
        assert scheme is not None
        assert scheme.zero_offset == offset
