"""A thread that runs one call while its owner does something else."""

from __future__ import annotations

import threading
from contextvars import ContextVar

import pytest

from tests.waiting import until
from worker.tp_group.courier import Courier


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_what_a_call_returns_or_raises_comes_back_in_order() -> None:
    """An exception is raised where its answer is asked for, and the next call runs."""
    courier: Courier[int] = Courier("answers")
    courier.send(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        courier.answer()
    courier.send(lambda: 7)
    assert courier.answer() == 7
    courier.close()


def test_a_call_has_its_owners_context() -> None:
    """So that its log lines carry model, rank and epoch."""
    epoch: ContextVar[int] = ContextVar("epoch")
    epoch.set(7)
    courier: Courier[int] = Courier("context")
    courier.send(epoch.get)
    assert courier.answer() == 7
    courier.close()


def test_its_owner_goes_on_meanwhile_and_waits_no_longer_than_it_wants() -> None:
    """A call that takes long is left to itself, and the thread ends after it."""
    courier: Courier[bool] = Courier("slow")
    gate = threading.Event()
    courier.send(gate.wait)
    courier.wait(0.01)
    courier.close()
    assert named("slow")
    gate.set()
    until(lambda: not named("slow"), 10.0)
