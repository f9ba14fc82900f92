"""Options that describe a model, for `serve` and `models load`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from control.engines import ENGINES, OWN
from control.messages import LOOKUP_TOKENS
from control.operations.spec import DTYPES
from control.quantization import KV_TYPES, QUANTS
from control.settings import demo_model
from control.sizes import parse_seconds, parse_size
from ops.demo import MODEL_DIR


def model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a model's specification, as `build_spec` takes them."""
    for option in reversed(
        [
            click.option("--name", help="Name that clients use [default: the last part of MODEL]."),
            click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Ranks per replica."),
            click.option("--devices", help="One per rank: cpu, or cuda:0,cuda:1 [default: GPUs, else CPU]."),
            click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True),
            click.option(
                "--max-context", type=click.IntRange(16), help="Most tokens of context [default: the model's]."
            ),
            click.option(
                "--kv-tokens", type=click.IntRange(16), help="Tokens of KV memory [default: from free memory]."
            ),
            click.option(
                "--kv-type",
                type=click.Choice(KV_TYPES),
                default="auto",
                show_default=True,
                help="How keys and values are stored on CPUs; auto: f16, or the model's type where torch computes it.",
            ),
            click.option(
                "--prefix-cache/--no-prefix-cache",
                default=True,
                show_default=True,
                help="Reuse the KV cache of equal prompt beginnings.",
            ),
            click.option(
                "--images/--no-images",
                default=True,
                show_default=True,
                help="Take images, where the model can; else its encoder of images is not loaded.",
            ),
            click.option(
                "--lookup",
                type=click.IntRange(0, 64),
                default=LOOKUP_TOKENS,
                show_default=True,
                help="Most tokens guessed from the context and verified in one step; 0: off.",
            ),
            click.option(
                "--deterministic",
                is_flag=True,
                help="Refuse to serve where other requests could change the bits of an answer. Selects CPUs.",
            ),
            click.option(
                "--quant",
                metavar=f"[{'|'.join(QUANTS)}]",
                help="Pack the weights in fewer bits, on CPUs. Selects CPUs if --devices is not given.",
            ),
            click.option("--gguf", metavar="NAME", help="GGUF file of MODEL to use: Q4_K_M, or its whole name."),
            click.option(
                "--engine",
                type=click.Choice([OWN, *ENGINES]),
                default=OWN,
                show_default=True,
                help="What computes: Furrow's own ranks, or an engine that a host offers.",
            ),
            click.option(
                "--engine-arg",
                "engine_args",
                metavar="NAME=VALUE",
                multiple=True,
                help="Option of that engine, such as max-model-len=32768; several times.",
            ),
            click.option(
                "--default",
                "sampling",
                metavar="NAME=NUMBER",
                multiple=True,
                help="Default of a sampling parameter, such as temperature=0.7, before the model's own; several times.",
            ),
            click.option(
                "--adapter",
                "adapters",
                metavar="NAME=PATH",
                multiple=True,
                help="Low-rank adapter (LoRA) of that engine, which clients ask for as MODEL:NAME; several times.",
            ),
            click.option(
                "--dequantize", is_flag=True, help="Make plain numbers of weights that a GGUF file has in blocks."
            ),
        ]
    ):
        function = option(function)
    return function


def idle_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--idle`, of a model on demand."""
    text = "A model on demand sleeps after so long without requests."
    option = click.option(
        "--idle", "idle_s", metavar="TIME", default="10m", show_default=True, callback=_whole_seconds, help=text
    )
    return option(function)


def _whole_seconds(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Raises SettingsError for what is no time."""
    return max(1, round(parse_seconds(value)))


def memory_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--memory`, of a host's agent."""
    text = (
        "Memory that CPU ranks of this host may have together, such as 12GiB; models are placed within it [default: "
        "what its control group or the machine has, but 256 MiB]. `off`: models are placed without regard to memory."
    )
    return click.option("--memory", metavar="SIZE", callback=_checked_size, help=text)(function)


def _checked_size(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Raises SettingsError for what is neither a size nor `off`."""
    if value not in (None, "off"):
        parse_size(value)
    return value


def demo_environment() -> dict[str, str]:
    """The environment that names the demonstration model to an API process, unless it is set already."""
    return {"FURROW_DEMO_MODEL": str(MODEL_DIR)} if demo_model() is None else {}
