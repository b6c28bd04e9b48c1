"""Captions, spans, answers, tokenizer and drawn training set of the shapes recipe."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from training.shapes.answers import HEADS, IGNORED, token_answers
from training.shapes.dataset import DatasetSize, build_dataset
from training.shapes.forms import FORMS, held_out_example, is_held_out, sample_example, training_example
from training.shapes.lexicon import STRANGE_WORDS_HELD_OUT, STYLE_HELD_OUT
from training.shapes.scenes import COLORS, SHAPES
from training.shapes.tokenizer import LENGTH, build_tokenizer, carry_over_embeddings


def test_training_and_evaluation_captions_never_meet() -> None:
    rng = random.Random(4)
    assert not any(is_held_out(training_example(rng).caption.text) for _ in range(500))
    for form in FORMS:
        texts = [held_out_example(rng, form).caption.text for _ in range(10)]
        assert all(is_held_out(text) or form == "one word" for text in texts)


def test_held_out_words_appear_in_no_training_caption() -> None:
    rng = random.Random(5)
    text = " ".join(training_example(rng).caption.text.lower() for _ in range(3000))
    words = set(re.findall(r"[\w-]+", text))
    assert not words & set(STRANGE_WORDS_HELD_OUT)
    assert not any(phrase in text for phrase in STYLE_HELD_OUT)


def test_spans_cover_the_phrases_they_speak_of() -> None:
    rng = random.Random(6)
    for _ in range(300):
        example = sample_example(rng)
        assert not re.search("[\ue000-\ue00f]", example.caption.text)
        owners = {span.owner for span in example.caption.spans}
        assert set(range(len(example.mentions))) <= owners
        assert sum(mention.count for mention in example.mentions) == len(example.scene.items)


def test_every_token_of_a_phrase_answers_for_its_item() -> None:
    rng = random.Random(7)
    tokenizer = build_tokenizer()
    example = next(
        e for e in (held_out_example(rng, "and") for _ in range(100)) if all(m.says_color for m in e.mentions)
    )
    encoded = tokenizer(example.caption.text, padding="max_length", return_offsets_mapping=True, return_tensors="np")
    answers = token_answers(example, encoded["offset_mapping"][0])
    names = tokenizer.convert_ids_to_tokens(encoded["input_ids"][0])
    for mention in example.mentions:
        item = example.scene.items[mention.first]
        row = answers[names.index(f"Ġ{item.color}")]
        colors = {list(COLORS)[answers[k][0]] for k, name in enumerate(names) if name == f"Ġ{item.color}"}
        assert item.color in colors
        assert row[list(HEADS).index("shape")] in range(len(SHAPES))
    assert (answers[[name == "<pad>" for name in names]] == IGNORED).all()


@pytest.mark.parametrize("form", FORMS)
def test_captions_of_every_form_fit_into_the_token_budget(form: str) -> None:
    rng = random.Random(8)
    tokenizer = build_tokenizer()
    lengths = [
        len(ids) for ids in tokenizer([held_out_example(rng, form).caption.text for _ in range(50)])["input_ids"]
    ]
    assert max(lengths) <= LENGTH


def test_known_words_are_single_tokens_and_unknown_ones_pieces_of_the_same_alphabet() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.tokenize("Two RED circles") == ["Ġtwo", "Ġred", "Ġcircles"]
    assert len(tokenizer.tokenize("kitten")) > 1
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()


def test_embeddings_carried_over_keep_the_rows_of_known_strings_and_average_the_pieces_of_new_ones() -> None:
    tokenizer = build_tokenizer()
    weights = torch.randn(len(tokenizer), 4)
    assert torch.equal(carry_over_embeddings(weights, tokenizer, tokenizer), weights)


def test_equal_sizes_and_seeds_draw_equal_sets_and_batches(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    size = DatasetSize(pictures=8, captions=1100, seed=3)
    first, second = (build_dataset(tmp_path / name, size, tokenizer) for name in ("a", "b"))
    batches = [data.examples(torch.Generator().manual_seed(1), 4) for data in (first, second)]
    assert torch.equal(batches[0].ids, batches[1].ids)
    assert batches[0].samples is not None
    assert batches[1].samples is not None
    assert torch.equal(batches[0].samples, batches[1].samples)
    assert batches[0].samples.abs().max() <= 1
    stamp = (tmp_path / "a" / "size.json").stat().st_mtime_ns
    build_dataset(tmp_path / "a", size, tokenizer)
    assert (tmp_path / "a" / "size.json").stat().st_mtime_ns == stamp, "the set was drawn again"
    assert np.load(tmp_path / "a" / "ids.npy").shape == (1100, LENGTH)
