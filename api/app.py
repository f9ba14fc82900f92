"""The application factory."""

from __future__ import annotations

from litestar import Litestar, get
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.exceptions import HTTPException, ValidationException
from litestar.openapi import OpenAPIConfig
from litestar.response import Redirect

from api.errors.message_errors import handle_in_shape
from api.openapi.document import ServedDocument, ServedPage
from api.openapi.openapi import add_bodies
from api.process import Process
from api.routes.chat import create_chat_completion
from api.routes.completions import create_completion
from api.routes.embeddings import create_embedding
from api.routes.farm import farm_routes
from api.routes.generation import identify
from api.routes.health import health, metrics, ready
from api.routes.messages import count_message_tokens, create_message
from api.routes.models import list_models, retrieve_model
from api.routes.requests import cancel_request, delete_request, follow_request, show_request
from api.routes.responses import (
    cancel_response,
    compact_response,
    count_input_tokens,
    create_response,
    delete_response,
    list_input_items,
    retrieve_response,
)
from api.routes.tokens import detokenize, tokenize, tokenizer_info
from api.routes.usage import own_usage
from api.settings import ApiSettings


def cross_origin(origins: tuple[str, ...]) -> CORSConfig | None:
    """The CORS settings that let pages of these origins call from a browser; None where there are none: no page may.

    Keys come in a header, never in a cookie, so that a page can't use its visitor's rights without being told a key.
    """
    if not origins:
        return None
    return CORSConfig(
        allow_origins=list(origins), allow_headers=["*"], allow_credentials=False, expose_headers=["*"], max_age=600
    )


@get("/docs", include_in_schema=False)
async def docs() -> Redirect:
    """Redirect from the path where other servers have their documentation."""
    return Redirect("/schema")


ROUTES = [
    create_chat_completion,
    create_completion,
    create_embedding,
    create_response,
    compact_response,
    count_input_tokens,
    retrieve_response,
    delete_response,
    cancel_response,
    list_input_items,
    create_message,
    count_message_tokens,
    list_models,
    retrieve_model,
    show_request,
    follow_request,
    delete_request,
    cancel_request,
    tokenize,
    detokenize,
    tokenizer_info,
    own_usage,
    farm_routes,
    health,
    ready,
    metrics,
    docs,
]


def create_app(settings: ApiSettings) -> Litestar:
    """An ASGI application for one API process; it needs nothing but the Redis that the settings name."""
    process = Process(settings)

    async def start(_: Litestar) -> None:
        process.start()

    async def stop(_: Litestar) -> None:
        await process.stop()

    app = Litestar(
        route_handlers=ROUTES,
        # All three, or the framework's own error shape leaks for some of them.
        exception_handlers={
            HTTPException: handle_in_shape,
            ValidationException: handle_in_shape,
            Exception: handle_in_shape,
        },
        before_request=identify,
        on_startup=[start],
        on_shutdown=[stop],
        cors_config=cross_origin(settings.cors_origins),
        request_max_body_size=None,
        openapi_config=OpenAPIConfig(
            title="Furrow",
            version="1",
            path="/schema",
            use_handler_docstrings=True,
            render_plugins=[ServedPage(), ServedDocument()],
        ),
        logging_config=None,
        state=State({"process": process}),
    )
    add_bodies(app.openapi_schema)
    return app
