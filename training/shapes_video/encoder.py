"""Tokenizer and UMT5 encoder of the clip captions; the encoder learns to parse as that of the pictures does."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load_file
from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

from training.shapes.encoder import ENCODER_SHAPE
from training.shapes.tokenizer import build_tokenizer, carry_over_embeddings
from training.shapes_video.captions import training_example
from training.shapes_video.dataset import LENGTH

__all__ = ["build_clip_tokenizer", "new_clip_encoder"]

SAMPLES: Final = 4000


def build_clip_tokenizer() -> Any:
    """A tokenizer that has every word of the clip captions; the same for every call."""
    rng = random.Random(0)
    texts = " ".join(training_example(rng).caption.text for _ in range(SAMPLES))
    return build_tokenizer(sorted(set(re.findall(r"[a-z0-9]+", texts.lower()))), length=LENGTH)


def new_clip_encoder(tokenizer: Any, *, start: Path | None = None) -> Any:
    """A fresh encoder, or that of the pipeline directory `start`, its embeddings carried over to this vocabulary.

    The encoder of the picture model will do: T5 is a UMT5 whose layers share one table of distances.
    """
    encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **ENCODER_SHAPE))
    if start is not None:
        weights = load_file(start / "text_encoder" / "model.safetensors")
        old_tokenizer = AutoTokenizer.from_pretrained(start, subfolder="tokenizer")
        weights["shared.weight"] = carry_over_embeddings(weights["shared.weight"], old_tokenizer, tokenizer)
        distances = "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
        for layer in range(1, encoder.config.num_layers):
            weights.setdefault(distances.format(layer), weights[distances.format(0)])
        encoder.load_state_dict({**encoder.state_dict(), **weights})
        encoder.tie_weights()
    return encoder
