"""Batches of commands reach a Cluster's nodes; and through redirections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from redis.exceptions import AskError, ClusterDownError, ConnectionError, MovedError

from control.redis.cluster import MOST_HOPS, NodeBatch, Routing, Sending, Shards, exchanging, routing_key
from control.redis.pipeline import RedisCommand

A, B = ("a", 1), ("b", 2)
LOW, HIGH = "bar", "foo"
"""Keys of slots 5061 and 12182."""


def shards() -> Shards:
    shards = Shards([A])
    shards.learn([[0, 8191, ["a", 1, "id"], ["replica", 9, "id"]], [8192, 16383, ["b", 2, "id"]]], A)
    return shards


def routing(table: Shards, *keys: str) -> Routing:
    return Routing(table, [RedisCommand(("GET", key)) for key in keys])


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("GET", "k"), "k"),
        (("EVALSHA", "sha", 2, "k", "l", "arg"), "k"),
        (("EVALSHA", "sha", 1, b"k", b"no text: \xff"), "k"),
        (("XREAD", "BLOCK", 5, b"STREAMS", "k", "0"), "k"),
        (("XREADGROUP", "GROUP", "g", "c", "STREAMS", "k", ">"), "k"),
        (("XINFO GROUPS", "k"), "k"),
        (("XGROUP", "CREATE", "k", "g", "0"), "k"),
        (("PING",), None),
        (("CONFIG SET", "maxmemory", "1"), None),
    ],
)
def test_a_command_goes_where_its_key_is(words: tuple[Any, ...], key: str | None) -> None:
    """Scripts, stream reads and subcommands have it in places of their own."""
    assert routing_key(words) == key


def test_commands_are_sent_to_each_node_together() -> None:
    """One batch for each node, and the replies come back in the order of the commands."""
    sent = routing(shards(), HIGH, LOW, HIGH)
    batches = sent.batches()
    assert [(batch.place, batch.indices) for batch in batches] == [(B, [0, 2]), (A, [1])]
    sent.take(batches[0], ["x", "z"])
    sent.take(batches[1], ["y"])
    assert sent.batches() == []
    assert sent.replies == ["x", "y", "z"]


def test_a_slot_that_moved_is_followed_and_remembered() -> None:
    """The next command goes to the new place at once, and the table is read again."""
    table = shards()
    sent = routing(table, LOW)
    sent.take(sent.batches()[0], [MovedError("5061 b:2")])
    assert [batch.place for batch in sent.batches()] == [B]
    assert table.stale
    assert table.owner(LOW) == B


def test_a_key_on_its_way_is_asked_for_once() -> None:
    """ASK sends this command to the other node, with ASKING before it; the table stays."""
    table = shards()
    sent = routing(table, LOW)
    sent.take(sent.batches()[0], [AskError("5061 b:2")])
    [batch] = sent.batches()
    assert batch == NodeBatch(B, True, [0])
    assert [command.words for command in sent.packed(batch)] == [("ASKING",), ("GET", LOW)]
    sent.take(batch, ["OK", "value"])
    assert sent.replies == ["value"]
    assert table.owner(LOW) == A


def test_redirections_come_to_an_end() -> None:
    """Two nodes that point at each other don't keep a command for ever: the last answer stands."""
    sent, hops = routing(shards(), LOW), 0
    while batches := sent.batches():
        sent.take(batches[0], [MovedError(f"5061 {'b:2' if hops % 2 else 'a:1'}")])
        hops += 1
    assert hops == MOST_HOPS
    assert isinstance(sent.replies[0], MovedError)


def test_a_node_that_is_away_fails_its_own_commands() -> None:
    """The others' replies stand; the table is to be read again."""
    table = shards()
    sent = routing(table, LOW, HIGH)
    low, high = sent.batches()
    sent.failed(low, ConnectionError("gone"))
    sent.take(high, ["value"])
    assert isinstance(sent.replies[0], ConnectionError)
    assert sent.replies[1] == "value"
    assert table.stale


def test_a_slot_without_a_node_is_an_absence() -> None:
    """As is a Cluster that is down: both ask for the table again."""
    table = Shards([A])
    table.learn([[0, 8191, ["", 1, "id"]]], A)
    assert table.owner(LOW) == A  # a node without a name is reached as it was asked
    sent = routing(table, HIGH, LOW)
    sent.take(sent.batches()[0], [ClusterDownError("The cluster is down")])
    assert isinstance(sent.replies[0], ConnectionError)
    assert table.stale


def test_a_node_with_an_old_table_undoes_no_redirection() -> None:
    """After a move the command goes to the new place, whoever has not heard of it; the replies of others are kept."""
    exchange = exchanging(shards(), [RedisCommand(("GET", LOW)), RedisCommand(("GET", HIGH))])
    places: list[tuple[Any, ...]] = []

    def replies(sendings: Sequence[Sending]) -> list[Any]:
        places.append(tuple(sending.place for sending in sendings))
        assert not any(sending.scout for sending in sendings)
        return [[MovedError("5061 b:2")] if sending.place == A else ["value"] for sending in sendings]

    sendings = next(exchange)
    with pytest.raises(StopIteration) as ended:
        while True:
            sendings = exchange.send(replies(sendings))
    assert ended.value.value == ["value", "value"] and places == [(A, B), (B,)]
