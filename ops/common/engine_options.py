"""The options by which a host offers external engines, and the environment that they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
import msgspec

from control.engines import named_values
from control.sizes import parse_size

ENGINE_OPTIONS = ("engine_python", "engine_command", "engine_url", "engine_memory")
"""Parameters of `engine_options`."""


def engine_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a host that offers external engines; `engine_environment` takes them."""
    texts = {
        "--engine-python": ("ENGINE=PATH", "Python with vllm or sglang, in an environment of its own."),
        "--engine-command": ("ENGINE=COMMAND", "Program of an engine, or a command that starts it in a container."),
        "--engine-url": ("ENGINE=URL", "Engine that runs already, with its model."),
        "--engine-memory": ("ENGINE=SIZE", "Memory of this host that one process of the engine may take."),
    }
    for name, (metavar, text) in reversed(texts.items()):
        function = click.option(name, metavar=metavar, multiple=True, help=text)(function)
    return function


def engine_environment(
    engine_python: Sequence[str],
    engine_command: Sequence[str],
    engine_url: Sequence[str],
    engine_memory: Sequence[str],
) -> dict[str, str]:
    """The environment of a worker with these engines. Raises SettingsError."""
    if not (engine_python or engine_command or engine_url or engine_memory):
        return {}
    from worker.external.host import VARIABLE, named_settings

    memory = {name: parse_size(size) for name, size in named_values("--engine-memory", engine_memory).items()}
    settings = named_settings(
        named_values("--engine-python", engine_python),
        named_values("--engine-command", engine_command),
        named_values("--engine-url", engine_url),
        memory,
    )
    return {VARIABLE: msgspec.json.encode(settings).decode()}
