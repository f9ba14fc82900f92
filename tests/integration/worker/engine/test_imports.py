"""Processes import only the libraries they need: each takes seconds and hundreds of MiB."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from worker.native.library import load_library

Checkpoint = Callable[[str], Path]

FAMILIES = ("gemma3_text", "glm4", "gpt_oss", "granitemoehybrid", "qwen2_moe", "qwen3", "qwen3_next", "smollm3")
"""One for each kind of modules: norms, joined projections, experts, recurrent layers."""

LOAD = """
import sys
from pathlib import Path
import worker.rank_process
from worker.collective import Solo
from worker.kv.slabs import SlabStore
from worker.models.served import Row, flatten
from worker.models.loading import load
from worker.standby_process import StandbyModel, import_all, prepare_model
import_all()
for folder in sys.argv[1:]:
    prepare_model(StandbyModel(folder, "auto", "cpu"))
    model = load(Path(folder), collective=Solo(), quant="int8")
    row = Row(1, [1, 2, 3], 0, True)
    model.forward(flatten([row], SlabStore(model.cache_layout, 128).begin([row.extent])))
print(sorted(set(sys.modules) & {"torch", "transformers", "triton"}))
"""


def imported(program: str, *arguments: str) -> str:
    process = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    return process.stdout.splitlines()[-1]


@pytest.mark.timeout(150)
@pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")
def test_a_rank_whose_model_runs_in_cpp_imports_no_torch(checkpoint: Checkpoint) -> None:
    """Nor transformers, and neither does the standby of its host."""
    assert imported(LOAD, *(str(checkpoint(family)) for family in FAMILIES)) == "[]"


NEED = """
import sys
from worker.agent.needs import need_of
from control.messages import ModelSpec
from pathlib import Path
from worker.repository.files import inspect
for folder in sys.argv[1:]:
    for quant in (None, "q4k"):
        need_of(ModelSpec(name="m", source=folder, quant=quant), inspect(Path(folder)))
print(sorted(set(sys.modules) & {"torch", "transformers", "triton"}))
"""


@pytest.mark.timeout(150)
def test_an_agent_that_counts_a_model_s_memory_imports_no_torch(checkpoint: Checkpoint) -> None:
    assert imported(NEED, *(str(checkpoint(family)) for family in FAMILIES)) == "[]"


VERB = "import ops.cli; ops.cli.cli.get_command(None, {!r})"


@pytest.mark.parametrize(
    ("start", "others"),
    [
        (
            "import worker.agent.supervision.__main__",
            {"structlog", "msgspec", "redis", "click", "importlib.metadata", "email"},
        ),
        ("import worker.__main__, worker.agent.agent", {"rich", "pygments", "litestar", "llguidance", "click"}),
        ("import worker.__main__, worker.standby_process", {"rich", "pygments", "litestar", "redis", "click"}),
        (
            "import api.__main__, api.settings;"
            "api.__main__.create_app(api.settings.ApiSettings(redis_url='redis://x'))",
            {"rich", "pygments", "numpy", "api.routes.reference"},
        ),
        ("import ops.cli", {"structlog", "msgspec", "redis", "rich", "importlib.metadata", "email"}),
        (VERB.format("ps"), {"rich", "pygments", "litestar", "uvicorn", "psutil"}),
        # `serve` imports the client of Redis once its processes are started; the others become another process.
        *((VERB.format(verb), {"structlog", "redis", "rich"}) for verb in ("serve", "worker", "api", "bench")),
        (VERB.format("run"), {"litestar", "uvicorn", "psutil"}),
    ],
)
def test_processes_without_a_model_start_without_what_they_do_not_need(start: str, others: set[str]) -> None:
    """Torch takes a second to import, pydantic 0.2 s, and rich 0.1 s. The framework imports pydantic where it is
    installed, and structlog imports rich."""
    forbidden = {"torch", "transformers", "pydantic", *others}
    assert imported(f"import sys; {start}; print(sorted(set(sys.modules) & {forbidden!r}))") == "[]"
