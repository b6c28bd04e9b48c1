"""Train a denoising transformer on an encoder that already parses; the encoder trains on, slowly, under its parse loss.

Flow matching with prediction of the clean sample: Muon on the transformer's matrices, AdamW on the rest, averaged
weights (EMA), bfloat16 where that is faster, and some captions left out for guidance. What differs between pictures
and clips, the transformer's call and the noise levels, is a subclass's.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import nn

from training.shapes.dataset import Batch
from training.shapes.encoder import ParseHead
from training.shapes.muon import Muon
from training.shapes.progress import Course, Reporter, load_state, save_state, step_generator

__all__ = ["DenoiserTrainer", "Inspect"]

MUON_RATE: Final = 0.015
ADAM_RATE: Final = 2e-3
ENCODER_RATE: Final = 5e-4
PARSE_WEIGHT: Final = 0.1
CAPTION_DROPOUT: Final = 0.1
EMA_DECAY: Final = 0.996
SAVE_EVERY: Final = 250
Inspect = Callable[[int], None]


class ExampleSource(Protocol):
    """A training set's captions with their samples."""

    def examples(self, generator: torch.Generator, size: int) -> Batch:
        """A random batch."""


def bfloat16_pays() -> bool:
    """Whether this processor is faster in bfloat16 than in fp32; without instructions for it, it is tenfold slower."""
    seconds = {}
    for kind in (torch.float32, torch.bfloat16):
        left, right = torch.ones(2048, 192, dtype=kind), torch.ones(192, 192, dtype=kind)
        left @ right
        began = time.perf_counter()
        left @ right
        seconds[kind] = time.perf_counter() - began
    return seconds[torch.bfloat16] < 0.8 * seconds[torch.float32]


class DenoiserTrainer(ABC):
    """Transformer, encoder and head with their optimizers and averages; `train` goes on from `state_file`."""

    part = "denoiser"

    def __init__(
        self,
        transformer: Any,
        encoder: Any,
        head: ParseHead,
        *,
        seed: int,
        state_file: Path,
        batch: int = 48,
        rate: float = 1.0,
    ) -> None:
        self.transformer, self.encoder, self.head = transformer, encoder, head
        self._seed, self._state_file, self._batch = seed, state_file, batch
        self._half = bfloat16_pays()
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in transformer.named_parameters():
            (matrices if parameter.ndim == 2 and self.by_muon(name) else rest).append(parameter)
        self._clipped = [*rest, *encoder.parameters()]
        text = [*encoder.parameters(), *head.parameters()]
        self._adam = torch.optim.AdamW([{"params": rest}, {"params": text}], betas=(0.9, 0.98), weight_decay=0.0)
        self._muon = Muon(matrices)
        self._rates = (ADAM_RATE * rate, ENCODER_RATE * rate, MUON_RATE * rate)
        self._live = [*transformer.parameters(), *encoder.parameters()]
        self._average = [parameter.detach().clone() for parameter in self._live]

    @abstractmethod
    def by_muon(self, name: str) -> bool:
        """Whether Muon trains the matrix of this name."""

    @abstractmethod
    def noise_levels(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """So many sigmas in 0..1."""

    @abstractmethod
    def predict(
        self, noisy: torch.Tensor, sigma: torch.Tensor, states: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """The clean samples that the transformer sees in the noisy ones."""

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, the modules hold their averaged weights, ready to draw or to be saved."""
        kept = [parameter.detach().clone() for parameter in self._live]
        with torch.no_grad():
            torch._foreach_copy_(self._live, self._average)
        self.transformer.eval()
        self.encoder.eval()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._live, kept)
            self.transformer.train()
            self.encoder.train()

    def train(
        self, dataset: ExampleSource, course: Course, *, reporter: Reporter, inspect: Inspect, inspect_every: int
    ) -> None:
        """Train to the end of the course; `inspect` is called with the step count, under averaged weights."""
        self._resume(course)
        self.transformer.train()
        self.encoder.train()
        with reporter.part(self.part, course.steps) as bar:
            while not course.done:
                began = time.perf_counter()
                losses = self._step(dataset, course)
                course.advance(time.perf_counter() - began)
                reporter.step(bar, course, losses)
                look = course.step % inspect_every == 0 and not course.done
                if look or course.step % SAVE_EVERY == 0 or course.done:
                    self._save(course)
                if look:
                    with self.averaged():
                        inspect(course.step)

    def _step(self, dataset: ExampleSource, course: Course) -> dict[str, float]:
        share = course.rate(warm_up=60, decay=0.7)
        adam, encoder, muon = self._rates
        self._adam.param_groups[0]["lr"], self._adam.param_groups[1]["lr"] = adam * share, encoder * share
        self._muon.param_groups[0]["lr"] = muon * share
        generator = step_generator(self._seed, course.step)
        sample_loss, parse_loss = self._losses(dataset.examples(generator, self._batch), generator)
        self._adam.zero_grad()
        self._muon.zero_grad()
        (sample_loss + PARSE_WEIGHT * parse_loss).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._clipped, 1.0)
        self._adam.step()
        self._muon.step()
        keep = min(EMA_DECAY, (course.step + 1) / (course.step + 10))
        torch._foreach_lerp_(self._average, [parameter.detach() for parameter in self._live], 1 - keep)
        return {self.part: sample_loss.item(), "parse": parse_loss.item()}

    def _losses(self, batch: Batch, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        assert batch.samples is not None
        clean = batch.samples
        dropped = torch.rand(len(clean), generator=generator) < CAPTION_DROPOUT
        kept = ~dropped[:, None]
        ids, mask = batch.ids * kept, batch.mask & kept
        noise = torch.randn(clean.shape, generator=generator)
        sigma = self.noise_levels(len(clean), generator)
        level = sigma.view(-1, *[1] * (clean.ndim - 1))
        with torch.autocast("cpu", torch.bfloat16, enabled=self._half):
            states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
            predicted = self.predict((1 - level) * clean + level * noise, sigma, states, mask)
        sample_loss = (((predicted.float() - clean) / level.clamp_min(0.1)) ** 2).mean()
        losses = self.head.losses(states.float()[~dropped], batch.answers[~dropped])
        return sample_loss, torch.stack(list(losses.values())).sum()

    def _save(self, course: Course) -> None:
        state = {
            "transformer": self.transformer.state_dict(),
            "encoder": self.encoder.state_dict(),
            "head": self.head.state_dict(),
            "average": self._average,
            "adam": self._adam.state_dict(),
            "muon": self._muon.state_dict(),
            "half": self._half,
            "step": course.step,
            "used_s": course.used_s,
        }
        save_state(self._state_file, state)

    def _resume(self, course: Course) -> None:
        state = load_state(self._state_file)
        if state is None:
            return
        self.transformer.load_state_dict(state["transformer"])
        self.encoder.load_state_dict(state["encoder"])
        self.head.load_state_dict(state["head"])
        self._adam.load_state_dict(state["adam"])
        self._muon.load_state_dict(state["muon"])
        self._half = state["half"]  # measured once per run: another answer would be another course
        with torch.no_grad():
            torch._foreach_copy_(self._average, state["average"])
        course.step, course.used_s = state["step"], state["used_s"]
