"""/v1/embeddings, /v2/embed, /v1/rerank and /score answer: before a real leader with tiny models."""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from tests import pooled_models
from tests.integration.api.conftest import ApiProcess, running_api
from tests.pooled_leader import leading
from tests.servers import Server

TEXTS = ["hello world", "", "a second text"]
PROMPTS = {"prompts": {"query": "find: ", "plain": ""}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    embedder = pooled_models.make(
        "bert", tmp_path_factory.mktemp("embedder"), dense=(24,), config_sentence_transformers=PROMPTS
    )
    ranker = pooled_models.make_cross_encoder("bert", tmp_path_factory.mktemp("ranker"))
    return embedder, ranker, pooled_models.make_reranker(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def api(
    server: Server, folders: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiProcess]:
    with (
        leading(server.url, "embedder", folders[0]),
        leading(server.url, "ranker", folders[1]),
        leading(server.url, "judge", folders[2]),
        running_api(server.url, tmp_path_factory.mktemp("api")) as api,
    ):
        yield api


@pytest.fixture(scope="module")
def client(api: ApiProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)


def post(api: ApiProcess, path: str, body: Any) -> tuple[int, Any]:
    content = body if isinstance(body, bytes) else None
    answer = httpx.post(f"{api.url}{path}", content=content, json=None if content else body, timeout=60)
    return answer.status_code, answer.json()


def embedded(api: ApiProcess, **fields: Any) -> list[list[float]]:
    status, answer = post(api, "/v1/embeddings", {"model": "embedder", **fields})
    assert status == 200, answer
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return [one["embedding"] for one in answer["data"]]


def tokens_of(*texts: str) -> list[int]:
    return pooled_models.tokenizer(pairs=True).backend_tokenizer.encode(*texts).ids


def same(found: list[float], expected: torch.Tensor) -> bool:
    numbers = torch.tensor(found, dtype=torch.float64)
    return bool(torch.cosine_similarity(numbers, expected, dim=0) > 0.99999) and abs(numbers.norm() - 1) < 1e-5


def test_vectors_are_those_of_the_model(client: openai.OpenAI, folders: tuple[Path, Path, Path]) -> None:
    """OpenAI's SDK asks for base64, and shows floats; an empty text is an input like others."""
    answer = client.embeddings.create(model="embedder", input=TEXTS)
    tokens = [tokens_of(text) for text in TEXTS]
    assert (answer.object, answer.model, answer.usage.prompt_tokens) == ("list", "embedder", sum(map(len, tokens)))
    for found, prompt in zip(answer.data, tokens, strict=True):
        assert same(found.embedding, pooled_models.reference(folders[0], prompt))


def test_inputs_come_in_four_forms(api: ApiProcess) -> None:
    """A text, texts, tokens and lists of tokens; tokens are taken as they are, without special ones."""
    [text] = embedded(api, input="hello")
    tokens = tokens_of("hello")
    assert embedded(api, input=["hello"]) == embedded(api, input=tokens) == embedded(api, input=[tokens]) == [text]
    assert embedded(api, input=tokens[1:-1]) != [text]


def test_dimensions_cut_and_normalise(api: ApiProcess) -> None:
    """The first numbers, at length 1 again; base64 holds the same numbers in float32."""
    [whole] = embedded(api, input="hello")
    [cut] = embedded(api, input="hello", dimensions=5)
    expected = torch.nn.functional.normalize(torch.tensor(whole[:5]), dim=0)
    assert torch.allclose(torch.tensor(cut), expected, atol=1e-6) and len(whole) == 24
    [packed] = embedded(api, input="hello", dimensions=5, encoding_format="base64")
    assert list(struct.unpack("<5f", base64.b64decode(packed))) == cut


def test_a_prompt_is_put_before_each_text(api: ApiProcess) -> None:
    """By the names of config_sentence_transformers.json, and never before tokens."""
    assert embedded(api, input="hello", prompt_name="query") == embedded(api, input="find: hello")
    tokens = tokens_of("hello")
    assert embedded(api, input=tokens, prompt_name="query") == embedded(api, input=tokens)


def test_inputs_are_cut_where_the_client_says_so(api: ApiProcess) -> None:
    """As at vLLM: the special tokens stay and count; -1 keeps what the context holds; ids are cut as they are."""

    def cut(most: int, one: str | list[int], **fields: Any) -> list[list[float]]:
        return embedded(api, input=one, truncate_prompt_tokens=most, **fields)

    assert cut(5, "hello") == embedded(api, input="hel")
    assert cut(5, "hello", truncation_side="left") == embedded(api, input="llo")
    tokens = tokens_of("hello")
    assert cut(4, tokens) == embedded(api, input=tokens[:4])
    assert cut(4, tokens, truncation_side="left") == embedded(api, input=tokens[-4:])
    assert cut(-1, "b" * 2_000_000) == embedded(api, input="b" * 126)
    assert cut(7, "hello") == embedded(api, input="hello")
    both = embedded(api, input=["hello", "he"], truncate_prompt_tokens=5)
    expected = [cut(5, "hello"), embedded(api, input="he")]
    assert torch.allclose(torch.tensor(both), torch.tensor(expected).squeeze(1), atol=1e-5)


def test_many_inputs_keep_their_order(api: ApiProcess) -> None:
    """2,048 texts are many requests of the queue; each vector is at its text's place."""
    texts = [f"text {index % 97}" for index in range(2048)]
    vectors = embedded(api, input=texts)
    assert len(vectors) == 2048
    alone = {text: embedded(api, input=text)[0] for text in texts[:3]}
    for place in (0, 1, 2, 97, 1940, 1941):
        close = torch.cosine_similarity(torch.tensor(vectors[place]), torch.tensor(alone[texts[place]]), dim=0)
        assert close > 0.999999


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "non-empty"),
        ({"input": [[]]}, "input", "'input[0]' is empty"),
        ({"input": ["a", "b" * 200]}, "input", "'input[1]' has 202 tokens; this model takes 128"),
        ({"input": "c" * 2_000_000}, "input", "'input[0]' has more than 128 tokens"),
        ({"input": [["x"]]}, "input[0][0]", "int"),
        ({"input": [5, 131]}, "input", "token id 131; this model's ids are 0 to 130"),
        ({"input": [[-1]]}, "input", "token id -1"),
        ({"input": [True]}, "input[0]", "bool"),
        ({"input": [1, "a"]}, "input", "a non-empty list of one of the two"),
        ({"input": ["a"] * 2049}, "input", "2049 entries; at most 2048"),
        ({"input": "a", "dimensions": 25}, "dimensions", "25; this model's vectors have 24"),
        ({"input": "a", "dimensions": 0}, "dimensions", "1 or more"),
        ({"input": "a", "dimensions": 10**30}, "dimensions", ""),
        ({"input": "a", "dimensions": True}, "dimensions", "bool"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
        ({"input": "a", "prompt_name": "x"}, "prompt_name", "this model has plain, query"),
        ({"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "2 tokens around each text"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "between -1 and"),
        ({"input": "a" * 200, "truncate_prompt_tokens": 150}, "input", "has 150 tokens; this model takes 128"),
        ({"input": "a", "truncation_side": "middle"}, "truncation_side", "middle"),
        ({"input": None}, "input", "null"),
        ({}, "input", "Missing"),
    ],
)
def test_what_no_vector_comes_of_is_refused(api: ApiProcess, fields: Any, param: str, words: str) -> None:
    """A 400 that names field, value and limit."""
    status, answer = post(api, "/v1/embeddings", {"model": "embedder", **fields})
    assert status == 400, answer
    assert answer["error"]["param"] == param and words in answer["error"]["message"], answer


def test_cohere_gets_its_own_form(api: ApiProcess) -> None:
    """The vectors of /v1/embeddings under the type's name; a type of input is the model's prompt, where it has one."""

    def asked(**fields: Any) -> Any:
        status, answer = post(api, "/v2/embed", {"model": "embedder", "texts": ["hello", "x"], **fields})
        assert status == 200, answer
        return answer

    answer = asked(input_type="search_document", embedding_types=["float"], truncate="NONE", output_dimension=5)
    assert answer["response_type"] == "embeddings_by_type" and answer["id"].startswith("embd-")
    assert answer["embeddings"] == {"float": embedded(api, input=["hello", "x"], dimensions=5)}
    assert answer["meta"]["billed_units"] == {"input_tokens": len(tokens_of("hello")) + len(tokens_of("x"))}
    found = asked(input_type="search_query")["embeddings"]["float"]
    assert found == embedded(api, input=["hello", "x"], prompt_name="query") != embedded(api, input=["hello", "x"])


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"texts": []}, "texts", "at least one"),
        ({"texts": None}, "texts", "null"),
        ({"texts": "a"}, "texts", "array"),
        ({"texts": [5]}, "texts[0]", "int"),
        ({"texts": ["a"] * 2049}, "texts", "2049 entries; at most 2048"),
        ({"texts": ["a", "b" * 200]}, "texts", "'texts[1]' has 202 tokens; this model takes 128"),
        ({"texts": ["c" * 2_000_000]}, "texts", "'texts[0]' has more than 128 tokens"),
        ({"inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "texts", "Missing"),
        ({"texts": ["a"], "embedding_types": ["float", "int8"]}, "embedding_types", "'int8'; only 'float'"),
        ({"texts": ["a"], "output_dimension": 25}, "output_dimension", "25; this model's vectors have 24"),
        ({"texts": ["a"], "output_dimension": 0}, "output_dimension", "1 or more"),
        ({"texts": ["a"], "input_type": "image"}, "input_type", "only texts"),
        ({"texts": ["a"], "input_type": "x"}, "input_type", "search_query"),
        ({"texts": ["a"], "max_tokens": 4}, "max_tokens", "split it"),
        ({"texts": ["a"], "model": "ranker"}, "model", "no embeddings"),
    ],
)
def test_cohere_is_told_what_is_not_served(api: ApiProcess, fields: Any, param: str, words: str) -> None:
    status, answer = post(api, "/v2/embed", {"model": "embedder", **fields})
    assert status == 400, answer
    assert answer["error"]["param"] == param and words in answer["error"]["message"], answer


def test_nothing_is_cut_for_cohere(api: ApiProcess) -> None:
    """Clients send `truncate` whatever they embed: the answer warns of it."""
    body = {"model": "embedder", "texts": ["a"], "truncate": "END"}
    answer = httpx.post(f"{api.url}/v2/embed", json=body, timeout=60)
    assert answer.status_code == 200 and "no input is cut" in answer.headers["warning"]


def test_nan_is_no_number(api: ApiProcess) -> None:
    status, answer = post(api, "/v1/embeddings", b'{"model": "embedder", "input": [NaN]}')
    assert status == 400 and "JSON" in answer["error"]["message"]


def test_a_reranker_orders_documents(api: ApiProcess) -> None:
    """The scores are those of /score, from the highest to the lowest, with the documents unless they are not wanted."""
    documents = ["one", "another text", "three"]
    _, scored = post(api, "/score", {"model": "ranker", "text_1": "what", "text_2": documents})
    scores = [one["score"] for one in scored["data"]]
    assert len(set(scores)) == 3 and all(0 < score < 1 for score in scores)
    fields = {"model": "ranker", "query": "what", "documents": [documents[0], {"text": documents[1]}, documents[2]]}
    _, ranked = post(api, "/v1/rerank", fields)
    order = sorted(range(3), key=lambda index: -scores[index])
    assert [one["index"] for one in ranked["results"]] == order
    assert [one["relevance_score"] for one in ranked["results"]] == [scores[index] for index in order]
    assert [one["document"]["text"] for one in ranked["results"]] == [documents[index] for index in order]
    _, first = post(api, "/v2/rerank", {**fields, "top_n": 1, "return_documents": False})
    assert first["results"] == [{"index": order[0], "relevance_score": scores[order[0]]}]
    _, pairs = post(api, "/v1/score", {"model": "ranker", "text_1": ["what", "x"], "text_2": ["one", "y"]})
    assert abs(pairs["data"][0]["score"] - scores[0]) < 1e-6


PAIR = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: %s\n<Query>: %s\n<Document>: %s"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


@pytest.mark.parametrize("instruction", [None, "short"])
def test_a_causal_reranker_says_how_likely_yes_is(
    api: ApiProcess, folders: tuple[Path, Path, Path], instruction: str | None
) -> None:
    """Qwen3-Reranker's own form of a pair, filled in once: fields in a text are text."""
    documents = ["one", "{query} {instruction}"]
    fields = {} if instruction is None else {"instruction": instruction}
    _, found = post(api, "/score", {"model": "judge", "text_1": "what", "text_2": documents, **fields})
    told = instruction or "Given a web search query, retrieve relevant passages that answer the query"
    for one, document in zip(found["data"], documents, strict=True):
        assert abs(one["score"] - pooled_models.reranked(folders[2], PAIR % (told, "what", document))) < 1e-5


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "q" * 200, "documents": ["a"]}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "instruction": "x"}, "instruction"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/embeddings", {"input": "a"}, "model"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "model"),
        ("/v1/completions", {"prompt": "x"}, "model"),
    ],
)
def test_a_reranker_refuses_what_it_can_not_do(api: ApiProcess, path: str, fields: Any, param: str) -> None:
    status, answer = post(api, path, {"model": "ranker", **fields})
    assert status == 400 and answer["error"]["param"] == param, answer


def test_the_kind_is_told(api: ApiProcess) -> None:
    """GET /v1/models says what a model gives, /ready that it gives something."""
    cards = {card["id"]: card for card in httpx.get(f"{api.url}/v1/models").json()["data"]}
    assert (cards["embedder"]["kind"], cards["embedder"]["dimensions"]) == ("embed", 24)
    assert (cards["ranker"]["kind"], cards["ranker"]["dimensions"]) == ("score", None)
    assert cards["embedder"]["max_model_len"] == 128
    listed = httpx.get(f"{api.url}/farm/models").json()["data"]
    assert {one["model"]: one["kind"] for one in listed} == {"embedder": "embed", "ranker": "score", "judge": "score"}
    assert httpx.get(f"{api.url}/ready", timeout=30).status_code == 200


def test_a_large_batch_starves_nobody(api: ApiProcess) -> None:
    """While one tenant's 1,024 long texts are computed, another's single text is answered long before them."""
    texts = ["x" * 120 + str(index) for index in range(1024)]
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        large = pool.submit(embedded, api, input=texts)
        time.sleep(0.3)
        took = [_timed(api) for _ in range(3)]
        assert not large.done(), "the batch must be under way"
        large.result()
        whole = time.monotonic() - began
    assert max(took) < whole / 3


def _timed(api: ApiProcess) -> float:
    began = time.monotonic()
    body = {"model": "embedder", "input": "a short text"}
    headers = {"authorization": "Bearer other"}
    assert httpx.post(f"{api.url}/v1/embeddings", json=body, headers=headers, timeout=60).status_code == 200
    return time.monotonic() - began


def test_vectors_in_ollamas_form(api: ApiProcess) -> None:
    """/api/embed and /api/embeddings: the vectors of /v1/embeddings, real counts, and refusals in Ollama's form."""
    vectors = embedded(api, input=TEXTS[:1] + TEXTS[2:])
    status, answer = post(api, "/api/embed", {"model": "embedder", "input": TEXTS[:1] + TEXTS[2:], "keep_alive": "5m"})
    assert (status, answer["model"], answer["embeddings"]) == (200, "embedder", vectors)
    assert answer["prompt_eval_count"] == sum(len(tokens_of(text)) for text in TEXTS[:1] + TEXTS[2:])
    assert answer["total_duration"] >= answer["load_duration"] > 0
    one = {"model": "embedder", "input": TEXTS[0], "dimensions": 8}
    assert post(api, "/api/embed", one)[1]["embeddings"] == embedded(api, input=TEXTS[0], dimensions=8)
    alone = {"embedding": embedded(api, input=TEXTS[0])[0]}
    assert post(api, "/api/embeddings", {"model": "embedder", "prompt": TEXTS[0]}) == (200, alone)
    assert post(api, "/api/embed", {"model": "embedder", "input": []})[1]["embeddings"] == []
    assert post(api, "/api/embeddings", {"model": "embedder"}) == (200, {"embedding": []})
    for body, named in (
        ({"model": "ranker", "input": "x"}, "gives scores"),
        ({"model": "embedder", "input": "x " * 5000}, "'input[0]'"),
        ({"model": "embedder", "input": ["x"] * 3000}, "'input'"),
        ({"model": "embedder", "input": "x", "dimensions": 99}, "'dimensions'"),
    ):
        status, answer = post(api, "/api/embed", body)
        assert status == 400 and named in answer["error"], answer
    status, answer = post(api, "/api/embeddings", {"model": "embedder", "prompt": "x " * 5000})
    assert status == 400 and "'prompt[0]' has more than" in answer["error"]
    status, answer = post(api, "/api/chat", {"model": "embedder", "messages": [{"role": "user", "content": "x"}]})
    assert status == 400 and "gives embeddings" in answer["error"]
    assert post(api, "/api/show", {"model": "embedder"})[1]["capabilities"] == ["embedding"]


def test_the_forms_of_llama_cpp_and_of_text_embeddings_inference(api: ApiProcess) -> None:
    """/embedding and /embed give the vectors of /v1/embeddings, for a text, tokens or several texts."""
    own = embedded(api, input=["hello world", "a"])
    body = {"model": "embedder"}

    def near(vectors: list[list[float]], expected: list[list[float]]) -> bool:
        """Vectors of other packs differ in their last digits."""
        return all(one == pytest.approx(other, abs=1e-4) for one, other in zip(vectors, expected, strict=True))

    status, answer = post(api, "/embedding", body | {"content": ["hello world", "a"]})
    assert (status, [one["index"] for one in answer]) == (200, [0, 1])
    assert near([one["embedding"][0] for one in answer], own) and len(answer[0]["embedding"]) == 1
    [one] = post(api, "/embedding", body | {"input": "a"})[1]
    assert near(one["embedding"], own[1:])
    assert near(post(api, "/embed", body | {"inputs": ["hello world", "a"]})[1], own)
    assert near(post(api, "/embed", body | {"inputs": "a", "normalize": True, "truncate": False})[1], own[1:])
    _, short = post(api, "/embed", body | {"inputs": "a", "dimensions": 4})
    assert len(short[0]) == 4
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/embedding", {}, "content"),
        ("/embedding", {"content": []}, "content"),
        ("/embedding", {"content": "a", "embd_normalize": -1}, "embd_normalize"),
        ("/embed", {"inputs": []}, "inputs"),
        ("/embed", {"inputs": "x" * 100_000}, "inputs"),
        ("/embed", {"inputs": "a", "normalize": False}, "normalize"),
        ("/embed", {"inputs": "a", "dimensions": 0}, "dimensions"),
    ]
    for path, fields, param in cases:
        status, answer = post(api, path, body | fields)
        assert (status, answer["error"]["param"]) == (400, param), answer


def test_reranking_in_the_form_of_text_embeddings_inference(api: ApiProcess) -> None:
    """`texts` on the path of Cohere's form: pairs of index and score, with texts where they are asked for."""
    body = {"model": "ranker", "query": "hello"}
    texts = ["a second text", "hello world", "x"]
    _, own = post(api, "/v1/rerank", body | {"documents": texts})
    order = [(one["index"], one["relevance_score"]) for one in own["results"]]
    for path in ("/rerank", "/v1/rerank", "/reranking"):
        status, answer = post(api, path, body | {"texts": texts})
        assert (status, [(one["index"], one["score"]) for one in answer]) == (200, order)
        assert answer[0].keys() == {"index", "score"}
    _, answer = post(api, "/rerank", body | {"texts": texts, "return_text": True, "top_n": 2})
    assert [one["text"] for one in answer] == [texts[index] for index, _ in order[:2]]
    for fields, param in (({"texts": []}, "texts"), ({"texts": ["a"], "raw_scores": True}, "raw_scores")):
        status, answer = post(api, "/rerank", body | fields)
        assert (status, answer["error"]["param"]) == (400, param)
