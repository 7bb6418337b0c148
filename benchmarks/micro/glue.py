"""The cost of glue in a real model: diffusers' Latte, unmodified, against the same model with switches by hand.

    python benchmarks/micro/glue.py [--ranks 2] [--frames 16] [--side 32] [--hidden 384] [--layers 4] [--repeat 15]
    python benchmarks/micro/glue.py --tiny        # 4 frames of 8 x 8, hidden 16: host work alone
    python benchmarks/micro/glue.py --tiny --compile inductor        # the unmodified one as one graph

Both run the same blocks on the same gloo ranks and send the same bytes through the same collective; by hand the forward
holds plain local tensors, calls the switch itself and slices its conditions itself. Steps (forward and backward) of the
two take turns, in one run; medians and quartiles over rounds. At realistic sizes blocks dominate; tiny ones leave
nothing but host work, which gives microseconds of glue per layer: the CPU time of a rank's own thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from diffusers import LatteTransformer3DModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dsp
from dsp.layout import Axis, Cut
from dsp.moves import gather_local, switch_local

STAGES = {
    "": "hidden_states=b c t h w -> b c t h w",
    "pos_embed": "(b t) [c h w] -> (b t) [s d]",
    "transformer_blocks.*": "(b t) [s d], encoder_hidden_states=(b t) [l d], timestep=(b t) [e]",
    "temporal_transformer_blocks.*": "(b s) [t d], timestep=(b s) [e]",
}


class ByHand(nn.Module):
    """Latte on this rank's frames, then on its share of each frame's tokens, and so on: batch 1, even sizes."""

    def __init__(self, latte: Any, mesh: DeviceMesh) -> None:
        super().__init__()
        self.latte, self.axis = latte, Axis.of(mesh)

    def forward(self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        m, axis = self.latte, self.axis
        _, channels, frames, height, width = hidden_states.shape
        x = axis.narrow(hidden_states, Cut(2))
        x = m.pos_embed(x.permute(0, 2, 1, 3, 4).reshape(-1, channels, height, width))
        own, tokens, hidden = x.shape
        shape = (1, frames, tokens, hidden)
        conditions = {"resolution": None, "aspect_ratio": None}
        time_spatial, embedded = m.adaln_single(timestep, conditions, batch_size=1, hidden_dtype=x.dtype)
        text = m.caption_projection(encoder_hidden_states).expand(own, -1, -1)
        time_temporal = time_spatial.expand(tokens // axis.size, -1)
        time_spatial = time_spatial.expand(own, -1)
        frames_cut, tokens_cut = Cut(1), Cut(2)
        pairs = list(zip(m.transformer_blocks, m.temporal_transformer_blocks))
        for i, (spatial, temporal) in enumerate(pairs):
            x = spatial(x, None, text, None, time_spatial, None, None)
            x = switch_local(x[None], frames_cut, tokens_cut, shape, axis)[0].transpose(0, 1)
            if i == 0:
                x = x + m.temp_pos_embed.to(x.dtype)
            x = temporal(x, None, None, None, time_temporal, None, None).transpose(0, 1)
            if i + 1 < len(pairs):
                x = switch_local(x[None], tokens_cut, frames_cut, shape, axis)[0]
        # after the last temporal block a rank holds whole frames of its tokens, which is all the head needs
        shift, scale = (m.scale_shift_table[None] + embedded[:, None]).chunk(2, dim=1)
        x = m.proj_out(m.norm_out(x) * (1 + scale) + shift)
        p, rows = m.config.patch_size, height // m.config.patch_size
        x = x.reshape(frames, rows // axis.size, -1, p, p, m.out_channels).permute(5, 0, 1, 3, 2, 4)
        x = x.reshape(1, m.out_channels, frames, height // axis.size, width)
        return gather_local(x, Cut(3), (1, m.out_channels, frames, height, width), axis)


def build(o: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    return LatteTransformer3DModel(
        num_attention_heads=max(o.hidden // 64, 1), attention_head_dim=min(o.hidden, 64), in_channels=4, out_channels=8,
        num_layers=o.layers, cross_attention_dim=o.hidden, attention_bias=True, sample_size=o.side, patch_size=2,
        caption_channels=64, activation_fn="gelu-approximate", norm_type="ada_norm_single",
        norm_elementwise_affine=False, norm_eps=1e-6, video_length=o.frames,
    )  # fmt: skip


def step(model: nn.Module, kwargs: dict[str, Tensor]) -> Tensor:
    model.zero_grad()
    out = model(**kwargs)
    out = out if isinstance(out, Tensor) else out.sample
    loss = out.square().mean()
    loss.backward()
    return out.detach()


def worker(rank: int, o: argparse.Namespace, store: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=o.ranks)
    mesh = init_device_mesh("cpu", (o.ranks,))
    g = torch.Generator().manual_seed(1)
    kwargs = {
        "hidden_states": torch.randn(1, 4, o.frames, o.side, o.side, generator=g),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 20, 64, generator=g),
    }
    ours, theirs = build(o), ByHand(build(o), mesh)
    dsp.parallelize(ours, mesh, STAGES, compile=o.compile)
    sent = []
    for model in (ours, theirs):
        with dsp.count_comm() as comm:
            result = step(model, kwargs)
        sent.append((comm.by_collective(), result))
    assert sent[0][0]["forward"] == sent[1][0]["forward"], sent  # the same traffic
    torch.testing.assert_close(sent[0][1], sent[1][1], rtol=1e-4, atol=1e-4)  # and the same numbers
    step(ours, kwargs)  # compiles it, if it is to be
    wall: dict[str, list[float]] = {"dsp": [], "by hand": []}
    host: dict[str, list[float]] = {"dsp": [], "by hand": []}
    for _ in range(o.repeat):
        for name, model in (("dsp", ours), ("by hand", theirs)):
            dist.barrier()
            began, used = time.perf_counter(), time.thread_time()
            step(model, kwargs)
            wall[name].append(time.perf_counter() - began)
            host[name].append(time.thread_time() - used)
    if rank == 0:
        ratios = [a / b for a, b in zip(wall["dsp"], wall["by hand"])]
        q1, median, q3 = statistics.quantiles(ratios, n=4)
        more = statistics.median(a - b for a, b in zip(host["dsp"], host["by hand"]))
        found = {
            "step_ms": {k: 1e3 * statistics.median(v) for k, v in wall.items()},
            "ratio": median, "quartiles": [q1, q3], "host_us_per_layer": 1e6 * more / o.layers,
            "host_ratio": statistics.median(a / b for a, b in zip(host["dsp"], host["by hand"])),
        }  # fmt: skip
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(o: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        out = f"{directory}/out.json"
        torch.multiprocessing.start_processes(worker, (o, f"{directory}/store", out), o.ranks, start_method="spawn")
        return json.loads(Path(out).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("ranks", 2), ("frames", 16), ("side", 32), ("hidden", 384), ("layers", 4), ("repeat", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", default="", help="a backend of torch.compile for dsp.parallelize")
    parser.add_argument("--tiny", action="store_true", help="measure host work alone, on a tiny model")
    o = parser.parse_args()
    if not o.tiny:
        show(o, measure(o))
    o.frames, o.side, o.hidden, o.repeat = 4, 8, 16, 10 * o.repeat
    show(o, measure(o))


def show(o: argparse.Namespace, found: dict[str, Any]) -> None:
    print(f"Latte, {o.layers} layers of two blocks, hidden {o.hidden}, {o.frames} frames of {o.side} x {o.side}")
    print("  step    " + "   ".join(f"{k} {v:.1f} ms" for k, v in found["step_ms"].items()))
    print(f"  ratio   {found['ratio']:.3f} (quartiles {found['quartiles'][0]:.3f} to {found['quartiles'][1]:.3f})")
    print(f"  host    {found['host_ratio']:.3f}, {found['host_us_per_layer']:.0f} us of glue a layer, both directions")


if __name__ == "__main__":
    main()
