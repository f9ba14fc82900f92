"""What is generated from the records of model types: their table, and the defaults of transformers' classes."""

from __future__ import annotations

import json
from typing import Any

from worker.families.family import Family
from worker.families.registry import FAMILIES, TEXT_PARTS


def defaults() -> str:
    """worker/families/defaults.json: a line for each type."""
    lines = [f'  "{kind}": {json.dumps(_defaults(family))}' for kind, family in sorted(FAMILIES.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _defaults(family: Family) -> dict[str, Any]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # only here: it takes seconds

    kind: Any = CONFIG_MAPPING[family.model_type]
    omitted = [name for part in TEXT_PARTS.values() if part.model_type == family.model_type for name in part.omitted]
    return {name: _default(kind, name) for name in sorted({*family.default_names, *omitted})}


def _default(kind: Any, name: str) -> Any:
    """The default of a field. That of the class comes first: an object has values in place of some that are null."""
    field = kind.__dataclass_fields__.get(name)
    if name == "head_dim" and field is None:
        return None
    whole = kind()
    if name == "rope_parameters":
        return getattr(whole, "rope_parameters", None)
    return getattr(whole, f"_{name}") if field is None else field.default


def table() -> str:
    """The model types in docs/engine.md."""
    rows = ["| kind | forward in C++ on CPUs | forward in torch |\n", "|---|---|---|\n"]
    for kind in ("dense types", "types with experts", "types with recurrent layers"):
        families = [family for _, family in sorted(FAMILIES.items()) if _kind(family) == kind]
        native, others = (
            ", ".join(family.model_type for family in families if family.is_native == is_native)
            for is_native in (True, False)
        )
        rows.append(f"| {kind} | {native} | {others} |\n")
    return "".join(rows)


def _kind(family: Family) -> str:
    if family.recurrent is not None:
        return "types with recurrent layers"
    return "dense types" if family.experts is None else "types with experts"
