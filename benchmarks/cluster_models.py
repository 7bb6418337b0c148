"""Wan and CogVideoX on emulated hosts: DSP against diffusers' own Ulysses on the same links, a step of each in turn.

    python benchmarks/cluster_models.py        # as root; docs/images/cluster-models.json
    python benchmarks/cluster_models.py --rates 100 0 --rounds 3 --ranks 2 --out FILE      # Mbit/s; 0 is no limit

Hosts, turns and ratios are those of benchmarks/cluster.py. The models are diffusers', unmodified, two layers deep, in
float32, with the proportions of the real ones: heads, the tokens of text to those of video. CogVideoX has no
`_cp_plan`, and its attention knows no Ulysses: Flux runs at its proportions, whose attention is joint as well and which
has one. Both methods get whole inputs and return whole outputs, the same on every rank.

Links drop nothing here, as those that collectives run over: they keep 400 ms of packets. With 50 ms the one exchange of
q, k and v lost some that three small ones did not, and TCP takes 200 ms to send them again.
"""

# ruff: noqa: E402 (the repository is put on the path first)

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import cluster
import torch
import torch.distributed as dist
from contenders import Circumstance, by_diffusers
from hosts import Hosts, Ranks, serve, stoppable, why_not
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dsp

METHODS = ("dsp", "diffusers")
LINES = {
    "Wan": "hidden_states=b c t h w, encoder_hidden_states=b n e",
    "CogVideoX": "hidden_states=b s c, encoder_hidden_states=b n e",
}


def wan() -> tuple[nn.Module, dict[str, Any]]:
    """12 heads as Wan 1.3B, and 12 x 8 x 12 tokens, a 28th of those of 81 frames of 480p."""
    import diffusers

    model = diffusers.WanTransformer3DModel(
        num_attention_heads=12, attention_head_dim=32, in_channels=16, out_channels=16, text_dim=32, freq_dim=32,
        ffn_dim=1024, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    video, text = torch.randn(1, 16, 12, 16, 24), torch.randn(1, 16, 32)
    return model, {"hidden_states": video, "encoder_hidden_states": text, "timestep": torch.tensor([500.0])}


def cogvideox() -> tuple[nn.Module, dict[str, Any]]:
    """16 tokens of text to 1,248 of video, as 226 to 17,550, in 48 narrow heads, as CogVideoX 5B."""
    import diffusers

    model = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=0, attention_head_dim=16, num_attention_heads=48,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    places = torch.cartesian_prod(torch.arange(12), torch.arange(8), torch.arange(13)).float()
    return model, {
        "hidden_states": torch.randn(1, 1248, 16), "encoder_hidden_states": torch.randn(1, 16, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([0.5]), "img_ids": places,
        "txt_ids": torch.zeros(16, 3),
    }  # fmt: skip


class Step:
    """Forward and backward. Gradients are averaged alike by both, so that is left out."""

    def __init__(self, name: str, method: str) -> None:
        torch.manual_seed(0)
        model, self.inputs = {"Wan": wan, "CogVideoX": cogvideox}[name]()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))
        if method == "dsp":
            dsp.parallelize(model, mesh, {"": LINES[name]})
        else:
            model = by_diffusers(model, mesh, Circumstance(), {}).model.args[0]
        self.model = model

    def forward(self) -> Tensor:
        return self.model(**self.inputs, return_dict=False)[0].square().mean()

    def backward(self, loss: Tensor) -> None:
        self.model.zero_grad()
        loss.backward()

    def average(self) -> None:
        pass


def build(name: str, model: str, method: str) -> float:
    """Make a step ready. Its loss, by which the methods are compared."""
    warnings.simplefilter("ignore")  # of autocast on CPU, by the models
    step: Any = Step(model, method)
    cluster.STEPS[name] = step
    loss = step.forward()
    step.backward(loss)
    return float(loss)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Wan and CogVideoX on emulated hosts, as root.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 300, 1000, 0], help="Mbit/s")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images/cluster-models", help="for OUT.json")
    options = parser.parse_args(arguments)
    if reason := why_not():
        print(f"skipped: hosts cannot be emulated here: {reason}")
        return 0
    found: list[dict[str, Any]] = []
    with stoppable(), Hosts(options.ranks, keeps=400) as hosts, Ranks(__file__, options.ranks, hosts) as ranks:
        for model in LINES:
            losses = [ranks.ask("build", name=f"{model} {m}", model=model, method=m)[0] for m in METHODS]
            assert abs(losses[0] - losses[1]) <= 1e-4 * abs(losses[1]), losses
        for rate in options.rates:
            hosts.rate(rate or None)
            for model in LINES:
                for mode in cluster.MODES:
                    times: dict[str, list[list[float]]] = {m: [] for m in METHODS}
                    for i, method in cluster.in_turn(METHODS, options.rounds):
                        taken = cluster.slowest(ranks.ask("timed", name=f"{model} {method}", mode=mode))
                        if i >= 0:
                            times[method].append(taken)
                    rows = cluster.rows_of(times)
                    found.append({"model": model, "rate": rate, "mode": mode, "rows": rows})
                    ratio, own = rows["diffusers"]["ratio"], rows["dsp"]["seconds"]["median"]
                    print(
                        f"{model:<11}{cluster.rate_name(rate):<10}{mode:<7}DSP {own:.3f} s, diffusers' Ulysses "
                        f"{ratio['median']:.2f} x that ({ratio['least']:.2f} to {ratio['most']:.2f})",
                        flush=True,
                    )
    options.out.with_suffix(".json").write_text(json.dumps({"ranks": options.ranks, "steps": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve({"build": build, "timed": cluster.timed})
    else:
        sys.exit(main(sys.argv[1:]))
