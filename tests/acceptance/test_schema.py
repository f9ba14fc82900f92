"""schemathesis finds no answer outside the OpenAPI document: it makes up good requests and bad ones.

It is a command of its own environment: `pipx install schemathesis`, or FURROW_SCHEMATHESIS=PATH of its `st`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.api.conftest import running_api
from tests.leader import ScriptedLeader
from tests.servers import NEW, serving

COMMAND = os.environ.get("FURROW_SCHEMATHESIS") or shutil.which("st") or shutil.which("schemathesis")
CHECKS = ",".join(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "unsupported_method",
        "negative_data_rejection",
        "valid_requests_are_taken",
    ]
)
"""The last one is in schema_hooks.py: `positive_data_acceptance`, but for what a schema can't say, by name."""
HOOKS = {"SCHEMATHESIS_HOOKS": "schema_hooks", "PYTHONPATH": str(Path(__file__).parent)}
EXAMPLES = os.environ.get("FURROW_SCHEMATHESIS_EXAMPLES", "10")
"""Of each operation, beside those that are made from each keyword of its schemas."""


@pytest.mark.timeout(400)
@pytest.mark.skipif(COMMAND is None, reason="schemathesis is not installed: pipx install schemathesis")
@pytest.mark.parametrize("part", ["--exclude-path-regex", "--include-path-regex"], ids=["clients", "operators"])
def test_no_request_meets_a_server_error_or_a_wrong_answer(part: str, tmp_path: Path) -> None:
    """Nor is a valid one refused, or an invalid one taken.

    Every operation, in the phases examples, coverage and fuzzing, with a fixed seed.
    Operators' by themselves: a model that they are made to load under any name is never there, and asking it is a 503.
    """
    assert COMMAND is not None
    options = [part, "^/farm", "--phases", "examples,coverage,fuzzing", "--max-examples", EXAMPLES, "--seed", "1"]
    options += ["--checks", CHECKS, "--request-timeout", "20", "--warnings", "off", "--no-color"]
    with serving(NEW) as server:
        leader = ScriptedLeader(server.url)
        leader.start()
        try:
            with running_api(server.url, tmp_path) as api:
                command = [COMMAND, "run", f"{api.url}/schema/openapi.json", *options]
                judged = subprocess.run(
                    command, capture_output=True, text=True, cwd=tmp_path, timeout=380, env=os.environ | HOOKS
                )
                failures = [line for line in api.lines if line.get("action") == "http_error"]
        finally:
            leader.stop()
    assert judged.returncode == 0, judged.stdout[-8000:] + judged.stderr[-2000:]
    assert failures == []
