"""The shares of quantized linear layers: a rank has whole groups of the inputs of those whose outputs are summed."""

from __future__ import annotations

import re

from control.errors import UnsupportedArchitecture
from worker.formats.shares import ends_at
from worker.repository.quantization.linear import QuantizedLinear

FEED_FORWARD = re.compile(r"\.(?:down_proj|c_proj|fc2|w2)$")
ATTENTION = re.compile(r"\.(?:o_proj|dense|out_proj)$")
"""Layers of whose inputs each rank has a share."""


def borders(found: dict[str, QuantizedLinear]) -> tuple[int, ...]:
    """The sizes of the groups of feed-forward layers, at whose multiples the ranks' shares end; the largest first."""
    groups = {one.group for module, one in found.items() if FEED_FORWARD.search(module) and one.group < one.inputs}
    return tuple(sorted(groups, reverse=True))


def check(module: str, linear: QuantizedLinear, ends: tuple[int, ...], tp: int) -> None:
    """Raise UnsupportedArchitecture unless `tp` ranks have whole groups of the layer's inputs."""
    if tp == 1 or linear.group == linear.inputs:
        return
    if FEED_FORWARD.search(module) is None:
        if ATTENTION.search(module) is None:
            return
        ends = ()  # heads are shared evenly
    if not _shared(linear, ends, tp):
        fitting = [str(one) for one in range(1, 65) if _shared(linear, ends, one)]
        raise UnsupportedArchitecture(
            f"{linear.weight} has {linear.inputs} inputs in groups of {linear.group}, which {tp} ranks can't share by "
            f"whole groups. Use one of --tp {', '.join(fitting[:8])}."
        )


def _shared(linear: QuantizedLinear, ends: tuple[int, ...], tp: int) -> bool:
    return linear.inputs >= tp and ends_at(linear.inputs, linear.group, ends, tp)
