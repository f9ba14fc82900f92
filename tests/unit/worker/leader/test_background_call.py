"""A thread runs one call: while its owner does something else."""

from __future__ import annotations

import threading
from contextvars import ContextVar

import pytest

from tests.waiting import until
from worker.leader.exchange import BackgroundCall


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_what_a_call_returns_or_raises_comes_back_in_order() -> None:
    """An exception is raised where its answer is asked for, and the next call runs."""
    background: BackgroundCall[int] = BackgroundCall("answers")
    background.send(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        background.answer()
    background.send(lambda: 7)
    assert background.answer() == 7
    background.close()


def test_a_call_has_its_owners_context() -> None:
    """So that its log lines carry model, rank and epoch."""
    epoch: ContextVar[int] = ContextVar("epoch")
    epoch.set(7)
    background: BackgroundCall[int] = BackgroundCall("context")
    background.send(epoch.get)
    assert background.answer() == 7
    background.close()


def test_its_owner_goes_on_meanwhile_and_waits_no_longer_than_it_wants() -> None:
    """A call that takes long is left to itself, and the thread ends after it."""
    background: BackgroundCall[bool] = BackgroundCall("slow")
    gate = threading.Event()
    background.send(gate.wait)
    background.wait(0.01)
    background.close()
    assert named("slow")
    gate.set()
    until(lambda: not named("slow"), 10.0)
