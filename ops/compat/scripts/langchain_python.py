"""LangChain's standard tests for chat models, with `ChatOpenAI`; each of them is a check."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from checks import BASE_URL, KEY, LONG, LOOP, MODEL, check, langchain_loop, main, tell, undisturbed
from langchain_openai import ChatOpenAI


class Reports:
    """Hears how each test ended."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, bool, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped or (report.when != "call" and not report.failed):
            return
        title = re.sub(r"^.*::", "", report.nodeid)
        words = re.findall(r"^E +(.+)$", str(report.longrepr), re.MULTILINE) if report.failed else []
        self.lines.append((title, report.passed, words[-1][:300] if words else ""))


reports = Reports()
# None of the configuration that a project around this file may have.
options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "--asyncio-mode=auto", "-c", os.devnull]
JSON = "(structured or json_mode)"
options += ["-k", f"(TestObjects and {JSON}) or (TestChat and not {JSON})"]
# The client keeps its connections, so all tests share one loop.
for scope in ("fixture", "test"):
    options += ["-o", f"asyncio_default_{scope}_loop_scope=session"]
printed = io.StringIO()
with redirect_stdout(printed):
    pytest.main([str(Path(__file__).with_name("langchain_standard.py")), *options], plugins=[reports])
for title, ok, detail in reports.lines:
    tell(title, ok, detail)
if not reports.lines:
    raise SystemExit(printed.getvalue()[-1500:])


@check(LOOP)
def loop() -> None:
    langchain_loop(ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key=KEY, max_retries=0))


@undisturbed()
def texts() -> Iterator[str]:
    model = ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key=KEY, max_retries=0, temperature=0, max_tokens=150)
    for chunk in model.stream(LONG):
        yield str(chunk.content)


main()
