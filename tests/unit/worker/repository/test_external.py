"""Files of models for external engines: any type will do, and what an API process needs is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from control.errors import ModelFilesError
from control.messages import ModelSpec
from tests import models, pooled_models
from tests.gguf_models import make, vocabulary
from worker.repository.external import external_model


def spec(engine: str, **fields: object) -> ModelSpec:
    return ModelSpec(name="m", source="s", engine=engine, **fields)  # type: ignore[arg-type]


def test_a_type_that_furrow_does_not_serve_has_assets(tmp_path: Path) -> None:
    folder = models.make("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "unheard_of", "architectures": ["Unheard"], "text_config": config | {"model_type": "inner"}}
    (folder / "config.json").write_text(json.dumps(outer))
    model = external_model(folder, spec("vllm", max_context=64))
    assert model.assets.context_length == 64 and model.assets.vocab_size == config["vocab_size"]
    assert model.assets.chat_template and len(model.fingerprint) == 16
    assert model.assets.engine == "vllm" and model.assets.kv_tokens == 64, "a model that sleeps takes requests too"


def test_a_gguf_file_is_for_llama_server_alone(tmp_path: Path) -> None:
    file, _ = make("llama", tmp_path, ["f32"])
    assert external_model(file, spec("llama-server")).assets.vocab_size == len(vocabulary()["tokenizer.ggml.tokens"])
    with pytest.raises(ModelFilesError, match="needs a folder with safetensors"):
        external_model(file, spec("vllm"))
    with pytest.raises(ModelFilesError, match="needs a GGUF file"):
        external_model(file.parent, spec("llama-server"))


def test_an_adapter_is_a_file_of_this_host_and_no_pickle(tmp_path: Path) -> None:
    folder = models.make("llama", tmp_path / "m")
    adapter = tmp_path / "sql"
    adapter.mkdir()
    named = spec("vllm", adapters={"sql": str(adapter)})
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelFilesError, match=r"adapter sql needs adapter_model\.safetensors"):
        external_model(folder, named)
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    assert external_model(folder, named).assets.adapters == ["sql"]
    file, _ = make("llama", tmp_path, ["f32"])
    with pytest.raises(ModelFilesError, match="adapter sql needs a GGUF file"):
        external_model(file, spec("llama-server", adapters={"sql": str(adapter)}))


def test_a_folder_of_vectors_is_for_engines_that_give_them(tmp_path: Path) -> None:
    folder = pooled_models.make("qwen3", tmp_path / "e", "last")
    assets = external_model(folder, spec("vllm")).assets
    assert assets.kind == "embed" and assets.pooling is not None and assets.pooling.dimensions > 0
    scores = pooled_models.make_reranker(tmp_path / "s")
    with pytest.raises(ModelFilesError, match="gives scores"):
        external_model(scores, spec("vllm"))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = models.make("llama", tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFilesError, match=r"no tokenizer\.json"):
        external_model(folder, spec("sglang"))
