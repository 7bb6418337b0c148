"""Weights of ESM-2 as transformers publishes them: an EsmForMaskedLM, or an EsmModel."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.files import read_table, read_text
from zoo.protein.esm2 import ESM2, TOKENS, Config
from zoo.reference import count, described, load_renamed, read_safetensors

CLASSES = ("EsmForMaskedLM", "EsmModel")
FREQUENCIES = "rotary_embeddings.inv_freq"
UNUSED = re.compile(r"lm_head\.|pooler\.|embeddings\.position_|encoder\.emb_layer_norm_after\.")


def read(folder: Path) -> ESM2:
    """The model of a folder with `config.json` and safetensors. ValueError: they are of another model, or damaged."""
    settings = published_settings(read_table(folder / "config.json"))
    if (vocabulary := folder / "vocab.txt").is_file() and (tokens := read_text(vocabulary).split()) != list(TOKENS):
        raise ValueError(f"{vocabulary} has other tokens than ESM-2: {' '.join(tokens[:40])}")
    with torch.device("meta"):
        model = ESM2(Config(**settings))
    fill(model, read_safetensors(folder))
    return model


def from_reference(state: Mapping[str, Tensor], heads: int) -> ESM2:
    """Build the model from the state dict of an EsmForMaskedLM or an EsmModel, which lacks the number of heads."""
    state = bare(state)
    try:
        tokens, hidden = state["embeddings.word_embeddings.weight"].shape
        mlp = len(state["encoder.layer.0.intermediate.dense.weight"])
    except KeyError as missing:
        raise ValueError(f"not transformers' ESM-2: no {missing}") from None
    model = ESM2(Config(hidden, count(state, "encoder.layer.{}."), heads, mlp, tokens))
    fill(model, state)
    return model


def fill(model: ESM2, state: Mapping[str, Tensor]) -> None:
    """Copy published weights into the model; what only predicts masked residues is not used."""
    state = dict(bare(state))
    each = [state.pop(name) for name in list(state) if name.endswith(FREQUENCIES)]  # transformers 4 saved every layer's
    size = model.config.hidden // model.config.heads
    state[FREQUENCIES] = each[0] if each else 10000 ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    load_renamed(model, state, esm_names, ignore=filter(UNUSED.match, state))


@described("EsmForMaskedLM", Config)
def published_settings(config: Mapping[str, Any], pipeline: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an EsmForMaskedLM's config; ValueError if it is of another model of the family, such as ESM-1b."""
    fixed = {
        "model_type": "esm", "position_embedding_type": "rotary", "emb_layer_norm_before": False, "token_dropout": True,
        "is_folding_model": False, "hidden_act": "gelu", "vocab_size": len(TOKENS),
    }  # fmt: skip
    for key, value in fixed.items():
        if (config.get(key) or False) != value and key in config:  # None is False
            raise ValueError(f"{key}={config[key]!r} in the config.json: ESM-2 has {value!r}")
    return {
        "hidden": config["hidden_size"], "depth": config["num_hidden_layers"], "heads": config["num_attention_heads"],
        "mlp": config["intermediate_size"], "eps": config["layer_norm_eps"],
    }  # fmt: skip


def bare(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The weights by their names in an EsmModel; transformers 5 saves the weights of norms as gamma and beta."""
    norms = {".gamma": ".weight", ".beta": ".bias"}
    names = {name: re.sub(r"\.gamma$|\.beta$", lambda end: norms[end[0]], name.removeprefix("esm.")) for name in state}
    return {names[name]: value for name, value in state.items()}


NAMES = {
    "embed": "embeddings.word_embeddings",
    "regression": "contact_head.regression",
    "frequencies": FREQUENCIES,
    "queries.norm": "attention.LayerNorm",
    "queries.qkv": ["attention.self.query", "attention.self.key", "attention.self.value"],
    "update.out": "attention.output.dense",
    "update.norm": "LayerNorm",
    "update.mlp.up": "intermediate.dense",
    "update.mlp.down": "output.dense",
}


def esm_names(name: str) -> str | list[str]:
    """The name in an EsmModel of a parameter of ours; several are joined."""
    if name in NAMES:
        return str(NAMES[name])
    module, _, leaf = name.rpartition(".")
    layer = re.match(r"layers\.(\d+)\.(.*)", module)
    before, theirs = (f"encoder.layer.{layer[1]}.", NAMES[layer[2]]) if layer else ("", NAMES[module])
    return f"{before}{theirs}.{leaf}" if isinstance(theirs, str) else [f"{before}{one}.{leaf}" for one in theirs]
