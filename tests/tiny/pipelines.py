"""Tiny diffusers pipelines with random weights, one per supported family, built from configuration objects.

`build(family, folder)` saves one with its own class names and file layout, a few hundred kilobytes to five megabytes,
in about a tenth of a second. What they draw is noise; sizes, steps, schedulers and call signatures are real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

_QWEN_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,-"


def _qwen_tokenizer() -> Any:
    names = [*sorted(ByteLevel.alphabet()), "<|endoftext|>", *_QWEN_SPECIAL]
    tokenizer = transformers.Qwen2Tokenizer(
        vocab={name: number for number, name in enumerate(names)},
        merges=[],
        additional_special_tokens=list(_QWEN_SPECIAL),
    )
    tokenizer.chat_template = _QWEN_TEMPLATE
    return tokenizer


def _clip_tokenizer() -> Any:
    alphabet = sorted(ByteLevel.alphabet())
    names = [*alphabet, *(letter + "</w>" for letter in alphabet), "<|startoftext|>", "<|endoftext|>"]
    vocab = {name: number for number, name in enumerate(names)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def _t5_tokenizer() -> Any:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0), *((letter, -3.0) for letter in _LETTERS)]
    return transformers.T5TokenizerFast(vocab=pieces, extra_ids=0)


def _clip_encoder(model_class: Any, tokenizer: Any) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        projection_dim=32,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        hidden_act="gelu",
    )
    return model_class(config).eval()


def _t5_encoder(tokenizer: Any, model_class: Any = None, config_class: Any = None) -> Any:
    config = (config_class or transformers.T5Config)(
        vocab_size=len(tokenizer) + 4, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0
    )
    return (model_class or transformers.T5EncoderModel)(config).eval()


def _kl_vae(latent_channels: int = 4, *, quant: bool = True) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=[32, 32],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=latent_channels,
        norm_num_groups=8,
        sample_size=64,
        shift_factor=0.06,
        scaling_factor=1.5,
        use_quant_conv=quant,
        use_post_quant_conv=quant,
    ).eval()


def _unet(**options: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=16,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **options,
    ).eval()


def qwen() -> Any:
    tokenizer = _qwen_tokenizer()
    tokens = tokenizer.convert_tokens_to_ids
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6},
            "vocab_size": len(tokenizer) + 3,
            "max_position_embeddings": 4096,
            "bos_token_id": None,
            "eos_token_id": tokens("<|im_end|>"),
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
            "window_size": 112,
        },
        image_token_id=tokens("<|image_pad|>"),
        video_token_id=tokens("<|video_pad|>"),
        vision_start_token_id=tokens("<|vision_start|>"),
        vision_end_token_id=tokens("<|vision_end|>"),
    )
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
        vae=diffusers.AutoencoderKLQwenImage(
            base_dim=16,
            z_dim=16,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.0] * 16,
            latents_std=[1.0] * 16,
        ).eval(),
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config).eval(),
        tokenizer=tokenizer,
        transformer=diffusers.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=64,
            out_channels=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=32,
            axes_dims_rope=(8, 4, 4),
        ).eval(),
    )


def sd15() -> Any:
    tokenizer = _clip_tokenizer()
    return diffusers.StableDiffusionPipeline(
        vae=_kl_vae(),
        text_encoder=_clip_encoder(transformers.CLIPTextModel, tokenizer),
        tokenizer=tokenizer,
        unet=_unet(cross_attention_dim=32, attention_head_dim=4),
        scheduler=diffusers.PNDMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            skip_prk_steps=True,
            set_alpha_to_one=False,
            steps_offset=1,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl() -> Any:
    tokenizer = _clip_tokenizer()
    return diffusers.StableDiffusionXLPipeline(
        vae=_kl_vae(),
        text_encoder=_clip_encoder(transformers.CLIPTextModel, tokenizer),
        text_encoder_2=_clip_encoder(transformers.CLIPTextModelWithProjection, tokenizer),
        tokenizer=tokenizer,
        tokenizer_2=_clip_tokenizer(),
        unet=_unet(
            attention_head_dim=(2, 4),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            transformer_layers_per_block=(1, 1),
            projection_class_embeddings_input_dim=6 * 8 + 32,
            cross_attention_dim=64,
        ),
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            steps_offset=1,
            beta_schedule="scaled_linear",
            timestep_spacing="leading",
        ),
    )


def sd3() -> Any:
    tokenizer, t5 = _clip_tokenizer(), _t5_tokenizer()
    return diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=32,
            patch_size=1,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=32,
            pooled_projection_dim=64,
            out_channels=4,
        ).eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_kl_vae(quant=False),
        text_encoder=_clip_encoder(transformers.CLIPTextModelWithProjection, tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=_clip_encoder(transformers.CLIPTextModelWithProjection, tokenizer),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=_t5_encoder(t5),
        tokenizer_3=t5,
    )


def flux() -> Any:
    tokenizer, t5 = _clip_tokenizer(), _t5_tokenizer()
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15),
        vae=_kl_vae(quant=False),
        text_encoder=_clip_encoder(transformers.CLIPTextModel, tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=_t5_encoder(t5),
        tokenizer_2=t5,
        transformer=diffusers.FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=[4, 4, 8],
            guidance_embeds=True,
        ).eval(),
    )


def _qwen3_config(tokenizer: Any, *, layers: int) -> Any:
    return transformers.Qwen3Config(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=len(tokenizer) + 3,
        max_position_embeddings=512,
        head_dim=8,
    )


def zimage() -> Any:
    tokenizer = _qwen_tokenizer()
    encoder = transformers.Qwen3Model(_qwen3_config(tokenizer, layers=2)).eval()
    transformer = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        rope_theta=256.0,
        t_scale=1000.0,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    ).eval()
    with torch.no_grad():  # these two are allocated, not initialised
        transformer.x_pad_token.normal_()
        transformer.cap_pad_token.normal_()
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_kl_vae(16, quant=False),
        text_encoder=encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )


def pixart() -> Any:
    t5 = _t5_tokenizer()
    return diffusers.PixArtAlphaPipeline(
        tokenizer=t5,
        text_encoder=_t5_encoder(t5),
        vae=_kl_vae(),
        transformer=diffusers.PixArtTransformer2DModel(
            sample_size=16,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            caption_channels=32,
            in_channels=4,
            cross_attention_dim=24,
            out_channels=8,
            use_additional_conditions=False,
        ).eval(),
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )


def wan() -> Any:
    t5 = _t5_tokenizer()
    return diffusers.WanPipeline(
        tokenizer=t5,
        text_encoder=_t5_encoder(t5, transformers.UMT5EncoderModel, transformers.UMT5Config),
        vae=diffusers.AutoencoderKLWan(
            base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        ).eval(),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        ),
        transformer=diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=32,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=64,
        ).eval(),
    )


def ltx() -> Any:
    t5 = _t5_tokenizer()
    five, four = (1,) * 5, (False,) * 4
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=five,
        decoder_layers_per_block=five,
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False, *four),
        upsample_residual=four,
        upsample_factor=(1,) * 4,
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    ).eval()
    return diffusers.LTXPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=_t5_encoder(t5),
        tokenizer=t5,
        transformer=diffusers.LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            patch_size=1,
            patch_size_t=1,
            num_attention_heads=4,
            attention_head_dim=8,
            cross_attention_dim=32,
            num_layers=1,
            caption_channels=32,
        ).eval(),
    )


FAMILIES: Mapping[str, Callable[[], Any]] = {
    family.__name__: family for family in (qwen, sd15, sdxl, sd3, flux, zimage, pixart, wan, ltx)
}


def build(family: str, folder: Path) -> Path:
    """Save a pipeline of `family` in `folder / family`; the same weights each time."""
    path = folder / family
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        FAMILIES[family]().save_pretrained(path)
    return path
