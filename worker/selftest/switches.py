"""The kernels that this process does without, by name. A process runs one rank, so it has one set of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

VARIABLE = "FURROW_DISABLE"
"""Environment variable: names of kernels to switch off, with commas between them."""

PLAIN: dict[str, str] = {
    "triton.store": "attention is computed by torch over gathered pages",
    "triton.decode": "attention is computed by torch over gathered pages",
    "triton.prefill": "attention is computed by torch over gathered pages",
    "triton.norm": "transformers' own norms are used",
    "triton.gate": "transformers' own feed-forward layers are used",
    "triton.rotary": "transformers' own rotary embedding is used",
    "graphs": "decode steps are launched kernel by kernel",
    "cpp": "CPUs run the reference in torch",
    "collective.native": "ranks on one host exchange over sockets",
    "collective.nccl": "GPU ranks exchange through the host's memory",
}
"""The names that can be switched off → how a model is served without each."""

ATTENTION = ("triton.store", "triton.decode", "triton.prefill")

_off: dict[str, str] = {}


def switch_off(reasons: Mapping[str, str], tried: Iterable[str] = PLAIN) -> None:
    """Do without these kernels (name → reason), and with all others of `tried` again."""
    for name in tried:
        _off.pop(name, None)
    _off.update(reasons)


def reason_off(*names: str) -> str | None:
    """The reason why the first of `names` that is off is off, with its name; None if all are on."""
    forced = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")}
    for name in names:
        if name in forced:
            return f"{name} is in {VARIABLE}"
        if name in _off:
            return f"{name}: {_off[name]}"
    return None


def unknown_names() -> list[str]:
    """Names in FURROW_DISABLE that nothing has."""
    names = (name.strip() for name in os.environ.get(VARIABLE, "").split(","))
    return sorted(name for name in names if name and name not in PLAIN)
