"""What a request that is not streamed costs beside its leader's own time: one after the other, on one connection."""

from __future__ import annotations

import http.client
import json
import time
from pathlib import Path

from ops.bench.fanning.ring import Ring
from ops.bench.summary import Summary, summarise

WARM_UP = 30


def overhead_ms(address: str, ring_path: Path, requests: int, tokens: int) -> Summary:
    """Milliseconds from the request's first byte to the answer's last, less those in which a leader had it."""
    ring, took = Ring(ring_path, 1), list[float]()
    connection = http.client.HTTPConnection(address, timeout=30)
    message = [{"role": "user", "content": "answer 0"}]
    body = json.dumps({"model": "scripted", "messages": message, "max_tokens": tokens}).encode()
    for turn in range(WARM_UP + requests):
        began = time.monotonic()
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        ended = time.monotonic()
        if response.status != 200 or json.loads(answer)["usage"]["completion_tokens"] != tokens:
            raise RuntimeError(f"status {response.status}: {answer[:300]!r}")
        if turn >= WARM_UP:
            took.append(1000 * (ended - began - ring.times[0]))
    connection.close()
    return summarise(took)
