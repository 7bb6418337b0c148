"""Rules of operations on each element, and of losses, which also sum over all."""

from __future__ import annotations

import math

import torch

from dsp.glue.rules.call import Frame, Outcome, align, independent, rule

ELEMENTWISE = """
abs absolute add sub subtract rsub mul multiply div divide true_divide rtruediv rdiv rmul radd floor_divide rfloordiv
remainder fmod pow rpow neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos
tan tanh sinh cosh asin acos atan arctan atan2 asinh acosh atanh sigmoid logit erf erfc erfinv lgamma digamma sinc
relu relu6 gelu silu elu selu celu mish hardswish hardtanh hardsigmoid leaky_relu softplus softsign tanhshrink
hardshrink softshrink threshold logsigmoid clamp clip clamp_min clamp_max where lerp addcmul addcdiv maximum minimum
fmax fmin eq ne lt le gt ge not_equal less greater greater_equal less_equal isnan isinf isfinite logical_and logical_or
logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor and or xor invert rand ror sign sgn floor ceil
round trunc frac nan_to_num masked_fill heaviside hypot copysign xlogy logaddexp logaddexp2 float half bfloat16 double
int long short char byte bool cfloat contiguous clone detach dropout alpha_dropout bernoulli zeros_like ones_like
full_like empty_like rand_like randn_like requires_grad real imag conj deg2rad rad2deg polar complex alias
zero fill copy iadd isub imul itruediv ipow data
truediv floordiv mod rmod float_power fix arccos arccosh arcsin arcsinh arctan2 arctanh angle signbit nextafter ldexp
gcd lcm i0 igamma igammac polygamma mvlgamma isreal isposinf isneginf isclose conj_physical resolve_conj resolve_neg
cdouble chalf iand ior ixor rxor lshift rshift rlshift rrshift ilshift irshift bitwise_left_shift bitwise_right_shift
log_sigmoid special_digamma special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2
special_expit special_expm1 special_gammainc special_gammaincc special_gammaln special_i0 special_i0e special_i1
special_i1e special_log1p special_log_ndtr special_logit special_multigammaln special_ndtr special_ndtri
special_polygamma special_psi special_round special_sinc special_xlog1py special_xlogy special_zeta
normal log_normal uniform exponential cauchy geometric
""".split()


@rule(*ELEMENTWISE, piecewise=True)
def elementwise(f: Frame) -> Outcome:
    operands = f.operands()
    if f.name == "where" and len(f.args) + len(f.kwargs) == 1:
        raise f.refuse("the number of places that it finds depends on the data")
    if f.kwargs.get("generator") is not None:
        raise f.refuse(
            "on this rank's shard its generator would draw other numbers than for the full tensor",
            "Draw the numbers for the full shape, as torch.randn(x.shape, generator=g) does",
        )
    return align(f, operands)[1]


@rule("data", piecewise=True)
def data(f: Frame) -> Outcome:
    """Detached: writes into `.data` itself are not counted, and copies in other layouts would miss them."""
    outcome = elementwise(f)
    outcome.func, outcome.args = torch.Tensor.detach, f.args[:1]
    return outcome


@rule("to type_as type", piecewise=True)
def cast(f: Frame) -> Outcome:
    x, cut = f.args[0], f.args[0].cut
    if cut is None:
        raise f.refuse("only the first argument may be sharded")
    if len(f.args) + len(f.kwargs) == 1 and f.name == "type":
        raise f.refuse("it returns the name of a type", "Use x.dtype")
    return Outcome(cut, x.shape[cut.dim])


UNBATCHED = {"dropout1d": 2, "dropout3d": 4}  # dims of an input without samples: channels come first
independent(
    "feature_dropout dropout1d dropout2d dropout3d feature_alpha_dropout",
    "one mask is shared along the sharded dim", lambda f, x: range(1 + (UNBATCHED.get(f.name) != x.ndim), x.ndim),
)  # fmt: skip


@rule("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits binary_cross_entropy")
def loss(f: Frame) -> Outcome:
    outcome = elementwise(f)
    reduction = f.kwargs.get("reduction", "mean")
    older = f.kwargs.get("size_average"), f.kwargs.get("reduce")
    if any(isinstance(a, (int, str)) for a in f.args) or older != (None, None):
        raise f.refuse("an option is given by position, or is size_average or reduce", "Write reduction= by name")
    if reduction == "mean" and f.name in ("mse_loss", "l1_loss") and f.kwargs.get("weight") is not None:
        raise f.refuse("its mean divides by the sum of the weights")
    if reduction == "none":
        return outcome
    outcome.kwargs = {**f.kwargs, "reduction": "sum"}
    shape = torch.broadcast_shapes(*(o.shape for o in f.operands()))
    outcome.reduce = float(math.prod(shape)) if reduction == "mean" else 1.0
    outcome.cut = None
    return outcome
