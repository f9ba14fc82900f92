"""The operator's routes: the functions behind the `furrow` command, over HTTP."""

from __future__ import annotations

from typing import Any

from litestar import Response, Router

from api.http.gate import operators_only
from api.routes.farm.access import change_limits, create_key, list_keys, revoke_key, show_usage
from api.routes.farm.models import (
    load_model,
    pause_model,
    reload_model,
    resume_model,
    scale_model,
    show_history,
    show_memory,
    show_models,
    show_spec,
    unload_model,
)
from api.routes.farm.places import (
    drain_host,
    drain_replica,
    follow_farm,
    forget_host,
    show_farm,
    show_hosts,
    show_plots,
)
from api.routes.farm.requests import (
    cancel_request,
    drop_letter,
    list_ended,
    list_letters,
    list_requests,
    retry_letter,
    show_letter,
    show_letter_text,
    show_life,
    show_text,
)


async def _unstored(response: Response[Any]) -> Response[Any]:
    """Litestar's `after_request`: no browser or proxy keeps prompts, names and keys, nor gives an answer of before."""
    response.headers.setdefault("cache-control", "no-store")
    return response


farm_routes = Router(
    path="/farm",
    guards=[operators_only],
    after_request=_unstored,
    tags=["operators"],
    route_handlers=[
        *(show_farm, follow_farm, show_plots, show_hosts, drain_host, forget_host, drain_replica),
        *(
            show_models,
            show_spec,
            show_memory,
            show_history,
            load_model,
            reload_model,
            scale_model,
            pause_model,
            resume_model,
            unload_model,
        ),
        *(list_requests, list_ended, cancel_request, show_life, show_text),
        *(list_letters, show_letter, show_letter_text, retry_letter, drop_letter),
        *(list_keys, create_key, change_limits, revoke_key, show_usage),
    ],
)
