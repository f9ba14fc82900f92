"""A check for schemathesis, which loads this file into its own environment: no valid request is refused.

What a schema can't say, or a model alone knows, is named in RULES by the words of its refusal; any other refusal of a
request that the document allows is a failure.
"""

from __future__ import annotations

import re

import schemathesis
from schemathesis import GenerationMode

REFUSED = (400, 413, 422)
RULES: dict[str, str] = {
    # Fields that need or exclude each other.
    "a stream is resumed as a stream": r"^Last-Event-ID continues a stream",
    "a cursor belongs to its request": r"^Last-Event-ID (names request|.* is not an event id)",
    "stream_options need stream": r"^'stream_options' is only allowed when",
    "input, or a response to continue": r"^Missing required parameter: 'input'\.",
    "a text or messages": r"^Send either 'prompt', a text, or 'messages'\.",
    "top_logprobs need logprobs": r"^'top_logprobs' needs 'logprobs'",
    "prompt_logprobs are not streamed": r"^'prompt_logprobs' is not served with 'stream'",
    "special tokens hide no stop strings": r"^'skip_special_tokens: false' is not served with",
    "two names of one limit": r"^'max_tokens' and 'max_completion_tokens' are both set",
    "a least number of tokens below the most": r"^'min_tokens' \(\d+\) is above the most tokens",
    "a timeout or a deadline": r"^'timeout' and 'deadline' are both set",
    "a deadline lies within a day": r"^'deadline' \(.*\) (has passed|is more than a day)",
    "a background response is stored": r"^'background' needs 'store'",
    "best_of is n": r"^'best_of' is not supported",
    "choices of all prompts": r"are more than 128 choices",
    "parts of a message by role and type": r"^Missing required parameter: '(messages|input)\[\d+\]",
    "fields of a message by role": r"^'messages\[\d+\]\.(tool_call_id|tool_calls)' belongs to role",
    "a message has one form of calls": r"^'messages\[\d+\]' has both 'tool_calls' and 'function_call'",
    "a last turn has no tool_use": r"has a 'tool_use' block without a result",
    "a turn says something": r"^'messages(\[\d+\]\.content)?' is empty; send at least one (block|message)",
    "a tool by type": r"^Missing required parameter: 'tools\[\d+\]\.\w+'\.|^'tools\[\d+\]' has type",
    "a choice by type": r"^Missing required parameter: 'tool_choice\.\w+'\.",
    "a choice among the tools": r"^'(tool_choice|function_call)[\w.\[\]]*' (is only allowed|names|must be of type)",
    "a continued message is the assistant's": r"^'continue_final_message' continues an assistant's message",
    "a new message or the last one": r"^'continue_final_message' and 'add_generation_prompt' exclude",
    "functions or tools": r"^'functions' and 'tool(s|_choice)' are both set",
    "one constraint": r"both constrain the answer",
    "names of tools": r"(must be 1 to 128 letters|is there twice)",
    # Limits of the model.
    "parts that are no text": r"(takes text parts only|served are text|documents of plain text)",
    "the vocabulary": r"has (token )?id -?\d+; this model's ids|^'logit_bias' names token",
    "the context": r"^This model's maximum context length is",
    "a template without tools": r"^This model's chat template does not take",
    "a template's own refusal": r"^The model's chat template (refused|leaves out)",
    "a tokenizer with marks of a gap": r"'(suffix|input_suffix|input_prefix)' is not supported by this model",
    # Grammars and schemas are languages of their own.
    "grammars": r"^[\w :]*'(response_format|structured_outputs|guided_\w+|json_schema|grammar|text\.format)\b",
    "schemas of functions": r"^Invalid schema for function",
    "unfit grammars": r"(is not valid JSON|is no valid|must be a JSON schema)",
    # Operators' routes: names of what exists, and of what there is to choose from.
    "hosts and replicas that are there": r"^(Host .* is unknown|model .* has no replica)",
    "a key that lasts": r"^the key would expire at",
    "a change that changes something": r"^Say what to change of the key",
    "names of classes, types and devices": r"^(priority cap|--quant|'dtype'|device) .*is unknown",
    # Models and requests that do not exist.
    "a key's usage": r"^Usage is counted per API key",
    "embeddings": r"gives no embeddings",
}
"""By what each says, the words of the refusal."""
_KNOWN = re.compile("|".join(f"(?:{rule})" for rule in RULES.values()), re.DOTALL)


@schemathesis.check
def valid_requests_are_taken(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    if case.meta is None or case.meta.generation.mode != GenerationMode.POSITIVE or response.status_code not in REFUSED:
        return
    message = response.json()["error"]["message"]
    assert _KNOWN.search(message), f"a request that the document allows was refused: {message}"
