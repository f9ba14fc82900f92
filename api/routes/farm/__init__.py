"""The operator's routes: the functions behind the `furrow` command, over HTTP."""

from __future__ import annotations

from litestar import Router

from api.access.operator import operators_only
from api.routes.farm.access import change_limits, create_key, list_keys, revoke_key, show_usage
from api.routes.farm.letters import drop_letter, list_letters, retry_letter, show_letter
from api.routes.farm.models import (
    load_model,
    pause_model,
    reload_model,
    resume_model,
    scale_model,
    show_history,
    show_models,
    show_spec,
    unload_model,
)
from api.routes.farm.places import drain_host, drain_replica, follow_farm, show_farm, show_hosts
from api.routes.farm.running import cancel_request, list_requests, show_life
from api.routes.farm.texts import show_letter_text, show_text

farm_routes = Router(
    path="/farm",
    guards=[operators_only],
    tags=["operators"],
    route_handlers=[
        *(show_farm, follow_farm, show_hosts, drain_host, drain_replica),
        *(
            show_models,
            show_spec,
            show_history,
            load_model,
            reload_model,
            scale_model,
            pause_model,
            resume_model,
            unload_model,
        ),
        *(list_requests, cancel_request, show_life, show_text),
        *(list_letters, show_letter, show_letter_text, retry_letter, drop_letter),
        *(list_keys, create_key, change_limits, revoke_key, show_usage),
    ],
)
