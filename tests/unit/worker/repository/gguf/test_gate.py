"""GGUF models are refused before any process; and the configuration that their metadata becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from control.errors import ModelFilesError, SettingsError, UnsupportedArchitecture
from control.messages import ModelSpec
from tests.gguf_models import Stored, factors, metadata, write
from worker.families.registry import FAMILIES
from worker.models.native.rotary import rotaries
from worker.repository.files import ModelFiles, inspect
from worker.repository.fingerprint import fingerprint
from worker.repository.gguf import gate
from worker.weights.formats import BLOCK_FORMATS

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e4},
}
SPEC = ModelSpec(name="m", source="m", dequantize=True)


def matrix(kind: str, outputs: int, inputs: int) -> Stored:
    form = BLOCK_FORMATS[kind]
    return Stored(form.ggml_type, (outputs, inputs), bytes(outputs * form.row_bytes(inputs)))


def vector(size: int) -> Stored:
    return Stored(0, (size,), bytes(4 * size))


def tensors(kind: str = "q8_0") -> dict[str, Stored]:
    found = {"token_embd.weight": matrix(kind, 131, 64), "output_norm.weight": vector(64)}
    for layer in range(2):
        shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
        shapes |= {"ffn_gate": (192, 64), "ffn_up": (192, 64), "ffn_down": (64, 192)}
        found |= {f"blk.{layer}.{name}.weight": matrix(kind, *shape) for name, shape in shapes.items()}
        found |= {f"blk.{layer}.{name}.weight": vector(64) for name in ("attn_norm", "ffn_norm")}
    return found


def model(folder: Path, changes: dict[str, Any] | None = None, stored: dict[str, Stored] | None = None) -> ModelFiles:
    fields = {name: value for name, value in (metadata("llama", CONFIG) | (changes or {})).items() if value is not None}
    return inspect(write(folder / "m.gguf", fields, stored or tensors()))


def check(files: ModelFiles, devices: tuple[str, ...] = ("cpu",), **changes: Any) -> None:
    assert files.gguf is not None
    gate.check(files.gguf, files.config, msgspec.structs.replace(SPEC, **changes), devices)


def test_metadata_becomes_a_configuration(tmp_path: Path) -> None:
    config = model(tmp_path).config
    assert config | CONFIG | {"rope_parameters": None} == config | {"rope_parameters": None, "rms_norm_eps": 1e-6}
    assert config["tie_word_embeddings"] and config["vocab_size"] == 131 and config["eos_token_id"] == 129
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}
    untied = model(tmp_path, stored=tensors() | {"output.weight": matrix("q8_0", 131, 64)})
    assert not untied.config["tie_word_embeddings"]
    check(untied)


def test_rotary_scalings_are_transformers_own(tmp_path: Path) -> None:
    scaling = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    yarn = model(tmp_path, scaling | {"llama.rope.scaling.original_context_length": 16}).config["rope_parameters"]
    assert yarn["rope_type"] == "yarn" and yarn["factor"] == 4 and yarn["original_max_position_embeddings"] == 16
    linear = model(tmp_path, {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0})
    assert linear.config["rope_parameters"]["factor"] == 2
    with pytest.raises(UnsupportedArchitecture, match=r"rope\.scaling\.type is 'longrope'"):
        model(tmp_path, scaling | {"llama.rope.scaling.type": "longrope"})
    with pytest.raises(UnsupportedArchitecture, match=r"the factors in rope_freqs\.weight are not Llama 3's"):
        ones = Stored(0, (8,), bytes.fromhex("0000a040") + bytes.fromhex("0000803f") * 6 + bytes.fromhex("0000a040"))
        model(tmp_path, stored=tensors() | {"rope_freqs.weight": ones})


@pytest.mark.parametrize("one", ["0000c07f", "0000807f", "00000000", "000080bf"])
def test_factors_that_are_no_divisors_are_refused(tmp_path: Path, one: str) -> None:
    """NaN, infinity, zero and negative numbers."""
    stored = Stored(0, (8,), bytes.fromhex("0000803f") * 4 + bytes.fromhex(one) * 4)
    with pytest.raises(ModelFilesError, match="finite numbers above 0 are needed"):
        model(tmp_path, stored=tensors() | {"rope_freqs.weight": stored})


@pytest.mark.parametrize("high", [4.0, 1.0])
@pytest.mark.parametrize("length", [256, 4096, 8192, 100_000])
def test_factors_of_any_original_length_are_read(tmp_path: Path, length: int, high: float) -> None:
    """The frequencies are those of the length that the converter knew, whatever the file shows of it; also where there
    is no passage between those that are divided and the others, as of Llama 4."""
    rope = {"rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": high}
    rope |= {"original_max_position_embeddings": length, "rope_type": "llama3"}
    files = model(tmp_path, stored=tensors() | {"rope_freqs.weight": factors(rope, 16)})
    rope_parameters = files.config["rope_parameters"]
    assert rope_parameters["rope_type"] == "llama3" and rope_parameters["factor"] == pytest.approx(
        8.0 if length < 100_000 else 1.0
    )
    expected, read = (
        rotaries({"max_position_embeddings": 512, "rope_parameters": one}, FAMILIES["llama"], 16, {})[""].inv_freq
        for one in (rope, rope_parameters)
    )
    assert read == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"general.architecture": "mamba"},
            "'mamba' is not supported from GGUF files. Supported: apertus, arcee, cohere2, command-r",
        ),
        ({"llama.expert_count": 8}, r"has no llama\.expert_used_count"),
        ({"general.architecture": "qwen2", "qwen2.expert_count": 8}, "qwen2 with experts is not supported"),
        ({"llama.block_count": 0}, "llama.block_count is 0; a whole number from 1 on"),
        ({"llama.block_count": None}, "has no llama.block_count"),
        ({"llama.feed_forward_length": [192, 96]}, r"feed_forward_length is \[96, 192\]"),
        ({"llama.rope.freq_base": float("nan")}, "rope.freq_base is nan"),
        ({"llama.rope.dimension_count": 8}, "heads are 16 wide and their rotated parts 8"),
        ({"llama.attention.head_count": 1.5}, "head_count is 1.5"),
    ],
)
def test_metadata_that_can_not_be_served_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ModelFilesError, UnsupportedArchitecture), match=message):
        model(tmp_path, changes)


@pytest.mark.parametrize(
    ("changes", "stored", "message"),
    [
        ({"llama.block_count": 2**31 - 1}, {}, r"has no tensor blk\.2\."),
        ({"llama.feed_forward_length": 160}, {}, r"ffn_gate\.weight has the shape \(192, 64\).*it is \(160, 64\)"),
        (
            {},
            {"blk.0.attn_q_norm.weight": vector(16)},
            r"with the tensors blk\.0\.attn_q_norm\.weight is not supported",
        ),
        ({}, {"output_norm.weight": matrix("q8_0", 2, 32)}, r"output_norm\.weight has the shape"),
        ({"tokenizer.ggml.pre": "brand-new"}, {}, "'brand-new', an unknown pre-tokenizer. Known: .*llama-bpe"),
        ({"tokenizer.ggml.model": "t5"}, {}, "'t5'; read are gpt2, llama, gemma4"),
    ],
)
def test_tensors_and_tokenizer_are_checked(
    tmp_path: Path, changes: dict[str, Any], stored: dict[str, Stored], message: str
) -> None:
    files = model(tmp_path, changes, tensors() | stored)
    with pytest.raises((ModelFilesError, UnsupportedArchitecture), match=message):
        check(files)


def test_blocks_are_for_cpus_without_another_packing(tmp_path: Path) -> None:
    files = model(tmp_path)
    for devices, changes, message in (
        (("cuda:0",), {}, r"cuda:0 can't compute with\. Use --dequantize, or --devices cpu"),
        (("cpu",), {"quant": "int8"}, r"--quant int8 does not pack again\. Leave it out, or add --dequantize"),
        (("cpu",), {"dtype": "bfloat16"}, "in float32, not in bfloat16"),
    ):
        with pytest.raises(SettingsError, match=message):
            check(files, devices, dequantize=False, **changes)
        check(files, devices, **changes)


def test_a_share_that_cuts_blocks_is_refused_with_those_that_fit(tmp_path: Path) -> None:
    """Heads are shared evenly: 64 inputs are 2 blocks. Feed-forward widths are not: 96 are 3, and two ranks have 1 and
    2 of them."""
    files = model(tmp_path)
    message = (
        r"--tp 4 would cut blocks of 32 weights of blk\.0\.attn_output\.weight \(Q8_0, 64 wide\)\. Use --tp 1, 2 or"
    )
    with pytest.raises(SettingsError, match=message):
        check(files, dequantize=False, tp=4)
    check(files, tp=4)
    narrow = tensors()
    for layer in range(2):
        narrow |= {f"blk.{layer}.{name}.weight": matrix("q8_0", 96, 64) for name in ("ffn_gate", "ffn_up")}
        narrow[f"blk.{layer}.ffn_down.weight"] = matrix("q8_0", 64, 96)
    files = model(tmp_path, {"llama.feed_forward_length": 96}, narrow)
    check(files, dequantize=False, tp=2)
    assert files.gguf is not None
    assert files.gguf.borders == (32,)


HYBRID: dict[str, Any] = CONFIG | {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def hybrid(folder: Path, changes: dict[str, Any] | None = None, more: dict[str, Stored] | None = None) -> ModelFiles:
    """A model of one recurrent layer and one with attention. Value heads lie in two tiles of 32 inputs."""
    stored = {name: one for name, one in tensors().items() if not name.startswith("blk.0.attn")}
    stored["blk.0.attn_norm.weight"] = vector(64)
    for name, rows in (("attn_qkv", 128), ("attn_gate", 64), ("ssm_beta", 4), ("ssm_alpha", 4), ("ssm_out", 64)):
        stored[f"blk.0.{name}.weight"] = matrix("q8_0", rows, 64)
    stored |= {"blk.0.ssm_conv1d.weight": Stored(0, (128, 4), bytes(2048)), "blk.0.ssm_norm.weight": vector(16)}
    stored |= {"blk.0.ssm_a": vector(4), "blk.0.ssm_dt.bias": vector(4)}
    stored |= {f"blk.1.attn_{name}_norm.weight": vector(16) for name in "qk"}
    stored["blk.1.attn_q.weight"] = matrix("q8_0", 128, 64)  # with the gate
    for layer in range(2):
        stored[f"blk.{layer}.post_attention_norm.weight"] = stored.pop(f"blk.{layer}.ffn_norm.weight")
    fields = metadata("qwen3_5_text", HYBRID) | (changes or {})
    return inspect(write(folder / "m.gguf", fields, stored | (more or {})))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """They count as layers in the metadata, and their tensors are not read; without that number they are unknown."""
    check(hybrid(tmp_path))
    more = {"blk.2.nextn.eh_proj.weight": matrix("q8_0", 64, 128), "blk.2.attn_norm.weight": vector(64)}
    files = hybrid(tmp_path, {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": 3}, more)
    assert files.config["num_hidden_layers"] == 2
    assert files.config["layer_types"] == ["linear_attention", "full_attention"]
    check(files)
    with pytest.raises(UnsupportedArchitecture, match=r"with the tensors blk\.2\.attn_norm\.weight, blk\.2\.nextn"):
        check(hybrid(tmp_path, {}, more))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qwen35.ssm.inner_size": 66}, r"inner_size is 66; a multiple of the 4 value heads"),
        ({"qwen35.rope.dimension_count": 32}, "dimension_count is 32; an even number up to 16"),
        ({"qwen35.nextn_predict_layers": 2}, "nextn_predict_layers is 2; less than the number of layers, 2,"),
        ({"qwen35.ssm.group_count": 3}, "4 value heads of recurrent layers can't share 3 key heads evenly"),
    ],
)
def test_metadata_of_recurrent_layers_is_checked(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ModelFilesError, UnsupportedArchitecture), match=message):
        check(hybrid(tmp_path, changes))


def test_each_tile_of_value_heads_is_shared_between_blocks(tmp_path: Path) -> None:
    """Two ranks would have 16 inputs of each tile, and a block has 32."""
    files = hybrid(tmp_path)
    check(files, dequantize=False)
    with pytest.raises(SettingsError, match=r"--tp 2 would cut blocks of 32 weights of blk\.0\.ssm_out\.weight"):
        check(files, dequantize=False, tp=2)
    check(files, tp=2)


def test_every_byte_of_the_settings_and_samples_of_the_file_name_the_weights(tmp_path: Path) -> None:
    files = model(tmp_path)
    names = {fingerprint(files, "auto"), fingerprint(files, "auto", None, True), fingerprint(files, "float32")}
    content = bytearray((tmp_path / "m.gguf").read_bytes())
    content[-200] ^= 1
    for place in range(len(content) - 64 * 204, len(content), 200):
        content[place] ^= 1
    (tmp_path / "m.gguf").write_bytes(content)
    assert len(names | {fingerprint(inspect(tmp_path / "m.gguf"), "auto")}) == 4


def test_specifications_from_before_there_was_gguf_are_read() -> None:
    old = msgspec.json.decode(b'{"name": "m", "source": "s", "quant": "int8"}', type=ModelSpec)
    assert old.gguf is None and not old.dequantize
