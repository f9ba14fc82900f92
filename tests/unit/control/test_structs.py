"""Structs are described before threads begin."""

from __future__ import annotations

import threading

import msgspec

from control.messages import describe_structs

evaluated: list[str] = []


def number() -> type[int]:
    """An annotation that records the thread in which msgspec evaluates it."""
    evaluated.append(threading.current_thread().name)
    return int


class Outer(msgspec.Struct):
    inner: Inner


class Inner(msgspec.Struct):
    field: number()  # type: ignore[valid-type]  # pyright: ignore[reportInvalidTypeForm]


def test_no_thread_describes_a_type() -> None:
    """msgspec shares a description that is not complete: two threads that first decode a type end the process."""
    describe_structs()
    decoded: list[Outer] = []
    thread = threading.Thread(
        target=lambda: decoded.append(msgspec.json.decode(b'{"inner": {"field": 1}}', type=Outer))
    )
    thread.start()
    thread.join()
    assert decoded == [Outer(Inner(1))]
    assert evaluated == [threading.main_thread().name]
