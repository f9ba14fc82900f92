"""The scripted leaders of a measurement, which write the time of each token."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence

import msgspec
from tokenizers import Tokenizer

from control.messages import GenerationRequest, ModelAssets, ModelSpec
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run
from control.requests import Claimed, Emission
from ops.bench.fanout.ring import TOKENS, Ring
from ops.bench.fanout.schedule import CALL, TEXT, Load
from ops.bench.fanout.scripted_leader import ScriptedLeader
from ops.demo import MODEL_DIR
from worker.leader.request import RunningRequest

MODEL = "scripted"
_CONTEXT = 1 << 20
_LAST_NUMBER = re.compile(r"\d+(?=\D*$)")


def demo_assets() -> ModelAssets:
    """The demonstration model's tokenizer and template."""
    config = msgspec.json.decode((MODEL_DIR / "tokenizer_config.json").read_bytes())
    text = (MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_str(text)
    end = tokenizer.token_to_id(config["eos_token"])
    assert end is not None, "the tokenizer has its own end-of-sequence token"
    return ModelAssets(
        tokenizer_json=text,
        tokenizer_config=config,
        chat_template=(MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8"),
        generation_config={},
        context_length=_CONTEXT,
        vocab_size=tokenizer.get_vocab_size(),
        eos_ids=[end],
        kv_tokens=1 << 30,
        created=int(time.time()),
    )


def publish(client: SyncRedis, model: str = MODEL, assets: ModelAssets | None = None) -> tuple[Tokenizer, list[int]]:
    """Put `model` into the catalog, by default with the demonstration model's assets; its tokenizer, and what every
    stream says."""
    assets = assets or demo_assets()
    catalog.put_spec(client, ModelSpec(name=model, source="scripted"))
    run(client, catalog.put_assets(model, assets))
    tokenizer = Tokenizer.from_str(assets.tokenizer_json)
    return tokenizer, tokenizer.encode(TEXT, add_special_tokens=False).ids


def number_of(params: GenerationRequest, tokenizer: Tokenizer) -> int:
    """The number that the client put at the end of its message."""
    found = _LAST_NUMBER.search(tokenizer.decode(params.prompt))
    if found is None:
        raise ValueError("a prompt without a number was claimed")
    return int(found[0])


class Replica(ScriptedLeader):
    """Leads as many streams as it has slots, and writes to the ring when each token leaves."""

    def __init__(
        self, client: SyncRedis, name: str, load: Load, tokenizer: Tokenizer, tokens: Sequence[int], ring: Ring
    ) -> None:
        super().__init__(client, MODEL, name, tokenizer.decode, self._answer, load.slots)
        self._load = load
        self._text = list(tokens)
        self._call: list[int] = tokenizer.encode(CALL, add_special_tokens=False).ids
        self._tokenizer, self._ring = tokenizer, ring
        self.numbers: dict[str, int] = {}
        """The client of each request."""

    def _answer(self, params: GenerationRequest) -> Sequence[int]:
        if not self._load.calls:
            return self._text
        return [*self._call, *self._text * -(-params.sampling.max_tokens // len(self._text))]

    def on_claim(self, claimed: Claimed, request: RunningRequest) -> None:
        self.numbers[claimed.rid] = number_of(request.params, self._tokenizer)

    def before_emit(self, emissions: Collection[Emission]) -> None:
        now, times, numbers = time.monotonic(), self._ring.times, self.numbers
        for emission in emissions:
            times[numbers[emission.rid] * TOKENS + emission.seq % TOKENS] = now
