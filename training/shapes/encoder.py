"""Teach the T5 encoder to parse captions before any picture is seen: every token names what its phrase says.

The picture transformer only reads text tokens and never mixes them, so binding colours to shapes and places must
happen here. Plain AdamW in fp32: with Muon or bfloat16 this small encoder stays at chance.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoTokenizer, T5Config, T5EncoderModel

from training.shapes.answers import IGNORED
from training.shapes.dataset import Batch
from training.shapes.progress import Course, Reporter, load_state, save_state, step_generator
from training.shapes.tokenizer import carry_over_embeddings

__all__ = ["ENCODER_SHAPE", "WIDTH", "CaptionSource", "ParseHead", "new_encoder", "train_encoder"]

WIDTH: Final = 128
ENCODER_SHAPE: Final[dict[str, Any]] = {
    "d_model": WIDTH,
    "d_kv": 32,
    "d_ff": 256,
    "num_layers": 3,
    "num_heads": 4,
    "pad_token_id": 0,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.0,
}
BATCH: Final = 128
FRESH_RATE: Final = 3e-3
WARM_RATE: Final = 1.5e-3
HEAD_ONLY_STEPS: Final = 40  # of a warm start: a fresh head must not tear at a working encoder
SAVE_EVERY: Final = 100


class CaptionSource(Protocol):
    """A training set's captions with their parser's answers."""

    def captions(self, generator: torch.Generator, size: int) -> Batch:
        """A random batch."""

    def validation(self) -> Batch:
        """Captions that no batch holds."""


def new_encoder(tokenizer: Any, *, start: Path | None = None) -> Any:
    """A fresh encoder, or that of the pipeline directory `start`, its embeddings carried over to this vocabulary."""
    if start is None:
        return T5EncoderModel(T5Config(vocab_size=len(tokenizer), **ENCODER_SHAPE))
    encoder = T5EncoderModel.from_pretrained(start, subfolder="text_encoder")
    old_tokenizer = AutoTokenizer.from_pretrained(start, subfolder="tokenizer")
    if old_tokenizer.get_vocab() != tokenizer.get_vocab():
        rows = carry_over_embeddings(encoder.shared.weight.detach(), old_tokenizer, tokenizer)
        encoder.resize_token_embeddings(len(tokenizer))
        with torch.no_grad():
            encoder.shared.weight.copy_(rows)
    return encoder


class ParseHead(nn.Linear):
    """The parser's answers from an encoded token, one group of scores per question; not part of the pipeline."""

    def __init__(self, questions: dict[str, int]) -> None:
        super().__init__(WIDTH, sum(questions.values()))
        self._questions = questions

    def losses(self, states: torch.Tensor, answers: torch.Tensor) -> dict[str, torch.Tensor]:
        """Cross entropy of every question over the tokens that have an answer."""
        losses = {}
        for k, (name, scores) in enumerate(self._scores(states)):
            losses[name] = F.cross_entropy(scores.flatten(0, 1), answers[..., k].flatten(), ignore_index=IGNORED)
        return losses

    def accuracy(self, encoder: Any, batch: Batch) -> dict[str, float]:
        """Share of the answered tokens that every question is right on."""
        with torch.no_grad():
            states = encoder(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state
            shares = {}
            for k, (name, scores) in enumerate(self._scores(states)):
                answers = batch.answers[..., k]
                asked = answers != IGNORED
                shares[name] = float((scores.argmax(-1) == answers)[asked].float().mean())
        return shares

    def _scores(self, states: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        return zip(self._questions, self(states).split(list(self._questions.values()), -1), strict=True)


def train_encoder(
    encoder: Any,
    head: ParseHead,
    dataset: CaptionSource,
    course: Course,
    *,
    state_file: Path,
    seed: int,
    warm: bool,
    reporter: Reporter,
) -> None:
    """Train encoder and head in place; goes on from `state_file` where there is one."""
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
    right = head.accuracy(encoder, dataset.validation())
    reporter.note("parsed right: " + "  ".join(f"{name} {share:.2%}" for name, share in right.items()))


def _step(
    encoder: Any,
    head: ParseHead,
    optimizer: torch.optim.Optimizer,
    dataset: CaptionSource,
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
    losses = head.losses(states, batch.answers)
    optimizer.zero_grad()
    torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
    optimizer.step()
    return {name: loss.item() for name, loss in losses.items()}
