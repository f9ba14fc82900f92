"""The random models of a run, in both forms that engines read; those that a folder has already are taken from there."""

from __future__ import annotations

import json
from pathlib import Path

from ops.bench.common.random_model import build
from ops.bench.common.shapes import SHAPES
from ops.bench.peers.gguf import convert


class Models:
    """One shape's files below `folder`."""

    def __init__(self, shape: str, folder: Path, dtype: str = "float32") -> None:
        self._shape, self._dtype, self._folder = shape, dtype, folder / f"{shape}-{dtype}"

    def checkpoint(self) -> Path:
        """The folder as transformers keeps a model; made where it is not there, or is of another shape."""
        made = self._folder / "shape.json"
        if not made.exists() or json.loads(made.read_text()) != SHAPES[self._shape]:
            for file in self._folder.glob("*"):
                file.unlink()
            self._folder.mkdir(parents=True, exist_ok=True)
            build(self._shape, self._folder, self._dtype)
            made.write_text(json.dumps(SHAPES[self._shape]))
        return self._folder

    def gguf(self, weights: str) -> Path:
        """The same weights for llama.cpp. Raises SettingsError for a kind that is not written."""
        file = self.checkpoint() / f"{weights}.gguf"
        return file if file.exists() else convert(self._folder, file, weights)
