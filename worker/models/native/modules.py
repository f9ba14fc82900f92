"""Meta models of the families whose forward is C++: modules with transformers' names and no forward of their own.

They hold what the weight loader fills and `Plan` reads.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from worker.layers.norms import FusedRMSNorm
from worker.models.native.rotary import rotary

META = torch.device("meta")


def native_meta_model(config: SimpleNamespace, config_json: dict[str, Any]) -> CausalModel:
    """The model of `config`, every parameter on the meta device. Raises NotNative for a rotary embedding that is left
    to transformers."""
    return CausalModel(config, rotary(config_json, config.head_dim)).eval()


class CausalModel(nn.Module):
    """Embedding, layers, last norm and head."""

    def __init__(self, config: SimpleNamespace, rotary_embedding: Any) -> None:
        super().__init__()
        self.config = config
        self.model = _Body(config, rotary_embedding)
        self.lm_head: nn.Module = _linear(config.hidden_size, config.vocab_size, False)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def set_input_embeddings(self, embedding: nn.Module) -> None:
        self.model.embed_tokens = embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, head: nn.Module) -> None:
        self.lm_head = head


class _Body(nn.Module):
    def __init__(self, config: SimpleNamespace, rotary_embedding: Any) -> None:
        super().__init__()
        self.rotary_emb = rotary_embedding
        self.embed_tokens: nn.Module = _embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = _norm(config, config.hidden_size)


class _Layer(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _FeedForward(config)
        self.input_layernorm = _norm(config, config.hidden_size)
        self.post_attention_layernorm = _norm(config, config.hidden_size)


class _Attention(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.head_dim
        queries, shared = config.num_attention_heads * width, config.num_key_value_heads * width
        self.scaling = width**-0.5
        self.q_proj = _linear(hidden, queries, config.query_key_value_bias)
        self.k_proj = _linear(hidden, shared, config.query_key_value_bias)
        self.v_proj = _linear(hidden, shared, config.query_key_value_bias)
        self.o_proj = _linear(queries, hidden, config.output_bias)
        if config.head_norms:
            self.q_norm, self.k_norm = _norm(config, width), _norm(config, width)


class _FeedForward(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = _linear(hidden, inner, config.feed_forward_bias)
        self.up_proj = _linear(hidden, inner, config.feed_forward_bias)
        self.down_proj = _linear(inner, hidden, config.feed_forward_bias)


def _norm(config: SimpleNamespace, width: int) -> FusedRMSNorm:
    return FusedRMSNorm(torch.empty(width, device=META), config.rms_norm_eps)


def _linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """A linear layer without its initialisation, for which torch would import its compiler."""
    linear = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(linear)
    linear.in_features, linear.out_features = inputs, outputs
    linear.weight = nn.Parameter(torch.empty(outputs, inputs, device=META), requires_grad=False)
    linear.register_parameter("bias", nn.Parameter(torch.empty(outputs, device=META)) if bias else None)
    return linear


def _embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding without its initialisation, as above."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width, device=META), _freeze=True)
