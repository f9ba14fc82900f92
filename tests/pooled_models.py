"""Makes tiny random checkpoints that give vectors or scores, with sentence-transformers' files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, processors
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests import models

ENCODER: dict[str, Any] = {
    "vocab_size": models.VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": models.PAD,
    "initializer_range": 0.2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "bert": ENCODER | {"type_vocab_size": 2, "max_position_embeddings": 128},
    "roberta": ENCODER | {"type_vocab_size": 1, "max_position_embeddings": 128 + models.PAD + 1},
    "xlm-roberta": ENCODER | {"type_vocab_size": 1, "max_position_embeddings": 128 + models.PAD + 1},
    "camembert": ENCODER | {"type_vocab_size": 1, "max_position_embeddings": 128 + models.PAD + 1},
    "mpnet": ENCODER,
    "distilbert": {
        "vocab_size": models.VOCAB_SIZE,
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 128,
        "pad_token_id": models.PAD,
        "initializer_range": 0.2,
    },
    "modernbert": ENCODER
    | {
        "num_hidden_layers": 4,
        "max_position_embeddings": 128,
        "local_attention": 8,
        "initializer_range": 0.4,
        "bos_token_id": models.BOS,
        "cls_token_id": models.BOS,
        "sep_token_id": models.EOS,
        "eos_token_id": models.EOS,
    },
    "qwen3": models.SHAPE | models.FAMILY_SHAPES["qwen3"],
    "gemma3_text": models.SHAPE | models.FAMILY_SHAPES["gemma3_text"] | {"use_bidirectional_attention": True},
}
FLAGS = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken"}


def make(
    kind: str, folder: Path, pool: str = "mean", normalize: bool = True, dense: tuple[int, ...] = (), **files: Any
) -> Path:
    """Save a random embedding model in `folder`, float32, with projections to the widths `dense`. `files` are further
    JSON files by name. Returns `folder`."""
    config = CONFIG_MAPPING[kind](**SHAPES[kind])
    torch.manual_seed(0)
    _save(AutoModel.from_config(config), folder, pairs=kind == "bert")
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    _write(folder / "1_Pooling/config.json", {name: name == FLAGS[pool] for name in FLAGS.values()})
    width = config.hidden_size
    for number, outputs in enumerate(dense, 2):
        modules.append(("Dense", place := f"{number}_Dense"))
        activation = "torch.nn.modules.activation.Tanh" if number == 2 else "torch.nn.modules.linear.Identity"
        layer = {"in_features": width, "out_features": outputs, "bias": number == 2, "activation_function": activation}
        _write(folder / place / "config.json", layer)
        tensors = {"linear.weight": torch.randn(outputs, width)}
        save_file(
            tensors | ({"linear.bias": torch.randn(outputs)} if number == 2 else {}),
            folder / place / "model.safetensors",
        )
        width = outputs
    if normalize:
        modules.append(("Normalize", f"{len(modules)}_Normalize"))
    _write_modules(folder, modules)
    for name, content in files.items():
        _write(folder / f"{name}.json", content)
    return folder


def make_cross_encoder(kind: str, folder: Path, labels: int = 1, **changes: Any) -> Path:
    """Save a random cross-encoder. Returns `folder`."""
    config = CONFIG_MAPPING[kind](**SHAPES[kind] | {"num_labels": labels} | changes)
    torch.manual_seed(0)
    _save(AutoModelForSequenceClassification.from_config(config), folder, pairs=kind == "bert")
    return folder


def make_reranker(folder: Path) -> Path:
    """Save a random causal model that scores pairs by the logits of "yes" and "no". Returns `folder`."""
    models.make("qwen3", folder, vocab_size=models.VOCAB_SIZE + 2)
    path = folder / "tokenizer.json"
    tokens = json.loads(path.read_text())
    tokens["model"]["vocab"] |= {"yes": models.VOCAB_SIZE, "no": models.VOCAB_SIZE + 1}
    path.write_text(json.dumps(tokens))
    place = "1_LogitScore"
    labels = {"true_token_id": models.VOCAB_SIZE, "false_token_id": models.VOCAB_SIZE + 1}
    _write(folder / place / "config.json", labels)
    _write_modules(folder, [("Transformer", ""), ("LogitScore", place)])
    return folder


def reranked(folder: Path, text: str) -> float:
    """The probability of "yes" beside "no" after a text, by transformers in float64."""
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([core.encode(text, add_special_tokens=False).ids])).logits[0, -1]
    return float(logits[-2:].softmax(dim=0)[0])


def reference(folder: Path, tokens: list[int]) -> torch.Tensor:
    """sentence-transformers' formula by transformers' model, in float64: the vector of one input."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    names = {
        module["type"].rpartition(".")[2]: folder / module["path"]
        for module in json.loads((folder / "modules.json").read_text())
        if not module["type"].endswith("Dense")
    }
    flags = json.loads((names["Pooling"] / "config.json").read_text())
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
        pooled = {"mean": hidden.mean(dim=0), "cls": hidden[0], "last": hidden[-1]}
        vector = next(pooled[pool] for pool, flag in FLAGS.items() if flags[flag])
        for path in sorted(folder.glob("*_Dense")):
            vector = _project(path, vector)
    return torch.nn.functional.normalize(vector, dim=0) if "Normalize" in names else vector


def _project(path: Path, vector: torch.Tensor) -> torch.Tensor:
    from safetensors.torch import load_file

    config, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    projected = tensors["linear.weight"].double() @ vector
    if config["bias"]:
        projected = projected + tensors["linear.bias"].double()
    return projected.tanh() if config["activation_function"].endswith("Tanh") else projected


def tokenizer(pairs: bool) -> PreTrainedTokenizerFast:
    """One token per ASCII byte, <s> before and </s> behind each text; the second of a pair has type 1 if `pairs`."""
    fast = models.tokenizer()
    core: Tokenizer = fast.backend_tokenizer
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1" if pairs else "<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", models.BOS), ("</s>", models.EOS)],
    )
    return fast


def _save(model: Any, folder: Path, pairs: bool) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms start as constants and biases as zeros: a mistake in either would go unseen.
            if "norm" in name.lower() or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer(pairs).save_pretrained(folder)


def _write_modules(folder: Path, modules: list[tuple[str, str]]) -> None:
    _write(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{module}"}
            for index, (module, path) in enumerate(modules)
        ],
    )


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
