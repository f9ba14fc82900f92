"""Trains the demonstration model: `python -m training.train [--out DIR] [--minutes N]`."""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.multiprocessing.spawn import spawn
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ops.demo import MAX_NEW_TOKENS, MODEL_DIR
from training import tokenizer
from training.averaging import Shared
from training.batches import IGNORED, batches

TOKENS_PER_BATCH = 1024
"""Of each process; one step learns from the batches of all processes."""
WARMUP_SHARE, DECAY_SHARE = 0.02, 0.5
MUON_RATE, EMBEDDING_RATE, NORM_RATE = 0.02, 3e-3, 1e-2
# Queries and keys start long, so that attention is sharp from the first step: copying is learned much sooner.
QUERY_KEY_SCALE = 1.7
REFINING_RATE = 0.4
"""The peak rates of `--refine`, relative to those of a first training."""


def configuration(tokens: PreTrainedTokenizerFast) -> Qwen3Config:
    """About one million parameters; heads, KV heads and the inner width all divide by four, so tp 1, 2 and 4 work."""
    return Qwen3Config(
        vocab_size=len(tokens),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokens.eos_token_id,  # pyright: ignore[reportArgumentType]: one token of text
        pad_token_id=tokens.pad_token_id,  # pyright: ignore[reportArgumentType]
        attention_dropout=0.0,
    )


def initial(tokens: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """The model before training."""
    model = Qwen3ForCausalLM(configuration(tokens))
    for name, parameter in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            nn.init.constant_(parameter, QUERY_KEY_SCALE)
    return model.train()


def _optimizers(model: nn.Module) -> Sequence[torch.optim.Optimizer]:
    """Muon for the matrices, Adam for the embedding (which is the output too) and the norms."""
    parameters = list(model.named_parameters())
    embedding = [p for name, p in parameters if "embed" in name]
    norms = [p for _, p in parameters if p.ndim == 1]
    matrices = [p for name, p in parameters if p.ndim == 2 and "embed" not in name]
    small = [{"params": embedding, "lr": EMBEDDING_RATE}, {"params": norms, "lr": NORM_RATE}]
    optimizers = [
        torch.optim.Muon(matrices, lr=MUON_RATE, momentum=0.95, weight_decay=0.01, ns_steps=5),
        torch.optim.AdamW(small, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base"] = group["lr"]
    return optimizers


def _rate(progress: float, peak: float) -> float:
    """Warm up, hold at `peak`, then fall to zero in a straight line; `progress` is from 0 to 1."""
    return peak * min(progress / WARMUP_SHARE, 1.0, (1.0 - progress) / DECAY_SHARE)


def _loss(model: Qwen3ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the learned tokens; only their positions reach the output matrix."""
    targets = labels[:, 1:]
    learned = targets != IGNORED
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][learned]
    return nn.functional.cross_entropy(model.lm_head(hidden), targets[learned])


def train(
    model: Qwen3ForCausalLM,
    tokens: PreTrainedTokenizerFast,
    options: argparse.Namespace,
    shared: Shared,
    report: Callable[[str], None],
) -> None:
    """Trains for `options.minutes` of processor time in each process: a busy machine takes longer, as good a model."""
    minutes, peak = options.minutes, REFINING_RATE if options.refine else 1.0
    optimizers = _optimizers(model)
    start, progress, step, smooth = time.process_time(), 0.0, 0, 0.0
    for ids, labels in batches(tokens, 1000 * options.seed + shared.rank, TOKENS_PER_BATCH):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["base"] * _rate(progress, peak)
        loss = _loss(model, ids, labels)
        loss.backward()
        spent = (time.process_time() - start) / (60 * minutes)
        mean_loss, progress = shared.average(model, loss.item(), spent)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step, smooth = step + 1, mean_loss if step == 0 else 0.98 * smooth + 0.02 * mean_loss
        if step % 100 == 0:
            report(f"step {step}  {minutes * progress:.1f} of {minutes:.1f} minutes  loss {smooth:.4f}")
        if progress >= 1:
            break


def save(model: Qwen3ForCausalLM, tokens: PreTrainedTokenizerFast, directory: Path) -> None:
    """Writes a checkpoint in the Hugging Face layout, weights in bf16."""
    model.to(torch.bfloat16)  # pyright: ignore[reportArgumentType]: transformers hides torch's overloads
    ends = [tokens.convert_tokens_to_ids(name) for name in (tokenizer.TURN_END, tokenizer.END_OF_TEXT)]
    model.generation_config = GenerationConfig(
        eos_token_id=ends, pad_token_id=tokens.pad_token_id, do_sample=False, max_new_tokens=MAX_NEW_TOKENS
    )
    model.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)  # an installed package is read by every user
    tokenizer.save(tokens, directory)


def _process(rank: int, arguments: argparse.Namespace, meeting: str) -> None:
    """One of the training processes, on one thread; the first one reports and saves."""
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    if arguments.refine:
        model = Qwen3ForCausalLM.from_pretrained(arguments.refine, dtype=torch.float32).train()
        tokens = PreTrainedTokenizerFast.from_pretrained(arguments.refine)
        tokens.chat_template = tokenizer.CHAT_TEMPLATE
    else:
        tokens = tokenizer.build()
        model = initial(tokens)
    shared = Shared(rank, arguments.processes, meeting)
    first = rank == 0
    train(model, tokens, arguments, shared, print if first else lambda _: None)
    if first:
        save(model, tokens, arguments.out)
        print(f"{model.num_parameters() / 1e6:.2f} M parameters written to {arguments.out}")
    shared.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train Furrow's demonstration model.")
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="directory for the checkpoint")
    parser.add_argument("--minutes", type=float, default=24.0, help="processor time to train for, in each process")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--refine", type=Path, help="go on from this checkpoint, at lower rates and with its tokenizer")
    parser.add_argument("--processes", type=int, default=2, help="one per free core")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        spawn(_process, (arguments, meeting), nprocs=arguments.processes)


if __name__ == "__main__":
    main()
