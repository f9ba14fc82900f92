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
    rearranged = dict[str, Floats]()
    for name, values in weights.items():
        stem, _, leaf = name.rpartition(".")
        if not stem.endswith(".experts"):
            rearranged[name] = values
            continue
        end = "bias" if leaf.endswith("_bias") else "weight"
        for expert, one in enumerate(values):
            rows = one if end == "bias" else one.T
            parts = {"gate": rows[0::2], "up": rows[1::2]} if leaf.startswith("gate_up") else {"down": rows}
            rearranged |= {f"{stem}.{expert}.{part}_proj.{end}": np.ascontiguousarray(of) for part, of in parts.items()}
    return rearranged


def experts_together(weights: dict[str, Floats]) -> dict[str, Floats]:
    """The inverse of `experts_apart`; experts without biases stay apart."""
    rearranged = dict[str, Floats]()
    of_experts = [name for name in weights if ".experts." in name and _BIAS in name]
    layers = sorted({name[: name.index(".experts.")] for name in of_experts})
    for name, values in weights.items():
        if not any(name.startswith(f"{layer}.experts.") for layer in layers):
            rearranged[name] = values
    for layer in layers:
        experts = range(sum(name.startswith(f"{layer}.experts.") and name.endswith(_BIAS) for name in weights))
        for end, suffix in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (
                np.stack([weights[f"{layer}.experts.{expert}.{part}_proj.{end}"] for expert in experts])
                for part in ("gate", "up", "down")
            )
            both = np.stack([gate, up], axis=2).reshape(len(gate), -1, *gate.shape[2:])
            for leaf, one in (("gate_up_proj", both), ("down_proj", down)):
                rearranged[f"{layer}.experts.{leaf}{suffix}"] = np.ascontiguousarray(
                    one.swapaxes(1, 2) if not suffix else one
                )
    return rearranged


def inputs_last(weights: dict[str, Floats], turned: bool = True) -> dict[str, Floats]:
    """The experts of llama4, which are stored together with their inputs first, as three matrices each; those of
    gemma4, whose inputs are last, where they are not `turned`."""
    rearranged = dict[str, Floats]()
    for name, values in weights.items():
        stem, _, leaf = name.rpartition(".")
        if not stem.endswith(".experts"):
            rearranged[name] = values
            continue
        parts = ("gate", "up") if leaf.startswith("gate_up") else ("down",)
        for expert, one in enumerate(values):
            of_parts = zip(parts, np.split(one.T if turned else one, len(parts)), strict=True)
            rearranged |= {f"{stem}.{expert}.{part}_proj.weight": np.ascontiguousarray(of) for part, of in of_parts}
    return rearranged


def inputs_first(weights: dict[str, Floats], turned: bool = True) -> dict[str, Floats]:
    """The inverse of `inputs_last`."""
    tensors = {name: values for name, values in weights.items() if ".experts." not in name}
    for stem in sorted({name[: name.index(".experts.") + 8] for name in weights.keys() - tensors.keys()}):
        experts = range(sum(name.startswith(f"{stem}.") and ".down_proj." in name for name in weights))
        for leaf, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            of_experts = np.stack(
                [
                    np.concatenate([weights[f"{stem}.{expert}.{part}_proj.weight"] for part in parts])
                    for expert in experts
                ]
            )
            tensors[f"{stem}.{leaf}"] = np.ascontiguousarray(of_experts.swapaxes(1, 2) if turned else of_experts)
    return tensors


STACKED = {"input_linear": ("gate", "up"), "output_linear": ("down",)}
"""Tensors of granitemoe with the matrices of all experts, one below the other."""


def stacked_apart(weights: dict[str, Floats]) -> dict[str, Floats]:
    """The experts of granitemoe as three matrices each."""
    rearranged = dict[str, Floats]()
    for name, values in weights.items():
        stem, _, leaf = name.removesuffix(".weight").rpartition(".")
        if leaf not in STACKED:
            rearranged[name] = values
            continue
        for expert, one in enumerate(values):
            parts = zip(STACKED[leaf], np.split(one, len(STACKED[leaf])), strict=True)
            rearranged |= {
                f"{stem}.experts.{expert}.{part}_proj.weight": np.ascontiguousarray(of) for part, of in parts
            }
    return rearranged


def stacked_together(weights: dict[str, Floats]) -> dict[str, Floats]:
    """The inverse of `stacked_apart`."""
    tensors = {name: values for name, values in weights.items() if ".experts." not in name}
    for stem in sorted({name[: name.index(".experts.")] for name in weights.keys() - tensors.keys()}):
        experts = range(sum(name.startswith(f"{stem}.experts.") and ".down_proj." in name for name in weights))
        for leaf, parts in STACKED.items():
            matrices = [
                np.concatenate([weights[f"{stem}.experts.{expert}.{part}_proj.weight"] for part in parts])
                for expert in experts
            ]
            tensors[f"{stem}.{leaf}.weight"] = np.stack(matrices)
    return tensors


def heads_apart(weights: dict[str, Floats], config: dict[str, Any]) -> dict[str, Floats]:
    """`kv_b_proj` as a file has it: a matrix of keys and one of values for each head, side by side in two tensors."""
    rearranged = dict[str, Floats]()
    plain = config["qk_nope_head_dim"]
    for name, values in weights.items():
        if not name.endswith("kv_b_proj.weight"):
            rearranged[name] = values
            continue
        stem = name.removesuffix("kv_b_proj.weight")
        heads = values.reshape(config["num_attention_heads"], -1, values.shape[1])
        rearranged[f"{stem}k_b_proj.weight"] = np.ascontiguousarray(heads[:, :plain].transpose(0, 2, 1))
        rearranged[f"{stem}v_b_proj.weight"] = np.ascontiguousarray(heads[:, plain:])
    return rearranged


def heads_together(weights: dict[str, Floats]) -> dict[str, Floats]:
    """The inverse of `heads_apart`."""
    tensors = {
        name: values for name, values in weights.items() if not name.endswith(("k_b_proj.weight", "v_b_proj.weight"))
    }
    for name, keys in weights.items():
        if name.endswith("k_b_proj.weight"):
            values = weights[name.replace("k_b_proj", "v_b_proj")]
            both = np.concatenate([keys.transpose(0, 2, 1), values], axis=1)
            tensors[name.replace("k_b_proj", "kv_b_proj")] = np.ascontiguousarray(both.reshape(-1, both.shape[2]))
    return tensors


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
