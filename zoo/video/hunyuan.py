"""HunyuanVideo (Kong et al., arXiv 2412.03603), a video transformer that attends over video and text as one sequence.

Published sizes; parameters with text of 4096 channels (a language model) and a pooled text of 768 (CLIP):

    size       two streams  one stream  hidden  heads   parameters      published as
    13B             20          40       3072     24    12,821,012,544  text to video
    i2v-13B         20          40       3072     24    12,810,991,680  image to video, latent_concat; no guidance input

Two blocks refine the text first. In the two-stream blocks video and text have separate weights (an MMDiT; Esser et al.,
arXiv 2403.03206); in the one-stream blocks they share weights. In both, each token attends to all video and text.
Queries and keys have an RMSNorm a head; those of the video are rotated by frame, row and column. One-stream blocks have
attention and MLP in parallel. Timestep, pooled text and the guidance that was distilled into the weights are embedded
as one vector, from which each block computes its modulation.

Attention is over the whole sequence; only its heads are independent, as in Wan. The layers before attention, attention
and the layers after it are therefore separate stages. The text, which is short, is a second sequence.

``from_reference`` loads diffusers' HunyuanVideoTransformer3DModel. The velocity is noise - x: ``flow_sign``.

Letters: `zoo/video/__init__.py`.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from zoo.init import init_like_dit
from zoo.layers import MLP, TimestepEmbed, expect
from zoo.video.blocks import VideoConfig, video_inputs
from zoo.video.hunyuan_blocks import JOINT, Block, Final, Refiner, SingleBlock

SIZES: dict[str, dict[str, Any]] = {
    "13B": {},
    "i2v-13B": {"in_channels": 33, "condition_channels": 17, "guidance": False},
    "test": {
        "hidden": 96, "depth": 2, "single": 2, "heads": 3, "in_channels": 4, "caption_channels": 20,
        "pooled_channels": 6,
    },
}  # fmt: skip
THETA = 256.0  # base of the rotation


@dataclass(frozen=True)
class Config(VideoConfig):
    hidden: int = 3072
    depth: int = 20  # blocks of two streams
    single: int = 40  # blocks of one stream
    refiner: int = 2  # blocks of the text alone
    heads: int = 24
    in_channels: int = 16
    condition_channels: int = 0  # the channels among in_channels that are not denoised: an image's latent and a mask
    caption_channels: int = 4096  # of the text encoder
    pooled_channels: int = 768  # of a second encoder, one vector a text; 0 for none
    guidance: bool = True  # the strength of the distilled guidance is an input

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden // self.heads % 32:
            raise ValueError(f"hidden={self.hidden} in heads={self.heads}: a head needs a multiple of 32 channels")


class HunyuanVideo(nn.Module):
    """``forward(x, timestep, context, context_mask=None, pooled=None, guidance=None)``

    x (b i t y x), timestep (b) on the scale 0 to 1000, context (b l caption_channels), context_mask (b l, True for
    tokens to be seen, which come first), pooled (b pooled_channels), guidance (b), 1000 times the strength
    -> (b o t y x). Any number of frames; frames of any size.
    """

    flow_sign = -1  # the velocity is noise - x
    first_frame = ("frame", "mask")  # what the channels of an image are, if any

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        dim = config.hidden
        self.stages = {
            "": "x=b [i] t y x -> b [o] t y x",
            "embed": "b n [k] -> b n [c]",
            "blocks.*.queries": "b n [c], modulation=b [k c], rope=n [e] -> b n h [e], b n h [e], b n h [e]",
            "blocks.*.text_queries": "b n [c], modulation=b [k c] -> b n h [e], b n h [e], b n h [e]",
            "blocks.*.core": JOINT,
            "blocks.*.update": "b n [c], y=b n [h e], modulation=b [k c]",
            "blocks.*.text_update": "b n [c], y=b n [h e], modulation=b [k c]",
            "singles.*.queries": "b n [c], modulation=b [k c], rope=n [e] -> b n h [e], b n h [e], b n h [e], b n [m]",
            "singles.*.core": JOINT,
            "singles.*.update": "b n [c], y=b n [h e], hidden=b n [m], modulation=b [k c]",
            "final": "b n [c], cond=b [c] -> b n [k]",
        }
        self.cores: dict[str, str] = {}  # none: Ulysses and rings here do not take two sequences at once
        self.tensor_parallel: dict[str, str] = {}

        self.t_embed = TimestepEmbed(dim)
        self.guidance = TimestepEmbed(dim) if config.guidance else None
        pooled = config.pooled_channels
        self.pooled = MLP(pooled, dim, dim, activation=nn.SiLU()) if pooled else None
        self.refiner = Refiner(dim, config.heads, config.refiner, config.caption_channels)
        self.embed = nn.Linear(config.in_channels * math.prod(config.patch), dim)
        self.blocks = nn.ModuleList(Block(dim, config.heads) for _ in range(config.depth))
        self.singles = nn.ModuleList(SingleBlock(dim, config.heads) for _ in range(config.single))
        self.final = Final(dim, config.out_channels * math.prod(config.patch))
        self.init_weights()

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        pooled: Tensor | None = None,
        guidance: Tensor | None = None,
    ) -> Tensor:
        expect("context", context, True, f"caption_channels={self.config.caption_channels}")
        expect("pooled", pooled, self.pooled is not None, f"pooled_channels={self.config.pooled_channels}")
        expect("guidance", guidance, self.guidance is not None, f"guidance={self.config.guidance}")
        assert context is not None
        cond = self.t_embed(timestep)
        if self.guidance is not None:
            cond = cond + self.guidance(guidance)
        if self.pooled is not None and pooled is not None:
            cond = cond + self.pooled(pooled.to(cond.dtype))
        text = self.refiner(context, timestep, context_mask)

        (frames, height, width), (_, p, q) = x.shape[2:], self.config.patch
        x = F.pad(x, (0, -width % q, 0, -height % p))
        down, right = x.shape[-2] // p, x.shape[-1] // q
        rope = self.positions(frames, down, right, x.device)
        x = self.embed(rearrange(x, "b i t (y p) (x q) -> b (t y x) (i p q)", p=p, q=q).to(self.embed.weight.dtype))
        for block in (*self.blocks, *self.singles):
            x, text = block(x, text, cond, rope, context_mask)
        x = rearrange(
            self.final(x, cond), "b (t y x) (o p q) -> b o t (y p) (x q)", t=frames, y=down, x=right, p=p, q=q
        )
        return x if x.shape[-2:] == (height, width) else x[..., :height, :width]

    def positions(self, t: int, y: int, x: int, device: torch.device) -> Tensor:
        """The rotation at each place of t frames of y x patches: sines, then cosines of the angles (n e), float32."""
        size = self.config.hidden // self.config.heads
        sides = size // 8, (size - size // 8) // 2, (size - size // 8) // 2
        angles = []
        for length, channels in zip((t, y, x), sides):
            steps = torch.arange(0, channels, 2, dtype=torch.float64, device=device)
            places = torch.arange(length, dtype=torch.float64, device=device)
            angles.append(places[:, None] * THETA ** (-steps / channels))
        turns = torch.cat(
            [
                repeat(angles[0], "t e -> (t y x) e", y=y, x=x),
                repeat(angles[1], "y e -> (t y x) e", t=t, x=x),
                repeat(angles[2], "x e -> (t y x) e", t=t, y=y),
            ],
            dim=-1,
        )
        return torch.cat([turns.sin(), turns.cos()], dim=-1).float()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise every parameter in place, after ``to_empty`` too, as DiT does.

        Xavier in every matrix, biases zero; the MLPs of timestep, guidance and texts at std 0.02; modulation and the
        final layer start at zero.
        """
        refiner = self.refiner
        init_like_dit(self, embeddings=(self.t_embed, self.guidance, refiner.t_embed, self.pooled, refiner.mean))

    def example_inputs(
        self, batch: int = 1, *, frames: int = 5, height: int = 8, width: int = 8, tokens: int = 7
    ) -> dict[str, Tensor]:
        """Random inputs of the forward, by name, on the default device; lengths in latent cells and text tokens."""
        config, text = self.config, (tokens, self.config.caption_channels)
        inputs = video_inputs(batch, config.in_channels, frames, height, width, text=text)
        if config.pooled_channels:
            inputs["pooled"] = torch.randn(batch, config.pooled_channels)
        if config.guidance:
            inputs["guidance"] = torch.full((batch,), 6000.0)
        return inputs
