"""`furrow demo`: serve the demonstration model with two ranks, stream answers, kill a rank during one, and stop."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import httpx

from control.process import child_environment
from control.redis.clients import SyncRedis
from control.redis.connection import connect
from control.replicas import health
from ops.cli.run.answer import StreamedAnswer
from ops.common.waiting import NotInTime, until
from ops.harness.farm import has_standby

QUESTIONS = ("What is a poisoned replica?", "Count from 1 to 20.")
STRUCK = "Count from 1 to 100."
STRIKE_AFTER = 5
"""Number of the answer's chunks after which a rank is killed; a chunk has all tokens that were ready."""
LONGEST = 400
"""Limit of tokens of an answer; each answer ends by itself before."""
START_LIMIT_S = 300.0
STOP_LIMIT_S = 120.0
STANDBY_LIMIT_S = 60.0


def main() -> int:
    """Run the demonstration; the exit status is 0 if all answers came whole and all processes stopped."""
    parser = argparse.ArgumentParser(prog="furrow demo", description=__doc__)
    parser.add_argument("--tp", type=int, default=2, help="ranks [default: 2]")
    parser.add_argument("--verbose", action="store_true", help="show the log of every process")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="furrow-demo-") as data, tempfile.TemporaryFile("w+") as logs:
        command = [sys.executable, "-m", "ops.cli", "serve", "demo", "--port", "0", "--data", data]
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
            finished = [show(address, question) is not None for question in QUESTIONS]
            finished.append(survive(address, Path(data), rank=options.tp - 1))
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
    """The `host:port` that the server prints once it is ready. Raises RuntimeError if it ends or takes too long."""
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


def show(address: str, question: str, strike: Callable[[], str] | None = None) -> str | None:
    """Ask, print the answer as it comes, and return it; None if the model did not end it by itself.

    `strike` is called during the answer and returns a description.
    """
    print(f"user:  {question}\nmodel: ", end="", flush=True)
    started = time.monotonic()
    times = list[float]()
    messages = [{"role": "user", "content": question}]
    body = {"model": "demo", "messages": messages, "stream": True, "temperature": 0, "max_tokens": LONGEST}
    with httpx.Client(base_url=f"http://{address}", timeout=120, trust_env=False) as http:
        answer = StreamedAnswer(http, "/v1/chat/completions", body)
        for piece in answer:
            if piece.text:
                times.append(time.monotonic())
            print(piece.text, end="", flush=True)
            if strike is not None and len(times) == STRIKE_AFTER:
                print(f"\n       >>> {strike()} <<<\n       ", end="", flush=True)
        answer.close()
    if answer.error:
        raise RuntimeError(answer.error)
    first, last = (times[0], times[-1]) if times else (started, started)
    speed = f"{(len(times) - 1) / (last - first):.0f} chunks/s" if len(times) > 1 else "no chunks"
    notes = [f"first token {1000 * (first - started):.0f} ms", speed, f"finish_reason {answer.finish}"]
    if strike is not None and len(times) > 1:
        notes.insert(1, f"longest pause {max(after - before for before, after in pairwise(times)):.2f} s")
    print(f"\n       [{', '.join(notes)}]\n")
    return answer.text if answer.finish == "stop" else None


def survive(address: str, data: Path, rank: int) -> bool:
    """Ask the same question twice and kill a rank during the second answer; True if the answers are equal."""
    undisturbed = show(address, STRUCK)
    with connect((data / "url").read_text().strip()) as client:
        strikes: list[int] = []
        wait_for_standby(client)

        def strike() -> str:
            beat = health.heartbeats(client, "demo", "r0", rank + 1)[rank]
            if beat is None:
                raise RuntimeError(f"rank {rank} has no heartbeat")
            os.kill(beat.pid, signal.SIGKILL)
            strikes.append(beat.pid)
            return f"kill -9 {beat.pid} (rank {rank})"

        disturbed = show(address, STRUCK, strike)
    same = disturbed is not None and disturbed == undisturbed
    if not strikes:
        print("The answer ended before a rank could be killed: this proves nothing.", end="\n\n")
    else:
        print("The answer continued where it was, and is the same." if same else "The two answers differ.", end="\n\n")
    return same and bool(strikes)


def wait_for_standby(client: SyncRedis) -> None:
    """Wait until the standby process is ready to replace a rank: after a start it imports its libraries."""
    if has_standby(client):
        return
    print("(waiting until the standby process has imported its libraries)\n", flush=True)
    with suppress(NotInTime):  # the strike then costs a little more
        until(lambda: has_standby(client), "the standby is ready", STANDBY_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
