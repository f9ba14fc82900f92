"""Damaged GGUF headers are refused: ten thousand, each as a fault of the file, or it is a model that the gate has
looked at."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import pytest

from control.errors import ModelFilesError, UnsupportedArchitecture
from control.messages import ModelSpec
from tests.gguf_models import Stored, metadata, write
from worker.repository import validation
from worker.repository.gguf import gate
from worker.repository.gguf.configuration import configuration
from worker.repository.gguf.tokenizer import read_tokenizer
from worker.weights.gguf import GgufModel, parse

CASES = 10_000
MEASURED = 500
"""The first of them count their memory, which takes time."""
CONFIG = {
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e4},
    "sliding_window": 8,
}
SPEC = ModelSpec(name="m", source="m", dequantize=True)
FALSE = (0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 2**40, 7)


def whole(folder: Path, family: str) -> bytes:
    sizes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    sizes |= dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), (32, 32))
    vectors = {"attn_norm": 32, "ffn_norm": 32}
    if family == "gemma3_text":
        vectors |= {"post_attention_norm": 32, "post_ffw_norm": 32, "attn_q_norm": 16, "attn_k_norm": 16}
    tensors = {
        "token_embd.weight": Stored(8, (131, 32), bytes(131 * 34)),
        "output_norm.weight": Stored(0, (32,), bytes(128)),
    }
    tensors |= {f"blk.0.{name}.weight": Stored(8, shape, bytes(shape[0] * 34)) for name, shape in sizes.items()}
    tensors |= {f"blk.0.{name}.weight": Stored(0, (size,), bytes(4 * size)) for name, size in vectors.items()}
    return write(folder / f"{family}.gguf", metadata(family, CONFIG), tensors).read_bytes()


def inspect(content: bytes) -> None:
    """All that the agent and the leader read of a file's header."""
    header = parse(content, Path("model.gguf"))
    model = GgufModel([Path("model.gguf")], header.fields, header.tensors)
    config = configuration(model)
    validation.check(config, 1)
    gate.check(model, config, SPEC, ["cpu"])
    read_tokenizer(model)


def damaged(content: bytes, chance: random.Random) -> bytes:
    """One to three faults: bytes, a false number of four or eight bytes, a piece lost or doubled, an end cut off."""
    changed, header = bytearray(content), content.index(b"blk.0.ffn_down.weight") + 400
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(4, min(header, len(changed) - 8))
        match chance.randrange(6):
            case 0:
                changed[place] = chance.randrange(256)
            case 1:
                changed[place : place + 8] = struct.pack("<Q", chance.choice(FALSE))
            case 2:
                changed[place : place + 4] = struct.pack("<I", chance.choice(FALSE) % 2**32)
            case 3:
                del changed[place : place + chance.randint(1, 16)]
            case 4:
                changed[place:place] = changed[place : place + chance.randint(1, 16)]
            case _:
                if chance.random() < 0.1:
                    del changed[place + 40 :]
    return bytes(changed)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_undamaged_file_is_served(tmp_path: Path, family: str) -> None:
    inspect(whole(tmp_path, family))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_damaged_headers_are_refused_as_faults_of_the_file(tmp_path: Path, family: str) -> None:
    """Nothing but the two refusals comes out, whatever the header says, and no number in it costs memory."""
    content, chance, refused = whole(tmp_path, family), random.Random(family), 0
    tracemalloc.start()
    for case in range(CASES // 2):
        if case == MEASURED:
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert most < 8 * 2**20
        try:
            inspect(damaged(content, chance))
        except (ModelFilesError, UnsupportedArchitecture):
            refused += 1
    assert refused > CASES // 4


def test_every_false_number_at_every_place_of_a_tensors_entry(tmp_path: Path) -> None:
    """Dimensions, type and offset of one tensor, each replaced by each false number. Type 7 has smaller blocks."""
    content = whole(tmp_path, "llama")
    entry = content.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight")
    for place, form in ((0, "<I"), (4, "<Q"), (12, "<Q"), (20, "<I"), (24, "<Q")):
        for number in FALSE:
            size = struct.calcsize(form)
            false = struct.pack(form, number % 2 ** (8 * size))
            if content[entry + place : entry + place + size] == false or (place, number) == (20, 7):
                continue
            with pytest.raises(ModelFilesError):
                inspect(content[: entry + place] + false + content[entry + place + size :])
