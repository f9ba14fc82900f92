"""Asks the demonstration model held-out questions: `python -m training.evaluate [--model DIR]`.

Exits with 1 when fewer than 95 % of the answers are right, or when any answer does not stop by itself.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM

from ops.demo import MODEL_DIR
from training.tasks.tasks import Conversation, held_out, held_out_with_tools

REQUIRED = 0.95


@dataclass(frozen=True, slots=True)
class Outcome:
    """The model's answer to one question."""

    conversation: Conversation
    answer: str
    stopped: bool

    @property
    def right(self) -> bool:
        return self.stopped and self.answer in self.conversation.answers


def load(directory: Path = MODEL_DIR) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerBase]:
    """The shipped bf16 weights, computed in float32, with the tokenizer as any user of the checkpoint gets it."""
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(directory)


@torch.inference_mode()
def answer_all(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, conversations: list[Conversation], rows: int = 24
) -> list[Outcome]:
    """Greedy answers, `rows` conversations at a time, padded on the left; the longest answers run together.

    An answer that is a quarter longer than the longest right one of its group counts as one that does not stop.
    """
    ordered = sorted(conversations, key=lambda conversation: len(conversation.answers[0]))
    ends = set(model.generation_config.eos_token_id)
    outcomes: list[Outcome] = []
    generate: Any = model.generate  # pyright: ignore[reportAttributeAccessIssue]
    for start in range(0, len(ordered), rows):
        group = ordered[start : start + rows]
        texts = [
            str(
                tokenizer.apply_chat_template(
                    list(c.messages), tools=list(c.tools) or None, tokenize=False, add_generation_prompt=True
                )
            )
            for c in group
        ]
        inputs = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
        longest = max(len(tokenizer(answer)["input_ids"]) for c in group for answer in c.answers)
        output = generate(**inputs, max_new_tokens=longest * 5 // 4 + 16, do_sample=False)
        for conversation, ids in zip(group, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            end = next((at for at, token in enumerate(ids) if token in ends), None)
            outcomes.append(Outcome(conversation, str(tokenizer.decode(ids[:end])), end is not None))
    return outcomes


def table(outcomes: list[Outcome]) -> str:
    """Right answers per task and in all, as a Markdown table."""
    lines = ["| task | questions | right | stopped by itself |", "|---|---:|---:|---:|"]
    tasks = sorted({outcome.conversation.task for outcome in outcomes})
    for task in [*tasks, None]:
        mine = [outcome for outcome in outcomes if task in (None, outcome.conversation.task)]
        right, stopped = sum(o.right for o in mine), sum(o.stopped for o in mine)
        lines.append(f"| {task or '**all**'} | {len(mine)} | {100 * right / len(mine):.1f} % | {stopped} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure Furrow's demonstration model on held-out questions.")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="checkpoint directory")
    parser.add_argument("--per-task", type=int, default=30, help="held-out questions of each task, at most")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--mistakes", type=int, default=20, help="how many wrong answers to print")
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model)
    conversations = held_out(arguments.seed, arguments.per_task)
    conversations += held_out_with_tools(arguments.seed, arguments.per_task)
    outcomes = answer_all(model, tokenizer, conversations)
    print(table(outcomes))
    for outcome in [o for o in outcomes if not o.right][: arguments.mistakes]:
        question = outcome.conversation.messages[-1]["content"]
        print(f"\n{outcome.conversation.task}: {question}")
        print(f"  want {outcome.conversation.answers[0]}\n  got  {outcome.answer}")
    share = sum(outcome.right for outcome in outcomes) / len(outcomes)
    return 0 if share >= REQUIRED and all(outcome.stopped for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
