"""The scripted leader of tests: a thread that a test pauses, steps and scripts, with no model behind it.

An API can be tested alone with it. `test_scripted_leader.py` holds it to the real leader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Tokenizer

from control.errors import EpochOver, RedisUnavailable
from control.messages import GenerationRequest, LogEntry, ModelAssets, ModelSpec
from control.records import catalog
from control.redis.connection import connect, run
from control.requests import Claimed
from ops.harness import scripted_leader
from tests.byte_model import EOS, byte_assets
from worker.leader.request import RunningRequest

POLL_S = 0.005


def echo(prompt: str) -> str:
    """The default script: what the last message said."""
    return "you said " + prompt.removesuffix("\n").rpartition(": ")[2]


@dataclass
class Held:
    """A claimed request with what was read of it."""

    rid: str
    tenant: str
    priority: str
    params: GenerationRequest
    log: list[LogEntry]


class ScriptedLeader(scripted_leader.ScriptedLeader):
    """Runs until `stop`. `reply` maps the prompt's text to what every choice says; then comes the end of sequence.

    `pause` freezes the emitting of tokens and `step` lets single ones through; `claiming` switches the claiming off.
    """

    def __init__(self, url: str, model: str = "tiny", assets: ModelAssets | None = None) -> None:
        self.assets = assets or byte_assets()
        self.tokenizer = Tokenizer.from_str(self.assets.tokenizer_json)
        super().__init__(connect(url), model, "r0", self.tokenizer.decode, self._script)
        self.reply: Callable[[str], str] = echo
        self.claiming = True
        self.fingerprint: str | None = None
        """That of the backend, for the requests that are claimed from now on."""
        self.claimed: list[Held] = []
        self._allowed = -1  # steps that may still be made; -1: no limit
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"leader-{model}", daemon=True)
        self.publish()

    def publish(self) -> None:
        """Put the model into the catalog; the group counts as formed at once."""
        self.tend()
        catalog.put_spec(self.client, ModelSpec(name=self.model, source="script"))
        run(self.client, catalog.put_assets(self.model, self.assets))

    def start(self) -> None:
        self._thread.start()

    def prompt(self, at: int = -1) -> str:
        """The prompt of a claimed request as text; of the last one by default."""
        return self.tokenizer.decode(self.claimed[at].params.prompt)

    # --- what a test turns ---

    def pause(self) -> None:
        with self._changed:
            self._allowed = 0

    def step(self, steps: int = 1) -> None:
        with self._changed:
            self._allowed = max(0, self._allowed) + steps
            self._changed.notify_all()

    def resume(self) -> None:
        with self._changed:
            self._allowed = -1
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        self.leave()
        self.client.close()

    def reset(self) -> None:
        """Back to the default script, nothing paused."""
        self.reply, self.claiming, self.fail_at, self.cached, self.fingerprint = echo, True, None, 0, None
        self.claimed.clear()
        self.resume()

    # --- the loop ---

    def on_claim(self, claimed: Claimed, request: RunningRequest) -> None:
        request.fingerprint = self.fingerprint
        self.claimed.append(Held(claimed.rid, claimed.tenant, claimed.priority, request.params, list(request.history)))

    def _script(self, params: GenerationRequest) -> list[int]:
        said = self.reply(self.tokenizer.decode(params.prompt))
        return [*self.tokenizer.encode(said, add_special_tokens=False).ids, self.tokenizer.token_to_id(EOS)]

    def _run(self) -> None:
        while not self._stopping:
            try:
                if self._lease is None:
                    self.publish()
                self.turn(speaks=self._may_speak(), claims=self.claiming)
            except (EpochOver, RedisUnavailable):
                self.drop()
            with self._changed:
                if not self._stopping and (self._allowed == 0 or not self.running):
                    self._changed.wait(POLL_S)

    def _may_speak(self) -> bool:
        with self._changed:
            allowed = self._allowed != 0
            if self.running and self._allowed > 0:
                self._allowed -= 1
        return allowed
