"""Refusals of Redis that are waited for."""

from __future__ import annotations

import pytest
from redis import exceptions

from control.redis.connection import lacks_right, transient


@pytest.mark.parametrize(
    "error",
    [
        exceptions.BusyLoadingError("Redis is loading the dataset in memory"),
        exceptions.ReadOnlyError("You can't write against a read only replica."),
        exceptions.ResponseError("MISCONF Redis is configured to save RDB snapshots, but it can't"),
        exceptions.ResponseError("Error running script (call to f_1): @user_script:1: -OOM command"),
        exceptions.ResponseError("UNBLOCKED force unblock from blocking operation, instance state changed"),
        exceptions.ResponseError("BUSY Redis is busy running a script."),
    ],
)
def test_a_server_that_will_serve_again(error: exceptions.ResponseError) -> None:
    """Loading, full, unable to save, a replica, busy: by type, by text, or inside a script of 6.2."""
    assert transient(error)


@pytest.mark.parametrize(
    "error",
    [
        exceptions.NoScriptError("No matching script."),
        exceptions.ResponseError("BUSYGROUP Consumer Group name already exists"),
        exceptions.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
        exceptions.ResponseError("Error running script (call to f_1): @user_script:1: attempt to index a nil value"),
    ],
)
def test_a_mistake_is_no_outage(error: exceptions.ResponseError) -> None:
    """Trying again would not help."""
    assert not transient(error)


@pytest.mark.parametrize(
    "error",
    [
        exceptions.NoPermissionError("User default has no permissions to run the 'evalsha' command"),
        exceptions.ResponseError("ERR ACL failure in script: User farm has no permissions to run the 'xadd' command"),
        exceptions.ResponseError("The user executing the script can't run this command or subcommand script: f_1"),
    ],
)
def test_a_right_that_is_lacking(error: exceptions.ResponseError) -> None:
    """It is neither an outage nor a mistake: processes wait for the operator."""
    assert lacks_right(error) and not transient(error)
