"""Functions that need care between stages, by plain names: random ones, and those that may return views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from dsp.core.torch_traits import DRAWS

# products mix every element of one operand with every element of the other
PRODUCTS = frozenset(
    "matmul rmatmul bmm mm einsum baddbmm scaled_dot_product_attention flex_attention varlen_attn".split()
)


RANDOM = frozenset(
    """
bernoulli rand_like randn_like normal log_normal uniform exponential cauchy geometric
""".split()
)
# the name of the dropped share, its position among the arguments, and its default
DROPOUTS = {
    **dict.fromkeys(
        "dropout alpha_dropout feature_dropout feature_alpha_dropout dropout1d dropout2d dropout3d".split(),
        ("p", 1, 0.5),
    ),
    "scaled_dot_product_attention": ("dropout_p", 4, 0.0),
}


def draws(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call draws random numbers. Dropout with p = 0 draws none, nor does dropout outside of training."""
    if name not in DROPOUTS:
        return name in RANDOM
    named, place, default = DROPOUTS[name]
    p = kwargs.get(named, args[place] if len(args) > place else default)
    if named == "dropout_p":
        return bool(p)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(p and training)


# more that draw, and have no rule
WITHOUT_RULE = """
rand randn randint randint_like randperm multinomial poisson binomial random rrelu gumbel_softmax native_dropout
fractional_max_pool2d fractional_max_pool3d svd_lowrank pca_lowrank multi_head_attention_forward
""".split()
RECURRENCES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
DRAWS.update({name: partial(draws, name) for name in (*RANDOM, *DROPOUTS)})
DRAWS.update(dict.fromkeys(WITHOUT_RULE, lambda args, kwargs: True))
DRAWS.update(dict.fromkeys(RECURRENCES, lambda args, kwargs: len(args) < 9 or bool(args[5] and args[6])))


# they allocate memory only if they must, and on a rank's shard it may look as if they need not
DENSE = frozenset("contiguous reshape reshape_as flatten ravel".split())
# they make no new numbers, but copies of those that they are given, or views
REARRANGING = DENSE | frozenset(
    """
expand expand_as broadcast_to repeat tile repeat_interleave getitem select narrow index_select chunk unsafe_chunk split
unsafe_split split_with_sizes tensor_split unbind iter cat concat concatenate stack flip roll clone unfold pixel_shuffle
pixel_unshuffle gather take_along_dim
""".split()
)


# they look like metadata, but read a tensor's data or let others read it; properties in Python, such as
# __cuda_array_interface__, have a name from Python 3.13 on
TELLING = frozenset("repr format data_ptr untyped_storage new_tensor ? __cuda_array_interface__".split())
