"""Tiny folders of latents for tests: random latents and texts, written as the encoder writes them."""

from pathlib import Path

import torch

from zoo.data.latent_manifest import Manifest, write_manifest
from zoo.data.latents import Entry, Writer

SHAPES = {(5, 4, 6): 7, (3, 6, 4): 5, (1, 4, 4): 2}  # frames, height and width in cells -> clips
CHANNELS, TEXT, LENGTH = 2, 6, 5


def manifest(**changes) -> Manifest:
    facts = {
        "vae": "AutoencoderTiny", "vae_path": "there", "vae_hash": "1", "channels": CHANNELS, "factor": (1, 8, 8),
        "causal": False, "shift": 0.0, "scale": 1.0, "text": "T5", "text_path": "there", "text_hash": "2",
        "text_channels": TEXT, "text_length": LENGTH,
    }  # fmt: skip
    return Manifest(**(facts | changes))


def latent_folder(folder: Path, shapes=SHAPES, fps=(24.0,), **changes) -> Path:
    """Clips of every shape in turn, their rates in turn, captions of 1 to 5 tokens, two or three clips a shard."""
    random, facts = torch.Generator().manual_seed(0), manifest(**changes)
    pooled = torch.randn(facts.pooled_channels, generator=random) if facts.pooled else None
    write_manifest(folder, facts, torch.randn(1, facts.text_channels, generator=random), pooled)
    clips = sorted((i, shape) for shape, count in shapes.items() for i in range(count))
    with Writer(folder, shard_bytes=2000) as writer:
        for n, (i, (t, h, w)) in enumerate(clips):
            tokens = 1 + n % facts.text_length
            name = f"{t}x{h}x{w}-{i}.mp4"
            entry = Entry(name, f"clip {n}", t, 8 * h, 8 * w, fps[n % len(fps)], (facts.channels, t, h, w), tokens)
            latent = torch.randn(entry.shape, generator=random)
            shapes_of = {"image": (3, facts.image_channels), "pooled": (facts.pooled_channels,), "start": entry.shape}
            more = {name: torch.randn(shapes_of[name], generator=random) for name in facts.more}
            writer.add(entry, latent, torch.randn(tokens, facts.text_channels, generator=random), **more)
    return folder
