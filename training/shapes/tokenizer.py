"""The captions' tokenizer: byte-level BPE in lower case, one token per known word, pieces and single letters for any
other.

`carry_over_embeddings` lets an encoder trained with an older vocabulary go on with this one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.shapes import lexicon
from training.shapes.forms import PLAIN

__all__ = ["LENGTH", "build_tokenizer", "carry_over_embeddings"]

LENGTH: Final = 48
SAMPLES_PER_FORM: Final = 1500
PAD: Final = "<pad>"


def _known_words() -> list[str]:
    """Every word of the plain forms and of the known style words; strange words stay unknown on purpose."""
    rng = random.Random(0)
    texts = [*lexicon.PREFIXES, *lexicon.STYLE_PREFIXES, *lexicon.STYLE_SUFFIXES, *lexicon.FILLERS]
    for form, (_, draw) in PLAIN.items():
        if form != "strange":
            texts += [re.sub("[\ue000-\ue00f]", "", draw(rng)[1].marked) for _ in range(SAMPLES_PER_FORM)]
    return sorted(set(re.findall(r"[a-z0-9]+", " ".join(texts).lower())))


def build_tokenizer(words: Sequence[str] | None = None, *, length: int = LENGTH) -> Any:
    """A fast tokenizer of these words, else the picture captions', that pads on the right to `length`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,  # never reached: merging ends when every known word is one token
        min_frequency=1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[PAD],
    )
    tokenizer.train_from_iterator([f" {word}" for word in words or _known_words()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, padding_side="right", model_max_length=length
    )


def carry_over_embeddings(weights: torch.Tensor, old_tokenizer: Any, new_tokenizer: Any) -> torch.Tensor:
    """Embeddings for the new vocabulary: those of the same strings, else the mean of the pieces they used to be."""
    old = old_tokenizer.get_vocab()
    rows = torch.empty(len(new_tokenizer), weights.shape[1], dtype=weights.dtype)
    for token, index in new_tokenizer.get_vocab().items():
        if token in old:
            rows[index] = weights[old[token]]
            continue
        pieces = old_tokenizer(new_tokenizer.convert_tokens_to_string([token]).strip())["input_ids"]
        rows[index] = weights[pieces].mean(0)
    return rows
