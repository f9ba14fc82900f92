"""The OpenAPI document as it is served."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from threading import Lock
from typing import Any

import msgspec
from litestar import Litestar, get
from litestar.enums import MediaType
from litestar.openapi import OpenAPIConfig
from litestar.types import ControllerRouterHandler

from api.openapi.openapi import add_bodies

JsonObject = dict[str, Any]


class Document:
    """The document of these routes, made when it is first read: that takes as long as the rest of the API's start."""

    def __init__(self, routes: Sequence[ControllerRouterHandler]) -> None:
        self._routes = routes
        self._making = Lock()

    @property
    def whole(self) -> JsonObject:
        with self._making:
            return self._whole

    @cached_property
    def _whole(self) -> JsonObject:
        from api.openapi.additions import complete  # types of all answers, which nothing else needs

        config = OpenAPIConfig(title="Furrow", version="1", use_handler_docstrings=True)
        described = Litestar(route_handlers=self._routes, openapi_config=config).openapi_schema
        add_bodies(described)
        return complete(described.to_schema())

    @cached_property
    def json(self) -> bytes:
        return msgspec.json.encode(self.whole)

    @cached_property
    def page(self) -> bytes:
        """For people; it loads nothing from any host."""
        from api.openapi.reference import page

        return page(self.whole)


def document_routes(document: Document) -> list[ControllerRouterHandler]:
    """`/schema/openapi.json`, and `/schema` for people; threads make them, so that streams go on meanwhile."""

    @get("/schema/openapi.json", include_in_schema=False, media_type=MediaType.JSON, sync_to_thread=True)
    def as_json() -> bytes:
        return document.json

    @get("/schema", include_in_schema=False, media_type=MediaType.HTML, sync_to_thread=True)
    def as_page() -> bytes:
        return document.page

    return [as_json, as_page]
