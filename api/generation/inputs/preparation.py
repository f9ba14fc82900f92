"""From the body of a request for vectors or scores to what is enqueued: packs of inputs, and the view of the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from api.generation.caller import Caller
from api.generation.inputs.encoding import Encoded, encode
from api.generation.prepared import Prepared, deadline_ms, on_disconnect_policy
from api.models.served import ServedModel
from api.schemas.embeddings import CohereEmbedRequest, EmbeddingRequest, InputsRequest, RerankRequest, VectorsRequest
from api.schemas.view import Endpoint, View
from control.errors import RequestError
from control.messages import GenerationRequest, Input, Sampling

PACK_INPUTS, PACK_TOKENS = 32, 1_024
"""Inputs and tokens of one request of the queue, or one input of any length: so small that tenants take turns."""


@dataclass(frozen=True, kw_only=True)
class PreparedInputs(Prepared):
    """A request for vectors or scores."""

    body: InputsRequest

    def view(self, member: int = 0) -> View:
        return View(
            endpoint=_endpoint(self.body),
            extra_fields=self._extra_fields() if not member else {},
            created=self.caller.request_log.received_ms // 1000,
            model=self.body.model or self.served.name,
            n=self.members[member].sampling.n,
            members=len(self.members),
            member=member,
            user=self.body.user,
            client_request_id=self.caller.client_request_id,
        )

    def _extra_fields(self) -> dict[str, Any]:
        body, fields = self.body, {"inputs": [member.sampling.n for member in self.members]}
        if isinstance(body, EmbeddingRequest):
            return {**fields, "encoding_format": body.encoding_format or "float"}
        if isinstance(body, RerankRequest):
            shown = body.texts if body.return_documents is not False else None
            return {**fields, "top_n": body.top_n, "documents": shown}
        return fields


async def prepare_inputs(body: InputsRequest, caller: Caller, served: ServedModel) -> PreparedInputs:
    """Check everything that can be checked before the queue. Raises RequestError and its kin."""
    _check_kind(body, served)
    dimensions = body.dimensions if isinstance(body, VectorsRequest) else None
    pooling = served.assets.pooling
    if dimensions is not None and pooling is not None and dimensions > pooling.dimensions:
        name = "output_dimension" if isinstance(body, CohereEmbedRequest) else "dimensions"
        raise RequestError(f"'{name}' is {dimensions}; this model's vectors have {pooling.dimensions}.", param=name)
    encoded = await served.run(caller.body_bytes, caller.images.tenant, encode, body)
    return PreparedInputs(
        body=body,
        caller=caller,
        served=served,
        members=[_member(pack, dimensions) for pack in packs(encoded)],
        priority=caller.identity.priority(body.priority),
        deadline_ms=deadline_ms(body),
        on_disconnect=on_disconnect_policy(body.on_disconnect, caller.on_disconnect),
    )


def packs(inputs: list[Encoded]) -> list[list[Encoded]]:
    """Neighbouring inputs together, as far as the limits of a pack allow."""
    found, tokens = list[list[Encoded]](), 0
    for one in inputs:
        if not found or len(found[-1]) == PACK_INPUTS or tokens + len(one.tokens) > PACK_TOKENS:
            found.append([])
            tokens = 0
        found[-1].append(one)
        tokens += len(one.tokens)
    return found


def _member(pack: list[Encoded], dimensions: int | None) -> GenerationRequest:
    return GenerationRequest(
        prompt=[token for one in pack for token in one.tokens],
        sampling=Sampling(max_tokens=0, temperature=0.0, seed="0", n=len(pack), dimensions=dimensions),
        inputs=[Input(len(one.tokens), one.second) for one in pack],
    )


def _endpoint(body: InputsRequest) -> Endpoint:
    if isinstance(body, EmbeddingRequest):
        return "embeddings"
    if isinstance(body, CohereEmbedRequest):
        return "embed"
    return "rerank" if isinstance(body, RerankRequest) else "score"


def _check_kind(body: InputsRequest, served: ServedModel) -> None:
    kind, name = served.assets.kind, served.name
    embeds = isinstance(body, VectorsRequest)
    if kind == ("embed" if embeds else "score"):
        return
    what = "embeddings" if embeds else "scores"
    gives = {
        "generate": f"generates text and gives no {what}",
        "embed": "gives embeddings and no scores",
        "score": "gives scores of pairs (/v1/rerank, /score) and no embeddings",
    }
    use = "an embedding model" if embeds else "a reranker"
    raise RequestError(
        f"The model '{name}' {gives[kind]}. Use {use} for this endpoint; GET /v1/models shows each model's kind.",
        param="model",
        code=f"{what}_not_supported",
    )
