"""Teach the T5 encoder to parse captions before any picture is seen: every token names what its phrase says.

The picture transformer only reads text tokens and never mixes them, so binding colours to shapes and places must
happen here. Plain AdamW in fp32: with Muon or bfloat16 this small encoder stays at chance.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoTokenizer, T5Config, T5EncoderModel

from training.shapes.answers import HEADS, IGNORED
from training.shapes.dataset import Batch, Dataset
from training.shapes.progress import Course, Reporter, load_state, save_state, step_generator
from training.shapes.tokenizer import carry_over_embeddings

__all__ = ["WIDTH", "answer_losses", "new_encoder", "new_head", "parse_accuracy", "train_encoder"]

WIDTH: Final = 128
BATCH: Final = 128
FRESH_RATE: Final = 3e-3
WARM_RATE: Final = 1.5e-3
HEAD_ONLY_STEPS: Final = 40  # of a warm start: a fresh head must not tear at a working encoder
SAVE_EVERY: Final = 100


def new_encoder(tokenizer: Any, *, start: Path | None = None) -> Any:
    """A fresh encoder, or that of the pipeline directory `start`, its embeddings carried over to this vocabulary."""
    if start is None:
        return T5EncoderModel(
            T5Config(
                vocab_size=len(tokenizer),
                d_model=WIDTH,
                d_kv=32,
                d_ff=256,
                num_layers=3,
                num_heads=4,
                pad_token_id=0,
                feed_forward_proj="gated-gelu",
                dropout_rate=0.0,
            )
        )
    encoder = T5EncoderModel.from_pretrained(start, subfolder="text_encoder")
    old_tokenizer = AutoTokenizer.from_pretrained(start, subfolder="tokenizer")
    if old_tokenizer.get_vocab() != tokenizer.get_vocab():
        rows = carry_over_embeddings(encoder.shared.weight.detach(), old_tokenizer, tokenizer)
        encoder.resize_token_embeddings(len(tokenizer))
        with torch.no_grad():
            encoder.shared.weight.copy_(rows)
    return encoder


def new_head() -> nn.Linear:
    """The parser's answers from an encoded token, all heads in one matrix; not part of the pipeline."""
    return nn.Linear(WIDTH, sum(HEADS.values()))


def _answers(head: nn.Linear, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(head(states).split(list(HEADS.values()), -1))


def answer_losses(head: nn.Linear, states: torch.Tensor, answers: torch.Tensor) -> dict[str, torch.Tensor]:
    """Cross entropy of every head over the tokens that have an answer."""
    losses = {}
    for k, (name, scores) in enumerate(zip(HEADS, _answers(head, states), strict=True)):
        losses[name] = F.cross_entropy(scores.flatten(0, 1), answers[..., k].flatten(), ignore_index=IGNORED)
    return losses


def parse_accuracy(encoder: Any, head: nn.Linear, batch: Batch) -> dict[str, float]:
    """Share of the answered tokens that every head gets right."""
    with torch.no_grad():
        states = encoder(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state
        shares = {}
        for k, (name, scores) in enumerate(zip(HEADS, _answers(head, states), strict=True)):
            answers = batch.answers[..., k]
            asked = answers != IGNORED
            shares[name] = float((scores.argmax(-1) == answers)[asked].float().mean())
    return shares


def train_encoder(
    encoder: Any, dataset: Dataset, course: Course, *, state_file: Path, seed: int, warm: bool, reporter: Reporter
) -> nn.Linear:
    """Train the encoder in place and return its head; goes on from `state_file` where there is one."""
    head = new_head()
    rate = WARM_RATE if warm else FRESH_RATE
    optimizer = torch.optim.AdamW(
        [{"params": encoder.parameters()}, {"params": head.parameters()}], lr=rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    state = load_state(state_file)
    if state:
        encoder.load_state_dict(state["encoder"])
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        course.step, course.used_s = state["step"], state["used_s"]

    def save() -> None:
        parts = {"encoder": encoder.state_dict(), "head": head.state_dict(), "optimizer": optimizer.state_dict()}
        save_state(state_file, {**parts, "step": course.step, "used_s": course.used_s})

    encoder.train()
    with reporter.part("encoder", course.steps) as bar:
        while not course.done:
            began = time.perf_counter()
            losses = _step(encoder, head, optimizer, dataset, course, seed=seed, rate=rate, warm=warm)
            course.advance(time.perf_counter() - began)
            reporter.step(bar, course, losses)
            if course.step % SAVE_EVERY == 0:
                save()
    save()
    encoder.eval()
    right = parse_accuracy(encoder, head, dataset.validation())
    reporter.note("parsed right: " + "  ".join(f"{name} {share:.2%}" for name, share in right.items()))
    return head


def _step(
    encoder: Any,
    head: nn.Linear,
    optimizer: torch.optim.Optimizer,
    dataset: Dataset,
    course: Course,
    *,
    seed: int,
    rate: float,
    warm: bool,
) -> dict[str, float]:
    share = course.rate(warm_up=50, decay=0.7)
    optimizer.param_groups[0]["lr"] = 0.0 if warm and course.step < HEAD_ONLY_STEPS else rate * share
    optimizer.param_groups[1]["lr"] = (4 * rate if warm and course.step < HEAD_ONLY_STEPS else rate) * share
    batch = dataset.captions(step_generator(seed, course.step), BATCH)
    states = encoder(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state
    losses = answer_losses(head, states, batch.answers)
    optimizer.zero_grad()
    torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
    optimizer.step()
    return {name: loss.item() for name, loss in losses.items()}
