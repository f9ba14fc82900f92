"""POST /v1/embeddings, /v2/embed, /v1/rerank and /score: the bodies, as SDKs and neighbours' clients send them, and the
answers, vectors, scores and documents in order.
"""

from __future__ import annotations

import builtins
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from api.schemas.answers import Shape
from api.schemas.decoding import Names, Warnings, decode_body, decode_request, missing, naming, refusal
from api.schemas.generation import MAX_LABEL, MAX_MODEL_NAME, check_number
from control.bounds import RANGES, shown
from control.errors import RequestError

_NOT_CUT = "An input beyond the model's context is refused; shorten it, or split it."

MAX_INPUTS = 2_048
"""OpenAI's bound: texts of one request."""

EncodingFormat = Literal["float", "base64"]


class InputFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of all requests for vectors and scores. None always means: not given."""

    model: str | None = None
    user: str | None = None
    # Furrow's own.
    priority: Literal["high", "normal", "low"] | None = None
    on_disconnect: str | int | float | None = None
    timeout: float | None = None
    deadline: float | None = None

    @property
    def stream(self) -> bool:
        return False


class EmbeddingRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's fields. `prompt_name` is sentence-transformers': the text that is put before each input. Truncation is
    vLLM's."""

    input: str | list[str | int | list[int]]
    dimensions: int | None = None
    encoding_format: EncodingFormat | None = None
    prompt_name: str | None = None
    truncate_prompt_tokens: int | None = None
    """So many tokens of each input are used, special tokens counted; -1: as many as the context has room for."""
    truncation_side: Literal["left", "right"] | None = None
    """The side that is cut off; not given: as the model's tokenizer does it."""

    @property
    def inputs(self) -> list[str | list[int]]:
        """One entry per input. Raises RequestError for a list that is empty, or of mixed kinds."""
        input_value = self.input
        if isinstance(input_value, str):
            return [input_value]
        ids = [entry for entry in input_value if isinstance(entry, int)]
        if ids and len(ids) == len(input_value):
            return [ids]
        if ids or not input_value:
            raise RequestError(
                "'input' must be a text, a list of token ids, or a non-empty list of one of the two.", param="input"
            )
        return [entry for entry in input_value if not isinstance(entry, int)]


InputType = Literal["search_document", "search_query", "classification", "clustering", "image"]


class CohereEmbedRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """Cohere's fields. `input_type` selects a prompt of the model."""

    texts: list[str]
    input_type: InputType | None = None
    output_dimension: int | None = None
    embedding_types: list[str] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: int | None = None

    @property
    def inputs(self) -> list[str]:
        return self.texts

    @property
    def dimensions(self) -> int | None:
        return self.output_dimension


class Document(msgspec.Struct, kw_only=True):
    """A document as Cohere's clients send it; other fields are ignored."""

    text: str


class RerankRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """Cohere's and Jina's fields."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None

    @property
    def texts(self) -> list[str]:
        return [entry if isinstance(entry, str) else entry.text for entry in self.documents]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(self.query, text) for text in self.texts]


class ScoreRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """vLLM's fields: one text with each of a list, or two lists of equal length."""

    text_1: str | list[str]
    text_2: str | list[str]
    instruction: str | None = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Raises RequestError for lists that don't fit."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second) or not first:
            raise RequestError(
                f"'text_1' has {len(first)} texts and 'text_2' {len(second)}; send one text and a list, or two lists "
                "of equal length.",
                param="text_2",
            )
        return list(zip(first, second, strict=True))


class TextRerankRequest(RerankRequest, kw_only=True, forbid_unknown_fields=True):
    """A body of text-embeddings-inference as Cohere's fields; no client sends it."""


class TeiRerankRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """text-embeddings-inference's fields, which come to the same path."""

    query: str
    texts: list[str]
    top_n: int | None = None
    """An addition of llama.cpp's."""
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: str | None = None


class NativeInputs(EmbeddingRequest, kw_only=True, forbid_unknown_fields=True):
    """A body of /embedding or /embed as OpenAI's fields; no client sends it."""

    endpoint: Literal["embedding", "tei_embed"]


class NativeEmbedRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """llama.cpp's fields of /embedding."""

    content: str | list[str | int | list[int]] | None = None
    input: str | list[str | int | list[int]] | None = None
    dimensions: int | None = None
    embd_normalize: int | None = None


class TeiEmbedRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """text-embeddings-inference's fields of /embed."""

    inputs: str | list[str | int | list[int]]
    dimensions: int | None = None
    prompt_name: str | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    truncation_direction: str | None = None


VectorsRequest = EmbeddingRequest | CohereEmbedRequest
InputsRequest = VectorsRequest | RerankRequest | ScoreRequest


def parse_embedding(body: bytes, warnings: Warnings | None = None) -> EmbeddingRequest:
    """Decode and check a body; raise RequestError naming the field at fault."""
    request = decode_request(body, EmbeddingRequest, warnings)
    check_inputs(request)
    return request


def check_inputs(request: EmbeddingRequest) -> None:
    """Raise RequestError naming the field at fault."""
    _check(request, "input", len(request.inputs))
    if request.dimensions is not None and request.dimensions < 1:
        raise RequestError(f"'dimensions' is {request.dimensions}; send 1 or more.", param="dimensions")
    if request.truncate_prompt_tokens is not None:
        check_number("truncate_prompt_tokens", request.truncate_prompt_tokens)


def parse_cohere(body: bytes, warnings: Warnings | None = None) -> CohereEmbedRequest:
    """As `parse_embedding`."""
    warnings = warnings or Warnings(strict=True)
    request = decode_request(body, CohereEmbedRequest, warnings)
    if request.max_tokens is not None:
        raise refusal("max_tokens", _NOT_CUT)
    if not request.texts:
        raise RequestError("'texts' is empty; send at least one.", param="texts")
    if request.input_type == "image":
        raise RequestError("'input_type' is 'image'; only texts are served.", param="input_type")
    for kind in request.embedding_types or ():
        if kind != "float":
            raise RequestError(
                f"'embedding_types' has {kind[:80]!r}; only 'float' is served. /v1/embeddings has base64 too.",
                param="embedding_types",
            )
    if request.truncate not in (None, "NONE"):
        warnings.add(f"'truncate' has no effect: no input is cut. {_NOT_CUT}", "truncate")
    _check(request, "texts", len(request.texts))
    if request.output_dimension is not None and request.output_dimension < 1:
        raise RequestError(
            f"'output_dimension' is {request.output_dimension}; send 1 or more.", param="output_dimension"
        )
    return request


def parse_native_embedding(body: bytes, warnings: Warnings | None = None) -> NativeInputs:
    """As `parse_embedding`, of llama.cpp's form."""
    request = decode_request(body, NativeEmbedRequest, warnings)
    content = request.content if request.content is not None else request.input
    if content is None:
        raise missing("content")
    if request.embd_normalize not in (None, _EUCLIDEAN):
        raise refusal("embd_normalize", "Vectors have the length that the model's own files give them.")
    return _native(request, "embedding", {r"^input\b": "content"}, content, request.dimensions)


def parse_tei_embedding(body: bytes, warnings: Warnings | None = None) -> NativeInputs:
    """As `parse_embedding`, of text-embeddings-inference's form."""
    request = decode_request(body, TeiEmbedRequest, warnings)
    if request.normalize is False:
        raise refusal("normalize", "Vectors have the length that the model's own files give them.")
    _warn_of_truncation(request.truncate, warnings)
    names = {r"^input\b": "inputs"}
    return _native(request, "tei_embed", names, request.inputs, request.dimensions, request.prompt_name)


_EUCLIDEAN = 2
"""llama.cpp's default length of vectors: 1."""


def _native(
    request: InputFields,
    endpoint: Literal["embedding", "tei_embed"],
    names: Names,
    texts: str | list[str | int | list[int]],
    dimensions: int | None,
    prompt_name: str | None = None,
) -> NativeInputs:
    shared = {name: getattr(request, name) for name in InputFields.__struct_fields__}
    inputs = NativeInputs(input=texts, endpoint=endpoint, dimensions=dimensions, prompt_name=prompt_name, **shared)
    with naming(names):
        check_inputs(inputs)
    return inputs


def _warn_of_truncation(truncate: bool | None, warnings: Warnings | None) -> None:
    if truncate and warnings is not None:
        warnings.add(f"'truncate' has no effect: no input is cut. {_NOT_CUT}", "truncate")


def parse_rerank(body: bytes, warnings: Warnings | None = None) -> RerankRequest:
    """As `parse_embedding`; `texts` in place of `documents` is text-embeddings-inference's form."""
    if "texts" in decode_body(body, dict[str, msgspec.Raw]):
        return _tei_rerank(decode_request(body, TeiRerankRequest, warnings), warnings)
    request = decode_request(body, RerankRequest, warnings)
    if not request.documents:
        raise RequestError("'documents' is empty; send at least one.", param="documents")
    _check(request, "documents", len(request.documents))
    if request.top_n is not None and request.top_n < 1:
        raise RequestError(f"'top_n' is {request.top_n}; send 1 or more.", param="top_n")
    return request


def _tei_rerank(request: TeiRerankRequest, warnings: Warnings | None) -> TextRerankRequest:
    if not request.texts:
        raise RequestError("'texts' is empty; send at least one.", param="texts")
    if request.raw_scores:
        raise refusal("raw_scores", "Scores are those that the model's own files define.")
    _warn_of_truncation(request.truncate, warnings)
    shared = {name: getattr(request, name) for name in InputFields.__struct_fields__}
    rerank = TextRerankRequest(
        query=request.query,
        documents=list(request.texts),
        top_n=request.top_n,
        return_documents=bool(request.return_text),
        **shared,
    )
    _check(rerank, "texts", len(rerank.documents))
    if rerank.top_n is not None and rerank.top_n < 1:
        raise RequestError(f"'top_n' is {rerank.top_n}; send 1 or more.", param="top_n")
    return rerank


def parse_score(body: bytes, warnings: Warnings | None = None) -> ScoreRequest:
    """As `parse_embedding`."""
    request = decode_request(body, ScoreRequest, warnings)
    _check(request, "text_2", len(request.pairs))
    return request


def _check(request: InputsRequest, name: str, count: int) -> None:
    if count > MAX_INPUTS:
        raise RequestError(f"'{name}' has {count} entries; at most {MAX_INPUTS} are served.", param=name)
    for field, most in (("model", MAX_MODEL_NAME), ("user", MAX_LABEL)):
        if len(getattr(request, field) or "") > most:
            raise RequestError(f"'{field}' is longer than {most} characters.", param=field)
    for field in ("timeout", "deadline"):
        value = getattr(request, field)
        if value is not None and not RANGES[field].holds(value):
            text = f"Invalid value for '{field}': {shown(value)} must be {RANGES[field]}."
            raise RequestError(text, param=field)


class InputUsage(Shape):
    prompt_tokens: int
    total_tokens: int


class Embedding(Shape, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """With `encoding_format: "base64"` the bytes of little-endian float32 numbers."""


class Embeddings(Shape, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: InputUsage


class VectorsByType(Shape):
    float: list[list[builtins.float]]


class ApiVersion(Shape):
    version: Literal["2"] = "2"


class BilledUnits(Shape):
    input_tokens: int


class EmbedMeta(Shape):
    api_version: ApiVersion
    billed_units: BilledUnits


class EmbeddedByType(Shape, kw_only=True):
    """Cohere's form of vectors."""

    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
    id: str
    embeddings: VectorsByType
    meta: EmbedMeta


class RankedDocument(Shape):
    text: str


class RankedResult(Shape):
    index: int
    """The document's place in the request."""
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class Reranked(Shape):
    id: str
    model: str
    usage: InputUsage
    results: list[RankedResult]
    """From the highest score to the lowest."""


class Score(Shape, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(Shape, kw_only=True):
    id: str
    model: str
    usage: InputUsage
    object: Literal["list"] = "list"
    created: int
    data: list[Score]


class NativeVector(Shape):
    """llama.cpp's form: the only vector of an input in a list."""

    index: int
    embedding: list[list[builtins.float]]


class TextScore(Shape):
    """The form of text-embeddings-inference."""

    index: int
    score: builtins.float
    text: str | UnsetType = UNSET
