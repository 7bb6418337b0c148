"""Mixers and norms of published Mambas, as mamba_ssm, transformers and Vision Mamba name them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from zoo.reference import count, load_renamed
from zoo.video.mamba import Config, Mamba1, Mamba2, STMamba


def mixer_from_reference(state: Mapping[str, Tensor], prefix: str = "", *, groups: int = 1) -> Mamba1 | Mamba2:
    """Build the mixer under ``prefix`` of a published Mamba-1, Mamba-2 or (bidirectional) Vision Mamba, with weights.

    Names are those of mamba_ssm, which transformers and Vision Mamba share: the prefix of layer 3 is
    "backbone.layers.3.mixer." in a language model, "layers.3.mixer." in a transformers MambaModel and in Vision Mamba.
    Shapes do not determine ``groups`` of a Mamba-2. Some Vision Mambas halve the sum of both directions: for these,
    halve ``out_proj.weight``.

    ValueError: names or shapes are not those of such a mixer.
    """
    state = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    if "A_log" not in state or "out_proj.weight" not in state or "conv1d.weight" not in state:
        raise ValueError(f"no Mamba mixer under the prefix {prefix!r}: it needs A_log, conv1d.weight, out_proj.weight")
    dim, inner = state["out_proj.weight"].shape
    channels, d_conv = len(state["conv1d.weight"]), state["conv1d.weight"].shape[-1]
    mixer: Mamba1 | Mamba2
    if state["A_log"].ndim == 2:
        mixer = Mamba1(dim, state["A_log"].shape[1], d_conv, inner // dim, "A_b_log" in state)
    else:
        d_state, head_dim = (channels - inner) // (2 * groups), inner // len(state["A_log"])
        mixer = Mamba2(dim, d_state, d_conv, inner // dim, head_dim=head_dim, groups=groups)
    load_renamed(mixer, state, reference_names)
    return mixer


def from_reference(state: Mapping[str, Tensor], *, groups: int = 1, **overrides: Any) -> STMamba:
    """Build a model whose blocks, in running order, have a published Mamba's norms and mixers; the rest is initialised.

    Names are as in ``mixer_from_reference``, for all layers. ``overrides`` are fields of the Config that weights do
    not determine: order, patch, in_channels, ... Weights outside the layers (embedding, head) are not used.
    """
    prefix = next((p for p in ("backbone.layers.", "layers.") if f"{p}0.mixer.A_log" in state), None)
    if prefix is None:
        raise ValueError("these weights are of another model; missing: backbone.layers.0.mixer.A_log")
    first = mixer_from_reference(state, f"{prefix}0.mixer.", groups=groups)
    inner, d_conv = first.ahead.conv1d.weight.shape
    kind: dict[str, Any] = {"mixer": "mamba1", "d_state": first.ahead.A_log.shape[-1]}
    if isinstance(first, Mamba2):
        heads = len(first.ahead.A_log)
        inner, d_state = len(first.norm), (inner - len(first.norm)) // (2 * groups)
        kind = {"mixer": "mamba2", "d_state": d_state, "head_dim": inner // heads, "groups": groups}
    hidden = len(first.out_proj.weight)
    values = {"hidden": hidden, "depth": count(state, prefix + "{}."), "expand": inner // hidden, "d_conv": d_conv}
    model = STMamba(Config(**{**values, **kind, "bidirectional": first.back is not None, **overrides}))
    layers = nn.ModuleList(nn.ModuleDict({"norm": b.norms[0], "mixer": b.mixers[0]}) for b in model.running())

    def names(name: str) -> str:
        layer, part, leaf = name.split(".", 2)
        return f"{prefix}{layer}.{part}.{reference_names(leaf) if part == 'mixer' else leaf}"

    load_renamed(layers, state, names, ignore=[name for name in state if not name.startswith(prefix)])
    return model


def reference_names(name: str) -> str:
    """The name in mamba_ssm of one of our parameters; names of the second direction are Vision Mamba's."""
    direction, _, parameter = name.partition(".")
    if name == "norm":
        return "norm.weight"
    if direction == "back":
        leaf, dot, suffix = parameter.partition(".")
        return "A_b_log" if leaf == "A_log" else f"{leaf}_b{dot}{suffix}"
    return parameter if direction == "ahead" else name
