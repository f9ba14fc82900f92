"""Training batches: conversations as token ids, sorted by length so that little is padding."""

import itertools
import random
from collections.abc import Iterator

import torch
from transformers import PreTrainedTokenizerFast

from training.tasks import tasks
from training.tasks.conversation import Piece, conversation_pieces

IGNORED = -100
DOCUMENT_SHARE = 0.04

Row = tuple[list[int], list[int]]


def _pieces(seed: int) -> Iterator[list[Piece]]:
    rng = random.Random(seed)
    chats, documents = tasks.training(seed), tasks.documents(seed)
    while True:
        if rng.random() < DOCUMENT_SHARE:
            prompt, continuation = next(documents)
            yield [(prompt, False), (continuation + "<|endoftext|>", True)]
        else:
            yield conversation_pieces(next(chats))


def _rows(tokenizer: PreTrainedTokenizerFast, samples: list[list[Piece]]) -> list[Row]:
    encoded = iter(tokenizer([text for pieces in samples for text, _ in pieces])["input_ids"])
    rows: list[Row] = []
    for pieces in samples:
        ids: list[int] = []
        labels: list[int] = []
        for _, learned in pieces:
            tokens = next(encoded)
            ids += tokens
            labels += tokens if learned else [IGNORED] * len(tokens)
        rows.append((ids, labels))
    return rows


def _batch(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORED)
    for index, (row_ids, row_labels) in enumerate(rows):
        ids[index, : len(row_ids)] = torch.tensor(row_ids)
        labels[index, : len(row_labels)] = torch.tensor(row_labels)
    return ids, labels


def batches(
    tokenizer: PreTrainedTokenizerFast, seed: int, tokens: int, pool: int = 3000
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (ids, labels) pairs of shape (rows, width) with rows * width <= `tokens` where one row allows it.

    Padding is on the right, where a causal model can't see it, so no attention mask is needed. Labels stand at
    their own position, not shifted.
    """
    rng = random.Random(seed)
    samples = _pieces(seed)
    while True:
        rows = sorted(_rows(tokenizer, list(itertools.islice(samples, pool))), key=lambda row: len(row[0]))
        groups: list[list[Row]] = [[]]
        for row in rows:
            if groups[-1] and len(row[0]) * (len(groups[-1]) + 1) > tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        yield from map(_batch, groups)
