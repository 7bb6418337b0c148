"""Unmodified models of other fields and packages under `dsp.parallelize`, by one line each, held to one process.

    python benchmarks/models/other_fields.py [--ranks 2 3] [--only FNO] [--write]     # to docs/verified.md

As diffusers_models.py holds those of diffusers: small, with random weights, in float64; the output and every
gradient are compared, and what each rank sends is counted and is what the plan says. The packages, but for torch, are
those of .ci/compared.txt.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.common import DOCS, line, on_ranks, options
from benchmarks.models import diffusers_models
from benchmarks.models.diffusers_models import Case, errors
from dsp.slices import cast
from dsp.text import human

PAGE = DOCS / "verified.md"


def neural_operator() -> nn.Module:
    """Fourier layers, of which a few modes are mixed (Li et al., arXiv 2010.08895)."""
    import tensorly

    tensorly.set_backend("pytorch")
    from neuralop.models import FNO
    from tensorly.plugins import use_default_einsum

    use_default_einsum()
    model = cast(FNO(n_modes=(6, 6), in_channels=2, out_channels=1, hidden_channels=8, n_layers=2), torch.float64)
    model(torch.randn(1, 2, 31, 46, dtype=torch.float64))  # it keeps the places of its grid
    return model


def graph() -> nn.Module:
    """Graph convolutions, at every time step of a series on the nodes (Kipf and Welling, arXiv 1609.02907)."""
    from torch_geometric.nn.models import GCN

    return GCN(8, 16, 2, 4)


def recurrent() -> nn.Module:
    """A language model of gated recurrences by a scan, and causal convolutions (Feng et al., arXiv 2410.01201)."""
    from minGRU_pytorch.minLM import minLM

    return minLM(num_tokens=32, dim=24, depth=2, enable_conv=True)


def medical() -> nn.Module:
    """A U-Net of volumes with residual blocks and group norms (Myronenko, arXiv 1810.11654)."""
    from monai.networks.nets import SegResNet

    return SegResNet(
        spatial_dims=3, init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 1, 1), blocks_up=(1, 1),
        num_groups=4,
    )  # fmt: skip


def alignment() -> nn.Module:
    """Attention along the rows of an alignment, tied, and along its columns (Rao et al., ICML 2021)."""
    import esm

    sizes = {"layers": 2, "embed_dim": 24, "ffn_embed_dim": 48, "attention_heads": 4, "embed_positions_msa_dim": 24}
    rates = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    most = {"max_tokens_per_msa": 2**14, "max_tokens": 2**14, "max_positions": 64, "final_layer": 2}
    more = {"embed_positions_msa": True, "logit_bias": True}
    arguments = argparse.Namespace(**sizes, **rates, **most, **more)
    return esm.MSATransformer(arguments, esm.data.Alphabet.from_architecture("msa_transformer"))


def edges() -> torch.Tensor:
    return torch.randint(0, 19, (2, 60), generator=torch.Generator().manual_seed(3))


CASES: dict[str, Case] = {
    "neuraloperator's FNO": Case(neural_operator, lambda: {"x": torch.randn(1, 2, 31, 46)}, "x=b c h w"),
    "torch_geometric's GCN": Case(graph, lambda: {"x": torch.randn(13, 19, 8), "edge_index": edges()}, "x=t n c"),
    "minGRU's language model": Case(recurrent, lambda: {"x": torch.randint(0, 32, (1, 61))}, "x=b n"),
    "monai's SegResNet": Case(medical, lambda: {"x": torch.randn(1, 1, 24, 16, 20)}, "x=b c d h w"),
    "fair-esm's MSATransformer": Case(alignment, lambda: {"tokens": torch.randint(4, 24, (1, 13, 20))}, "tokens=b r c"),
}
HEAD = "model", "the one line", "N", "output", "gradients", "largest share", "sends, forward"


def row(mesh: DeviceMesh, name: str) -> str:
    found = diffusers_models.held(mesh, CASES[name])
    share = f"{found['share']:.2f}", human(found["planned"])
    return line([name, f"`{CASES[name].line}`", mesh.size(), *errors(found), *share])


def main() -> None:
    o = options(__doc__, ranks=[2, 3], only=[""], write=False)
    names = [name for name in CASES if any(part in name for part in o.only)]
    place = {"page": PAGE, "name": "other fields", "cases": list(CASES), "head": HEAD}
    for n in o.ranks:
        on_ranks(
            n, diffusers_models.make_rows, names, row, partial(diffusers_models.write, **place) if o.write else None
        )


if __name__ == "__main__":
    main()
