"""Whole protein trunks of OpenFold3, unmodified and without one stage named: the plan comes from the glue alone."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from tests.support.parity import assert_step_equal
from tests.support.shares import shares
from tests.support.slow import long, slow

pytest.importorskip("openfold3", reason="openfold3 is installed without its dependencies: see .ci/run")

PAIR = {"c_hidden_mul": 128, "c_hidden_pair_att": 32, "no_heads_pair": 4, "transition_n": 4, "pair_dropout": 0.25}
AF2 = {
    "c_m": 256, "c_z": 128, "c_hidden_msa_att": 32, "c_hidden_opm": 32, "c_s": 384, "no_heads_msa": 8, "no_blocks": 1,
    "transition_type": "relu", "msa_dropout": 0.15, "no_column_attention": False, "opm_first": False, **PAIR,
}  # fmt: skip
AF3 = {
    "c_s": 384, "c_z": 128, "c_hidden_pair_bias": 24, "no_heads_pair_bias": 16, "no_blocks": 1,
    "transition_type": "swiglu", **PAIR,
}  # fmt: skip
SMALL = {
    "c_m": 12, "c_z": 8, "c_hidden_msa_att": 4, "c_hidden_opm": 3, "c_s": 10, "c_hidden_mul": 6, "no_heads_msa": 4,
    "c_hidden_pair_att": 4, "no_heads_pair": 2, "c_hidden_pair_bias": 3, "no_heads_pair_bias": 4, "no_blocks": 2,
    "transition_n": 2, "msa_dropout": 0.0, "pair_dropout": 0.0,
}  # fmt: skip
SHARED = {"fuse_projection_weights": False, "inf": 1e9, "eps": 1e-8, "use_reentrant": False}


def quiet(make: Any, config: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that a CPU has not
        return make(**{"blocks_per_ckpt": None, **config, **SHARED})


def evoformer(config: dict[str, Any]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from openfold3.core.model.latent.evoformer import EvoformerStack
    return quiet(EvoformerStack, config)


EVOFORMER = {"": "m=b s r c, z=b i j d, msa_mask=b s r, pair_mask=b i j -> b s r c, b i j d, b r e"}


class Trunk(nn.Module):
    """AF3, Algorithm 1, lines 2 to 14, and one step of the diffusion transformer on what comes out."""

    stages = {"": "single=b r e, msa=b s r f, relpos=b i j p, a=b r q -> b r g, b i j d, b r q"}

    def __init__(self, config: dict[str, Any], cycles: int = 2) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from openfold3.core.model.latent.msa_module import MSAModuleStack
            from openfold3.core.model.latent.pairformer import PairFormerStack
            from openfold3.core.model.layers.diffusion_transformer import DiffusionTransformer
        c_s, c_z, c_m = config["c_s"], config["c_z"], config["c_m"]
        self.cycles = cycles
        self.init_s = nn.Linear(5, c_s)
        self.init_i, self.init_j, self.position = nn.Linear(5, c_z), nn.Linear(5, c_z), nn.Linear(4, c_z)
        self.norm_z, self.again_z = nn.LayerNorm(c_z), nn.Linear(c_z, c_z)
        self.norm_s, self.again_s = nn.LayerNorm(c_s), nn.Linear(c_s, c_s)
        self.embed_msa, self.embed_single = nn.Linear(6, c_m), nn.Linear(5, c_m)
        both = {**config, "transition_type": "swiglu"}
        self.msa_module = quiet(MSAModuleStack, {**both, "opm_first": True})
        self.pairformer = quiet(PairFormerStack, both)
        self.diffusion = DiffusionTransformer(
            c_a=7, c_s=c_s, c_z=c_z, c_hidden=4, no_heads=2, no_blocks=2, n_transition=2, n_query=None, n_key=None,
            inf=1e9,
        )  # fmt: skip

    def forward(self, single: Tensor, msa: Tensor, relpos: Tensor, mask: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        s_init = self.init_s(single)
        z_init = self.init_i(single)[..., :, None, :] + self.init_j(single)[..., None, :, :] + self.position(relpos)
        s, z = torch.zeros_like(s_init), torch.zeros_like(z_init)
        pair_mask = mask[..., None] * mask[..., None, :]
        for cycle in range(self.cycles):
            with torch.set_grad_enabled(torch.is_grad_enabled() and cycle == self.cycles - 1):
                z = z_init + self.again_z(self.norm_z(z))
                m = self.embed_msa(msa) + self.embed_single(single).unsqueeze(-3)
                z = self.msa_module(m, z, msa_mask=mask[..., None, :].expand(m.shape[:-1]), pair_mask=pair_mask)
                s = s_init + self.again_s(self.norm_s(s))
                s, z = self.pairformer(s=s, z=z, single_mask=mask, pair_mask=pair_mask)
        return s, z, self.diffusion(a=a, s=s, z=z, mask=mask)


def randomized(model: nn.Module) -> nn.Module:
    """Modules that start as zero would hide every error."""
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.double()


def make(kind: str, config: dict[str, Any]) -> tuple[nn.Module, dict[str, str]]:
    if kind == "trunk":
        return randomized(Trunk(config)), Trunk.stages
    extra = {"opm_first": kind == "opm first", "transition_type": "relu", "no_column_attention": False}
    return randomized(evoformer({**config, **extra})), EVOFORMER


def inputs(kind: str, s: int, r: int, config: dict[str, Any]) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(s * r)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    mask = torch.ones(1, r, dtype=torch.float64)
    mask[:, -1] = 0
    if kind == "trunk":
        return {
            "single": draw(1, r, 5), "msa": draw(1, s, r, 6), "relpos": draw(1, r, r, 4), "mask": mask,
            "a": draw(1, r, 7),
        }  # fmt: skip
    msa_mask = (torch.rand(1, s, r, generator=g, dtype=torch.float64) > 0.2).double() * mask
    pair_mask = mask[..., None] * mask[..., None, :]
    m, z = draw(1, s, r, config["c_m"]), draw(1, r, r, config["c_z"])
    return {"m": m, "z": z, "msa_mask": msa_mask, "pair_mask": pair_mask}


def loss_of(*out: Tensor) -> Tensor:
    return sum(((i + 1) * dsp.mean(y.sin()) for i, y in enumerate(out)), torch.zeros(()))


def parity(mesh: DeviceMesh, kind: str, shapes: list[tuple[int, int]], gather: bool, ckpt: bool) -> None:
    config = {**SMALL, "blocks_per_ckpt": 1} if ckpt else SMALL
    single, stages = make(kind, config)
    model, _ = make(kind, config)
    dsp.parallelize(model, mesh, stages, gather_output=gather)
    warnings.filterwarnings("ignore", "CUDA is not available")  # the models ask for CUDA's autocast
    for shape in shapes:
        single.zero_grad()
        assert_step_equal(single, model, mesh, inputs(kind, *shape, config), loss=loss_of)


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        (3, "evoformer"), (2, "trunk"), long(4, "opm first"),
        *(long(n, kind) for n, kind in ((2, "evoformer"), (4, "evoformer"), (2, "opm first"), (3, "opm first"))),
        *(long(n, "trunk") for n in (3, 4)),
    ],
)  # fmt: skip
def test_outputs_and_every_gradient(mesh: DeviceMesh, kind: str) -> None:
    parity(mesh, kind, [(5, 7), (3, 6)], mesh.size() != 3, False)


@pytest.mark.parametrize("kind", ["evoformer", long("trunk")])
def test_under_the_trunks_own_checkpointing(mesh: DeviceMesh, kind: str) -> None:
    parity(mesh, kind, [(5, 7)], True, True)


def real_plan(config: dict[str, Any], blocks: int, s: int, r: int, n: int) -> dsp.Plan:
    with torch.device("meta"):
        model = evoformer({**config, "no_blocks": blocks})
        kwargs = {
            "m": torch.empty(1, s, r, 256), "z": torch.empty(1, r, r, 128),
            "msa_mask": torch.empty(1, s, r), "pair_mask": torch.empty(1, r, r),
        }  # fmt: skip
        return dsp.plan(model, kwargs=kwargs, size=n, stages=EVOFORMER, dtype=torch.bfloat16, gather_output=False)


@pytest.mark.parametrize(("n", "s", "r"), [(2, 512, 768), long(4, 128, 1024), slow(8, 512, 768), long(16, 512, 2048)])
def test_no_block_sends_more_than_its_schedule(n: int, s: int, r: int) -> None:
    """AF2's block at full width, forward: FastFold's schedule, and the one that switches triangle channels."""
    fastfold = 2 * (n - 1) * (r * r * (272 * n + 512) + s * r * (32 * n + 512)) // n**2
    pair = 16 * n + 256 + 2 * min(128 * n, 384)
    channels = 2 * (n - 1) * (r * r * pair + s * r * (32 * n + 512)) // n**2
    plans = [real_plan(AF2, blocks, s, r, n) for blocks in (1, 2)]
    block = plans[1].bytes["forward"] - plans[0].bytes["forward"]  # the first begins as it likes
    assert plans[0].bytes["forward"] <= block < fastfold
    big = [s for s in plans[1].switches if s.kind == "gather" and s.bytes > 2 * (n - 1) * r * r * 64 // n]
    assert len(big) == (4 if n == 2 else 0)  # a whole operand is cheaper than three switches on two ranks only
    if n > 2:
        assert block == channels


@pytest.mark.parametrize("mesh", [2, long(4)])
def test_pair_activations_are_shared_out(mesh: DeviceMesh) -> None:
    def parallelize(model: nn.Module) -> None:
        dsp.parallelize(model, mesh, EVOFORMER, gather_output=False)

    warnings.filterwarnings("ignore", "CUDA is not available")
    build = partial(make, "evoformer", {**SMALL, "no_blocks": 1})
    given = inputs("evoformer", 8, 48, SMALL)
    assert max(shares(lambda: build()[0], given, parallelize, 48 * 48 * 2)) <= 1.3 / mesh.size()


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("kind", [long("evoformer"), long("opm first")])
def test_discover_finds_no_stage_that_costs_more_than_the_operations(kind: str) -> None:
    config = {**SMALL, "no_blocks": 1}
    model, stages = make(kind, config)
    sample = inputs(kind, 5, 7, config)
    found = dsp.discover(model, kwargs={k: torch.cat([v, v.flip(1)]) for k, v in sample.items()})
    for n in (2, 3, 4):
        for shape in ((5, 7), (8, 16)):
            options = {"kwargs": inputs(kind, *shape, config), "size": n}
            one, two = (dsp.plan(model, stages=s, **options) for s in (found, stages))
            costs = [(sum(plan.bytes.values()), plan.flops_whole) for plan in (one, two)]  # bytes are compared first
            assert costs[0] <= costs[1]
