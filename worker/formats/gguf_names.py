"""Names of the tensors of GGUF files for transformers' parameters.

The names are llama.cpp's (github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py).
"""

from __future__ import annotations

OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
EXPERT_LAYER_NAMES = LAYER_NAMES | {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
GEMMA3_LAYER_NAMES = LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GPT_OSS_LAYER_NAMES = EXPERT_LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
}
HYBRID_LAYER_NAMES = EXPERT_LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
QWEN3_NEXT_LAYER_NAMES = HYBRID_LAYER_NAMES | {
    "linear_attn.in_proj_b": "ssm_ba",
    "linear_attn.in_proj_a": "ssm_ba",
}
"""Both projections are one tensor: see `RATES`."""
RATES = ".ssm_ba.weight"
"""For each key head the rows of beta of its value heads, then those of alpha."""
WHOLE_NAMES = {
    "self_attn.sinks": "attn_sinks.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}
"""Parameters that are no module's weight or bias, with their whole names in the file."""
_FUSED = {"ffn_gate_exps.weight": 0, "ffn_up_exps.weight": 1}


def fused_name(name: str) -> tuple[str, int] | None:
    """The tensor that holds the experts' `name` beside another one in files that were converted with fused gates, and
    the half of each expert's rows that it is; None for a tensor that is never fused."""
    stem, dot, leaf = name.partition("ffn_")
    half = _FUSED.get(dot + leaf)
    return None if half is None else (f"{stem}ffn_gate_up_exps.weight", half)
