"""Servers that the whole run shares. Whoever takes one empties it first."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from ops.chaos.system.topologies import ClusterTopology, SentinelTopology, cluster, sentinel
from tests.servers import NEW, OLD, Server, serving
from worker.agent.devices import accelerators

# Read when torch is loaded, so set before anything imports it: threads that spin while they wait starve each other
# where tests run side by side.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Whatever the system has on its PATH, the farms of tests have the server that comes with them.
os.environ["FURROW_REDIS_SERVER"] = str(NEW)

# Agents of tests run side by side; those that are about metrics name a port.
os.environ.setdefault("FURROW_METRICS", "off")

# Read when Triton is loaded, which other libraries may do: without a GPU its kernels run in its interpreter.
if not accelerators():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that runs the tests in the background lets them ignore Ctrl-C, and all processes that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes that tests start find the sources compiled: an API process is ready in two thirds of the time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# No test meets a certificate of the internet, and each HTTP client would read them all: 30 ms of processor time.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

# No command finds a farm that others run on this machine, nor do they find those of the tests.
_STATE = tempfile.TemporaryDirectory(prefix="furrow-tests-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name

# A slow machine is no failure of a property.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# As in the product, tracebacks without local variables: those of a step hold its prompts, and take seconds to render.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)


# Collections of garbage take 7 to 14 % of the processor time of tests: torch and the collected tests are many objects.
gc.set_threshold(10_000, *gc.get_threshold()[1:])


def pytest_collection_finish() -> None:
    """No collection visits what lives as long as the run."""
    gc.freeze()


@pytest.fixture(scope="session")
def old_server() -> Iterator[Server]:
    with serving(OLD) as server:
        yield server


@pytest.fixture(scope="session")
def new_server() -> Iterator[Server]:
    with serving(NEW) as server:
        yield server


@pytest.fixture(scope="session")
def cluster_server() -> Iterator[ClusterTopology]:
    """Three shards without replicas."""
    with cluster(binary=NEW) as topology:
        yield topology


@pytest.fixture(scope="session")
def sentinel_servers() -> Iterator[SentinelTopology]:
    """A primary with a replica and three Sentinels. Whoever fails it over heals it."""
    with sentinel(binary=NEW) as topology:
        yield topology
