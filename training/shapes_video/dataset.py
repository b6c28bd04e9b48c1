"""The training set on disk: drawn paths as coefficients, and captions with token ids, answers and colours.

Paths cost the drawing time and are few; every caption takes one of them and brings colours of its own, so a clip's
coefficients are put together when a batch is read.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path as Folder
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from training.shapes.answers import IGNORED
from training.shapes.dataset import Batch
from training.shapes.scenes import BACKGROUNDS, COLORS, SHAPES
from training.shapes.wording import BACKGROUND
from training.shapes_video.captions import Example, training_example
from training.shapes_video.clips import MOTIONS, coverages, sample_path
from training.shapes_video.columns import GRID, PATTERNS, VALUES, columns_of, find_patterns

__all__ = ["LENGTH", "QUESTIONS", "ClipDataset", "ClipDatasetSize", "build_clip_dataset", "token_answers"]

LENGTH: Final = 32  # tokens of a caption
HELD_BACK: Final = 1000  # last captions, for the encoder's validation loss
PATHS_SEEN: Final = 250  # paths that the patterns are found in
TINT: Final = 5  # a drawn colour is off by so much at most: no two reds are the same
QUESTIONS: Final[dict[str, int]] = {  # asked of every token of the shape's phrase: number of answers
    "color": len(COLORS) + 1,
    "shape": len(SHAPES),
    "motion": len(MOTIONS),
    "background": len(BACKGROUNDS),  # asked of the background's tokens too
}
Report = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ClipDatasetSize:
    """How much to draw; equal sizes and seeds give equal files."""

    paths: int
    captions: int
    seed: int


def token_answers(example: Example, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int8]:
    """Class per token and question, `[tokens, questions]`; `offsets` are each token's start and end."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    clip = example.clip
    background = list(BACKGROUNDS).index(clip.background)
    replies = [
        list(COLORS).index(clip.color) if example.says_color else len(COLORS),
        SHAPES.index(clip.path.shape),
        list(MOTIONS).index(clip.path.motion),
        background,
    ]
    answers = np.full((len(offsets), len(QUESTIONS)), IGNORED, np.int8)
    for span in example.caption.spans:
        inside = (ends > starts) & (starts >= span.start - 1) & (ends <= span.end)  # a token may begin with its blank
        if span.owner == BACKGROUND:
            answers[inside, -1] = background
        else:
            answers[inside] = replies
    return answers


class ClipDataset:
    """The arrays of a folder; `patterns` are those that the coefficients belong to."""

    def __init__(self, folder: Folder) -> None:
        self.patterns = torch.from_numpy(np.load(folder / "patterns.npy"))
        self._coefficients = torch.from_numpy(np.load(folder / "coefficients.npy"))
        self._ids = np.load(folder / "ids.npy")
        self._answers = np.load(folder / "answers.npy")
        self._colors = torch.from_numpy(np.load(folder / "colors.npy")).float()
        if len(self._ids) <= HELD_BACK:
            raise ValueError(f"{len(self._ids)} captions leave none to train on: {HELD_BACK} are held back")

    def strengths(self) -> torch.Tensor:
        """How strong each pattern is in the paths: root mean square of its coefficient."""
        return self._coefficients.flatten(0, 2).square().mean(0).sqrt()

    def captions(self, generator: torch.Generator, size: int) -> Batch:
        """A random batch of captions."""
        return self._batch(self._choose(generator, size))

    def examples(self, generator: torch.Generator, size: int) -> Batch:
        """A random batch of captions with the coefficients of their clips, for colours in -1..1."""
        chosen = self._choose(generator, size)
        batch = self._batch(chosen)
        tint = torch.randint(-TINT, TINT + 1, (size, 2, 3), generator=generator)
        color, background = ((self._colors[chosen] + tint).clamp(0, 255) / 127.5 - 1).unbind(1)
        shares = self._coefficients[chosen % len(self._coefficients)]
        clips = (color - background)[:, None, None, :, None] * shares[..., None, :]
        clips[..., 0] += background[:, None, None] * VALUES**0.5  # the even column
        return Batch(batch.ids, batch.mask, batch.answers, clips.permute(0, 3, 4, 1, 2).flatten(1, 2)[:, :, None])

    def validation(self) -> Batch:
        """The captions that no batch holds."""
        return self._batch(torch.arange(len(self._ids) - HELD_BACK, len(self._ids)))

    def _choose(self, generator: torch.Generator, size: int) -> torch.Tensor:
        return torch.randint(0, len(self._ids) - HELD_BACK, (size,), generator=generator)

    def _batch(self, chosen: torch.Tensor) -> Batch:
        rows = chosen.numpy()
        ids = torch.from_numpy(self._ids[rows].astype(np.int64))
        mask = ids != 0
        longest = int(mask.sum(1).max())
        answers = torch.from_numpy(self._answers[rows, :longest].astype(np.int64))
        return Batch(ids[:, :longest], mask[:, :longest], answers)


def build_clip_dataset(
    folder: Folder, size: ClipDatasetSize, tokenizer: Any, *, report: Report = lambda done: None
) -> ClipDataset:
    """Draw the set into `folder`, or open the one that is already there with the same size and seed.

    `report` is told of every path drawn. Caption `k` speaks of path `k % paths`.
    """
    stamp = folder / "size.json"
    wanted = json.dumps({**asdict(size), "tokens": len(tokenizer)})
    if stamp.is_file() and stamp.read_text() == wanted:
        return ClipDataset(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    rng = random.Random(size.seed)
    paths = [sample_path(rng) for _ in range(size.paths)]
    examples = [training_example(rng, paths[k % size.paths]) for k in range(size.captions)]
    examples, ids, answers = _fitting(rng, examples, tokenizer)
    looks = [(COLORS[example.clip.color], BACKGROUNDS[example.clip.background]) for example in examples]
    np.save(folder / "colors.npy", np.asarray(looks, np.uint8))
    np.save(folder / "ids.npy", ids)
    np.save(folder / "answers.npy", answers)
    patterns = find_patterns(
        torch.stack([torch.from_numpy(coverages(path)) for path in paths[:: max(1, size.paths // PATHS_SEEN)]])
    )
    np.save(folder / "patterns.npy", patterns.numpy())
    coefficients = torch.empty(size.paths, GRID, GRID, PATTERNS)
    for k, path in enumerate(paths):
        coefficients[k] = columns_of(torch.from_numpy(coverages(path))[None])[0] @ patterns.T
        report(k + 1)
    np.save(folder / "coefficients.npy", coefficients.numpy())
    stamp.write_text(wanted)
    return ClipDataset(folder)


def _fitting(
    rng: random.Random, examples: list[Example], tokenizer: Any
) -> tuple[list[Example], npt.NDArray[np.int16], npt.NDArray[np.int8]]:
    """The examples, those of more than `LENGTH` tokens worded anew, with token ids and answers."""
    examples = list(examples)
    ids = np.zeros((len(examples), LENGTH), np.int16)
    answers = np.full((len(examples), LENGTH, len(QUESTIONS)), IGNORED, np.int8)
    left = list(range(len(examples)))
    while left:
        texts = [examples[k].caption.text for k in left]
        options = {"padding": "max_length", "max_length": LENGTH + 1, "truncation": True, "return_tensors": "np"}
        encoded = tokenizer(texts, return_offsets_mapping=True, **options)
        too_long = []
        for k, tokens, offsets in zip(left, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if tokens[LENGTH]:
                too_long.append(k)
                examples[k] = training_example(rng, examples[k].clip.path)
            else:
                ids[k], answers[k] = tokens[:LENGTH], token_answers(examples[k], offsets[:LENGTH])
        left = too_long
    return examples, ids, answers
