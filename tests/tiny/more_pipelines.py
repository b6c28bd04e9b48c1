"""Tiny pipelines of further families, for the matrix of merged forwards only: built in memory, never saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
import transformers

from tiny.pipelines import _kl_vae, _t5_tokenizer

__all__ = ["MORE_FAMILIES", "build_in_memory"]


def _gemma(tokenizer: Any, **options: Any) -> Any:
    config = transformers.Gemma2Config(
        vocab_size=len(tokenizer) + 4,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
        pad_token_id=0,
        **options,
    )
    return transformers.Gemma2Model(config).eval()


def lumina2() -> Any:
    tokenizer = _t5_tokenizer()
    return diffusers.Lumina2Pipeline(
        transformer=diffusers.Lumina2Transformer2DModel(
            sample_size=4,
            patch_size=2,
            in_channels=4,
            hidden_size=8,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=1,
            num_kv_heads=1,
            multiple_of=16,
            axes_dim_rope=(4, 2, 2),
            axes_lens=(300, 128, 128),
            cap_feat_dim=8,
        ).eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_kl_vae(quant=False),
        text_encoder=_gemma(tokenizer),
        tokenizer=tokenizer,
    )


def sana() -> Any:
    tokenizer = _t5_tokenizer()
    blocks, multiscales = ("ResBlock", "EfficientViTBlock"), ((), (5,))
    return diffusers.SanaPipeline(
        transformer=diffusers.SanaTransformer2DModel(
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_attention_heads=2,
            attention_head_dim=4,
            num_cross_attention_heads=2,
            cross_attention_head_dim=4,
            cross_attention_dim=8,
            caption_channels=8,
            sample_size=32,
        ).eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=diffusers.AutoencoderDC(
            in_channels=3,
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_types=blocks,
            decoder_block_types=blocks,
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            encoder_qkv_multiscales=multiscales,
            decoder_qkv_multiscales=multiscales,
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            downsample_block_type="conv",
            upsample_block_type="interpolate",
        ).eval(),
        text_encoder=_gemma(tokenizer),
        tokenizer=tokenizer,
    )


MORE_FAMILIES: Mapping[str, Callable[[], Any]] = {family.__name__: family for family in (lumina2, sana)}


def build_in_memory(family: str) -> Any:
    """A pipeline of `family`; the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MORE_FAMILIES[family]()
