"""Wan and CogVideoX on emulated hosts: DSP against diffusers' own Ulysses on the same links, a step of each in turn.

    python benchmarks/cluster_models.py    # as root, 24 GB of memory; benchmarks/results/cluster-models.json
    python benchmarks/cluster_models.py --sizes small --rates 100 0 --rounds 3 --out FILE    # 0: no limit

Hosts, turns and ratios are those of cluster.py. The models are diffusers', unmodified, in float32, with the
proportions of the real ones: heads, the tokens of text to those of video. They have two layers; `real` ones have all
widths of Wan 1.3B and CogVideoX 5B, `small` ones are so narrow that the host's own time weighs as it hardly ever does.
Ranks map their weights from one file: the machine holds them once. CogVideoX has no `_cp_plan`, and its attention knows
no Ulysses: Flux runs at its proportions, whose attention is joint as well and which has one. Both methods get whole
inputs and return whole outputs, the same on every rank.

Links drop nothing here, as those that collectives run over: they keep 400 ms of packets. With 50 ms the one exchange of
q, k and v lost some that three small ones did not, and TCP takes 200 ms to send them again.
"""

import copy
import itertools
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsp
from benchmarks import cluster
from benchmarks.common import circumstances, options, rate_name, write_down
from benchmarks.contenders import Circumstance, by_diffusers
from benchmarks.hosts import Hosts, Ranks, script, stoppable, why_not
from benchmarks.methods import all_ranks

METHODS = ("dsp", "diffusers")
SIZES = ("real", "small")
LINES = {
    "Wan": "hidden_states=b c t h w, encoder_hidden_states=b n e",
    "CogVideoX": "hidden_states=b s c, encoder_hidden_states=b n e",
}


def wan(size: str) -> tuple[nn.Module, dict[str, Any]]:
    """Two layers of 12 heads as Wan 1.3B, and 12 x 8 x 12 tokens, a 28th of those of 81 frames of 480p."""
    import diffusers

    wide, inner, text_dim, freq = {"real": (128, 8960, 4096, 256), "small": (32, 1024, 32, 32)}[size]
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=12, attention_head_dim=wide, in_channels=16, out_channels=16, text_dim=text_dim,
        freq_dim=freq, ffn_dim=inner, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    video, text = torch.randn(1, 16, 12, 16, 24), torch.randn(1, 16, text_dim)
    return model, {"hidden_states": video, "encoder_hidden_states": text, "timestep": torch.tensor([500.0])}


def cogvideox(size: str) -> tuple[nn.Module, dict[str, Any]]:
    """16 tokens of text to 1,248 of video, as 226 to 17,550, in 48 heads as CogVideoX 5B."""
    import diffusers

    wide, text_dim, pooled, axes = {"real": (64, 4096, 768, (16, 24, 24)), "small": (16, 32, 32, (4, 4, 8))}[size]
    model = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=0, attention_head_dim=wide, num_attention_heads=48,
        joint_attention_dim=text_dim, pooled_projection_dim=pooled, axes_dims_rope=axes,
    )  # fmt: skip
    places = torch.cartesian_prod(torch.arange(12), torch.arange(8), torch.arange(13)).float()
    return model, {
        "hidden_states": torch.randn(1, len(places), 16), "encoder_hidden_states": torch.randn(1, 16, text_dim),
        "pooled_projections": torch.randn(1, pooled), "timestep": torch.tensor([0.5]), "img_ids": places,
        "txt_ids": torch.zeros(16, 3),
    }  # fmt: skip


class Step:
    """Forward and backward. Gradients are averaged alike by both, so that is left out."""

    def __init__(self, name: str, method: str, model: nn.Module, inputs: dict[str, Any]) -> None:
        self.inputs = inputs
        if method == "dsp":
            dsp.parallelize(model, all_ranks(), {"": LINES[name]})
        else:
            model = by_diffusers(model, all_ranks(), Circumstance(), {}).model.args[0]
        self.model = model

    def forward(self) -> Tensor:
        return self.model(**self.inputs, return_dict=False)[0].square().mean()

    def backward(self, loss: Tensor) -> None:
        self.model.zero_grad()
        loss.backward()

    def average(self) -> None:
        pass


def one_copy(model: nn.Module) -> None:
    """Have all ranks map the weights of a model from one file, which goes when they do."""
    file = Path(os.environ["STORE"].removeprefix("file://")).with_name("weights.pt")
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), file)
    dist.barrier()
    model.load_state_dict(torch.load(file, mmap=True, weights_only=True), assign=True)
    dist.barrier()
    if dist.get_rank() == 0:
        file.unlink()


def build(model: str, size: str) -> list[float]:
    """Make the steps of all methods ready, in the place of those before; they share their weights. Their losses."""
    warnings.simplefilter("ignore")  # of autocast on CPU, by the models
    cluster.STEPS.clear()
    torch.manual_seed(0)
    bare, inputs = {"Wan": wan, "CogVideoX": cogvideox}[model](size)
    one_copy(bare)
    losses = []
    for method in METHODS:
        replica = copy.deepcopy(bare, {id(p): p for p in bare.parameters()})
        step = cluster.STEPS[method] = Step(model, method, replica, inputs)
        loss = step.forward()
        step.backward(loss)
        losses.append(float(loss))
    return losses


def main(arguments: Sequence[str]) -> int:
    o = options(
        __doc__, arguments, {"sizes": SIZES, "models": LINES}, ranks=4, sizes=list(SIZES), models=list(LINES),
        rates=[100.0, 300.0, 0.0], rounds=6, out=None,
    )  # fmt: skip
    if o.rounds % 2:
        raise SystemExit("--rounds must be even: in each round another method is first, and by that slower")
    if reason := why_not():
        print(f"skipped: hosts cannot be emulated here: {reason}")
        return 0
    steps: list[dict[str, Any]] = []
    with stoppable(), Hosts(o.ranks, keeps=400) as hosts, Ranks(__file__, o.ranks, hosts) as ranks:
        for size, model in itertools.product(o.sizes, o.models):
            hosts.rate(None)
            losses = ranks.ask("build", model=model, size=size)[0]
            assert abs(losses[0] - losses[1]) <= 1e-4 * abs(losses[1]), losses
            for rate, mode in itertools.product(o.rates, cluster.MODES):
                hosts.rate(rate or None)
                ask = lambda name, mode=mode: ranks.ask("timed", name=name, mode=mode)  # noqa: E731
                times = cluster.take_turns(METHODS, o.rounds, ask)
                rows = {method: cluster.row_of(rounds, times["dsp"]) for method, rounds in times.items()}
                steps.append({"size": size, "model": model, "rate": rate, "mode": mode, "rows": rows})
                for method, row in rows.items():
                    cluster.show(f"{size} {model}, {rate_name(rate)}, {mode}: {method}", row)
    write_down("cluster-models", o.out, circumstances(arguments) | {"ranks": o.ranks, "steps": steps})
    return 0


if __name__ == "__main__":
    script(main, build=build, timed=cluster.timed)
