"""The values of `--quant`, and the options that each allows."""

from __future__ import annotations

from collections.abc import Sequence

from control.errors import SettingsError

QUANTS = ("int8", "f16")


def check_quant(quant: str | None, dtype: str, devices: Sequence[str]) -> None:
    """Raises SettingsError, naming value and remedy, for an unknown `quant` or one that dtype or devices rule out."""
    if quant is None:
        return
    if quant not in QUANTS:
        raise SettingsError(f"--quant {quant} is unknown: use {' or '.join(QUANTS)}, or leave it out")
    if dtype not in ("auto", "float32"):
        raise SettingsError(
            f"--quant {quant} computes in float32, not in --dtype {dtype}: use --dtype float32, or leave --quant out"
        )
    for device in devices:
        if not device.startswith("cpu"):
            raise SettingsError(
                f"--quant {quant} is for CPUs, not for {device}: use --devices cpu, or leave --quant out"
            )
