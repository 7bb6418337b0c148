"""Tiny encoders with random weights, to try the whole way from clips to samples on a laptop, and for the tests.

    python -m zoo.video.tiny_encoders DIR [--fit CLIPS] [--pipeline wan]

writes `vae/`, `text_encoder/` and `tokenizer/`, each as diffusers and transformers would. They know nothing: the text
encoder tells captions apart and no more, and a random autoencoder decodes to noise. `--fit CLIPS` trains the
autoencoder on the frames of your videos, some minutes on two cores, until they are recognisable. `--pipeline` adds
a transformer and a scheduler, which makes DIR the folder of a pipeline for infer.py. For pictures worth looking at take
pretrained ones.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from zoo.data.sampling import generator
from zoo.data.video_file import VideoError
from zoo.data.video_folder import VideoFolder
from zoo.video.encoders import BEFORE, TEMPLATE, TEXT_ENCODERS
from zoo.video.pretrained import CodecError, image_processor, library

__all__ = [
    "AUTOENCODERS",
    "PIPELINES",
    "fit",
    "save_autoencoder",
    "save_pipeline",
    "save_pooled_encoder",
    "save_text_encoder",
]

# The smallest configuration of each class; video autoencoders have the factors of the published ones
AUTOENCODERS: dict[str, dict[str, Any]] = {
    "AutoencoderKL": {
        "down_block_types": ["DownEncoderBlock2D"] * 3,
        "up_block_types": ["UpDecoderBlock2D"] * 3,
        "block_out_channels": [16, 32, 32],
        "latent_channels": 4,
        "norm_num_groups": 8,
        "mid_block_add_attention": False,
    },
    "AutoencoderKLCogVideoX": {
        "block_out_channels": [8, 8, 8, 8],
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 2,
    },
    "AutoencoderKLWan": {
        "base_dim": 3,
        "z_dim": 4,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.1, -0.2, 0.3, -0.4],
        "latents_std": [0.5, 0.6, 0.7, 0.8],
    },
    "AutoencoderKLHunyuanVideo": {
        "block_out_channels": [8, 8, 8, 8],
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 4,
    },
    "AutoencoderKLMochi": {
        "encoder_block_out_channels": [32] * 4,
        "decoder_block_out_channels": [32] * 4,
        "layers_per_block": [1] * 5,
        "latent_channels": 4,
        "latents_mean": [0.1, -0.2, 0.3, -0.4],
        "latents_std": [0.5, 0.6, 0.7, 0.8],
    },
    "AutoencoderKLLTXVideo": {
        "block_out_channels": [8] * 4,
        "decoder_block_out_channels": [8] * 4,
        "layers_per_block": [1] * 5,
        "decoder_layers_per_block": [1] * 5,
        "latent_channels": 4,
    },
}


WAN: dict[str, Any] = {
    "num_attention_heads": 6, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 64,
    "ffn_dim": 96, "num_layers": 2,
}  # fmt: skip
LATTE: dict[str, Any] = {
    "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8, "num_layers": 1,
    "cross_attention_dim": 64, "attention_bias": True, "sample_size": 16, "patch_size": 2, "caption_channels": 64,
    "video_length": 5, "activation_fn": "gelu-approximate", "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False, "norm_eps": 1e-6,
}  # fmt: skip
HUNYUAN: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 4, "out_channels": 4, "num_layers": 1,
    "num_single_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 64, "pooled_projection_dim": 32,
    "rope_axes_dim": (4, 14, 14),
}  # fmt: skip
UNIPC: dict[str, Any] = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
# class of a pipeline, its transformers, autoencoder, scheduler, and further entries of model_index.json
PIPELINES: dict[str, tuple[str, list[dict[str, Any]], str, tuple[str, dict[str, Any]], dict[str, Any]]] = {
    "wan": ("WanPipeline", [WAN], "AutoencoderKLWan", ("UniPCMultistepScheduler", UNIPC), {}),
    "wan-2.2": (
        "WanPipeline", [WAN, WAN], "AutoencoderKLWan", ("UniPCMultistepScheduler", UNIPC), {"boundary_ratio": 0.875},
    ),
    "wan-i2v": (
        "WanImageToVideoPipeline", [WAN | {"in_channels": 12, "image_dim": 32, "added_kv_proj_dim": 72}],
        "AutoencoderKLWan", ("UniPCMultistepScheduler", UNIPC), {},
    ),
    "wan-2.2-i2v": (
        "WanImageToVideoPipeline", [WAN | {"in_channels": 12}] * 2, "AutoencoderKLWan",
        ("UniPCMultistepScheduler", UNIPC), {"boundary_ratio": 0.9},
    ),
    "wan-ti2v": (
        "WanImageToVideoPipeline", [WAN], "AutoencoderKLWan", ("FlowMatchEulerDiscreteScheduler", {"shift": 5.0}),
        {"expand_timesteps": True},
    ),
    "hunyuan": (
        "HunyuanVideoPipeline", [HUNYUAN], "AutoencoderKLHunyuanVideo",
        ("FlowMatchEulerDiscreteScheduler", {"shift": 7.0}), {},
    ),
    "latte": ("LattePipeline", [LATTE], "AutoencoderKL", ("DDIMScheduler", {"clip_sample": False}), {}),
}  # fmt: skip


def save_pipeline(folder: Path, name: str, *, seed: int = 0) -> None:
    """Write a random pipeline to `folder`, as diffusers would: transformer, autoencoder, text encoder, scheduler."""
    diffusers, transformers = library("diffusers"), library("transformers")
    kind, models, autoencoder, (scheduler, settings), more = PIPELINES[name]
    begins = next(name for name in ("Hunyuan", "Latte", "Wan") if kind.startswith(name))
    family = f"{begins if begins != 'Hunyuan' else 'HunyuanVideo'}Transformer3DModel"
    index: dict[str, Any] = {"_class_name": kind, "_diffusers_version": diffusers.__version__, **more}
    for i, config in enumerate(models):
        part = "transformer" if i == 0 else f"transformer_{i + 1}"
        _random(partial(getattr(diffusers, family), **config), seed + i).save_pretrained(folder / part)
        index[part] = ["diffusers", family]
    save_autoencoder(folder / "vae", autoencoder, seed=seed)
    text = {"Latte": "T5", "Wan": "UMT5", "Hunyuan": "Llama"}[begins]
    save_text_encoder(folder, seed=seed, kind=text)
    getattr(diffusers, scheduler)(**settings).save_pretrained(folder / "scheduler")
    index |= {
        "vae": ["diffusers", autoencoder], "text_encoder": ["transformers", TEXT_ENCODERS[text.lower()]],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"], "scheduler": ["diffusers", scheduler],
    }  # fmt: skip
    if begins == "Hunyuan":
        save_pooled_encoder(folder, seed=seed)
        index["text_encoder_2"] = ["transformers", "CLIPTextModel"]
        index["tokenizer_2"] = ["transformers", "CLIPTokenizer"]
    if any(config.get("image_dim") for config in models):
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
        vision = transformers.CLIPVisionConfig(**sizes, image_size=32, patch_size=16)
        _random(lambda: transformers.CLIPVisionModel(vision), seed).save_pretrained(folder / "image_encoder")
        side = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
        image_processor(transformers)(**side).save_pretrained(folder / "image_processor")
        index |= {
            "image_encoder": ["transformers", "CLIPVisionModel"],
            "image_processor": ["transformers", "CLIPImageProcessor"],
        }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))


def save_autoencoder(folder: Path, name: str = "AutoencoderKL", *, seed: int = 0) -> None:
    """Write a random autoencoder of class `name` to `folder`."""
    module = _random(lambda: getattr(library("diffusers"), name)(**AUTOENCODERS[name]), seed)
    module.save_pretrained(folder)


def save_text_encoder(folder: Path, *, channels: int = 64, seed: int = 0, kind: str = "T5") -> None:
    """Write a random T5, UMT5 or Llama to `folder`/text_encoder, and a byte tokenizer to `folder`/tokenizer."""
    transformers, tokenizers = library("transformers"), library("tokenizers")
    transformers.utils.logging.disable_progress_bar()  # for files of some kilobytes
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *alphabet])}
    tokens = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], unk_token="<unk>"))
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = tokenizers.decoders.ByteLevel()
    tokens.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    if kind == "Llama":  # the text around captions is as many tokens as Llama's
        around = TEMPLATE.partition("{}")[0]
        tokens.add_tokens(
            sorted({around[i * len(around) // BEFORE : (i + 1) * len(around) // BEFORE] for i in range(BEFORE)})
        )
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, **special).save_pretrained(folder / "tokenizer")
    sizes = {"vocab_size": len(tokens.get_vocab()), "num_hidden_layers": 3}
    if kind == "Llama":
        sizes |= {"hidden_size": channels, "intermediate_size": 2 * channels, "num_attention_heads": 4}
        config = transformers.LlamaConfig(**sizes, max_position_embeddings=512, pad_token_id=0)
    else:
        sizes |= {"d_model": channels, "d_ff": 2 * channels, "d_kv": channels // 4, "num_heads": 4, "num_layers": 2}
        del sizes["num_hidden_layers"]
        config = getattr(transformers, f"{kind}Config")(**sizes, feed_forward_proj="gated-gelu")
    module = _random(lambda: getattr(transformers, TEXT_ENCODERS[kind.lower()])(config), seed)
    module.save_pretrained(folder / "text_encoder")


def save_pooled_encoder(folder: Path, *, channels: int = 32, seed: int = 0) -> None:
    """Write a random CLIP text model to `folder`/text_encoder_2, and a tokenizer of letters to `folder`/tokenizer_2."""
    transformers, tokenizers = library("transformers"), library("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "tokenizer_2").mkdir(parents=True, exist_ok=True)
    vocabulary = {word: i for i, word in enumerate(words)}
    transformers.CLIPTokenizer(vocab=vocabulary, merges=[]).save_pretrained(folder / "tokenizer_2")
    sizes = {"hidden_size": channels, "intermediate_size": 2 * channels, "num_attention_heads": 4}
    config = transformers.CLIPTextConfig(
        **sizes, num_hidden_layers=2, vocab_size=len(words), bos_token_id=len(words) - 2, eos_token_id=len(words) - 1
    )
    _random(lambda: transformers.CLIPTextModel(config), seed).save_pretrained(folder / "text_encoder_2")


def fit(
    folder: Path, clips: Path, *, steps: int = 600, side: int = 64, batch: int = 8, report: Callable[[str], Any] = print
) -> float:
    """Train the AutoencoderKL at `folder` on frames of the videos under `clips`; return the final mean absolute error.

    Frames are squares of `side` pixels; the loss is L1 and a little KL divergence. Then shift_factor and scaling_factor
    are set so that latents have mean 0 and variance 1.
    """
    module = library("diffusers").AutoencoderKL.from_pretrained(folder, local_files_only=True, low_cpu_mem_usage=False)
    pixels = _squares(clips, side, report)
    optimizer = torch.optim.AdamW(module.parameters(), 2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    draw = generator("tiny encoders")
    error = 0.0
    for step in range(1, steps + 1):
        x = pixels[torch.randint(len(pixels), (batch,), generator=draw)].float() / 127.5 - 1
        posterior = module.encode(x).latent_dist
        y = module.decode(posterior.mean + posterior.std * torch.randn(posterior.mean.shape, generator=draw)).sample
        loss = (y - x).abs().mean() + 1e-4 * posterior.kl().mean() / posterior.mean[0].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        error = 0.95 * error + 0.05 * (y - x).abs().mean().item() if step > 1 else (y - x).abs().mean().item()
        if step == 1 or step % 100 == 0 or step == steps:
            report(f"step {step}/{steps}: mean absolute error {error:.3f} of a range of 2")
    with torch.no_grad():
        z = torch.cat([module.encode(x.float() / 127.5 - 1).latent_dist.mode() for x in pixels[:64].split(batch)])
    module.register_to_config(shift_factor=z.mean().item(), scaling_factor=1 / z.std().item())
    module.save_pretrained(folder)
    return error


def _squares(clips: Path, side: int, report: Callable[[str], Any]) -> Tensor:
    """Squares [n, 3, side, side], uint8, from frames throughout the videos, in random order."""
    data = VideoFolder(clips, frames=1, height=side, width=side)
    count = max(16, 1024 // len(data))
    report(f"reading {count * len(data)} frames of {len(data)} videos")
    frames = [data.clip(i, epoch)["x"][:, 0] for i in range(len(data)) for epoch in range(count)]
    return (
        ((torch.stack(frames) + 1) * 127.5)
        .round()
        .to(torch.uint8)[torch.randperm(len(frames), generator=generator("squares"))]
    )


def _random(build: Callable[[], Any], seed: int) -> Any:
    """A module with random weights of this seed; the global generator is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().eval()


def main(arguments: Sequence[str]) -> int:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m zoo.video.tiny_encoders", description=__doc__, formatter_class=shape)
    parser.add_argument("dir", type=Path, help="the folder to write")
    parser.add_argument("--fit", type=Path, metavar="CLIPS", help="train the autoencoder on the videos of this folder")
    parser.add_argument("--steps", type=int, default=600, help="of that training (default 600)")
    parser.add_argument("--pipeline", choices=list(PIPELINES), help="a whole pipeline of random weights")
    options = parser.parse_args(arguments)
    options.dir.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(prefix=".unfinished-", dir=options.dir) as name:  # a fit that is ended leaves nothing
            folder = Path(name)
            if options.pipeline:
                save_pipeline(folder, options.pipeline)
            else:
                save_autoencoder(folder / "vae")
                save_text_encoder(folder)
            if options.fit:
                fit(folder / "vae", options.fit, steps=options.steps)
            shutil.copytree(folder, options.dir, dirs_exist_ok=True)
    except (CodecError, VideoError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    parts = [*(["transformer", "scheduler"] if options.pipeline else []), "vae", "text_encoder", "tokenizer"]
    print(f"wrote {', '.join(f'{options.dir}/{part}' for part in parts)}: tiny, not pretrained")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
