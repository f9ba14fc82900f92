"""`furrow show` and `furrow ps`: files on this host, and models of a farm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from control.errors import ModelFilesError, ModelNotFound
from control.redis.connection import connect, run
from control.replicas import health
from ops.cli import cli
from ops.cli.show import summarize
from ops.demo import MODEL_DIR
from tests.integration.ops.populated import MODEL, populate
from tests.servers import Server
from worker.repository.files import inspect


@pytest.fixture(autouse=True)
def no_farm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REDIS_URL", "FURROW_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)


def shown(*words: str) -> Any:
    ended = CliRunner().invoke(cli, ["show", *words, "--json"], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.output)


def test_a_folder(tmp_path: Path) -> None:
    """Architecture, parameters, types, template and licence, from the files alone."""
    shown_part = shown("demo")["files"]
    assert (shown_part["architecture"], shown_part["quantization"], shown_part["kind"]) == ("qwen3", None, "generate")
    assert shown_part["types"]["bf16"]["bytes"] == 2 * shown_part["parameters"]
    text = CliRunner().invoke(cli, ["show", str(MODEL_DIR)]).output
    assert "qwen3" in text and "licence          not named" in text
    template = CliRunner().invoke(cli, ["show", "demo", "--template"]).output
    assert template == shown_part["template"] and "{%" in template


def test_the_licence_is_the_one_that_the_files_name(tmp_path: Path) -> None:
    """The head of README.md, else a file of that name."""
    for path in MODEL_DIR.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "LICENSE").write_text("x")
    assert summarize(inspect(tmp_path)).licence == "LICENSE"
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    assert summarize(inspect(tmp_path)).licence == "apache-2.0"


def test_packed_weights_are_counted_as_weights(tmp_path: Path) -> None:
    """Four bits each in a GPTQ checkpoint; scales and zero points are none."""
    for path in MODEL_DIR.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    packed = {
        "a.qweight": torch.zeros(4, 16, dtype=torch.int32),
        "a.qzeros": torch.zeros(1, 2, dtype=torch.int32),
        "a.scales": torch.zeros(1, 16, dtype=torch.float16),
        "a.g_idx": torch.zeros(32, dtype=torch.int32),
        "b.weight": torch.zeros(10, dtype=torch.float16),
    }
    save_file(packed, tmp_path / "model.safetensors")
    summary = summarize(inspect(tmp_path))
    assert summary.parameters == 32 * 16 + 10 and summary.quantization == "gptq (int4)"


def test_what_is_not_there_is_said(tmp_path: Path, new_server: Server) -> None:
    """A folder, a name without a farm, and a name that the farm does not know."""
    with pytest.raises(ModelFilesError, match="does not exist"):
        shown(str(tmp_path / "none"))
    with pytest.raises(ModelFilesError, match="no model of a farm"):
        shown("unknown")
    with connect(new_server.url) as client:
        client.flushall()
        populate(client, new_server.url)
        with pytest.raises(ModelNotFound, match="demo"):
            shown("unknown", "--redis", new_server.url)


def test_a_model_of_the_farm_whose_files_are_elsewhere(new_server: Server) -> None:
    """Its settings are shown all the same, with the reason why its files are not."""
    with connect(new_server.url) as client:
        client.flushall()
        populate(client, new_server.url)
        output = shown(MODEL, "--redis", new_server.url)
        assert output["files"] is None and "somewhere/demo" in output["files_missing"]
        assert (output["served"]["spec"]["tp"], output["served"]["kv_tokens"]) == (2, None)
        assert "not yet" in CliRunner().invoke(cli, ["show", MODEL, "--redis", new_server.url]).output


def test_ps_lists_what_runs(new_server: Server) -> None:
    """Replicas whose ranks beat, with the sum of their memory, and for how long they serve."""
    with connect(new_server.url) as client:
        client.flushall()
        populated = populate(client, new_server.url)
        epoch = populated.lease.epoch
        run(client, health.note_formation(MODEL, "r0", health.Formation(epoch, epoch, epoch, epoch, epoch + 500)))
        ended = CliRunner().invoke(cli, ["ps", "--json", "--redis", new_server.url])
        [row] = json.loads(ended.output)
        assert (row["model"], row["replica"], row["host"]) == (MODEL, "r0", "alpha")
        assert (row["memory_bytes"], row["serving_since_ms"]) == (2 * 2**20, epoch + 500)
        text = CliRunner().invoke(cli, ["ps", "--redis", new_server.url]).output
        assert "2 MiB" in text and "SERVING FOR" in text
        client.flushall()
        assert "Nothing runs." in CliRunner().invoke(cli, ["ps", "--redis", new_server.url]).output
