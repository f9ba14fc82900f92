"""Tensors of safetensors files by name, read by the slice: a rank never holds more than its own part."""

from __future__ import annotations

from contextlib import ExitStack
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from control.errors import ModelFilesError

Ranges = list[tuple[int, int]]
"""Half-open intervals along one dimension, in order."""


class StoredTensors(Protocol):
    """The tensors of a checkpoint, whatever its files are."""

    def __contains__(self, name: str) -> bool: ...

    @property
    def read_share(self) -> float:
        """How much of it was read, 0 to 1; a tensor of which only a part is kept counts as a whole."""
        ...

    def read(self, name: str, dim: int | None = None, ranges: Ranges | None = None) -> Any:
        """The tensor `name`, or only its `ranges` along `dim`, joined: a Tensor or Blocks. Raises ModelFilesError
        naming a missing one."""
        ...


class Checkpoint:
    """The tensors of several files as one mapping; open only inside `with`."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._stack = ExitStack()
        self._where: dict[str, Any] = {}
        self._numbers: dict[str, int] = {}
        """The number of values of each tensor that was not read yet."""
        self._all_numbers = 0

    def __enter__(self) -> Checkpoint:
        for path in self._files:
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except Exception as error:
                self._stack.close()
                raise ModelFilesError(f"{path} can't be read: {error}") from error
            self._where.update(dict.fromkeys(handle.keys(), handle))
        self._numbers = {name: prod(handle.get_slice(name).get_shape()) for name, handle in self._where.items()}
        self._all_numbers = sum(self._numbers.values())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._where.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    @property
    def read_share(self) -> float:
        """How much of it was read, 0 to 1; a tensor of which only a part is kept counts as a whole."""
        return 1 - sum(self._numbers.values()) / max(1, self._all_numbers)

    def read(self, name: str, dim: int | None = None, ranges: Ranges | None = None) -> Tensor:
        """The tensor `name`, or only its `ranges` along `dim`, joined. Raises ModelFilesError naming a missing one."""
        if name not in self._where:
            folder = self._files[0].parent if self._files else "?"
            raise ModelFilesError(
                f"The weights in {folder} have no tensor {name}; is this the checkpoint of its config?"
            )
        stored = self._where[name].get_slice(name)
        self._numbers.pop(name, None)
        if dim is None or ranges is None:
            return stored[:]
        parts = [stored[(slice(None),) * dim + (slice(start, stop),)] for start, stop in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
