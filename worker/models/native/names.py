"""Names of modules whose forward is C++, where they are not those of transformers."""

from __future__ import annotations

from dataclasses import replace

from worker.repository.families import FAMILIES, Family

RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "lfm2": (
        (".mlp.gate_proj", ".feed_forward.w1"),
        (".mlp.up_proj", ".feed_forward.w3"),
        (".mlp.down_proj", ".feed_forward.w2"),
        (".self_attn.o_proj", ".self_attn.out_proj"),
        (".self_attn.q_norm", ".self_attn.q_layernorm"),
        (".self_attn.k_norm", ".self_attn.k_layernorm"),
        ("model.norm.", "model.embedding_norm."),
    ),
}
"""By model type, parts of the names here, and what transformers has in their place."""


def native_family(model_type: str) -> Family:
    """The row of the table of served types, with the names that modules have here."""
    served, renamed = FAMILIES[model_type], RENAMED.get(model_type, ())
    roles = dict(served.roles)
    for ours, theirs in renamed:
        roles = {f".{name}".replace(theirs, ours)[1:]: role for name, role in roles.items()}
    return replace(served, roles=roles, renamed=(*renamed, *served.renamed))
