"""The training set on disk: pictures, token ids and parser's answers as plain arrays, made once from a seed.

All captions teach the encoder; the first `pictures` of them have their scene drawn and teach the picture model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from training.shapes.answers import HEADS, token_answers
from training.shapes.drawing import SIDE, render
from training.shapes.forms import Example, training_example
from training.shapes.tokenizer import LENGTH

__all__ = ["Batch", "Dataset", "DatasetSize", "build_dataset"]

CHUNK: Final = 1000
HELD_BACK: Final = 1000  # last captions, for the encoder's validation loss
Report = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class DatasetSize:
    """How much to draw; equal sizes and seeds give equal files."""

    pictures: int
    captions: int
    seed: int

    def __post_init__(self) -> None:
        if self.pictures > self.captions - HELD_BACK:
            text = f"{self.captions} captions leave {self.captions - HELD_BACK} to train on: {HELD_BACK} are held back"
            raise ValueError(f"{text}; {self.pictures} pictures need one each")


@dataclass(frozen=True, slots=True)
class Batch:
    """Captions as `ids [n, tokens]`, `mask`, `answers [n, tokens, heads]`, cut to the longest; `samples` in -1..1."""

    ids: torch.Tensor
    mask: torch.Tensor
    answers: torch.Tensor
    samples: torch.Tensor | None = None


class Dataset:
    """The arrays of a folder, read on demand."""

    def __init__(self, folder: Path) -> None:
        self._pictures = np.load(folder / "pictures.npy", mmap_mode="r")
        self._ids = np.load(folder / "ids.npy")
        self._answers = np.load(folder / "answers.npy", mmap_mode="r")
        if len(self._ids) <= HELD_BACK:
            raise ValueError(f"{len(self._ids)} captions leave none to train on: {HELD_BACK} are held back")

    def captions(self, generator: torch.Generator, size: int) -> Batch:
        """A random batch of captions."""
        return self._batch(torch.randint(0, len(self._ids) - HELD_BACK, (size,), generator=generator))

    def examples(self, generator: torch.Generator, size: int) -> Batch:
        """A random batch of captions with their pictures."""
        return self._batch(torch.randint(0, len(self._pictures), (size,), generator=generator), pictures=True)

    def validation(self) -> Batch:
        """The captions that no batch holds."""
        return self._batch(torch.arange(len(self._ids) - HELD_BACK, len(self._ids)))

    def _batch(self, chosen: torch.Tensor, *, pictures: bool = False) -> Batch:
        rows = chosen.numpy()
        ids = torch.from_numpy(self._ids[rows].astype(np.int64))
        mask = ids != 0
        longest = int(mask.sum(1).max())
        answers = torch.from_numpy(self._answers[rows, :longest].astype(np.int64))
        drawn = None
        if pictures:
            drawn = torch.from_numpy(self._pictures[rows]).permute(0, 3, 1, 2).float() / 127.5 - 1
        return Batch(ids[:, :longest], mask[:, :longest], answers, drawn)


def build_dataset(folder: Path, size: DatasetSize, tokenizer: Any, *, report: Report = lambda done: None) -> Dataset:
    """Draw the set into `folder`, or open the one that is already there with the same size and seed."""
    stamp = folder / "size.json"
    wanted = json.dumps({**asdict(size), "tokens": len(tokenizer)})
    if stamp.is_file() and stamp.read_text() == wanted:
        return Dataset(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    rng, noise = random.Random(size.seed), np.random.default_rng(size.seed)
    pictures = np.lib.format.open_memmap(
        folder / "pictures.npy", mode="w+", dtype=np.uint8, shape=(size.pictures, SIDE, SIDE, 3)
    )
    ids = np.zeros((size.captions, LENGTH), np.int16)
    answers = np.zeros((size.captions, LENGTH, len(HEADS)), np.int8)
    for start in range(0, size.captions, CHUNK):
        chunk = _draw_short(rng, tokenizer, min(CHUNK, size.captions - start))
        for k, (example, tokens, replies) in enumerate(chunk, start):
            ids[k], answers[k] = tokens, replies
            if k < size.pictures:
                pictures[k] = render(example.scene, noise=noise)
        report(start + len(chunk))
    pictures.flush()
    np.save(folder / "ids.npy", ids)
    np.save(folder / "answers.npy", answers)
    stamp.write_text(wanted)
    return Dataset(folder)


def _draw_short(rng: random.Random, tokenizer: Any, count: int) -> list[tuple[Example, Any, Any]]:
    """Examples whose captions fit into `LENGTH` tokens, with token ids and answers."""
    kept: list[tuple[Example, Any, Any]] = []
    while len(kept) < count:
        examples = [training_example(rng) for _ in range(count - len(kept))]
        encoded = tokenizer(
            [example.caption.text for example in examples],
            padding="max_length",
            max_length=LENGTH + 1,
            truncation=True,
            return_tensors="np",
            return_offsets_mapping=True,
        )
        for example, ids, offsets in zip(examples, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if ids[LENGTH] == 0:
                kept.append((example, ids[:LENGTH], token_answers(example, offsets[:LENGTH])))
    return kept
