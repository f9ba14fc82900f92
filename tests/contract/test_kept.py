"""Prompt and log of an ended request stay for a time; and nobody brings one back."""

from __future__ import annotations

import msgspec
import pytest

from control import requests
from control.constants import RESPONSE_OVERHEAD, RETENTION_MS
from control.errors import RequestNotFound
from control.keys import ResponseKeys
from control.messages import GenerationRequest, LogEntry, Sampling, encode
from control.records.responses import Quota, StoredResponse, drop_response, end_response, keep_response, watch_response
from control.requests import Emission
from control.requests.upkeep.replay import Difference, KeptRequest, differences, find_kept, replay
from tests.contract.conftest import MODEL, Farm, last, token

MONTH_MS = 30 * 86_400_000


def ended(farm: Farm, rid: str, keep_ms: int) -> None:
    lease = farm.lead()
    farm.put(rid, api="api1", keep_ms=keep_ms)
    farm.claim(lease)
    farm.emit(lease, Emission(rid, 1, [token(1), last(2)], "finished"))


@pytest.mark.parametrize("keep_ms", [RETENTION_MS // 2, MONTH_MS])
def test_a_kept_request_has_its_prompt_and_its_log(farm: Farm, keep_ms: int) -> None:
    """For as long as was asked for, and never shorter than any request."""
    ended(farm, "a", keep_ms)
    request = find_kept(farm.client, ["other", MODEL], "a")
    assert request.params.prompt and [entry.seq for entry in request.entries] == [1, 2] and request.tokens == 2
    for key in (farm.keys.request("a"), farm.keys.log("a")):
        assert 0.9 * max(keep_ms, RETENTION_MS) < farm.client.pttl(key) <= max(keep_ms, RETENTION_MS)


def test_a_request_is_not_kept_unasked(farm: Farm) -> None:
    """The message names the option; one that runs, or is unknown, is refused as well."""
    ended(farm, "a", 0)
    farm.put("b", keep_ms=MONTH_MS)
    for rid, words in (("a", "--keep-requests SECONDS"), ("b", "has not ended"), ("c", "No request 'c'")):
        with pytest.raises(RequestNotFound, match=words):
            find_kept(farm.client, [MODEL], rid)


def test_a_request_with_images_is_not_replayed(farm: Farm) -> None:
    """Its pixels went with its end."""
    ended(farm, "a", MONTH_MS)
    params = msgspec.json.decode(farm.field("a", "params") or "")
    params["images"] = [[0, 1, 28, 28, "d"]]
    farm.client.hset(farm.keys.request("a"), "params", msgspec.json.encode(params).decode())
    with pytest.raises(RequestNotFound, match="has images"):
        find_kept(farm.client, [MODEL], "a")


def test_a_follower_of_a_kept_request_does_not_bring_it_back(farm: Farm) -> None:
    """Its parameters are not told once it has ended: an API process would enqueue it again after a loss of data."""
    ended(farm, "a", MONTH_MS)
    assert farm.run(requests.follow(MODEL, "a", "", "t", 0, params=True)).params == ""
    farm.put("b", keep_ms=MONTH_MS)
    assert farm.run(requests.follow(MODEL, "b", "", "t", 0, params=True)).params


def test_a_replay_is_the_same_request_as_long_as_it_was(farm: Farm) -> None:
    """It has the seed and the prompt of the first, and a tenant of its own."""
    ended(farm, "a", MONTH_MS)
    request = find_kept(farm.client, [MODEL], "a")
    replay(farm.client, request, "again")
    [claimed] = farm.claim(farm.lead()).requests
    assert claimed.rid == "again" and farm.field("again", "tenant") == "furrow-replay"
    assert farm.field("again", "keep") is None
    same = msgspec.structs.replace(request.params.sampling, max_tokens=2)
    assert (
        farm.field("again", "params")
        == msgspec.json.encode(msgspec.structs.replace(request.params, sampling=same)).decode()
    )


QUOTA = Quota(2_000, 10)
PARAMS = GenerationRequest(prompt=[1, 2, 3], sampling=Sampling(max_tokens=9, seed="7"))
LOG = [token(1), last(2)]


def store_chat(farm: Farm, rid: str, params: bytes = encode(PARAMS), log: bytes | None = encode(LOG)) -> None:
    """A chat with `store`, which has ended if it has a log."""
    chat = StoredResponse(
        rid=rid, owner="o", tenant="t", model=MODEL, view="{}", input=[], kind="chat", metadata="{}", params=params
    )
    farm.run(keep_response(chat, MONTH_MS, QUOTA))
    for call in watch_response(rid, "o", "chat"):
        farm.run(call)
    if log is not None:
        farm.run(end_response(rid, "o", b"{}", MONTH_MS, QUOTA, log))


def total(farm: Farm) -> int:
    return int(farm.client.hget(ResponseKeys("o").sizes, "total") or 0)


def test_a_stored_chat_is_a_kept_request(farm: Farm) -> None:
    """For as long as it is stored, of whatever owner; its own keys in the model are gone by then."""
    store_chat(farm, "a")
    assert find_kept(farm.client, ["other", MODEL], "a") == KeptRequest(MODEL, "a", PARAMS, LOG)
    with pytest.raises(RequestNotFound, match="model 'm' of request 'a' is not loaded"):
        find_kept(farm.client, ["other"], "a")
    for call in drop_response("a", "o"):
        farm.run(call)
    with pytest.raises(RequestNotFound, match="--response-ttl may be over"):
        find_kept(farm.client, [MODEL], "a")
    assert total(farm) == 0
    store_chat(farm, "b", log=None)
    with pytest.raises(RequestNotFound, match="has not ended"):
        find_kept(farm.client, [MODEL], "b")


@pytest.mark.parametrize(("params", "log"), [(b"", encode(LOG)), (encode(PARAMS), b"[" + b" " * 2_000 + b"]")])
def test_a_chat_without_room_for_its_tokens_is_stored_alone(farm: Farm, params: bytes, log: bytes) -> None:
    """Nothing of what only a replay needs stays then, and its bytes are not counted."""
    store_chat(farm, "a", params, log)
    fields = farm.client.hgetall(ResponseKeys("o").record("a"))
    assert fields["response"] == "{}" and not {"params", "entries"} & fields.keys()
    assert total(farm) <= RESPONSE_OVERHEAD + sum(len(name) + len(value) for name, value in fields.items())
    with pytest.raises(RequestNotFound, match="stored without its prompt"):
        find_kept(farm.client, [MODEL], "a")


def entries(*tokens: int, finish: str | None = None, choice: int = 0) -> list[LogEntry]:
    log = [LogEntry(seq, choice, one) for seq, one in enumerate(tokens, 1)]
    return [*log[:-1], msgspec.structs.replace(log[-1], finish=finish)]


def test_differences() -> None:
    """Of tokens, lengths and ends; of a request that was cancelled only the tokens that it had count."""

    def kept_request(*log: LogEntry) -> KeptRequest:
        params = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=9, n=1 + max(one.choice for one in log)))
        return KeptRequest("m", "a", params, list(log))

    first = kept_request(*entries(1, 2, 3, finish="length"))
    assert differences(first, entries(1, 2, 3, finish="length")) == []
    other = entries(1, 2, 4, finish="length")
    assert differences(first, other) == [Difference(0, 2, first.entries[2], other[2])]
    assert differences(first, entries(1, 2)) == [Difference(0, 2, first.entries[2], None)]
    assert differences(first, entries(1, 2, 3, finish="stop"))[0].position == 2
    cancelled = kept_request(*entries(1, 2), LogEntry(3, 0, None, "cancelled", "by the client"))
    assert differences(cancelled, entries(1, 2, finish="length")) == []
    two = kept_request(*entries(1, 2, finish="stop"), *entries(5, 6, finish="stop", choice=1))
    assert [one.choice for one in differences(two, entries(1, 2, finish="stop"))] == [1]
