"""The behaviours that tests show, by the room that owns them: a row for each subject of tests/subjects.py, and for each
file of tests that no subject names."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from tests.rooms import ROOT, TOPS, rooms
from tests.subjects import SUBJECTS

TESTS = ROOT / "tests"
FARM = "The whole farm"
DOCS = "The documents"
# Folders of tests that are not named after a room.
_FOLDERS = {
    "acceptance/console": "api/console",
    "acceptance": FARM,
    "unit/docs": DOCS,
    "unit/ops/observability": "ops",
    "integration/worker/fake_gpu": "worker/engine",
}
# Rooms whose behaviour is shown by files in another folder: those of contracts, and tests that need a whole engine.
_FILES = {
    "contract": {
        "control": "keys limits settlements usage",
        "control/records": "catalog responses",
        "control/redis": "connection loss rotation topology",
        "control/replicas": "commands health lease memory_deaths",
        "control/requests": (
            "claim counts dead emit ending enqueue expected_wait follow image_bytes kept many_choices places rollback "
            "stranded suspects turns waiting weights"
        ),
        "control/scripts": "full growth refused_arguments",
        "api/background": "rounds",
        "ops/local": "embedded",
    },
    "integration/worker/engine": {
        "worker": "imports",
        "worker/collective": "collectives",
        "worker/kv": "kv_types pages",
        "worker/models": "backend loading need",
        "worker/weights": (
            "block_quants packed_structure packed_weights quant quantized_checkpoints quantized_experts weight_cache"
        ),
    },
    "integration/api/chat": {"api/routes": "stored_chats"},
    "integration/ops": {DOCS: "redis_cli"},
    "unit/ops": {"ops/wheels": "package"},
}
_OWNERS = {
    f"{folder}/test_{name}.py": room
    for folder, files in _FILES.items()
    for room, names in files.items()
    for name in names.split()
} | _FOLDERS


@dataclass(frozen=True)
class Module:
    """A file of tests."""

    path: Path
    owner: str  # `top/room`, `top`, FARM or DOCS
    behaviour: str  # the first clause of its docstring
    tests: tuple[str, ...]  # names of its functions, in their order


def first_clause(text: str) -> str:
    """The text up to its first `:`, `;` or `.` that ends a clause; one within backticks does not."""
    hidden = re.sub(r"`[^`]*`", lambda code: "`" * len(code[0]), " ".join(text.split()))
    return " ".join(text.split())[: len(re.split(r"[:;.](?= |$)", hidden)[0])]


def owner_of(path: Path) -> str:
    """The room whose behaviour a file of tests shows."""
    relative = path.relative_to(TESTS)
    for prefix, owner in _OWNERS.items():
        if relative.is_relative_to(prefix):
            return owner
    if relative.parts[0] == "gpu":
        return f"worker/{path.stem.removeprefix('test_')}"
    assert relative.parts[0] != "contract", f"tests/{relative}: name its room in _FILES"
    top, *below = relative.parent.parts[1:]
    room = below[0] if below else ""
    return f"{top}/{room}" if room in rooms(top) else top


def read(path: Path) -> Module:
    tree = ast.parse(path.read_text())
    functions = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    return Module(path, owner_of(path), first_clause(ast.get_docstring(tree) or ""), tuple(functions))


def modules() -> list[Module]:
    return [read(path) for path in sorted(TESTS.rglob("test_*.py"))]


def name_of(module: Module) -> str:
    return module.path.stem.removeprefix("test_")


def rows(owner: str, owned: list[Module]) -> list[tuple[str, list[str]]]:
    """The behaviours of a room with the names of their files, each name once."""
    names = sorted({name_of(module) for module in owned})
    subjects = [(behaviour, files.split()) for behaviour, files in SUBJECTS.get(owner, {}).items()]
    grouped = {name for _, files in subjects for name in files}
    alone = {name_of(module): module.behaviour for module in owned if name_of(module) not in grouped}
    return subjects + [(alone[name], [name]) for name in names if name in alone]


def behaviours() -> str:
    """The lists in docs/coverage.md."""
    owned: dict[str, list[Module]] = {}
    for module in modules():
        owned.setdefault(module.owner, []).append(module)
    order = [FARM, *(name for top in TOPS for name in (top, *(f"{top}/{room}" for room in rooms(top)))), DOCS]
    lines: list[str] = []
    for owner in order:
        if owner in owned:
            title = f"`{owner}`" if "/" in owner or owner in TOPS else owner
            lines += [f"### {title}", ""]
            lines += [
                f"- {behaviour}: {', '.join(f'`{name}`' for name in names)}"
                for behaviour, names in rows(owner, owned[owner])
            ]
            lines += [""]
    return "\n".join(lines)
