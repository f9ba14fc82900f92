"""Chooses the GGUF file of a folder or repository."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from control.errors import ModelFilesError
from worker.weights.gguf import SPLIT, split_files

_NO_MODELS = ("mmproj", "imatrix")
"""Parts of the names of files beside a model: a vision encoder, statistics of activations."""
_SHOWN = 24


def choose(names: Iterable[str], quantization: str | None, where: str) -> list[str]:
    """The parts of the one model that `quantization` names, in order. It is a type such as `Q4_K_M` or a file's
    name, in any case; None stands for the only model. Raises ModelFilesError with the list where none or several
    fit."""
    models = first_parts(names)
    fitting = [name for name in models if quantization is None or _fits(name, quantization.lower())]
    if len(fitting) == 1:
        return [str(PurePosixPath(part)) for part in split_files(Path(fitting[0]))]
    shown = ", ".join((fitting or models)[:_SHOWN]) + (" …" if len(fitting or models) > _SHOWN else "")
    if not models:
        raise ModelFilesError(f"{where} has no GGUF model{f' for --gguf {quantization}' if quantization else ''}.")
    if quantization is None:
        raise ModelFilesError(f"{where} has several GGUF models: {shown}. Name one with --gguf, such as --gguf Q4_K_M.")
    if fitting:
        raise ModelFilesError(
            f"--gguf {quantization} fits several files of {where}: {shown}. Give the whole name of one."
        )
    raise ModelFilesError(f"--gguf {quantization} fits no file of {where}. There are: {shown}.")


def first_parts(names: Iterable[str]) -> list[str]:
    """The models among files, in order; one that was split goes by the name of its first part."""
    return sorted({_first_part(name) for name in names if is_model(name)})


def is_model(name: str) -> bool:
    lower = PurePosixPath(name).name.lower()
    return lower.endswith(".gguf") and not any(part in lower for part in _NO_MODELS)


def names_in(folder: Path) -> list[str]:
    """GGUF files of a folder and of the folders in it, as relative paths."""
    paths = [path for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.suffix.lower() == ".gguf"]
    return sorted(path.relative_to(folder).as_posix() for path in paths if path.is_file())


def _first_part(name: str) -> str:
    """A model that was split goes by the name of its first part."""
    path = PurePosixPath(name)
    if SPLIT.fullmatch(path.name) is None:
        return name
    return PurePosixPath(split_files(Path(name))[0]).as_posix()


def model_stem(name: str) -> str:
    """The file's name without its ending, and without the number of its part."""
    path = PurePosixPath(name)
    parts = SPLIT.fullmatch(path.name)
    return parts["stem"] if parts is not None else path.stem


def _fits(name: str, quantization: str) -> bool:
    path = PurePosixPath(name.lower())
    stem = model_stem(name.lower())
    if quantization in (str(path), path.name, path.stem, stem):
        return True
    return re.search(rf"[-._]{re.escape(quantization)}$", stem) is not None
