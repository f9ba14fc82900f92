"""The libraries that a process imports: each takes seconds and hundreds of MiB."""

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
from worker.models.batch import Row, flatten
from worker.models.loading import load
from worker.standby_process import Preparation, import_all, prepare_model
import_all()
for folder in sys.argv[1:]:
    prepare_model(Preparation(folder, "auto", "cpu"))
    model = load(Path(folder), collective=Solo(), quant="int8")
    row = Row(1, [1, 2, 3], 0, True)
    model.forward(flatten([row], SlabStore(model.cache_layout, 128).begin([row.extent]), model.device))
print(sorted(set(sys.modules) & {"torch", "torch._dynamo", "transformers", "triton"}))
"""


def imported(program: str, *arguments: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    return found.stdout.splitlines()[-1]


@pytest.mark.timeout(150)
@pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")
def test_a_rank_whose_model_runs_in_cpp_imports_no_transformers(checkpoint: Checkpoint) -> None:
    """Nor torch's compiler, and neither does the standby of its host."""
    assert imported(LOAD, *(str(checkpoint(family)) for family in FAMILIES)) == "['torch']"


@pytest.mark.parametrize(
    "start",
    [
        "import worker.agent.agent",
        "import worker.agent.supervision.supervisor",
        "import api.__main__, api.settings; api.__main__.create_app(api.settings.ApiSettings(redis_url='redis://x'))",
        "import ops.cli",
    ],
)
def test_processes_without_a_model_start_without_what_they_do_not_need(start: str) -> None:
    """Torch takes a second to import, pydantic 0.2 s, which the framework imports where it is installed."""
    program = f"import sys; {start}; print(sorted(set(sys.modules) & {{'torch', 'transformers', 'pydantic'}}))"
    assert imported(program) == "[]"
