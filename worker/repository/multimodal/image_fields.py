"""Fields of the files that describe an image part: each is checked, and an error names the field and its value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from control.errors import ModelFilesError


def whole(fields: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number from 1 on; `default` where the field is missing. Raises ModelFilesError."""
    value = fields.get(name)
    value = default if value is None else value
    if not is_whole(value, 1):
        raise ModelFilesError(f"The files for images have {name} = {value!r}; a whole number from 1 on is needed.")
    return value


def is_whole(value: Any, least: int) -> bool:
    """True for an integer from `least` on that is no truth value."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def normalisation(processor: Mapping[str, Any], mean: list[float], std: list[float]) -> dict[str, Any]:
    """How pixels become numbers, as fields of an ImagePart; `mean` and `std` are the processor's own where the file has
    none. Raises ModelFilesError."""
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if processor.get(name) is False:
            raise ModelFilesError(f"preprocessor_config.json has {name} = false, which is not supported for images.")
    fields: dict[str, Any] = {}
    for name, default in (("mean", mean), ("std", std)):
        values = processor.get(f"image_{name}", default)
        if not isinstance(values, list) or len(values) != 3 or not all(isinstance(one, int | float) for one in values):
            raise ModelFilesError(f"preprocessor_config.json has image_{name} = {values!r}; three numbers are needed.")
        fields[name] = values
    factor = processor.get("rescale_factor", 1 / 255)
    if not isinstance(factor, int | float) or not factor > 0:
        raise ModelFilesError(f"preprocessor_config.json has rescale_factor = {factor!r}; a number is needed.")
    return fields | {"rescale": factor}
