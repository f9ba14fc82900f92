"""Builds one rank's shard of a model: transformers' modelling code, each parameter read only as far as it is kept."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from control.errors import SettingsError
from worker.collective import Collective
from worker.kv.base import CacheLayout
from worker.models import experts, gates, parallel
from worker.models.checkpoint import Checkpoint
from worker.models.families import Family
from worker.models.files import ModelFiles, inspect
from worker.models.served import ServedModel
from worker.models.sharding import ShardPlan, padded_share
from worker.models.skeleton import configuration, skeleton

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


def load(source: ModelFiles | Path, *, collective: Collective, dtype: str = "auto", device: str = "cpu") -> ServedModel:
    """This rank's shard, ready to serve. Raises ModelFilesError, UnsupportedArchitecture or SettingsError.

    Nothing is exchanged with other ranks, so they may load at their own pace.
    """
    files = source if isinstance(source, ModelFiles) else inspect(source)
    gates.check(files.config, collective.world_size)
    config = configuration(files.config)
    where = torch.device(device)
    chosen = resolve_dtype(dtype, where, config)
    model = skeleton(config, chosen, where)
    plan = ShardPlan.of_config(config, gates.kv_heads(files.config), collective.rank, collective.world_size)
    with Checkpoint(files.weights) as checkpoint:
        _Filler(model, checkpoint, plan, gates.family_of(files.config), chosen, where).fill()
    link = parallel.Link(collective)
    if plan.world_size > 1:
        _install_parallel(model, plan, link)
    if where.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from worker.models.fusing import fuse  # only here: on a CPU neither Triton nor its kernels are loaded

        fuse(model)
    return ServedModel(model, link, _cache_layout(config, plan, chosen, where), config.vocab_size)


def resolve_dtype(name: str, device: torch.device, config: Any = None) -> torch.dtype:
    """`auto` is float32 on a CPU, where 16-bit products are slow, and the checkpoint's own type elsewhere."""
    if name == "auto":
        own = getattr(config, "dtype", None)
        return torch.float32 if device.type == "cpu" else own if isinstance(own, torch.dtype) else torch.bfloat16
    if name not in DTYPES:
        raise SettingsError(f"Unknown dtype '{name}'. Use auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


class _Filler:
    """Replaces every meta parameter by what this rank keeps of it."""

    def __init__(
        self,
        model: Any,
        checkpoint: Checkpoint,
        plan: ShardPlan,
        family: Family,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.model, self.checkpoint, self.plan = model, checkpoint, plan
        self.family, self.dtype, self.device = family, dtype, device

    def fill(self) -> None:
        keys = self.family.expert_keys
        model, tied = self.model, bool(self.model.config.tie_word_embeddings)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        for module_name, module in list(model.named_modules()):
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                if tied and module is head and leaf == "weight":
                    continue
                if module is embedding or module is head:
                    tensor = self._vocabulary(f"{module_name}.{leaf}", parameter.shape[0])
                elif keys is not None and experts.is_fused(module_name, leaf):
                    tensor = experts.read(self.checkpoint, self.plan, module_name, leaf, parameter, keys)
                else:
                    tensor = self._sliced(module_name, leaf, parameter)
                # Always a copy: what safetensors returns may be the mapped file, at an odd address. Products would be
                # slower, their last bits would depend on the file's header, and a file changed in place would be read.
                kept = torch.empty(tensor.shape, dtype=self.dtype, device=self.device).copy_(tensor)
                module._parameters[leaf] = nn.Parameter(kept, requires_grad=False)
        if tied:
            head.weight = embedding.weight

    def _sliced(self, module: str, leaf: str, parameter: Tensor) -> Tensor:
        name, role = f"{module}.{leaf}", self.plan.role(module)
        for ours, stored in self.family.renamed:
            name = name.replace(ours, stored)
        if role == "colwise":
            return self.checkpoint.read(name, 0, [self.plan.interval(module, parameter.shape[0])])
        if role == "rowwise" and leaf == "weight":
            return self.checkpoint.read(name, 1, [self.plan.interval(module, parameter.shape[1])])
        return self.checkpoint.read(name)

    def _vocabulary(self, name: str, size: int) -> Tensor:
        """The rank's rows, padded with zeros to the width that all ranks share."""
        start, stop, width = padded_share(size, self.plan.rank, self.plan.world_size)
        rows = self.checkpoint.read(name, 0, [(start, stop)])
        missing = width - rows.shape[0]
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _install_parallel(model: Any, plan: ShardPlan, link: parallel.Link) -> None:
    """Put our modules where a forward must exchange; the others work on the smaller weights as they are."""
    for name, module in list(model.named_modules()):
        role = plan.role(name)
        if role == "rowwise" and isinstance(module, nn.Linear):
            parallel.replace(model, name, parallel.RowParallelLinear(module, link))
        elif role == "moe_tp_experts":
            parallel.replace(model, name, parallel.ReducedExperts(module, link))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    vocab_size = model.config.vocab_size
    start, _, _ = padded_share(vocab_size, plan.rank, plan.world_size)
    parallel.cut_embedding(embedding)
    model.set_output_embeddings(parallel.VocabParallelHead(head, vocab_size, link))
    model.set_input_embeddings(parallel.VocabParallelEmbedding(embedding, start, link))


def _cache_layout(config: Any, plan: ShardPlan, dtype: torch.dtype, device: torch.device) -> CacheLayout:
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    windows = [window if kinds is None or kinds[layer] == "sliding_attention" else None for layer in range(layers)]
    return CacheLayout(
        layers=layers,
        kv_heads=plan.local_kv_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        windows=tuple(windows),
        dtype=dtype,
        device=device,
    )
