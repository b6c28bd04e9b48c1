"""Clips, their captions and answers, how they are packed, and the checker against ground truth."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from training.shapes.answers import IGNORED
from training.shapes.forms import is_held_out
from training.shapes.scenes import BACKGROUNDS, COLORS, SHAPES
from training.shapes_video.autoencoder import new_autoencoder
from training.shapes_video.captions import held_out_example, training_example
from training.shapes_video.checker import check_clip
from training.shapes_video.clips import FRAMES, MOTIONS, render
from training.shapes_video.dataset import LENGTH, token_answers
from training.shapes_video.encoder import build_clip_tokenizer
from training.shapes_video.packing import COLORS as PACKED_COLORS
from training.shapes_video.packing import pack, unpack


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_clip_tokenizer()


def test_the_checker_is_right_on_at_least_99_of_100_drawn_clips() -> None:
    rng = random.Random(3)
    examples = [held_out_example(rng) for _ in range(100)]
    wrong = [example.caption.text for example in examples if not check_clip(render(example.clip), example)["all"]]
    assert len(wrong) <= 1, wrong


def test_the_checker_names_what_is_wrong_with_a_clip() -> None:
    rng = random.Random(4)
    example = next(
        e for e in iter(lambda: training_example(rng), None) if e.clip.path.motion == "right" and e.says_color
    )
    video = render(example.clip)
    assert {name for name, good in check_clip(video[::-1], example).items() if not good} == {"motion", "all"}
    still = np.repeat(video[6:7], FRAMES, 0)
    assert {name for name, good in check_clip(still, example).items() if not good} == {"motion", "all"}
    other = next(shape for shape in SHAPES if shape != example.clip.path.shape)
    reshaped = render(replace(example.clip, path=replace(example.clip.path, shape=other)))
    assert {name for name, good in check_clip(reshaped, example).items() if not good} == {"shape", "all"}
    empty = np.full_like(video, 250)
    assert not any(check_clip(empty, example)[name] for name in ("motion", "shape", "color", "count", "all"))


def test_the_shape_goes_where_its_motion_says_and_stays_whole() -> None:
    rng = random.Random(5)
    for _ in range(40):
        path = training_example(rng).clip.path
        across, down = MOTIONS[path.motion]
        assert np.sign(round(path.x[-1] - path.x[0], 6)) == across
        assert np.sign(round(path.y[-1] - path.y[0], 6)) == down
        for x, y, radius in zip(path.x, path.y, path.radius, strict=True):
            assert 1.1 * radius < min(x, y, 1 - x, 1 - y)


def test_training_never_meets_a_held_out_caption_and_fixes_what_is_unsaid() -> None:
    rng = random.Random(6)
    examples = [training_example(rng) for _ in range(300)]
    assert not any(is_held_out(example.caption.text) for example in examples)
    assert is_held_out(held_out_example(rng).caption.text)
    for example in examples:
        if not example.says_background:
            assert example.clip.background == ("gray" if example.clip.color == "white" else "white")


def test_every_token_of_the_shape_and_its_motion_names_color_shape_motion_and_background(tokenizer: Any) -> None:
    rng = random.Random(7)
    for _ in range(50):
        example = training_example(rng)
        encoded = tokenizer(example.caption.text, return_offsets_mapping=True, return_tensors="np")
        answers = token_answers(example, encoded["offset_mapping"][0])
        clip = example.clip
        color = list(COLORS).index(clip.color) if example.says_color else len(COLORS)
        wanted = [color, SHAPES.index(clip.path.shape), list(MOTIONS).index(clip.path.motion)]
        told = answers[answers[:, 0] != IGNORED]
        assert len(told) >= 2
        assert (told[:, :3] == wanted).all()
        backgrounds = answers[answers[:, 3] != IGNORED, 3]
        assert (backgrounds == list(BACKGROUNDS).index(clip.background)).all()
        assert len(backgrounds) > len(told) or not example.says_background


def test_the_tokenizer_knows_every_word_and_captions_fit(tokenizer: Any) -> None:
    rng = random.Random(8)
    lengths = [len(tokenizer(training_example(rng).caption.text)["input_ids"]) for _ in range(300)]
    assert sorted(lengths)[-6] <= LENGTH  # a few with fillers and style words are worded anew
    assert len(tokenizer("a growing red star on a pale green background")["input_ids"]) == 9


def test_packing_loses_nothing() -> None:
    clips = torch.rand(2, 3, FRAMES, 16, 8)
    assert torch.equal(unpack(pack(clips)), clips)


def test_the_autoencoder_decodes_packed_clips_to_half_a_level_of_256() -> None:
    clips = torch.rand(1, 3, 5, 16, 24) * 2 - 1
    with torch.no_grad():
        decoded = new_autoencoder().decode(pack(clips)).sample
    assert (decoded - clips).abs().max() < 1 / 255


def test_the_autoencoder_encodes_the_colors_of_packed_clips() -> None:
    clips = torch.rand(1, 3, 9, 16, 24) * 2 - 1
    with torch.no_grad():
        latents = new_autoencoder().encode(clips).latent_dist.mode()
    assert (latents - pack(clips))[:, :PACKED_COLORS].abs().max() < 1 / 255


def test_half_precision_costs_the_autoencoder_little() -> None:
    clips = torch.rand(1, 3, 5, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        decoded = new_autoencoder().to(torch.float16).decode(pack(clips).half()).sample.float()
    assert (decoded - clips).abs().max() < 6 / 255
