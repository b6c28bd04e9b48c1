"""The checker against ground truth: what it says of drawn scenes, and that it does see what is wrong."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from training.shapes.checker import check, look
from training.shapes.drawing import render
from training.shapes.forms import FORMS, held_out_example
from training.shapes.scenes import Demand, Item, Scene, Wanted

PER_FORM = 25


def test_the_checker_is_right_on_at_least_99_of_100_drawn_scenes_of_all_forms() -> None:
    rng, noise = random.Random(11), np.random.default_rng(11)
    wrong = []
    for form in FORMS:
        for _ in range(PER_FORM):
            example = held_out_example(rng, form)
            verdict = check(render(example.scene, noise=noise), example.demand)
            if not verdict["all"]:
                wrong.append((example.caption.text, verdict))
    assert len(wrong) <= 0.01 * PER_FORM * len(FORMS), wrong


def scene(arrangement: str, *items: Item, background: str = "white") -> Scene:
    return Scene(background, arrangement, items)  # type: ignore[arg-type]


RED_CIRCLE = Item("circle", "red", "medium", 0.27, 0.5, 0.16)
BLUE_SQUARE = Item("square", "blue", "medium", 0.73, 0.5, 0.16)
SMALL_STAR = Item("star", "yellow", "small", 0.5, 0.5, 0.13)
LARGE_CIRCLE = Item("circle", "blue", "large", 0.5, 0.5, 0.38)


def demand(arrangement: str, *wanted: tuple[str, str], background: str | None = None) -> Demand:
    return Demand(arrangement, tuple(Wanted(color, shape) for color, shape in wanted), background)  # type: ignore[arg-type]


def wrong_in(picture: Scene, asked: Demand) -> set[str]:
    return {name for name, good in check(render(picture), asked).items() if not good} - {"all"}


def test_a_right_pair_passes_and_each_wrong_attribute_is_named() -> None:
    pair = scene("row", RED_CIRCLE, BLUE_SQUARE)
    assert wrong_in(pair, demand("row", ("red", "circle"), ("blue", "square"), background="white")) == set()
    assert wrong_in(pair, demand("row", ("green", "circle"), ("blue", "square"))) == {"color"}
    assert wrong_in(pair, demand("row", ("red", "heart"), ("blue", "square"))) == {"shape"}
    assert wrong_in(pair, demand("row", ("blue", "square"), ("red", "circle"))) == {"order"}
    assert wrong_in(pair, demand("column", ("red", "circle"), ("blue", "square"))) == {"order"}
    assert wrong_in(pair, demand("row", ("red", "circle"), ("blue", "square"), background="black")) == {"background"}


def test_one_item_too_many_or_too_few_is_a_wrong_count() -> None:
    pair = scene("row", RED_CIRCLE, BLUE_SQUARE)
    assert "count" in wrong_in(pair, demand("row", ("red", "circle"), ("red", "circle"), ("blue", "square")))
    assert wrong_in(pair, demand("single", ("red", "circle"))) == {"count"}


def test_an_item_inside_another_is_told_from_one_beside_it() -> None:
    nested = scene("inside", SMALL_STAR, LARGE_CIRCLE)
    asked = demand("inside", ("yellow", "star"), ("blue", "circle"))
    assert wrong_in(nested, asked) == set()
    beside = scene("row", replace(SMALL_STAR, x=0.2), replace(LARGE_CIRCLE, x=0.7, radius=0.2))
    assert wrong_in(beside, asked) == {"order"}
    assert "order" in wrong_in(nested, demand("inside", ("blue", "circle"), ("yellow", "star")))


def test_a_clip_frame_is_read_with_every_connected_part_as_one_item() -> None:
    nested = render(scene("inside", SMALL_STAR, LARGE_CIRCLE))
    assert [(seen.color, seen.shape) for seen in look(nested, nested=False).items] == [("blue", "circle")]
    pair = look(render(scene("row", RED_CIRCLE, BLUE_SQUARE)), nested=False)
    assert {(seen.color, seen.shape) for seen in pair.items} == {("red", "circle"), ("blue", "square")}


def test_an_item_in_the_hole_of_a_ring_is_inside_it() -> None:
    ring = Item("ring", "green", "large", 0.5, 0.5, 0.4)
    dot = Item("square", "red", "small", 0.5, 0.5, 0.12)
    assert wrong_in(scene("inside", dot, ring), demand("inside", ("red", "square"), ("green", "ring"))) == set()


@pytest.mark.parametrize("strength", [60, 200])
def test_noise_is_no_whole_item(strength: int) -> None:
    pixels = np.random.default_rng(3).integers(0, strength, (64, 64, 3)).astype(np.uint8)
    assert not check(pixels, demand("single", ("red", "circle")))["all"]
    assert not check(pixels, Demand("single", (Wanted(),)))["all"]


def test_an_empty_picture_shows_nothing_and_fails_every_demand() -> None:
    blank = np.full((64, 64, 3), 250, np.uint8)
    assert look(blank).items == ()
    verdict = check(blank, demand("single", ("red", "circle"), background="white"))
    assert verdict["background"]
    assert not verdict["count"]
    assert not verdict["all"]


def test_place_and_size_of_a_single_item_are_held_to_what_was_said() -> None:
    corner = Scene("white", "single", (Item("star", "green", "small", 0.22, 0.22, 0.13),), "top left")
    right = Demand("single", (Wanted("green", "star", "top left", "small"),))
    assert wrong_in(corner, right) == set()
    assert wrong_in(corner, replace(right, wanted=(Wanted("green", "star", "bottom", "large"),))) == {"place", "size"}
