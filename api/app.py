"""The application factory."""

from __future__ import annotations

from litestar import Litestar, get
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.exceptions import HTTPException, ValidationException
from litestar.plugins import PluginProtocol
from litestar.plugins.core import MsgspecDIPlugin
from litestar.response import Redirect

from api.console import console_routes
from api.http.errors import handle_in_shape
from api.process import Process
from api.routes import (
    completions,
    embeddings,
    health,
    llama_cpp,
    messages,
    models,
    ollama,
    requests,
    responses,
    tokens,
    usage,
)
from api.routes.document import OpenApiDocument, document_routes
from api.routes.farm import farm_routes
from api.routes.generation import identify
from api.settings import ApiSettings


def cross_origin(origins: tuple[str, ...]) -> CORSConfig | None:
    """CORS for pages of these origins; None without any. Keys are headers: a page has no rights of its visitor."""
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
    completions.create_chat_completion,
    completions.create_completion,
    embeddings.create_embedding,
    embeddings.embed,
    embeddings.rerank,
    embeddings.score,
    embeddings.embed_in_llama_cpp_form,
    embeddings.embed_in_tei_form,
    completions.fill_gap,
    llama_cpp.complete,
    llama_cpp.apply_template,
    llama_cpp.count_chat_tokens,
    llama_cpp.show_props,
    llama_cpp.list_slots,
    completions.list_chat_completions,
    completions.retrieve_chat_completion,
    completions.relabel_chat_completion,
    completions.delete_chat_completion,
    completions.list_chat_messages,
    responses.create_response,
    responses.compact_response,
    responses.count_input_tokens,
    responses.retrieve_response,
    responses.delete_response,
    responses.cancel_response,
    responses.list_input_items,
    messages.create_message,
    messages.count_message_tokens,
    models.list_models,
    models.retrieve_model,
    models.delete_model,
    ollama.chat,
    ollama.generate_text,
    ollama.embed_texts,
    ollama.embed_text,
    ollama.list_tags,
    ollama.show_model,
    ollama.list_running,
    ollama.ollama_version,
    ollama.pull_model,
    ollama.delete_model,
    ollama.root,
    requests.show_request,
    requests.follow_request,
    requests.delete_request,
    requests.cancel_request,
    tokens.tokenize,
    tokens.detokenize,
    tokens.tokenizer_info,
    usage.own_usage,
    farm_routes,
    console_routes,
    health.health,
    health.stream_probe,
    health.version,
    health.load,
    health.ready,
    health.metrics,
    docs,
]


class Application(Litestar):
    """Litestar without plugins that nothing here uses: pydantic, where it is installed, takes 0.2 s to import."""

    @staticmethod
    def _get_default_plugins(plugins: list[PluginProtocol]) -> list[PluginProtocol]:
        return [*plugins, MsgspecDIPlugin()]


def create_app(settings: ApiSettings) -> Litestar:
    """An ASGI application for one API process; it needs nothing but the Redis that the settings name."""
    process = Process(settings)

    async def start(_: Litestar) -> None:
        process.start()

    async def stop(_: Litestar) -> None:
        await process.stop()

    return Application(
        route_handlers=[*ROUTES, *document_routes(OpenApiDocument(ROUTES))],
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
        openapi_config=None,
        logging_config=None,
        state=State({"process": process}),
    )
