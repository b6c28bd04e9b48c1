"""Train the picture transformer on an encoder that already parses; the encoder trains on, slowly, under its parse loss.

Flow matching in pixel space with prediction of the clean picture, as `PRXPixelPipeline` samples it: Muon on the
transformer's matrices, AdamW on the rest, averaged weights (EMA), bfloat16 where that is faster, and some captions
left out for guidance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from training.shapes.dataset import Batch, Dataset
from training.shapes.encoder import answer_losses
from training.shapes.muon import Muon
from training.shapes.progress import Course, Reporter, load_state, save_state, step_generator

__all__ = ["PictureTrainer"]

MUON_RATE: Final = 0.015
ADAM_RATE: Final = 2e-3
ENCODER_RATE: Final = 5e-4
PARSE_WEIGHT: Final = 0.1
CAPTION_DROPOUT: Final = 0.1
EMA_DECAY: Final = 0.996
SAVE_EVERY: Final = 250
NOT_MUON: Final = ("final_layer", "img_in", "txt_in", "modulation", "adaLN", "time_in")
Inspect = Callable[[int], None]


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


class PictureTrainer:
    """Transformer, encoder and head with their optimizers and averages; `train` goes on from `state_file`."""

    def __init__(
        self,
        transformer: Any,
        encoder: Any,
        head: nn.Linear,
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
            by_muon = parameter.ndim == 2 and not any(part in name for part in NOT_MUON)
            (matrices if by_muon else rest).append(parameter)
        self._clipped = [*rest, *encoder.parameters()]
        text = [*encoder.parameters(), *head.parameters()]
        self._adam = torch.optim.AdamW([{"params": rest}, {"params": text}], betas=(0.9, 0.98), weight_decay=0.0)
        self._muon = Muon(matrices)
        self._rates = (ADAM_RATE * rate, ENCODER_RATE * rate, MUON_RATE * rate)
        self._live = [*transformer.parameters(), *encoder.parameters()]
        self._average = [parameter.detach().clone() for parameter in self._live]

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
        self, dataset: Dataset, course: Course, *, reporter: Reporter, inspect: Inspect, inspect_every: int
    ) -> None:
        """Train to the end of the course; `inspect` is called with the step count, under averaged weights."""
        self._resume(course)
        self.transformer.train()
        self.encoder.train()
        with reporter.part("picture", course.steps) as bar:
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

    def _step(self, dataset: Dataset, course: Course) -> dict[str, float]:
        share = course.rate(warm_up=60, decay=0.7)
        adam, encoder, muon = self._rates
        self._adam.param_groups[0]["lr"], self._adam.param_groups[1]["lr"] = adam * share, encoder * share
        self._muon.param_groups[0]["lr"] = muon * share
        generator = step_generator(self._seed, course.step)
        picture_loss, parse_loss = self._losses(dataset.examples(generator, self._batch), generator)
        self._adam.zero_grad()
        self._muon.zero_grad()
        (picture_loss + PARSE_WEIGHT * parse_loss).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._clipped, 1.0)
        self._adam.step()
        self._muon.step()
        keep = min(EMA_DECAY, (course.step + 1) / (course.step + 10))
        torch._foreach_lerp_(self._average, [parameter.detach() for parameter in self._live], 1 - keep)
        return {"picture": picture_loss.item(), "parse": parse_loss.item()}

    def _losses(self, batch: Batch, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        assert batch.pictures is not None
        clean = batch.pictures
        dropped = torch.rand(len(clean), generator=generator) < CAPTION_DROPOUT
        kept = ~dropped[:, None]
        ids, mask = batch.ids * kept, batch.mask & kept
        noise = torch.randn(clean.shape, generator=generator)
        sigma = torch.sigmoid(torch.randn(len(clean), generator=generator) + 0.6)
        level = sigma[:, None, None, None]
        with torch.autocast("cpu", torch.bfloat16, enabled=self._half):
            states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
            predicted = self.transformer(
                hidden_states=(1 - level) * clean + level * noise,
                timestep=sigma,
                encoder_hidden_states=states,
                attention_mask=mask,
                return_dict=False,
            )[0]
        picture_loss = (((predicted.float() - clean) / level.clamp_min(0.1)) ** 2).mean()
        losses = answer_losses(self.head, states.float()[~dropped], batch.answers[~dropped])
        return picture_loss, torch.stack(list(losses.values())).sum()

    def _save(self, course: Course) -> None:
        state = {
            "transformer": self.transformer.state_dict(),
            "encoder": self.encoder.state_dict(),
            "head": self.head.state_dict(),
            "average": self._average,
            "adam": self._adam.state_dict(),
            "muon": self._muon.state_dict(),
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
        with torch.no_grad():
            torch._foreach_copy_(self._average, state["average"])
        course.step, course.used_s = state["step"], state["used_s"]
