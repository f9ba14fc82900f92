"""The process in which a loop runs: `PYTHON -m ops.bench.peers.engines.child LOOP SETUP`, one JSON line per answer.

It says {"ready": true} once the model is loaded, then answers each {"prompts", "tokens"} with {"streams"}; or
{"unavailable": why} and {"failed": why}, after which it ends. Output of libraries goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict
from typing import Any, TextIO

from ops.bench.peers.base import Setup, Unavailable


def main(loop_name: str, setup: str) -> int:
    """Serve requests from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        loop = importlib.import_module(f"ops.bench.peers.loops.{loop_name}").load(Setup.of_json(json.loads(setup)))
        say(answers, ready=True)
        for line in sys.stdin:
            asked: dict[str, Any] = json.loads(line)
            streams = loop.run(asked["prompts"], asked["tokens"])
            say(answers, streams=[asdict(stream) for stream in streams])
    except (Unavailable, ImportError) as error:
        say(answers, unavailable=str(error))
        return 1
    except Exception as error:
        traceback.print_exc()
        say(answers, failed=f"{type(error).__name__}: {error}")
        return 1
    return 0


def say(answers: TextIO, **answer: Any) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    # At once: threads that a library left must not keep the process.
    os._exit(main(*sys.argv[1:]))
