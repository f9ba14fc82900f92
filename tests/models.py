"""Makes tiny random checkpoints that a whole farm can serve: weights, configuration, tokenizer, chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from worker.models.torch.meta_model import register_unlisted

VOCAB_SIZE = 131
"""Not divisible by 2 or 4 on purpose; 128 ASCII bytes, then <s>, </s>, <pad>."""

BOS, EOS, PAD = 128, 129, 130

TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    # Far from uniform logits, so that greedy ties are out of the question.
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}

SLIDING_AND_FULL: dict[str, Any] = {
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

RECURRENT: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

RECURRENT_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 33,
    "shared_expert_intermediate_size": 45,
    "initializer_range": 0.15,
    **RECURRENT,
}

MAMBA: dict[str, Any] = {
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "position_embedding_type": "nope",
    "intermediate_size": 33,
    "shared_intermediate_size": 45,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "attention_bias": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 33,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}

GRANITE_EXPERTS: dict[str, Any] = {
    "intermediate_size": 33,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.25,
    "logits_scaling": 2.0,
}

FAMILY_SHAPES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {"mlp_bias": True},
    "cohere": {"tie_word_embeddings": True, "logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": {"tie_word_embeddings": True, "logit_scale": 0.5, **SLIDING_AND_FULL},
    "deepseek_v3": {
        **LATENT,
        "first_k_dense_replace": 1,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "dots1": {
        "attention_bias": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 33,
        "n_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        **SLIDING_AND_FULL,
    },
    "ernie4_5": {"tie_word_embeddings": True, "use_bias": True},
    "ernie4_5_moe": {
        "tie_word_embeddings": False,
        "use_bias": True,
        "num_hidden_layers": 4,
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 33,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
    },
    "exaone_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 33,
        "num_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "routed_scaling_factor": 1.5,
        **SLIDING_AND_FULL,
    },
    "exaone4": {"sliding_window_pattern": 2, **SLIDING_AND_FULL},
    "falcon_h1": {
        "mamba_d_ssm": 96,
        "mamba_n_heads": 6,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 2,
        "mamba_d_conv": 4,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "initializer_range": 0.1,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 4.0,
        "key_multiplier": 0.5,
        "attention_in_multiplier": 1.5,
        "attention_out_multiplier": 0.8,
        "mlp_multipliers": [0.7, 1.5],
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.6,
        "ssm_multipliers": [0.7, 0.9, 0.8, 1.5, 0.6],
    },
    "gemma": {"initializer_range": 0.1, "tie_word_embeddings": True},
    "gemma2": {
        "initializer_range": 0.1,
        "sliding_window": 12,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3_text": {"tie_word_embeddings": True, "query_pre_attn_scalar": 16, **SLIDING_AND_FULL},
    "gemma3n_text": {
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
        "num_hidden_layers": 5,
        "sliding_window": 12,
        "layer_types": [
            *("sliding_attention", "sliding_attention", "full_attention"),
            *("sliding_attention", "full_attention"),
        ],
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 120,
        "pad_token_id": 0,
        "altup_num_inputs": 3,
        "altup_active_idx": 0,
        "laurel_rank": 12,
        "activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.3, 0.0],
        "final_logit_softcapping": 10.0,
    },
    "gemma4_text": {
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
        "num_hidden_layers": 5,
        "sliding_window": 12,
        "layer_types": [
            *("sliding_attention", "sliding_attention", "full_attention"),
            *("sliding_attention", "full_attention"),
        ],
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "use_double_wide_mlp": True,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 33,
        "final_logit_softcapping": 10.0,
    },
    "glm": {"attention_bias": True},
    "glm4": {"attention_bias": True},
    "glm4_moe": {
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 33,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
    "glm4_moe_lite": {
        **LATENT,
        "q_lora_rank": None,
        "v_head_dim": 24,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.5,
        "rope_parameters": {**YARN, "truncate": False},
        **SLIDING_AND_FULL,
    },
    "granite": {
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "granitemoe": GRANITE_EXPERTS,
    "granitemoehybrid": MAMBA,
    "granitemoeshared": {**GRANITE_EXPERTS, "attention_multiplier": 0.2, "shared_intermediate_size": 45},
    "hunyuan_v1_dense": {"attention_bias": True},
    "hunyuan_v1_moe": {
        "attention_bias": True,
        "num_experts": 8,
        "moe_intermediate_size": [33, 33, 33],
        "moe_topk": [2, 2, 2],
        "intermediate_size": 33,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
    },
    "internlm3": {"qkv_bias": True, "bias": True},
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_bias": True,
        "block_multiple_of": 15,
        "block_ffn_dim_multiplier": 1.2,
        "tie_word_embeddings": True,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_bias": True,
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 33,
        "routed_scaling_factor": 1.5,
    },
    "lfm3": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
        "sliding_window": 12,
        "conv_bias": True,
        "tie_word_embeddings": True,
    },
    "llama4_text": {
        "intermediate_size": 33,
        "intermediate_size_mlp": 90,
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
        "attention_chunk_size": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_layers": [0, 3],
        "floor_scale": 8,
        "attn_scale": 0.5,
    },
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "mimo_v2_flash": {
        "head_dim": 48,
        "v_head_dim": 32,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "attention_value_scale": 0.5,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 33,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        **SLIDING_AND_FULL,
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "ministral": SLIDING_AND_FULL,
    "ministral3": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
    "mistral": {"sliding_window": 12},
    "mistral4": {
        **LATENT,
        "head_dim": 20,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "rope_parameters": {
            **YARN,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "llama_4_scaling_beta": 0.1,
            "partial_rotary_factor": 0.4,
        },
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "conv_kernel": 4,
        "time_step_min": 1e-6,  # transformers limits the steps of prompts by it
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 33,
        "moe_shared_expert_intermediate_size": 45,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
    },
    "olmo2": {},
    "olmo3": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": YARN,
        },
        **SLIDING_AND_FULL,
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 33},
    "phi": {
        "initializer_range": 0.15,
        "qk_layernorm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "phi3": {
        "sliding_window": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    },
    "phimoe": {
        "attention_bias": True,
        "lm_head_bias": True,
        "sliding_window": 12,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.2,
    },
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 33,
        "shared_expert_intermediate_size": 45,
        "mlp_only_layers": [1],
    },
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_5_moe_text": RECURRENT_EXPERTS,
    "qwen3_5_text": RECURRENT,
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 33,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "qwen3_next": {"mlp_only_layers": [1], **RECURRENT_EXPERTS},
    "seed_oss": {"attention_out_bias": True, "mlp_bias": True},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "starcoder2": {"use_bias": True, "sliding_window": 12},
}

NORM_NOISE = {
    "gemma": 3.0,
    "gemma2": 3.0,
    "gemma3_text": 3.0,
    "gemma3n_text": 1.0,
    "gemma4_text": 1.0,
    "glm4_moe": 1.0,
    "olmo2": 1.0,
}
"""Standard deviation added to the layers' norm weights, 0.1 if not here. With less, families that norm the output of
a sublayer only repeat the last token: the embedding, which they scale up, drowns all else."""


def make(family: str, folder: Path, seed: int = 0, norm_noise: float | None = None, **changes: Any) -> Path:
    """Save a random model of `family` in `folder`, float32; `changes` override the shape, `norm_noise` the noise of its
    layers' norms. Returns `folder`."""
    shape = SHAPE | FAMILY_SHAPES[family] | changes
    config = CONFIG_MAPPING[family](**shape)
    register_unlisted(family)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms start as constants and biases as zeros: a mistake in either would go unseen.
            if "norm" in name:
                layers = NORM_NOISE.get(family, 0.1) if norm_noise is None else norm_noise
                noise = 0.1 if name == "model.norm.weight" else layers
                parameter.add_(noise * torch.randn_like(parameter))
            elif name.endswith(("bias", "router.scale", "per_expert_scale", "mamba.D", "mixer.D")):
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif name.endswith("correct_output_scale"):
                parameter.add_(torch.randn_like(parameter))
            if name.endswith(("mamba.dt_bias", "mixer.dt_bias")):
                parameter.sub_(4)  # as long as the tests' prompts are remembered
            if family in ("gemma3n_text", "gemma4_text") and name.endswith(("q_norm.weight", "router.scale")):
                # Training makes up for what these types leave out: attention is not scaled, scores of experts are.
                parameter.mul_(0.25 if "q_norm" in name else 16.0)
        for name, buffer in model.named_buffers():
            # Zeros or ones as well, and as likely to be forgotten.
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                buffer.add_(0.3 * torch.randn_like(buffer))
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per ASCII byte."""
    # Byte-level BPE writes bytes as printable characters by a map of its own.
    names = bytes_to_unicode()
    alphabet = {names[byte]: byte for byte in range(128)}
    core = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>", "<pad>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    return fast
