"""Every rule, over every layout of its operands: what it accepts is right on every rank, what it refuses says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from dsp.comm.layout import Cut
from dsp.core.torch_calls import NUMPY_NAMES, positions
from dsp.core.torch_traits import ATTRIBUTE_OPS, FILLED, METADATA, SOURCES, UNRUNNABLE, in_place, op_name, traits_of
from dsp.core.torch_traits import RANDOM as DRAWN
from dsp.glue.rules import RULES
from dsp.glue.rules.call import PIECEWISE, no_rule, rule
from dsp.support.tensors import tensors_in
from tests.support.slow import slow
from tools.prover.forms import AUTOMATIC, FORMS, Form, flags, form, ints, x
from tools.prover.prover import Call, Proof, functions, prove, prove_source

RANDOM = {"dropout", "alpha_dropout", "empty_like", *DRAWN}  # shapes alone
# torch functions without a rule: on a sharded tensor they run whole, gathered by the plan
WHOLE = frozenset(
    """
__bool__ __complex__ __float__ __int__ __long__ adaptive_max_pool1d adaptive_max_pool1d_with_indices adaptive_max_pool2d
adaptive_max_pool2d_with_indices adaptive_max_pool3d adaptive_max_pool3d_with_indices addbmm addmm addmv addr
affine_grid affine_grid_generator alias_copy allclose aminmax apply argwhere array array_wrap as_strided as_strided_copy
as_strided_scatter atleast_1d atleast_2d atleast_3d autocast autocast_to_full_precision autocast_to_reduced_precision
baddbmm batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats
batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats bilinear binary_cross_entropy_by_number
bincount binomial block_diag broadcast_tensors cartesian_prod ccol_indices ccol_indices_copy
chain_matmul channel_shuffle cholesky_ex cholesky_inverse cholesky_solve choose_qparams_optimized
clear_non_serializable_cached_data coalesce coalesced col_indices col_indices_copy column_stack combinations cond
const_data_ptr constant_pad_nd contains conv_tbc convolution corrcoef cosine_embedding_loss cosine_similarity cov cpu
cross_entropy crow_indices crow_indices_copy ctc_loss cuda cummax cummin cumulative_trapezoid deepcopy dense_dim
dequantize detach_copy diag diag_embed diagflat diagonal diagonal_copy diagonal_scatter diff dimI dimV dim_order dist
dlpack dlpack_device dot dsmm dsplit dstack eig eigvals embedding_bag embedding_of_weight equal expand_copy
fake_quantize_per_channel_affine fake_quantize_per_tensor_affine fbgemm_linear_fp16_weight
fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8_weight fbgemm_linear_int8_weight_fp32_activation
fbgemm_linear_quantize_weight fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_quantized_matrix fft_hfft2 fft_hfftn fft_ihfft2
fft_ihfftn fill_diagonal fliplr flipud fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d
fractional_max_pool3d_with_indices frexp frobenius_norm fused_moving_avg_obs_fake_quant gaussian_nll_loss
geqrf ger gradient grid_sampler grid_sampler_2d grid_sampler_3d gru_cell gumbel_softmax hash_tensor hinge_embedding_loss
histc histogram histogramdd householder_product hsmm hsplit hspmm hstack idiv ifloordiv imod index index_fill
indices indices_copy inner int_repr inv_ex ipu is_coalesced is_distributed is_nonzero is_set_to is_view
isin istft item kl_div kron kthvalue ldl_factor ldl_factor_ex ldl_solve linear_cross_entropy lobpcg local_response_norm
lp_pool1d lp_pool2d lp_pool3d lstm_cell lstsq lu lu_factor lu_factor_ex lu_solve lu_unpack map map2
margin_ranking_loss masked_scatter masked_select matrix_norm matrix_power matrix_rank max_pool1d_with_indices
max_pool2d_with_indices max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d meshgrid miopen_batch_norm
miopen_convolution miopen_convolution_add_relu miopen_convolution_relu miopen_convolution_transpose
miopen_depthwise_convolution miopen_rnn mode module_load msort mtia multi_dot multi_head_attention_forward
multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss multinomial mv nanmedian nanquantile narrow_copy
native_batch_norm native_channel_shuffle native_dropout native_group_norm native_layer_norm native_norm
nested_tensor_size nested_tensor_storage_offsets nested_tensor_strides nll_loss nnz nonzero nonzero_static
norm_by_weight norm_except_dim nuclear_norm numpy orgqr ormqr outer pca_lowrank pdist permute_copy
pin_memory pinverse poisson poisson_nll_loss prelu put q_per_channel_axis q_per_channel_scales
q_per_channel_zero_points q_scale
q_zero_point qscheme quantile quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic quantized_batch_norm
quantized_gru_cell quantized_lstm_cell quantized_max_pool1d quantized_max_pool2d quantized_max_pool3d
quantized_rnn_relu_cell quantized_rnn_tanh_cell random record_stream reduce_ex register_post_accumulate_grad_hook renorm
resize resize_as resize_as_sparse reversed rnn_relu_cell rnn_tanh_cell rot90 row_indices row_indices_copy row_stack
rrelu saddmm select_copy select_scatter set setstate share_memory slice_copy slice_inverse
slice_scatter smm soft_margin_loss solve_ex sparse_dim sparse_mask sparse_mask_projection
sparse_resize sparse_resize_and_clear special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0
special_bessel_y1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he special_laguerre_polynomial_l
special_legendre_polynomial_p special_log_softmax special_logsumexp special_modified_bessel_i0
special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0
special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_softmax
special_spherical_bessel_j0 split_copy split_with_sizes_copy spmm squeeze_copy sspaddmm stft storage storage_type
sum_to_size svd_lowrank sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum t_copy take tensordot
tensorinv tensorsolve to_dense to_mkldnn to_sparse tolist trace transpose_copy trapezoid trapz triangular_solve
triplet_margin_loss triplet_margin_with_distance_loss unbind_copy unfold_copy unique unique_consecutive
unravel_index unsafe_split_with_sizes unsqueeze_copy values values_copy vander vdot vecdot view_as_complex_copy
view_as_real_copy view_copy vsplit vstack xpu
""".split()
)
# what reads numbers out of a tensor, or moves it off its device, and shares its name with a function of tensors
READS = {"__bool__", "__float__", "__int__", "__long__", "__complex__"}
# functions of torch.functional that no call of a valid form reaches here, and why
APART = {
    "torch.spmm": "of sparse tensors", "torch.Tensor.__div__": "of Python 2", "torch.Tensor.__long__": "of Python 2",
}  # fmt: skip


def valid(func: Callable[..., Any], forms: list[Form], most: int = 99) -> Iterator[Call]:
    """The calls of a function that it takes, on whole tensors."""
    for args, kwargs in forms:
        try:
            call = Call(func, args, kwargs, values=op_name(func)[0] not in RANDOM)
            prove(call, 1, only=())
        except (TypeError, RuntimeError, ValueError, IndexError, AttributeError):
            continue
        yield call
        most -= 1
        if not most:
            return


IN_NUMPY = {name: numpy_name for numpy_name, name in NUMPY_NAMES.items()}


def named(call: Call) -> Iterator[Call]:
    """A call by keywords, of all its arguments and of all but the first, in each form that the function takes; by
    torch's names, and by NumPy's."""
    forms = positions(call.func)
    for names in dict.fromkeys((*forms, *(tuple(IN_NUMPY.get(name, name) for name in names) for names in forms))):
        for first in (0, 1):
            by_name = dict(zip(names[first:], call.args[first:]))
            if first >= len(call.args) or len(call.args) > len(names) or by_name.keys() & call.kwargs.keys():
                continue
            try:
                out = call.func(*call.args[:first], **by_name, **call.kwargs)
            except Exception:  # it takes them by position alone
                continue
            if out is NotImplemented:
                continue
            yield Call(call.func, call.args[:first], {**by_name, **call.kwargs}, values=call.values)


def functions_by_rule() -> dict[str, list[Callable[..., Any]]]:
    found: dict[str, list[Callable[..., Any]]] = {}
    for name, func in functions():
        attribute = op_name(func)[1]
        if name in RULES and name not in METADATA and (not attribute or name in ATTRIBUTE_OPS):
            found.setdefault(RULES[name].__name__, []).append(func)
    return found


BY_RULE = functions_by_rule()


def show(wrong: list[Proof]) -> str:
    lines = [f"{p.call} over {p.n}: {p.wrong[0]} (and {len(p.wrong) - 1} more)" for p in wrong]
    return "\n".join([f"{len(lines)} calls are wrong:", *lines[:40], "", "the first in full:", *map(str, wrong[:1])])


@pytest.mark.parametrize(
    "rule", [slow(rule) if rule in ("attention", "recurrent") else rule for rule in sorted(BY_RULE)]
)
def test_accepted_layouts_are_right(rule: str) -> None:
    proven(rule, 3)


@pytest.mark.slow
@pytest.mark.parametrize("rule", sorted(BY_RULE))
def test_it_is_right_on_two_ranks_too(rule: str) -> None:
    proven(rule, 2)


PIECES = {RULES[name].__name__ for name in PIECEWISE}


@pytest.mark.parametrize("rule", [r if r in ("cat", "take", "getitem", "setitem") else slow(r) for r in sorted(PIECES)])
def test_joined_pieces_are_right(rule: str) -> None:
    """Each piece is sharded on its own, as text and the tokens of a video that are joined to it."""
    proven(rule, 3, joins=8 if rule in ("take", "getitem", "setitem") else 1)


def proven(rule: str, n: int, joins: int = 0) -> None:
    wrong: list[Proof] = []
    untested: list[str] = []
    accepted = 0
    for func in BY_RULE[rule]:
        resolved = torch.overrides.resolve_name(func) or getattr(func, "__name__", "")
        if resolved in APART or func.__name__ in READS:
            continue
        name = op_name(func)[0]
        calls = list(valid(func, FORMS[name]) if name in FORMS else valid(func, AUTOMATIC, 4))
        if not calls:
            untested.append(resolved)
        if not joins:
            calls += [by_name for call in calls[:2] for by_name in named(call)]
        for call in calls:
            proof = prove(call, n, folds=name in FORMS and (not joins or rule == "cat"), joins=joins)
            accepted += proof.accepted
            if proof.wrong:
                wrong.append(proof)
    assert not wrong, show(wrong)
    assert not untested, f"no valid call of these is known, give them a form: {', '.join(untested)}"
    assert accepted, f"the rule {rule} refuses everything"


BROADCASTS = [
    ((4, 6, 3), (6, 3)), ((4, 6, 3), (4, 1, 3)), ((6, 1), (4, 6, 3)), ((4, 1, 1), (1, 6, 3)), ((5,), (1,)),
    ((0, 4), (4,)), ((2, 5), ()),
]  # fmt: skip


@pytest.mark.parametrize("shapes", BROADCASTS, ids=str)
def test_broadcasting(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    one, two = x(*shapes[0]), x(*shapes[1])
    calls = [
        Call(torch.add, (one, two)), Call(Tensor.__rsub__, (one, two)), Call(torch.clamp, (one,), {"min": two}),
        Call(torch.where, (flags(*shapes[0]), two, 0.5)), Call(torch.lerp, (one, two, x(3))),
        Call(torch.addcmul, (one, two, one)),
    ]  # fmt: skip
    wrong = []
    for call in calls:
        try:
            proofs = [prove(call, n, folds=True) for n in (2, 3)]
        except RuntimeError:
            continue  # no such call on whole tensors: x(3) does not broadcast
        wrong += [p for p in proofs if p.wrong]
        assert sum(p.accepted for p in proofs), str(proofs[0])
    assert not wrong, show(wrong)


@pytest.mark.parametrize("n", [2, 3])
def test_a_mask_that_is_cut_another_way(n: int) -> None:
    """Queries along their positions, keys and values whole, and a mask for each head that is cut along the heads."""
    q, k, mask = x(2, 4, 6, 5), x(2, 4, 3, 5), x(2, 4, 1, 3)
    layouts = [(Cut(2), None, None, cut) for cut in (None, Cut(0), Cut(1), Cut(3))]
    proof = prove(Call(F.scaled_dot_product_attention, (q, k, k, mask)), n, only=layouts)
    assert [*proof.verdicts.values()] == ["ok", "refused", "refused", "refused"], str(proof)


def test_a_stretch_is_made_in_parts() -> None:
    wrong, parts = [], 0
    for name in SOURCES - FILLED:
        forms = [
            form(x(1, 3), (5, 3)), form(x(3), (4, 3)), form(x(4, 1, 3), (4, 6, 3)), form(x(4, 1, 3), 1, 5, 1),
            form(x(3), 4, 1), form(x(3), (4, 1)), form(x(4, 3), 3, 1), form(x(4), 5), form(x(4, 3), repeats=2, dim=0),
            form(x(1, 3), size=(5, -1)), form(x(1, 3), repeats=(4, 1)),
        ]  # fmt: skip
        for func in (f for n, f in functions() if n == name):
            for call in valid(func, forms):
                for n in (2, 3):
                    proof = prove_source(call, n)
                    parts += proof.accepted
                    if proof.wrong:
                        wrong.append(proof)
    assert not wrong, show(wrong)
    assert parts > 20


FILLS = [
    Call(torch.zeros, (4, 6)), Call(torch.ones, ((5, 3),), {"dtype": torch.int64}), Call(torch.full, ((4, 6, 2), 0.5)),
    Call(torch.full, (), {"size": (7,), "fill_value": True}), Call(Tensor.new_zeros, (x(2), 4, 6)),
    Call(Tensor.new_ones, (x(2), (5, 3))), Call(Tensor.new_full, (x(2), [4, 6], 2.0)),
    Call(Tensor.new_zeros, (x(2),), {"size": (3, 4), "dtype": torch.complex128}),
]  # fmt: skip


@pytest.mark.parametrize("call", FILLS, ids=str)
@pytest.mark.parametrize("n", [2, 3])
def test_zeros_are_made_in_parts(call: Call, n: int) -> None:
    (whole,) = tensors_in(call.func(*call.args, **call.kwargs))
    cuts = [Cut(d, outer) for d, size in enumerate(whole.shape) for outer in (1, 2) if size % outer == 0]
    proof = prove_source(call, n, cuts)
    assert not proof.wrong, show([proof])
    assert proof.accepted == len(cuts)


@pytest.mark.parametrize("n", [2, 3])
def test_writes_into_zeros_may_be_sharded(n: int) -> None:
    """By index or by slices: along every dim but the one that is written to, which is whole or cut for all."""
    index = ints(3, 1, high=4).expand(3, 5)
    for func, args in (
        (Tensor.index_add_, (torch.zeros(4, 5, dtype=torch.float64), 0, torch.tensor([3, 1, 3]), x(3, 5))),
        (Tensor.scatter_add_, (torch.zeros(4, 5, dtype=torch.float64), 0, index, x(3, 5))),
        (Tensor.__setitem__, (torch.zeros(4, 5, dtype=torch.float64), (slice(0, 3), slice(None)), x(3, 5))),
    ):
        proof = prove(Call(func, args), n)
        assert not proof.wrong, str(proof)
        assert proof.accepted, str(proof)


def test_every_torch_function_is_known() -> None:
    """With a rule, and so proven above, or run whole: none by omission."""
    whole = {
        name
        for name, func in functions()
        if name not in {*RULES, *METADATA, *FILLED, *UNRUNNABLE} and (not op_name(func)[1] or name in ATTRIBUTE_OPS)
    }
    new = sorted(whole - WHOLE)
    if new and tuple(map(int, torch.__version__.split(".")[:2])) != (2, 13):
        pytest.skip(f"functions that torch 2.13 does not have run whole: {' '.join(new)}")
    assert not new, f"give these a rule, or list them as run whole: {' '.join(new)}"
    assert not WHOLE & set(RULES), "these have a rule now"


HOW = ("mean", "sum", "none")
CLASSES, SOME = ints(4, 3, high=5), torch.where(flags(4, 3), ints(4, 3, high=5), -100)
PARTS = [
    Call(torch.addmm, (x(5), x(4, 3), x(3, 5))), Call(Tensor.addmm, (x(4, 1), x(4, 3), x(3, 5)), {"beta": 0.5}),
    Call(torch.baddbmm, (x(1, 4, 5), x(2, 4, 3), x(2, 3, 5)), {"beta": 0, "alpha": 2.0}),
    Call(Tensor.baddbmm, (x(2, 4, 5),), {"batch1": x(2, 4, 3), "batch2": x(2, 3, 5), "beta": 0.5}),
    Call(torch.addmm, (), {"input": x(4, 5), "mat1": x(4, 3), "mat2": x(3, 5)}),
    Call(torch.hstack, ([x(3), x(2)],)), Call(torch.hstack, ([x(3, 2, 2), x(3, 1, 2)],)),
    Call(torch.vstack, ([x(3), x(2, 3)],)), Call(torch.column_stack, ([x(3), x(3, 2)],)),
    Call(F.pad, (x(4, 5), (1, torch.tensor(2)))), Call(torch.diff, (x(4, 5), 2, 0)), Call(Tensor.diff, (x(4, 5),)),
    *(Call(F.prelu, both) for both in [(x(2, 3, 4) - 0.5, x(3)), (x(2, 3) - 0.5, x(1)), (x(4) - 0.5, x(1))]),
    Call(torch.outer, (x(3), x(4))),
    Call(F.cosine_similarity, (x(2, 3, 4), x(3, 4)), {"dim": -1}),
    Call(torch.cosine_similarity, (x(2, 3), x(2, 3), 1, 9.0)),
    Call(F.kl_div, (x(3, 4), x(3, 4)), {"reduction": "batchmean"}),
    Call(F.kl_div, (x(3, 4), x(3, 4)), {"reduction": "sum", "log_target": True}),
    *(Call(F.cross_entropy, (x(4, 5, 3), SOME), {"reduction": how, "label_smoothing": 0.1}) for how in HOW),
    *(Call(f, (x(4, 5, 3), CLASSES)) for f in (F.cross_entropy, F.nll_loss)),
    Call(F.cross_entropy, (x(5), CLASSES[0, 0])),
]  # fmt: skip


@pytest.mark.parametrize("call", PARTS, ids=lambda call: call.func.__name__)
def test_written_out_operations_equal_the_function(call: Call) -> None:
    inputs = [t for t in tensors_in((call.args, call.kwargs)) if t.requires_grad]
    expected = call.func(*call.args, **call.kwargs)
    found = traits_of(call.func).written_out(nullcontext(), call.args, call.kwargs)
    assert_close(found, expected)
    weight = torch.linspace(0.5, 2, found.numel(), dtype=found.dtype).view(found.shape)
    grads = [torch.autograd.grad((y * weight).sum(), inputs, materialize_grads=True) for y in (found, expected)]
    assert_close(*grads)


def test_reads_of_numbers_are_refused() -> None:
    """`bool(x)` is no cast: what a rank would read is a number of its own part."""
    for method in ("__bool__", "__float__", "__int__", "__complex__"):
        call = Call(getattr(Tensor, method), (x(2),))
        name, _ = op_name(call.func)
        assert name not in RULES, f"{method} passes for the function {name!r}"


def test_a_name_has_one_rule() -> None:
    def user_rule(f: Any) -> Any:
        return no_rule(f)

    with pytest.raises(ValueError, match=r"cumsum\(\) has a rule already, in dsp\.glue\.rules"):
        rule("cumsum")(user_rule)


def test_in_place_forms_are_known() -> None:
    assert in_place(Tensor.add_)
    assert in_place(Tensor.__iand__)
    assert not in_place(Tensor.__and__)
    assert not in_place(F.relu)


# --- the dims along which a rule has to take an operation -------------------------------------------------------------

A = 2, 4, 6, 8
LEAST: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "add": (torch.add, (x(*A), x(*A)), 4),
    "add a vector": (torch.add, (x(*A), x(8)), 4),
    "where": (torch.where, (x(*A) > 0.5, x(*A), x(4, 1, 8)), 4),
    "fold": (torch.Tensor.reshape, (x(*A), (8, 6, 8)), 4),
    "open": (torch.Tensor.unflatten, (x(*A), -1, (2, -1)), 4),
    "permute": (torch.Tensor.permute, (x(*A), (3, 0, 2, 1)), 4),
    "linear": (F.linear, (x(*A), x(5, 8)), 3),
    "matmul": (torch.matmul, (x(*A), x(2, 4, 8, 6)), 3),
    "einsum": (torch.einsum, ("btsc,btrc->btsr", x(*A), x(*A)), 3),
    "attention": (F.scaled_dot_product_attention, (x(*A), x(*A), x(*A)), 3),
    "layer norm": (F.layer_norm, (x(*A), (8,)), 4),
    "softmax": (torch.softmax, (x(*A), -1), 4),
    "sum": (torch.sum, (x(*A),), 4),
    "mean": (torch.mean, (x(*A),), 4),
    "a loss": (F.mse_loss, (x(*A), x(*A)), 4),
    "cat": (torch.cat, ([x(*A), x(*A)], -1), 3),
    "cat of nothing": (torch.cat, ([x(*A), x(0)], 1), 4),
    "stack": (torch.stack, ([x(*A), x(*A)], 2), 4),
    "select": (torch.select, (x(*A), 2, 1), 4),
    "narrow": (torch.narrow, (x(*A), 2, 1, 2), 4),
    "unfold": (torch.Tensor.unfold, (x(*A), 1, 2, 1), 3),
    "two indices": (torch.Tensor.__getitem__, (x(*A), (0, slice(None), 0)), 4),
    "index and slices": (torch.Tensor.__getitem__, (x(*A), (slice(None), 1, None, slice(2, 4))), 3),
    "a list": (torch.Tensor.__getitem__, (x(*A), (slice(None), [0, 1])), 3),
    "set": (torch.Tensor.__setitem__, (x(*A, grad=False), (slice(None), [0, 2]), x(2, 2, 6, 8, grad=False)), 2),
    "pad": (F.pad, (x(*A), (1, 2)), 3),
    "conv": (F.conv2d, (x(*A), x(3, 4, 3, 3)), 3),
    "group norm": (F.group_norm, (x(*A), 2), 3),
}


@pytest.mark.parametrize("name", LEAST)
def test_accepted_along(name: str) -> None:
    func, args, least = LEAST[name]
    proof = prove(Call(func, args), 2)
    dims = {cut.dim for layouts, said in proof.verdicts.items() if said == "ok" and (cut := layouts[0]) is not None}
    assert len(dims) >= least, proof


NONE: dict[str, tuple[Call, int]] = {  # calls, and a dim along which no rule may take them
    "running statistics": (Call(F.instance_norm, (x(4, 6, 3), torch.zeros(6).double(), torch.ones(6).double())), 0),
    "a weighted mean": (Call(F.mse_loss, (x(4, 6), x(4, 6)), {"weight": x(4, 6)}), 0),
    "an older reduction": (Call(F.l1_loss, (x(4, 6), x(4, 6)), {"size_average": False}), 0),
    "no dims to roll": (Call(torch.roll, (x(4, 6), 1, ())), 0),
    "channels first": (Call(F.dropout1d, (x(4, 6), 0.5), values=False), 1),
    "channels first, in 3 dims": (Call(F.dropout3d, (x(4, 6, 2, 2), 0.5), values=False), 1),
}


@pytest.mark.parametrize("name", NONE)
@pytest.mark.filterwarnings("ignore:size_average")
def test_refused_along(name: str) -> None:
    call, dim = NONE[name]
    cuts = tuple(
        Cut(dim) if t.ndim > dim and t.shape[dim] > 1 and t.requires_grad else None
        for t in tensors_in((call.args, call.kwargs))
    )
    assert prove(call, 2, only=[cuts]).verdicts == {cuts: "refused"}


@pytest.mark.parametrize("func", [torch.kron, torch.nonzero])
def test_no_layout_will_do(func: Callable[..., Any]) -> None:
    args = (x(*A, grad=False),) * (2 if func is torch.kron else 1)
    assert not prove(Call(func, args), 2).accepted
