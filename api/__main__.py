"""`python -m api`: one HTTP API process, until SIGTERM or SIGINT and the end of its open streams."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
from types import FrameType
from typing import Any

if __name__ == "__main__":
    gc.disable()  # a start leaves little garbage, and a collection visits all that it makes; `serve` enables it

from control import logs  # before structlog, which imports rich without it

# isort: split
import click

from api.app import create_app
from api.http.bodies import MIB, BodyLimits
from api.http.connection import ConnectionLimits
from api.options import api_options
from api.server import Server
from api.settings import ApiSettings
from control import access
from control.errors import FurrowError
from control.listening import free_port, second_port
from control.messages import describe_structs
from control.operations.options import asks_for_key, key_options, redis_option, why_asked
from control.process import die_with_parent
from control.redis.connection import connect, run
from control.redis.servers import wait_until_ready
from control.settings import Settings, wait_for_url

OWN_FILES = 128
"""Open files that are no clients' connections: those to Redis, children, sockets."""


@click.command()
@redis_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0: a free port.")
@key_options
@api_options
def main(
    redis_url: str | None,
    host: str,
    port: int,
    api_keys: tuple[str, ...],
    keys: bool,
    no_auth: bool,
    header_timeout: float,
    max_connections: int,
    max_body: float,
    body_memory: float,
    ollama_port: int | None,
    **options: Any,
) -> None:
    """Run one HTTP API process."""
    if redis_url:
        os.environ["FURROW_REDIS_URL"] = redis_url
    try:
        environment = Settings.from_environment()
        if environment.has_parent:
            die_with_parent()
        asks = asks_for_key(host, api_keys, keys, no_auth)
        port = free_port(host, port)
        if ollama_port is not None:
            ollama_port = second_port(host, ollama_port, port)
        logs.configure(environment.log_format, environment.log_level)
        key_count = count_keys(environment)
        if asks and not (keys or api_keys):
            click.echo(f"furrow api: {why_asked(host, key_count)}", err=True)
    except FurrowError as error:
        click.echo(f"furrow api: {error}", err=True)
        sys.exit(1)
    max_connections = fitting_connections(max_connections)
    text_bytes = round(max_body * MIB)
    memory_bytes = round(body_memory * MIB)
    settings = ApiSettings(
        redis_url=environment.redis_url,
        host=host,
        port=port,
        ollama_port=ollama_port,
        api_keys=api_keys,
        require_keys=asks,
        connection_limits=ConnectionLimits(head_timeout=header_timeout, connections=max_connections),
        body_limits=BodyLimits(text_bytes=text_bytes, memory_bytes=memory_bytes, grace=header_timeout),
        **options,
    )
    serve(settings)


def count_keys(environment: Settings) -> int:
    """The number of the farm's API keys, once its Redis has answered. Raises RedisUnavailable, and
    SettingsError where none is there to connect to."""
    wait_for_url(environment.redis_url, environment.redis_wait_s)
    with connect(environment.redis_url) as client:
        wait_until_ready(client, environment.redis_wait_s, lambda line: click.echo(line, err=True))
        return run(client, access.count())


def fitting_connections(connections: int) -> int:
    """As many of these connections as the process may have open files, each being one; the soft limit is raised."""
    # The usual soft limit of 1024 is less than what may wait in the queue.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    fitting = max(1, most - OWN_FILES) if most != resource.RLIM_INFINITY else connections
    if fitting < connections:
        click.echo(
            f"furrow api: `ulimit -Hn` allows {most} open files: {fitting} connections instead of {connections}, and "
            f"503 beyond them. Raise it to {connections + OWN_FILES} (LimitNOFILE= of a systemd unit) or lower "
            "--max-connections.",
            err=True,
        )
    return min(connections, fitting)


def serve(settings: ApiSettings) -> None:
    """Serve until a signal, then drain for up to the grace period."""
    describe_structs()
    app = create_app(settings)
    server = Server(app, app.state.process)
    server.garbage_collection.start()
    # A thread that reads the catalog each second would keep the streams waiting for five milliseconds at a time.
    sys.setswitchinterval(0.001)

    def stop(_number: int, _frame: FrameType | None) -> None:
        server.should_exit = True

    # For a signal before the server listens; then it has handlers of its own.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    server.run()


if __name__ == "__main__":
    main()
