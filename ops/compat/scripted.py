"""A farm whose model answers as its prompts order, behind a real API: the other half of a client's tool loop.

A user's turn holds an order: JSON in base64, which no client's quoting alters, as `order` in scripts/checks.py writes
it. `{"say": TEXT}` is answered with the text; `{"call": {"name": NAME, "arguments": {...}}, "then": TEXT}` with the
call where the tool is offered, and after its result with the text. With `"dies": true` the leader's process kills
itself in the middle of the text, and a new one continues. The last order of a prompt decides.

`python -m ops.compat.scripted MODEL [FORM]` is the leader; `scripted_farm` runs it, an API process and a private
server. It writes calls in the form of a family, whose marks are tokens of its vocabulary: the demonstration model's, or
that of a template in `templates/`.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from api.chat.reading.table import TABLE
from api.chat.reading.writing import written_calls
from control.errors import EpochOver, RedisUnavailable
from control.listening import free_port
from control.messages import GenerationRequest, ModelAssets, ModelSpec
from control.process import die_with_parent
from control.records import catalog
from control.redis.connection import connect, run
from control.requests import Claimed, Emission
from ops.bench.hostile.answers import MARK
from ops.common.waiting import until
from ops.demo import MODEL_DIR
from ops.harness.farm import HOST, part_environment, say
from ops.harness.processes import until_terminated
from ops.harness.scripted_leader import ScriptedLeader
from ops.local.embedded import EmbeddedServer
from ops.local.ready import is_ready
from ops.local.supervisor import Part, Supervisor
from worker.leader.request import RunningRequest
from worker.repository import files
from worker.repository.assets import read_assets

START_LIMIT_S = 120.0
TICK_S = 0.1
# Between two steps; while no request runs.
STEP_S = 0.002
IDLE_S = 0.02
KV_TOKENS = 1 << 24
"""Large enough for any prompt; there is no such memory."""
ANSWER = "I have no order."
"""The answer to a prompt without an order, such as that for a conversation's title."""
_ORDER = re.compile(r"\[order:([\w+/=]+)\]")
_RESULT = re.compile(r"<tool_response>|\[TOOL_RESULTS\]|<\|start\|>tool|<\|tool\|>")
TEMPLATES = Path(__file__).parent / "templates"
DEMONSTRATION = "hermes"
"""The form of the demonstration model."""
THOUGHT = "I do as I am told."
"""The reasoning of a family that reasons, before each answer."""
FORMS = (DEMONSTRATION, *sorted(path.stem for path in TEMPLATES.glob("*.jinja")))


def last_order(prompt: str) -> tuple[dict[str, Any], str]:
    """The last order of a prompt, and the text after it."""
    orders = list(_ORDER.finditer(prompt))
    if not orders:
        return {"say": ANSWER}, ""
    return json.loads(base64.b64decode(orders[-1][1])), prompt[orders[-1].end() :]


def answer(prompt: str, name: str = DEMONSTRATION) -> str:
    """The text that the last order of `prompt` asks for, in the form `name`; all but the demonstration model reason."""
    form = TABLE[name]
    order, since = last_order(prompt)
    call: Any = order.get("call")
    if "say" in order:
        text: str | None = order["say"]
    elif _RESULT.search(since):
        text = order["then"]
    else:
        text = None if f'"name": "{call["name"]}"' in prompt.partition("</tools>")[0] else ANSWER
    before = ""
    if name != DEMONSTRATION and form.reasoning:
        following = form.channels.following if form.channels is not None else ""
        before = f"{form.reasoning[0].open}{THOUGHT}{form.reasoning[0].close}{following}"
    if text is not None:
        return f"{before}{form.answer[0]}{text}{form.answer[1]}"
    assert form.calls is not None
    return before + written_calls(form.calls, [(call["name"], call["arguments"])])


def assets_of(name: str) -> ModelAssets:
    """The demonstration model's assets, with the template of a form and its marks as tokens."""
    assets = msgspec.structs.replace(read_assets(files.inspect(MODEL_DIR), None), kv_tokens=KV_TOKENS)
    if name == DEMONSTRATION:
        return assets
    tokenizer = Tokenizer.from_str(assets.tokenizer_json)
    marks = sorted({mark for text in TABLE[name].marks for mark in MARK.findall(text)})
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return msgspec.structs.replace(
        assets,
        tokenizer_json=tokenizer.to_str(),
        chat_template=(TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"),
        vocab_size=tokenizer.get_vocab_size(),
    )


class OrderedLeader(ScriptedLeader):
    """Leads replica r0 of a model with the demonstration model's tokenizer, and the template of a form."""

    def __init__(self, redis_url: str, model: str, form: str = DEMONSTRATION) -> None:
        self._form = form
        self.assets = assets_of(form)
        self._tokenizer = Tokenizer.from_str(self.assets.tokenizer_json)
        super().__init__(connect(redis_url), model, "r0", self._tokenizer.decode, self._script)
        self._deaths: dict[str, int] = {}
        """The length of a request's log after which this process kills itself."""

    def lead(self, stopping: Callable[[], bool]) -> None:
        """Put the model into the catalog and lead until `stopping`. A predecessor's lock is waited for."""
        catalog.put_spec(self.client, ModelSpec(name=self.model, source="script"))
        run(self.client, catalog.put_assets(self.model, self.assets))
        while not stopping():
            time.sleep(STEP_S if self.running else IDLE_S)
            try:
                self.turn()
            except EpochOver:  # the lock is lost, or another process holds it still
                self._end_epoch()
                time.sleep(TICK_S)
            except RedisUnavailable:
                self.drop()
        self.leave()

    def _end_epoch(self) -> None:
        """Give back what is left of the lease; the next turn acquires the lock, and adopts the requests, anew."""
        with suppress(RedisUnavailable):
            self.leave()
        self.drop()

    def on_claim(self, claimed: Claimed, request: RunningRequest) -> None:
        """An order to die holds for the process that begins the request."""
        order, _ = last_order(self._text(request.params))
        if order.get("dies") and not request.history:
            self._deaths[claimed.rid] = len(self._tokens[claimed.rid]) // 2

    def before_emit(self, emissions: Collection[Emission]) -> None:
        if any(emission.seq >= self._deaths.get(emission.rid, emission.seq + 1) for emission in emissions):
            os.kill(os.getpid(), signal.SIGKILL)

    def _script(self, params: GenerationRequest) -> list[int]:
        tokens = self._tokenizer.encode(answer(self._text(params), self._form), add_special_tokens=False).ids
        return [*tokens, self.assets.eos_ids[0]]

    def _text(self, params: GenerationRequest) -> str:
        return self._tokenizer.decode(params.prompt, skip_special_tokens=False)


@contextmanager
def scripted_farm(model: str, data: Path, *options: str, form: str = DEMONSTRATION) -> Generator[str]:
    """Serve `model` by orders, in a form of `FORMS`; yields the API's URL. `options` are those of `furrow api`."""
    address = (HOST, free_port(HOST, 0))
    stopping = threading.Event()
    with EmbeddedServer(data) as redis_url:
        supervisor = Supervisor(part_environment(redis_url), say)

        def supervise() -> None:
            supervisor.start(Part("leader", "ops.compat.scripted", [model, form]))
            supervisor.start(Part("api", "api", ["--host", HOST, "--port", str(address[1]), *options]))
            while not stopping.wait(TICK_S):
                supervisor.tend()
            supervisor.stop()

        thread = threading.Thread(target=supervise, name="scripted-farm")
        thread.start()
        try:
            until(lambda: is_ready(address), "the API process is ready", START_LIMIT_S, TICK_S)
            yield f"http://{address[0]}:{address[1]}"
        finally:
            stopping.set()
            thread.join()


def main() -> None:
    """Lead until SIGTERM."""
    die_with_parent()
    OrderedLeader(os.environ["FURROW_REDIS_URL"], *sys.argv[1:]).lead(until_terminated())


if __name__ == "__main__":
    main()
