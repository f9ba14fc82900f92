"""The roles of weights in tensor parallelism: the part of each that a rank of several keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Role = Literal["colwise", "rowwise", "halves", "query_key_value", "width_norm", "experts", "regions", "mamba"]
"""The part of a module, or of a parameter that is no module's, that a rank of several keeps:

colwise          a share of the outputs; of keys and values whole heads
rowwise          a share of the inputs; the products are summed over the ranks
halves           gate above up in one matrix: the same share of the outputs of each
query_key_value  queries, keys and values in one matrix: whole heads of each
width_norm       an RMS norm over all heads at once: the ranks sum their squares
regions          parts of a recurrent layer, one below the other: the same share of each, whole heads where it has some
mamba            the parts of a Mamba layer, one below the other: whole heads of each, and B and C of their groups
experts          a share of each expert's inner width; the outputs are summed over the ranks
"""

Roles = Mapping[str, Role]
"""Role by the name within a layer. What has none is whole on every rank."""
