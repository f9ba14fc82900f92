"""The specification of a model from what an operator names: source, ranks, devices, types."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control.bounds import refusal
from control.engines import OWN, check_adapters, check_engine, parse_adapters, parse_arguments
from control.errors import DevicesError, SettingsError
from control.keys import check_model_name
from control.messages import LOOKUP_TOKENS, ModelSpec
from control.quantization import canonical_quant, check_kv_type, check_quant

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
_SCALE = re.compile(r"(\d{1,40})(?:\.\.(\d{1,40}))?")
_DEVICE = re.compile(r"cpu|cuda:\d+")


def build_spec(
    model: str,
    *,
    name: str | None = None,
    tp: int = 1,
    devices: str | None = None,
    dtype: str = "auto",
    max_context: int | None = None,
    kv_tokens: int | None = None,
    kv_type: str = "auto",
    quant: str | None = None,
    gguf: str | None = None,
    dequantize: bool = False,
    prefix_cache: bool = True,
    images: bool = True,
    lookup: int = LOOKUP_TOKENS,
    deterministic: bool = False,
    replicas: int | str = 1,
    target_wait_s: float = 2.0,
    idle_s: int = 600,
    spread: bool = False,
    drain_s: int = 300,
    surge: bool = True,
    engine: str = OWN,
    engine_args: Mapping[str, str] | Sequence[str] = (),
    adapters: Mapping[str, str] | Sequence[str] = (),
    sampling: Mapping[str, float] | Sequence[str] = (),
    demo: Path | None = None,
) -> ModelSpec:
    """The desired state that the options describe. `engine_args` and `sampling`: `name=value` each, or by name;
    `adapters`: `name=path`. `demo`: folder of the demonstration model, where there is one.

    Raises RequestError, DevicesError or SettingsError.
    """
    numbers = {"tp": tp, "max_context": max_context, "kv_tokens": kv_tokens, "lookup": lookup}
    scale = Scale.of(replicas)
    for number, value in (numbers | {"target_wait_s": target_wait_s, "idle_s": idle_s, "drain_s": drain_s}).items():
        if value is not None and (text := refusal(number, value)) is not None:
            raise SettingsError(text)
    source = model_source(model, demo)
    defaults = sampling_defaults(sampling)
    if source in TINY and engine == OWN:
        dequantize = dequantize or quant is None
        defaults = {"temperature": 0.0, **defaults}
    placed = parse_devices(devices, tp)
    arguments = engine_args if isinstance(engine_args, Mapping) else parse_arguments(engine_args)
    check_engine(engine, arguments)
    adapter_files = dict(adapters) if isinstance(adapters, Mapping) else parse_adapters(adapters)
    check_adapters(engine, adapter_files)
    if engine != OWN:
        own_options = {
            "--quant": quant,
            "--dtype": None if dtype == "auto" else dtype,
            "--kv-tokens": kv_tokens,
            "--kv-type": None if kv_type == "auto" else kv_type,
            "--dequantize": dequantize or None,
            "--deterministic": deterministic or None,
            "--spread": spread or None,
        }
        check_own_options(engine, own_options)
    quant = canonical_quant(quant)
    check_quant(quant, dtype, placed)
    check_kv_type(kv_type, dtype, placed)
    if deterministic:
        check_deterministic(dtype, placed)
    if (quant is not None or kv_type != "auto" or deterministic) and not placed:
        placed = ["cpu"] * tp
    return ModelSpec(
        name=check_model_name(name or model_name(model, source)),
        source=source,
        tp=tp,
        **scale.fields,
        target_wait_s=target_wait_s,
        idle_s=idle_s,
        spread=spread,
        drain_s=drain_s,
        surge=surge,
        devices=placed,
        dtype=dtype,
        quant=quant,
        gguf=gguf,
        dequantize=dequantize,
        max_context=max_context,
        kv_tokens=kv_tokens,
        kv_type=kv_type,
        prefix_cache=prefix_cache,
        images=images,
        lookup=lookup,
        deterministic=deterministic,
        engine=engine,
        engine_args=dict(arguments),
        adapters=adapter_files,
        sampling=defaults,
    )


TINY = frozenset({"smollm2"})
"""Models that Furrow knows by name and that are so small that products in blocks change their answers, and that chance
leads them astray (decision 16)."""
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
"""Sampling parameters whose defaults a specification may have."""


def sampling_defaults(named: Mapping[str, float] | Sequence[str]) -> dict[str, float]:
    """Checked defaults; texts are `name=value`. Raises SettingsError."""
    if not isinstance(named, Mapping):
        named = dict(_default(text) for text in named)
    for name, value in named.items():
        if name not in DEFAULTS:
            raise SettingsError(f"--default {name}: use one of {', '.join(DEFAULTS)}.")
        if (text := refusal(name, value)) is not None:
            raise SettingsError(f"--default: {text}")
    return dict(named)


def _default(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise SettingsError(f"--default {text!r}: give it as NAME=NUMBER, such as temperature=0.7.") from None


def check_own_options(engine: str, options: Mapping[str, object]) -> None:
    """Raise SettingsError for an option that only Furrow's own engine has; `options`: by name, None where it is not."""
    for option, value in options.items():
        if value is not None:
            raise SettingsError(
                f"{option} is an option of Furrow's own engine, not of {engine}: leave it out. Options of {engine} are "
                "named with --engine-arg NAME=VALUE."
            )


@dataclass(frozen=True, slots=True)
class Scale:
    """The number of replicas of a model: from `least` to `most`, as many as the requests need."""

    least: int
    most: int

    @classmethod
    def of(cls, replicas: int | str) -> Scale:
        """Of `2`, which means 2..2, or `0..4`. Raises SettingsError for what is neither or out of range."""
        match = _SCALE.fullmatch(str(replicas).strip())
        if match is None:
            raise SettingsError(f"replicas {replicas!r} is neither a number nor a range such as 0..4")
        least = int(match[1])
        most = int(match[2] or match[1])
        if least > most:
            raise SettingsError(
                f"replicas {least}..{most}: the first number is the least that run, the second the most; use "
                f"{most}..{least}"
            )
        if (text := refusal("replicas", most)) is not None:
            raise SettingsError(text)
        return cls(least, most)

    @property
    def fields(self) -> dict[str, Any]:
        """Those of a ModelSpec."""
        return {"replicas": self.most, "min_replicas": None if self.least == self.most else self.least}

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}..{self.most}"


def check_deterministic(dtype: str, devices: list[str]) -> None:
    """Raises SettingsError for a type or a device that `--deterministic` is not offered for."""
    if dtype not in ("auto", "float32"):
        raise SettingsError(
            f"--deterministic needs the forward in C++, which computes in float32, not in --dtype {dtype}: use --dtype "
            "float32, or leave --deterministic out"
        )
    for device in devices:
        if not device.startswith("cpu"):
            raise SettingsError(
                f"--deterministic is not offered on {device}: on GPUs the order of sums in products, norms, attention "
                "and NCCL depends on the batch. Use --devices cpu, or leave --deterministic out"
            )


def model_source(model: str, demo: Path | None = None) -> str:
    """The folder `demo` for the name `demo`; the absolute path of a folder or GGUF file; else a repository id.

    Raises SettingsError for the name `demo` where its folder is not known.
    """
    if model == "demo":
        if demo is None:
            raise SettingsError(
                "the demonstration model is not known to this process; name a folder or a repository, or set "
                "FURROW_DEMO_MODEL to its folder"
            )
        return str(demo)
    if Path(model).is_file() and not model.lower().endswith(".gguf"):
        raise SettingsError(
            f"{model} is a file and no model: give a folder with config.json, tokenizer.json and safetensors, "
            "a .gguf file, or a Hugging Face repository"
        )
    if (
        Path(model).is_dir()
        or (model.lower().endswith(".gguf") and Path(model).is_file())
        or model.startswith((".", "/", "~"))
    ):
        return str(Path(model).expanduser().resolve())
    return model


def model_name(model: str, source: str) -> str:
    """A folder or file is served under its last part, a repository under its full id, the demonstration model as
    `demo`."""
    name = Path(source).name if source.startswith("/") and model != "demo" else model
    return name[: -len(".gguf")] if name.lower().endswith(".gguf") else name


def parse_devices(devices: str | None, tp: int) -> list[str]:
    """Raises DevicesError naming both numbers where there is not one device per rank. `cpu` alone serves all ranks."""
    if not devices:
        return []
    named = [device.strip() for device in devices.split(",")]
    for device in named:
        if not _DEVICE.fullmatch(device):
            raise DevicesError(f"device {device!r} is unknown: use cpu, or cuda:0, cuda:1 and so on")
    if named == ["cpu"]:
        named *= tp
    if len(named) != tp:
        raise DevicesError(f"{len(named)} devices were given for {tp} ranks (--tp {tp}): name one device per rank")
    return named
