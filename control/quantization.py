"""The values of `--quant` and `--kv-type`, and the options that each allows."""

from __future__ import annotations

from collections.abc import Sequence

from control.errors import SettingsError

BLOCK_QUANTS = {
    "q4_0": "q4_0",
    "q4_1": "q4_1",
    "q5_0": "q5_0",
    "q5_1": "q5_1",
    "q8_0": "q8_0",
    "q8_1": "q8_0",
    "q2k": "q2_k",
    "q3k": "q3_k",
    "q4k": "q4_k",
    "q5k": "q5_k",
    "q6k": "q6_k",
    "q8k": "q8_0",
}
"""Names that keep weights in blocks, each with the format of the blocks. ggml has Q8_1 and Q8_K for activations."""

QUANTS = ("int8", "f16", *BLOCK_QUANTS)


KV_TYPES = ("auto", "f32", "f16", "bf16", "q8_0")
"""The types in which CPUs store keys and values. `auto`: f16 where C++ computes the model, else its own type."""


def check_kv_type(kv_type: str, dtype: str, devices: Sequence[str]) -> None:
    """Raises SettingsError, naming value and remedy, for an unknown `kv_type` or one that dtype or devices rule out."""
    if kv_type not in KV_TYPES:
        raise SettingsError(f"--kv-type {kv_type} is unknown: use one of {', '.join(KV_TYPES)}")
    if kv_type == "auto":
        return
    if dtype not in ("auto", "float32"):
        raise SettingsError(
            f"--kv-type {kv_type} is for models that are computed in float32, not in --dtype {dtype}: use --dtype "
            "float32, or leave --kv-type out"
        )
    _check_cpus("--kv-type", kv_type, devices)


def _check_cpus(option: str, value: str, devices: Sequence[str]) -> None:
    for device in devices:
        if not device.startswith("cpu"):
            raise SettingsError(
                f"{option} {value} is for CPUs, not for {device}: use --devices cpu, or leave {option} out"
            )


def canonical_quant(quant: str | None) -> str | None:
    """The name as QUANTS has it: any case, and `q4_k` for `q4k`. An unknown name is returned as it is."""
    if quant is None:
        return None
    name = quant.lower()
    return next((one for one in (name, name.replace("_k", "k")) if one in QUANTS), quant)


def check_quant(quant: str | None, dtype: str, devices: Sequence[str]) -> None:
    """Raises SettingsError, naming value and remedy, for an unknown `quant` or one that dtype or devices rule out."""
    if quant is None:
        return
    if quant not in QUANTS:
        raise SettingsError(f"--quant {quant} is unknown: use one of {', '.join(QUANTS)}, or leave it out")
    if dtype not in ("auto", "float32"):
        raise SettingsError(
            f"--quant {quant} computes in float32, not in --dtype {dtype}: use --dtype float32, or leave --quant out"
        )
    _check_cpus("--quant", quant, devices)
