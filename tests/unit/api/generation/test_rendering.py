"""A stream's bytes depend on the log alone: resumed at any place, joined in any way, a client has the same."""

from __future__ import annotations

from itertools import accumulate, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.generation.chunks import StreamRenderer
from api.schemas.view import Endpoint, View, parse_cursor
from control.messages import LogEntry
from tests.integration.api.sse import Event, events
from tests.unit.api.chat.test_answer import EOS, VOCABULARY

TEXTS = ["naïve 😀 END", "two"]


def log_of(texts: list[str], cached: int | None = None) -> list[LogEntry]:
    """Choices that speak in turns, each ended by the end-of-sequence token."""
    rows = [[*VOCABULARY.tokenizer.encode(text, add_special_tokens=False).ids, EOS] for text in texts]
    log: list[LogEntry] = []
    for at in range(max(map(len, rows))):
        for choice, tokens in enumerate(rows):
            if at < len(tokens):
                last = at == len(tokens) - 1
                finish, cause = ("stop", "token") if last else (None, None)
                told = cached if not log else None
                log.append(
                    LogEntry(len(log) + 1, choice, tokens[at], finish, cause, cached=told)  # type: ignore[arg-type]
                )
    return log


LOGS = [log_of(TEXTS, cached=3), log_of(["x"] * 2, cached=1)]
VIEW = View(
    endpoint="chat", created=1, model="m", n=2, members=2, include_usage=True, stop=["EN?"], stop_ids=[EOS], stream=True
)


def stream(sizes: list[int], resume: str | None = None) -> list[Event]:
    """Feed both members' logs in batches of the given sizes, in turns, then end."""
    renderer = StreamRenderer("abc", VIEW, VOCABULARY, 5, parse_cursor(resume) if resume else None)
    data = b""
    cuts = [list(accumulate(sizes, initial=0))] * 2
    for batch in range(len(sizes)):
        for member, log in enumerate(LOGS):
            if part := log[cuts[member][batch] : cuts[member][batch + 1]]:
                data += renderer.feed(member, part)
    for member, log in enumerate(LOGS):
        if rest := log[sum(sizes) :]:
            data += renderer.feed(member, rest)
    assert renderer.finished
    return list(events((data + renderer.end()).decode().splitlines()))


def seen(event_list: list[Event]) -> tuple[list[str], list[str]]:
    texts = [""] * 4
    rest: list[object] = []
    for event in event_list:
        for choice in event.data["choices"] if event.data else []:
            texts[choice["index"]] += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                rest.append((choice["index"], choice["finish_reason"]))
        if event.data and event.data["usage"]:
            rest.append(event.data["usage"])
    return texts, sorted(map(str, rest))


@given(st.lists(st.integers(1, 6), max_size=8), st.lists(st.integers(1, 6), max_size=8), st.integers(0, 10**6))
def test_resuming_loses_and_repeats_nothing(before: list[int], after: list[int], cut: int) -> None:
    """Cut after any event, resumed with other batches, the client has what an undisturbed stream gives."""
    first = stream(before)
    kept = first[: cut % len(first) + 1]
    rest = [event for event in stream(after, kept[-1].id) if not event.done]
    assert seen(kept + rest) == seen(stream([]))


def test_usage_counts_all_prompts_and_choices() -> None:
    """Two prompts with two choices each: four texts, all tokens counted, those that were cached too."""
    texts, rest = seen(stream([]))
    assert texts == [*TEXTS, "x", "x"]
    total = sum(entry.token is not None for log in LOGS for entry in log)
    usage = {"prompt_tokens": 5, "completion_tokens": total, "total_tokens": 5 + total}
    details = {"prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 0}}
    assert str(usage | details) in rest


def test_neighbouring_tokens_are_one_chunk() -> None:
    """Tokens that are ready at once go out as one chunk per run of a choice."""
    view = View(endpoint="completions", created=1, model="m", stop_ids=[EOS])
    renderer = StreamRenderer("abc", view, VOCABULARY, 5)
    events_read = list(events(renderer.feed(0, log_of(["hello"])).decode().splitlines()))
    assert [event.text for event in events_read] == ["hello", ""]
    assert events_read[1].data["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("text", ["", "abc", "abc:", "abc:1", "abc:1.", "abc:-1.0", "abc:1.0,x", ":1.1"])
def test_a_cursor_that_nobody_sent(text: str) -> None:
    """A Last-Event-ID of another shape is refused by name."""
    from control.errors import RequestError

    with pytest.raises(RequestError, match="Last-Event-ID"):
        parse_cursor(text)


@given(st.lists(st.integers(1, 6), max_size=8), st.integers(0, 200))
def test_ids_and_counts_of_each_chunk_are_of_the_log_alone(sizes: list[int], cut: int) -> None:
    """However tokens are joined and wherever a stream is resumed, each chunk's ids follow those before it, and its
    counts are those of its choice up to its last token.
    """
    view = msgspec.structs.replace(
        VIEW, members=1, return_ids=True, continuous_usage=True, prompt_ids=[[1, 2, 3, 4, 5]], stop=[]
    )
    whole = shown(view, sizes)
    resumed = whole[min(cut, len(whole) - 1)].id
    ids: list[list[int]]
    for part in ([*whole[: cut + 1], *shown(view, sizes[::-1], resumed)], whole):
        ids = [[], []]
        for event in part:
            if event.done or not event.data["choices"]:
                continue
            [choice] = event.data["choices"]
            ids[choice["index"]] += choice.get("token_ids", [])
            counted = len(ids[choice["index"]])
            usage = {"prompt_tokens": 5, "total_tokens": 5 + counted, "completion_tokens": counted}
            assert event.data["usage"] == usage
            assert event.data.get("prompt_token_ids") == ([1, 2, 3, 4, 5] if "role" in choice["delta"] else None)
        assert ids == [[entry.token for entry in LOGS[0] if entry.choice == choice] for choice in (0, 1)]


def shown(view: View, sizes: list[int], resume: str | None = None) -> list[Event]:
    """The events of the first log under `view`, fed in batches of these sizes."""
    renderer = StreamRenderer("abc", view, VOCABULARY, 5, parse_cursor(resume) if resume else None)
    cuts = [0, *accumulate(sizes), len(LOGS[0])]
    data = b"".join(renderer.feed(0, LOGS[0][start:end]) for start, end in pairwise(cuts))
    return list(events((data + renderer.end()).decode().splitlines()))


def test_ids_of_a_completion() -> None:
    """As in vLLM: each choice's first chunk has its prompt's ids, and a whole body has both lists in each choice."""
    view = View(endpoint="completions", created=1, model="m", members=2, stop_ids=[EOS], return_ids=True)
    view.prompt_ids = [[7], [8, 9]]
    one = [entry for entry in LOGS[1] if entry.choice == 0]
    log = [msgspec.structs.replace(entry, seq=seq) for seq, entry in enumerate(one, 1)]
    tokens = [entry.token for entry in log]
    renderer = StreamRenderer("abc", view, VOCABULARY, 3)
    data = (renderer.feed(0, log) + renderer.feed(1, log) + renderer.end()).decode()
    choices = [event.data["choices"][0] for event in events(data.splitlines()) if not event.done]
    assert [choice.get("prompt_token_ids") for choice in choices if choice["text"] == ""][:2] == [[7], [8, 9]]
    assert [choice["token_ids"] for choice in choices if choice["text"]] == [tokens] * 2
    renderer = StreamRenderer("abc", view, VOCABULARY, 3)
    pieces = renderer.empty_pieces()
    for member in (0, 1):
        renderer.collect(pieces, member, log)
    whole = msgspec.json.decode(renderer.whole(pieces))["choices"]
    assert [(choice["prompt_token_ids"], choice["token_ids"]) for choice in whole] == [([7], tokens), ([8, 9], tokens)]


def computed_by(log: list[LogEntry], *fingerprints: str) -> list[LogEntry]:
    """The first entry names the first fingerprint, the middle one the second."""
    places = dict(zip((0, len(log) // 2), fingerprints, strict=False))
    return [msgspec.structs.replace(entry, fingerprint=places.get(at)) for at, entry in enumerate(log)]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_every_chunk_names_the_replica_that_computed_it(endpoint: str) -> None:
    """From the middle on another one, however the entries are fed; the last ones, of end and usage, the last one."""
    view = msgspec.structs.replace(VIEW, endpoint=endpoint, n=1, members=1)
    log = computed_by(log_of(["one two three"]), "fp_a", "fp_b")
    middle = len(log) // 2
    for parts in ([log], [[entry] for entry in log], [log[: middle + 1], log[middle + 1 :]]):
        renderer = StreamRenderer("abc", view, VOCABULARY, 5)
        data = b"".join(renderer.feed(0, part) for part in parts) + renderer.end()
        event_list = [event.data for event in events(data.decode().splitlines()) if event.data]
        texts = {"fp_a": "", "fp_b": ""}
        for chunk in event_list:
            for choice in chunk["choices"]:
                texts[chunk["system_fingerprint"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        assert texts == {"fp_a": "one two three"[:middle], "fp_b": "one two three"[middle:]}
        assert event_list[-1]["usage"] and event_list[-1]["system_fingerprint"] == "fp_b"


def test_a_body_names_the_last_replica_and_no_name_of_several() -> None:
    """An answer that moved has the fingerprint under which it ended; prompts that differ have none; without entries
    that name one there is no such field."""

    def whole(*logs: list[LogEntry]) -> str | None:
        view = msgspec.structs.replace(VIEW, endpoint="completions", n=1, members=len(logs))
        renderer = StreamRenderer("abc", view, VOCABULARY, 5)
        pieces = renderer.empty_pieces()
        for member, log in enumerate(logs):
            renderer.collect(pieces, member, log)
        body = msgspec.json.decode(renderer.whole(pieces))
        assert body.get("system_fingerprint", "") is not None
        return body.get("system_fingerprint")

    log = log_of(["one"])
    assert whole(computed_by(log, "fp_a")) == whole(*[computed_by(log, "fp_a")] * 2) == "fp_a"
    assert whole(computed_by(log, "fp_a", "fp_b")) == "fp_b"
    assert whole(computed_by(log, "fp_a"), computed_by(log, "fp_b")) is None
    assert whole(log) is None


@pytest.mark.parametrize("told", [{"seed": 7}, {}])
def test_a_stream_s_body_to_store(told: dict[str, int]) -> None:
    """It is JSON with and without fields of the request, and the same for a client that had a part before."""
    view = msgspec.structs.replace(VIEW, n=1, members=1, extra_fields=told)
    log = log_of(["naive"])
    whole = StreamRenderer("abc", view, VOCABULARY, 5)
    pieces = whole.empty_pieces()
    whole.collect(pieces, 0, log)
    body = whole.with_request(pieces)
    assert msgspec.json.decode(body) == msgspec.json.decode(whole.whole(pieces)) | told
    resumed = StreamRenderer("abc", view, VOCABULARY, 5, parse_cursor("abc:2.1"))
    resumed.feed(0, log[:-1])
    assert resumed.to_store is None
    resumed.feed(0, log[-1:])
    assert resumed.to_store == (body if told else None)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_model_may_have_any_name(endpoint: Endpoint) -> None:
    """Also one that reads like a chunk without choices, at which the bytes around a choice are divided."""
    name = 'm"choices":[]\\"choices":[]'
    renderer = StreamRenderer("abc", View(endpoint=endpoint, created=1, model=name, stop_ids=[EOS]), VOCABULARY, 5)
    chunks = [event.data for event in events(renderer.feed(0, log_of(["hi"])).decode().splitlines())]
    assert {chunk["model"] for chunk in chunks} == {name} and all(len(chunk["choices"]) == 1 for chunk in chunks)
