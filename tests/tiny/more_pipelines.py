"""Tiny pipelines of further families, for the matrix of merged forwards only: built in memory, never saved.

Prompt templates are cut short, because the tiny tokenizers make a token of every letter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import diffusers
import torch
import transformers

from tiny.pipelines import _QWEN_TEMPLATE, _kl_vae, _qwen3_config, _qwen_tokenizer, _t5_encoder, _t5_tokenizer, qwen

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


def flux2_klein() -> Any:
    tokenizer = _qwen_tokenizer()
    return diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKLFlux2(
            block_out_channels=(8, 8),
            down_block_types=["DownEncoderBlock2D"] * 2,
            up_block_types=["UpDecoderBlock2D"] * 2,
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
            sample_size=64,
        ).eval(),
        text_encoder=transformers.Qwen3ForCausalLM(_qwen3_config(tokenizer, layers=1)).eval(),
        tokenizer=tokenizer,
        transformer=diffusers.Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            timestep_guidance_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        ).eval(),
    )


def hunyuan_video15() -> Any:
    tokenizer = _qwen_tokenizer()
    tokenizer.chat_template = _QWEN_TEMPLATE
    config = transformers.Qwen2_5_VLTextConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=len(tokenizer) + 3,
        rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6},
    )
    glyphs = transformers.ByT5Tokenizer()
    pipe = diffusers.HunyuanVideo15Pipeline(
        text_encoder=transformers.Qwen2_5_VLTextModel(config).eval(),
        tokenizer=tokenizer,
        transformer=diffusers.HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=1,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            text_embed_dim=16,
            text_embed_2_dim=32,
            image_embed_dim=8,
            rope_axes_dim=(2, 2, 4),
            target_size=16,
            task_type="t2v",
        ).eval(),
        vae=diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(8, 8),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=4,
            downsample_match_channel=False,
            upsample_match_channel=False,
        ).eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=_t5_encoder(glyphs),
        tokenizer_2=glyphs,
        # Without guidance in the last third: requests must not take each other's steps for their own.
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0, stop=0.7),
    )
    pipe.system_message, pipe.prompt_template_encode_start_idx = "s", 10
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens = 64, 16, 3
    return pipe


def qwen_edit() -> Any:
    """The processor's own class for videos needs torchvision, which has no build for this torch; pictures do not."""
    parts = qwen()
    with mock.patch.object(transformers.Qwen2VLProcessor, "check_argument_for_proper_class"):
        processor = transformers.Qwen2VLProcessor(
            image_processor=transformers.Qwen2VLImageProcessorPil(),
            tokenizer=parts.tokenizer,
            video_processor=None,
            chat_template=_QWEN_TEMPLATE,
        )
    pipe = diffusers.QwenImageEditPipeline(**parts.components, processor=processor)
    pipe.prompt_template_encode = "<|im_start|><|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>"
    pipe.prompt_template_encode_start_idx = 1
    return pipe


MORE_FAMILIES: Mapping[str, Callable[[], Any]] = {
    family.__name__: family for family in (lumina2, sana, flux2_klein, hunyuan_video15, qwen_edit)
}


def build_in_memory(family: str) -> Any:
    """A pipeline of `family`; the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MORE_FAMILIES[family]()
