"""Experts that are stored together, as gpt_oss has them and GGUF files with fused gates, and apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_BIAS = ".gate_proj.bias"


def experts_apart(weights: dict[str, Floats]) -> dict[str, Floats]:
    """The experts of gpt_oss, which are stored together, as three matrices and biases each."""
    found = dict[str, Floats]()
    for name, values in weights.items():
        stem, _, leaf = name.rpartition(".")
        if not stem.endswith(".experts"):
            found[name] = values
            continue
        end = "bias" if leaf.endswith("_bias") else "weight"
        for expert, one in enumerate(values):
            rows = one if end == "bias" else one.T
            parts = {"gate": rows[0::2], "up": rows[1::2]} if leaf.startswith("gate_up") else {"down": rows}
            found |= {f"{stem}.{expert}.{part}_proj.{end}": np.ascontiguousarray(of) for part, of in parts.items()}
    return found


def experts_together(weights: dict[str, Floats]) -> dict[str, Floats]:
    """The inverse of `experts_apart`; experts without biases stay apart."""
    found = dict[str, Floats]()
    of_experts = [name for name in weights if ".experts." in name and _BIAS in name]
    layers = sorted({name[: name.index(".experts.")] for name in of_experts})
    for name, values in weights.items():
        if not any(name.startswith(f"{layer}.experts.") for layer in layers):
            found[name] = values
    for layer in layers:
        experts = range(sum(name.startswith(f"{layer}.experts.") and name.endswith(_BIAS) for name in weights))
        for end, suffix in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (
                np.stack([weights[f"{layer}.experts.{expert}.{part}_proj.{end}"] for expert in experts])
                for part in ("gate", "up", "down")
            )
            both = np.stack([gate, up], axis=2).reshape(len(gate), -1, *gate.shape[2:])
            for leaf, one in (("gate_up_proj", both), ("down_proj", down)):
                found[f"{layer}.experts.{leaf}{suffix}"] = np.ascontiguousarray(
                    one.swapaxes(1, 2) if not suffix else one
                )
    return found


def fused(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a GGUF file with gate and up projections of experts in one, as llama.cpp's converter fuses them
    where it is told to. A gate of another type than its neighbour stays apart."""
    found = dict(tensors)
    for name, gate in tensors.items():
        other = name.replace("ffn_gate_exps", "ffn_up_exps")
        if "ffn_gate_exps" not in name or tensors[other].type != gate.type:
            continue
        count, rows, width = gate.shape
        both = [np.frombuffer(one.data, np.uint8).reshape(count, -1) for one in (gate, tensors[other])]
        del found[name], found[other]
        found[name.replace("ffn_gate_exps", "ffn_gate_up_exps")] = replace(
            gate, shape=(count, 2 * rows, width), data=np.concatenate(both, axis=1).tobytes()
        )
    return found
