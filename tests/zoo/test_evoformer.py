"""Evoformer and Pairformer against OpenFold3: every kind of block, and stacks with their weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.support.oracles import close, copy_weights, randomise
from tests.support.refusals import refused
from zoo.protein import embedding, evoformer, layers, pairformer, templates
from zoo.protein.openfold import openfold_names

pytest.importorskip("openfold3", reason="openfold3 is installed without its dependencies: see .ci/run")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of kernels that a CPU has not
    import openfold3.core.config.default_linear_init_config as lin_init
    from ml_collections import ConfigDict
    from openfold3.core.model.latent.evoformer import EvoformerBlock, EvoformerStack
    from openfold3.core.model.latent.msa_module import MSAModuleBlock, MSAModuleStack
    from openfold3.core.model.latent.pairformer import PairFormerBlock, PairFormerStack
    from openfold3.core.model.latent.template_module import TemplateEmbedderAllAtom
    from openfold3.core.model.layers import msa
    from openfold3.core.utils.all_atom_multimer import make_transform_from_reference
    from openfold3.core.utils.geometry.vector import Vec3Array
    from openfold3.core.utils.relpos import relpos_complex

pytestmark = pytest.mark.filterwarnings("ignore:.*CUDA is not available")  # the oracles ask for CUDA's autocast

EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
INF = -layers.MASKED
S, R, C_M, C_Z, C_S = 5, 7, 12, 8, 10


def with_biases(config: ConfigDict) -> ConfigDict:
    """OpenFold3's table of linear layers, with the biases that AlphaFold 2 has: it is written for AlphaFold 3."""
    found = ConfigDict(config.to_dict())

    def visit(table: Any, path: tuple[str, ...]) -> None:
        for key, value in table.items():
            if "bias" in value and not (key == "linear_z" and "init" in value and value["init"] == "default"):
                value["bias"] = key not in ("linear_q", "linear_k", "linear_v")
            elif "bias" not in value:
                visit(value, (*path, key))

    visit(found, ())
    return found


AF2 = with_biases(lin_init.evo_block_init)


def masks(dtype: torch.dtype, *, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """For residues (b r), the alignment (b s r) and pairs (b i j). In double the last residue is padding; in single,
    where a row without one key is rounded away by the mask, all rows have one."""
    residues = torch.ones(2, R)
    msa, pair = (torch.rand(2, n, R) > 0.3 for n in (S, R))
    msa[:, 0] = msa[:, :, 0] = pair[:, 0] = pair[:, :, 0] = True
    if dtype is torch.float64:
        residues[1, -1] = 0
        msa, pair = msa * residues[:, None], pair * residues[:, None] * residues[..., None]
    return residues.to(dtype), msa.to(dtype), pair.to(dtype)


def compare(
    model: nn.Module, oracle: nn.Module, version: int, run: Callable[..., Any], run_oracle: Callable[..., Any],
    shapes: list[tuple[int, ...]], dtype: torch.dtype, names: Callable[[str], list[str]] | None = None,
) -> None:  # fmt: skip
    """Outputs, gradients of inputs and of all parameters agree; every oracle parameter has one of ours."""
    names = names or openfold_names(version)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]
    model.to(dtype), oracle.to(dtype)
    randomise(oracle)
    copy_weights(model, oracle, names)
    inputs = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    found = []
    for f in (run, run_oracle):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = f(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        g = torch.Generator().manual_seed(3)
        sum((y * torch.randn(y.shape, generator=g, dtype=torch.float64).to(dtype)).mean() for y in out).backward()
        found.append((out, [x.grad for x in leaves]))
    (ours, our_grads), (theirs, their_grads) = found
    for i, (a, b) in enumerate(zip(ours, theirs)):
        assert a.shape == b.shape
        assert b.std() > 0.1
        close(a, b, tolerance, f"output {i}")
    grads = {name: param.grad for name, param in oracle.named_parameters()}
    pairs = {f"input {i}": (a, [b]) for i, (a, b) in enumerate(zip(our_grads, their_grads))}
    pairs |= {name: (param.grad, [grads[n] for n in names(name)]) for name, param in model.named_parameters()}
    assert {n for name, _ in model.named_parameters() for n in names(name)} == set(grads)
    # softmax ignores what all keys share, so the gradient of a bias before it is zero but for rounding
    floor = 1e-2 * max(b.abs().max() for _, theirs in pairs.values() for b in theirs if b is not None)
    for name, (a, theirs) in pairs.items():
        if a is None:
            assert all(b is None for b in theirs), name
        else:
            wanted = torch.cat(theirs).reshape(a.shape)
            error = ((a - wanted).abs().max() / wanted.abs().max().clamp(min=floor)).item()
            assert error < tolerance, f"{name}: relative error {error:.1e}"


def stack(*blocks: nn.Module) -> nn.Module:
    return nn.ModuleDict({"blocks": nn.ModuleList(blocks)})


MSA, PAIR = (2, S, R, C_M), (2, R, R, C_Z)


def global_names(name: str) -> list[str]:
    layer, _, suffix = name.rpartition(".")
    theirs = {"norm": ["layer_norm_m"], "kv": ["global_attention.linear_k", "global_attention.linear_v"]}
    theirs |= {"q": ["global_attention.linear_q"], "gate": ["global_attention.linear_g"]}
    theirs |= {"out": ["global_attention.linear_o"]}
    return [f"{n}.{suffix}" for n in theirs[layer]]


# Blocks and stacks

SMALL = {
    "c_m": C_M, "c_z": C_Z, "c_hidden_msa_att": 4, "c_hidden_opm": 3, "c_hidden_mul": 5, "c_hidden_pair_att": 4,
    "no_heads_msa": 3, "no_heads_pair": 2, "transition_n": 2, "msa_dropout": 0.15, "pair_dropout": 0.25, "inf": INF,
    "fuse_projection_weights": False,
}  # fmt: skip
OURS = {
    "c_m": C_M, "c_z": C_Z, "c_s": C_S, "msa_heads": 3, "msa_head_dim": 4, "pair_heads": 2, "pair_head_dim": 4,
    "triangle": 5, "outer": 3, "transition": 2, "chunk": 50,
}  # fmt: skip
STACK = {"blocks_per_ckpt": None, "use_reentrant": False, "eps": 1e-8}


def as_alphafold_2(oracle: nn.Module) -> nn.Module:
    """The ending node's bias as AlphaFold 2 takes it: OpenFold3's block transposes it, as AlphaFold 3 does."""

    def plain(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "transpose_bias": False}

    for name, module in oracle.named_modules():
        if name.endswith("tri_att_end"):
            module.register_forward_pre_hook(plain, with_kwargs=True)
    return oracle.eval()


def evoformer_oracle(make: Any, opm_first: bool, **more: Any) -> nn.Module:
    return as_alphafold_2(
        make(
            **SMALL, **more, transition_type="relu", no_column_attention=False, opm_first=opm_first,
            linear_init_params=AF2,
        )
    )  # fmt: skip


class GlobalColumns(msa.MSAColumnGlobalAttention):
    """As its block calls it: OpenFold3 keeps the layer, and no block that has it."""

    def forward(self, m: Tensor, mask: Tensor, **kernels: Any) -> Tensor:
        return super().forward(m, mask)


def pairformer_oracle(make: Any, **more: Any) -> nn.Module:
    config = {k: v for k, v in SMALL.items() if "msa" not in k and k not in ("c_m", "c_hidden_opm")}
    single = {"c_s": C_S, "c_hidden_pair_bias": 4, "no_heads_pair_bias": 3}
    return make(**config, **single, **more, transition_type="swiglu").eval()


def evoformer_pair(opm_first: bool, extra: bool) -> tuple[nn.Module, nn.Module, int, Any]:
    config = evoformer.Config(**OURS, c_e=C_M, extra_heads=3, extra_head_dim=4, opm_first=opm_first)
    oracle = evoformer_oracle(EvoformerBlock, opm_first, eps=1e-8)
    if extra:
        oracle.msa_att_col = GlobalColumns(C_M, 4, 3, INF, linear_init_params=AF2.msa_row_att)

    def names(name: str) -> list[str]:
        before, column, layer = name.partition("column.") if extra else (name, "", "")
        return [f"{before}msa_att_col.{n}" for n in global_names(layer)] if column else openfold_names(2)(name)

    return evoformer.Block(config, extra=extra), oracle, 2, names


def msa_pair() -> tuple[nn.Module, nn.Module, int, Any]:
    oracle = MSAModuleBlock(**SMALL, eps=1e-8, transition_type="swiglu", opm_first=True)
    return pairformer.MSABlock(pairformer.Config(**OURS)), oracle, 3, None


def pairformer_pair() -> tuple[nn.Module, nn.Module, int, Any]:
    config = pairformer.Config(**OURS, single_heads=3, single_head_dim=4)
    return pairformer.PairformerBlock(config), pairformer_oracle(PairFormerBlock), 3, None


@EVERY_DTYPE
@pytest.mark.parametrize(
    ("make", "options"),
    [
        *((evoformer_pair, (opm_first, extra)) for opm_first in (False, True) for extra in (False, True)),
        (msa_pair, ()), (pairformer_pair, ()),
    ],
)  # fmt: skip
def test_blocks_agree_with_openfold(make: Any, options: tuple, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, oracle, version, names = make(*options)
    ours, oracle = ours.eval(), oracle.eval()
    residues, msa_mask, pair_mask = masks(dtype)
    shape, mask = ((2, R, C_S), residues) if make is pairformer_pair else (MSA, msa_mask)
    compare(
        stack(ours), stack(oracle), version,
        lambda x, z: ours(x, z, mask, pair_mask), lambda x, z: oracle(x, z, mask, pair_mask, _mask_trans=False),
        [shape, PAIR], dtype, names,
    )  # fmt: skip


def alike(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert b.std() > 0.1
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * b.abs().max().item())


@torch.no_grad()
@pytest.mark.parametrize("opm_first", [False, True])
def test_evoformer_takes_the_weights_of_an_openfold_stack(opm_first: bool) -> None:
    torch.manual_seed(0)
    oracle = evoformer_oracle(EvoformerStack, opm_first, c_s=C_S, no_blocks=2, **STACK).double()
    randomise(oracle)
    state = oracle.state_dict()
    model = zoo.from_reference("evoformer", state, opm_first=opm_first).double().eval()
    ours = {**OURS, "chunk": layers.CHUNK}
    assert model.config == evoformer.Config(**ours, depth=2, extra_depth=0, opm_first=opm_first)
    _, msa_mask, pair_mask = masks(torch.float64)
    m, z = (torch.randn(shape, dtype=torch.float64) for shape in (MSA, PAIR))
    wanted = oracle(m, z, msa_mask, pair_mask, _mask_trans=False)
    for block in model.blocks:
        m, z = block(m, z, msa_mask, pair_mask)
    alike((m, z, model.single(m[:, 0])), wanted)

    name = "blocks.1.msa_att_row.mha.linear_g.bias"
    refused("unknown: more", zoo.from_reference, "evoformer", {**state, "more": torch.zeros(1)})
    refused(f"missing: {name}", zoo.from_reference, "evoformer", {k: v for k, v in state.items() if k != name})
    refused(r"of another model; missing: 'linear\.weight'", zoo.from_reference, "evoformer", {})


@torch.no_grad()
def test_pairformer_takes_the_weights_of_an_openfold_trunk() -> None:
    torch.manual_seed(0)
    more = {"no_blocks": 2, **STACK}
    msa_module = MSAModuleStack(**SMALL, **more, transition_type="swiglu", opm_first=True).eval()
    trunk = pairformer_oracle(PairFormerStack, **{k: v for k, v in more.items() if k != "eps"})
    oracle = nn.ModuleDict({"msa_module": msa_module, "pairformer_stack": trunk}).double()
    randomise(oracle)
    state = {**oracle.state_dict(), "diffusion_module.linear_s.weight": torch.zeros(1)}
    model = zoo.from_reference("pairformer", state).double().eval()
    ours = {**OURS, "chunk": layers.CHUNK, "msa_depth": 2, "depth": 2, "single_heads": 3, "single_head_dim": 4}
    assert model.config == pairformer.Config(**ours)
    mask, msa_mask, pair_mask = masks(torch.float64)
    m, z, s = (torch.randn(shape, dtype=torch.float64) for shape in (MSA, PAIR, (2, R, C_S)))
    wanted = trunk(s, msa_module(m, z, msa_mask, pair_mask, _mask_trans=False), mask, pair_mask, _mask_trans=False)
    for block in model.msa_blocks:
        m, z = block(m, z, msa_mask, pair_mask)
    for block in model.blocks:
        s, z = block(s, z, mask, pair_mask)
    alike((s, z), wanted)
    refused("missing: 'msa_module", zoo.from_reference, "pairformer", {})


def test_relative_encodings_agree_with_openfold() -> None:
    """AlphaFold 3's on four chains, of which some are copies; AlphaFold 2's is its first part."""
    torch.manual_seed(0)
    place, chain = torch.randint(12, (2, R)), torch.randint(4, (2, R))
    entity, copy = chain % 3, chain // 3 * 4
    batch = {"residue_index": place, "asym_id": chain, "entity_id": entity, "token_index": place, "sym_id": copy}
    features = relpos_complex(batch, 3, 2).double()
    ours = embedding.RelativeEncoding(C_Z, 3).double()
    residues = torch.stack([place, chain, entity, copy], -1)
    torch.testing.assert_close(ours(residues, residues), features @ ours.weight)
    first = embedding.ChainOffset(C_Z, 3).double()
    wanted = features[..., : 2 * 3 + 2] @ first.weight
    torch.testing.assert_close(first(residues[..., :2], residues[..., :2]), wanted)


def template_names(name: str) -> list[str]:
    layer, _, kind = name.rpartition(".")
    table = {
        "pairs.norm": ["template_pair_embedder.layer_norm_z"], "pairs.project": ["template_pair_embedder.linear_z"],
        "features.distance": ["template_pair_embedder.dgram_linear"],
        "features.left": ["template_pair_embedder.aatype_linear_1"],
        "features.right": ["template_pair_embedder.aatype_linear_2"],
        "features.numbers": [
            f"template_pair_embedder.{one}_linear" for one in ("pseudo_beta_mask", "backbone_mask", "x", "y", "z")
        ],
        "mean.norm": ["template_pair_stack.layer_norm"], "update.out": ["linear_t"],
    }  # fmt: skip
    if layer in table:
        return [f"{theirs}.{kind}" for theirs in table[layer]]
    block, number, *rest = name.split(".")
    found = openfold_names(3)(".".join([block, number, "pair", *rest]))
    return [f"template_pair_stack.{theirs.replace('.pair_stack', '')}" for theirs in found]


@torch.no_grad()
def test_template_embedder_agrees_with_openfold() -> None:
    torch.manual_seed(0)
    c, n = 8, 3
    pair = {"c_hidden_tri_att": c // 4, "c_hidden_tri_mul": c, "no_blocks": 2, "no_heads": 4, "pair_transition_n": 2}
    more = {"transition_type": "swiglu", "dropout_rate": 0.25, "tri_mul_first": True, "fuse_projection_weights": False}
    config = {
        "c_t": c, "c_z": C_Z, "template_pair_embedder": {"c_in": C_Z, "c_dgram": 39, "c_aatype": 23, "c_out": c},
        "template_pair_stack": {
            "c_t": c, **pair, **more, "blocks_per_ckpt": None, "ckpt_per_template": False, "inf": INF,
        },
    }  # fmt: skip
    oracle = TemplateEmbedderAllAtom(ConfigDict(config)).double().eval()
    ours = templates.TemplateEmbedder(C_Z, c, 2).double().eval()
    randomise(oracle)
    with torch.no_grad():
        theirs = dict(oracle.named_parameters())
        for name, param in ours.named_parameters():
            whole = torch.cat([theirs[one] for one in template_names(name)], 1 if "numbers" in name else 0)
            param.copy_(whole.T if name.split(".")[1] in ("distance", "left", "right") else whole)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.values())

    z, given = torch.randn(PAIR, dtype=torch.float64), templates.template_inputs(2, R, n)
    given = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
    asym_id = (torch.arange(R) > 4).long().expand(2, -1)
    residues, _, _ = masks(torch.float64)
    pair_mask = residues[:, :, None] * residues[:, None]  # its transitions are masked, which a ragged mask would tell
    frame, beta = given["template_seen"].double().unbind(-1)
    chains = asym_id[:, None, :, None] == asym_id[:, None, None]
    apart = torch.cdist(given["template_beta"], given["template_beta"], compute_mode="donot_use_mm_for_euclid_dist")
    lower = torch.linspace(3.25, 50.75, 39, dtype=torch.float64)
    upper = torch.cat([lower[1:], lower.new_tensor([1e8])])
    distogram = ((apart[..., None] > lower) & (apart[..., None] < upper)).double()
    atoms = [Vec3Array.from_array(x) for x in given["template_backbone"].unbind(-2)]
    rigid = make_transform_from_reference(*atoms)
    towards = rigid[..., None].inverse().apply_to_point(rigid.translation[..., None, :]).normalized().to_tensor()
    both = (frame[..., None] * frame[..., None, :] * chains)[..., None]
    batch = {
        "asym_id": asym_id, "template_restype": nn.functional.one_hot(given["template_sequence"], 23),
        "template_pseudo_beta_mask": beta, "template_backbone_frame_mask": frame,
        "template_unit_vector": towards * both,
        "template_distogram": distogram * (beta[..., None] * beta[..., None, :] * chains)[..., None],
    }  # fmt: skip
    wanted = z + oracle(batch, z, pair_mask)
    got = ours(z, asym_id, *given.values(), pair_mask)
    there = pair_mask.bool()
    assert (wanted - z)[there].std() > 0.1
    close((got - z)[there], (wanted - z)[there], 1e-8, "update")
