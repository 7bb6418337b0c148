"""ESM-2 against transformers', with the same random weights: its contacts, on any number of ranks, and by infer.py."""

import json
import shutil
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

import dsp
from tests.support.inference import infer, infer_here
from tests.support.parity import assert_parallel_equal
from tests.support.paths import STRUCTURES
from zoo.data.protein.sequences import read_chains
from zoo.data.protein.structure import read_structure
from zoo.protein import esm2, esm2_weights

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQLXUBZ"
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}


def transformers_model(**changes):
    from transformers import EsmConfig, EsmForMaskedLM

    torch.manual_seed(0)
    options = {
        **SIZES, "vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary",
        "token_dropout": True, "emb_layer_norm_before": False, "layer_norm_eps": 1e-5, **changes,
    }  # fmt: skip
    model = EsmForMaskedLM(EsmConfig(**options, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4) if parameter.ndim > 1 else parameter.uniform_(-0.5, 1.5)
    return model


@pytest.fixture(scope="module")
def theirs():
    return transformers_model()


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    """As published: the model, its config.json and its tokens."""
    path = tmp_path_factory.mktemp("esm") / "esm2_tiny"
    theirs.save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(esm2.TOKENS) + "\n")
    return path


def contacts(model, sequence):
    tokens = esm2.encode(sequence)
    with torch.no_grad():
        return model.predict_contacts(tokens, torch.ones_like(tokens))[0]


def test_tokens_are_those_of_the_published_tokenizer(folder):
    from transformers import EsmTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = EsmTokenizer(str(folder / "vocab.txt"))
    assert tokenizer(SEQUENCE)["input_ids"] == esm2.encode(SEQUENCE)[0].tolist()


def test_contacts_are_those_of_transformers(theirs, folder):
    expected = contacts(theirs, SEQUENCE)
    assert expected.std() > 1e-2
    for model in (esm2_weights.read(folder), esm2_weights.from_reference(theirs.state_dict(), heads=4)):
        torch.testing.assert_close(model(esm2.encode(SEQUENCE))[0].detach(), expected, rtol=0, atol=1e-6)


def test_rounded_frequencies_of_older_checkpoints_count(theirs):
    """transformers 4 saved the frequencies of each layer, in half precision where the weights were trained in it."""
    state = theirs.state_dict()
    rounded = state.pop("esm.rotary_embeddings.inv_freq").half().float() * 1.01
    state |= {f"esm.encoder.layer.{i}.attention.self.rotary_embeddings.inv_freq": rounded for i in range(3)}
    model = esm2_weights.from_reference(state, heads=4)
    other = transformers_model()
    other.esm.rotary_embeddings.inv_freq.copy_(rounded)
    torch.testing.assert_close(model(esm2.encode(SEQUENCE))[0].detach(), contacts(other, SEQUENCE), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mesh", [2, 3], indirect=True)
def test_ranks_are_exact(mesh):
    torch.manual_seed(0)
    model = esm2_weights.from_reference(transformers_model().double().state_dict(), heads=4).double()
    assert_parallel_equal(model, mesh, (esm2.encode(SEQUENCE),), rtol=1e-9, atol=1e-12)


def test_no_map_of_attention_is_sent():
    with torch.device("meta"):
        plan = dsp.plan(esm2.ESM2(esm2.Config(depth=2)), (torch.zeros(1, 502, dtype=torch.long),), size=4)
    assert plan.bytes["forward"] < 2 * 20 * 502**2 * 4 / 4  # of the maps of both layers a rank makes this much


def test_files_of_sequences(tmp_path):
    """Records of a FASTA file, the query of an alignment, each chain of a structure, and each sequence once."""
    shutil.copy(STRUCTURES / "1A8O.cif.gz", tmp_path)
    true = read_structure(STRUCTURES / "1A8O.cif.gz").sequence
    (tmp_path / "two.fasta").write_text(f">sp|P1|ONE first\n{SEQUENCE.lower()}*\n>known\n{true[:30]}\n{true[30:]}\n")
    (tmp_path / "a.a3m").write_text(f">q\n{SEQUENCE[:20]}\n>r\n{SEQUENCE[:19]}-\n")
    proteins = read_chains([tmp_path])
    assert [(p.name, p.sequence) for p in proteins] == [
        ("a", SEQUENCE[:20]), ("sp_P1_ONE", SEQUENCE), ("known", true)
    ]  # fmt: skip
    assert [bool(p.contact_atoms()[1].any()) for p in proteins] == [False, False, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.fasta: it is empty"),
        ("<!DOCTYPE html><html><body>404</body></html>", "x.fasta: it is an HTML page"),
        (">a\nMK1\n", "x.fasta: 'a' has '1', which stands for no residue"),
        (">a\nMK\n>a\nMKV\n", "two proteins are called a"),
    ],
)
def test_sequences_that_cannot_be_read(tmp_path, text, message):
    (tmp_path / "x.fasta").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_chains([tmp_path / "x.fasta"])


def test_infer_writes_what_transformers_predicts(theirs, folder, tmp_path, whole_world, capsys):
    """On three ranks as on one, for several sequences; the structure of one of them is known."""
    shutil.copy(STRUCTURES / "1A8O.cif.gz", tmp_path / "known.cif.gz")
    true = read_structure(tmp_path / "known.cif.gz").sequence
    (tmp_path / "x.fasta").write_text(f">one\n{SEQUENCE}\n>two\n{true}\n")
    options = [folder, tmp_path / "x.fasta", tmp_path / "known.cif.gz"]
    assert infer(*options, "--out", tmp_path / "1") == 0
    out = capsys.readouterr().out
    assert "one: 27 residues; its structure is not known\ntwo: 70 residues\n" in out
    assert "  long  " in out
    assert "mean of 1; 1 protein without a known structure\n" in out
    whole_world(infer_here, 3, (*options, "--out", tmp_path / "3"))
    for ranks in "13":
        for name, sequence in (("one", SEQUENCE), ("two", true)):
            with np.load(tmp_path / ranks / f"{name}.npz") as stored:
                np.testing.assert_allclose(stored["contact"], contacts(theirs, sequence), rtol=0, atol=2e-6)
            assert (tmp_path / ranks / f"{name}.csv").read_text().startswith("i,j,chain_i,chain_j,residue_i,")
            with Image.open(tmp_path / ranks / f"{name}.png") as picture:
                assert picture.width > 400


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "absolute"}, "position_embedding_type='absolute' in the config.json: ESM-2 has"),
        ({"vocab_size": 64}, "vocab_size=64 in the config.json: ESM-2 has 33"),
        ({"num_hidden_layers": 2}, "these weights are of another model; unknown: encoder.layer.2.LayerNorm.bias"),
    ],
)
def test_another_model_is_named(folder, tmp_path, capsys, changes, message):
    shutil.copytree(folder, tmp_path / "esm")
    config = tmp_path / "esm/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    (tmp_path / "x.fasta").write_text(f">one\n{SEQUENCE}\n")
    assert infer(tmp_path / "esm", tmp_path / "x.fasta", "--out", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
