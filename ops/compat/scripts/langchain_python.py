"""LangChain's standard tests for chat models, with `ChatOpenAI`; each of them is a check."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from checks import BASE_URL, KEY, MODEL, tell

try:
    from langchain_openai import ChatOpenAI
    from langchain_tests.integration_tests import ChatModelIntegrationTests
except ImportError as error:
    tell("the script ran to its end", False, str(error))
    raise


class TestFurrow(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "base_url": BASE_URL,
            "api_key": KEY,
            "max_retries": 0,
            "temperature": 0,
            "max_tokens": 200,
            "stream_usage": True,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True


class Told:
    """Hears how each test ended."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and not report.failed:
            return
        title = "standard test " + re.sub(r"^.*::", "", report.nodeid)
        if report.skipped:
            return
        words = str(report.longrepr).strip().splitlines()
        self.lines.append((title, report.passed, words[-1][:300] if report.failed and words else ""))

    def __init__(self) -> None:
        self.lines: list[tuple[str, bool, str]] = []


if __name__ == "__main__":
    told = Told()
    with redirect_stdout(io.StringIO()):
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "--asyncio-mode=auto",
            "--disable-socket",
            "--allow-hosts=127.0.0.1,localhost,::1",
            "--rootdir",
            str(Path(__file__).parent),
        ]
        options = [option for option in options if "socket" not in option and "allow-hosts" not in option]
        pytest.main([__file__, *options], plugins=[told])
    for title, ok, detail in told.lines:
        tell(title, ok, detail)
