"""`furrow demo`: the main job, seen: serve the demonstration model with two ranks, stream two answers, stop."""

from __future__ import annotations

import argparse
import http.client
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

from control.process import child_environment

QUESTIONS = ("What is a poisoned replica?", "Count from 1 to 20.")
LONGEST = 200
"""Tokens of an answer; each ends by itself long before."""
START_LIMIT_S = 300.0
STOP_LIMIT_S = 120.0


def main() -> int:
    """Run the demonstration; the exit status is 0 only if both answers came and everything stopped."""
    parser = argparse.ArgumentParser(prog="furrow demo", description=__doc__)
    parser.add_argument("--tp", type=int, default=2, help="ranks [default: 2]")
    parser.add_argument("--verbose", action="store_true", help="show the log of every process")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="furrow-demo-") as data, tempfile.TemporaryFile("w+") as logs:
        command = [sys.executable, "-m", "control.cli", "serve", "demo", "--port", "0", "--data", data]
        print(f"$ furrow serve demo --tp {options.tp}", flush=True)
        server = subprocess.Popen(
            [*command, "--tp", str(options.tp), "--devices", "cpu"],
            env=child_environment(REDIS_URL="", FURROW_REDIS_URL=""),
            stdout=subprocess.PIPE,
            stderr=None if options.verbose else logs,
            text=True,
        )
        finished = [False]
        try:
            address = wait_for_address(server)
            print(f"  ready at http://{address}/v1\n", flush=True)
            finished = [show(address, question) for question in QUESTIONS]
        except (RuntimeError, OSError) as error:
            print(f"\nfurrow demo: {error}", file=sys.stderr)
        finally:
            server.terminate()
            status = server.wait(STOP_LIMIT_S)
        print(f"stopped (status {status})")
        if status != 0 or not all(finished):
            logs.seek(0)
            print(logs.read()[-8000:], file=sys.stderr)
            return 1
    return 0


def wait_for_address(server: subprocess.Popen[str]) -> str:
    """`host:port`, as the server prints it once it is ready. Raises RuntimeError if it ends or takes too long."""
    limit = threading.Timer(START_LIMIT_S, server.kill)
    limit.start()
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if match := re.search(r"http://([^/\s]+)/v1", line):
                return match[1]
    finally:
        limit.cancel()
    raise RuntimeError(f"the server ended or was not ready within {START_LIMIT_S:.0f} s")


def show(address: str, question: str) -> bool:
    """Ask and print the answer as it comes; True if the model ended it by itself."""
    print(f"user:  {question}\nmodel: ", end="", flush=True)
    started, first, count, reason = time.monotonic(), 0.0, 0, None
    for piece, finish in stream(address, question):
        if piece and not first:
            first = time.monotonic()
        count += bool(piece)
        reason = finish or reason
        print(piece, end="", flush=True)
    now = time.monotonic()
    speed = (count - 1) / (now - first) if count > 1 else 0.0
    print(f"\n       [first token {1000 * (first - started):.0f} ms, {speed:.0f} chunks/s, finish_reason {reason}]\n")
    return reason == "stop"


def stream(address: str, question: str) -> Iterator[tuple[str, str | None]]:
    """Text and finish reason of each chunk of a streamed chat completion."""
    connection = http.client.HTTPConnection(address, timeout=120)
    messages = [{"role": "user", "content": question}]
    body = {"model": "demo", "messages": messages, "stream": True, "temperature": 0, "max_tokens": LONGEST}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {response.read().decode()}")
    for line in response:
        if match := re.match(rb"data: (\{.*\})", line):
            for choice in json.loads(match[1]).get("choices", []):
                yield choice["delta"].get("content") or "", choice["finish_reason"]
    connection.close()


if __name__ == "__main__":
    sys.exit(main())
