"""Pipelines of diffusers after one line for their transformer and one for their decoder: the video of one process."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

import dsp
from dsp.stages.known import stages_for, table
from dsp.stages.notation import NotationError
from dsp.stages.pipelines import SharedBatch, parts_of
from dsp.support.tensors import tensors_in
from tests.support import known_models as known
from tests.support.paths import ROOT
from tests.support.runs import launched
from tests.support.slow import keep_short, long, slow

diffusers = pytest.importorskip("diffusers")

WAN = {"": "hidden_states=b c t h w, encoder_hidden_states=b n e"}
LTX = {"": "hidden_states=b s c, encoder_hidden_states=b n e"}


def wan_transformer(heads: int = 6) -> nn.Module:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=8,
        ffn_dim=32, num_layers=3, rope_max_seq_len=16,
    )  # fmt: skip


def wan() -> Any:
    vae = diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.WanPipeline(None, None, vae=vae, scheduler=scheduler, transformer=wan_transformer())


def ltx() -> Any:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=6, attention_head_dim=8, cross_attention_dim=48,
        num_layers=2, caption_channels=16,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=4, block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1), spatio_temporal_scaling=(True, False), patch_size=2,
        decoder_spatio_temporal_scaling=(True, False), down_block_types=("LTXVideoDownBlock3D",) * 2,
        decoder_inject_noise=(False,) * 3, upsample_residual=(False,) * 2, upsample_factor=(1,) * 2,
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return diffusers.LTXPipeline(scheduler, vae, None, None, transformer)


PIPELINES: dict[str, tuple[Callable[[], Any], dict[str, str], dict[str, Any]]] = {
    "wan": (wan, WAN, {}),
    "ltx": (ltx, LTX, {f"{kind}prompt_attention_mask": torch.ones(1, 10).bool() for kind in ("", "negative_")}),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    pipe = PIPELINES[name][0]()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sampled(pipe: Any, name: str) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    text = {f"{kind}prompt_embeds": torch.randn(1, 10, 16, generator=draw) for kind in ("", "negative_")}
    size = {"height": 32, "width": 64, "num_frames": 9, "num_inference_steps": 2}
    return pipe(**text, **PIPELINES[name][2], **size, generator=draw, output_type="pt").frames


@pytest.mark.parametrize(("name", "whole", "mesh"), [long("wan", True, 2), slow("ltx", False, 3)])
def test_a_pipeline_gives_the_video_of_one_process(mesh: DeviceMesh, name: str, whole: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        single, pipe = made(name), made(name)
        expect = sampled(single, name)
        if whole:
            dsp.parallelize(pipe, mesh)
        else:
            dsp.parallelize(pipe.transformer, mesh, PIPELINES[name][1])
        with dsp.count_comm() as comm:
            got = sampled(pipe, name)
        assert comm.forward.bytes
        torch.testing.assert_close(got, expect, rtol=1e-5, atol=1e-5)
        for kwargs in ({}, {"return_dict": False}) if whole else ():
            frames = torch.randn(1, 3, 9, 16, 32, generator=torch.Generator().manual_seed(0))
            two = pipe.vae.encode(frames, **kwargs), single.vae.encode(frames, **kwargs)
            mine, theirs = (out[0] if kwargs else out.latent_dist for out in two)
            torch.testing.assert_close(mine.mode(), theirs.mode(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(mine.std, theirs.std, rtol=1e-5, atol=1e-5)


def test_known_models_are_those_of_the_table() -> None:
    """The package's line of each class is the one that tests/support/known_models.py holds to one process."""
    shown: dict[str, Any] = {}
    for name, case in (known.CASES | known.MORE).items():
        kind, _, part = name.partition(", ")
        if part:
            way = {"decoder": "decode", "encoder": "encode"}[part]
            shown.setdefault(kind, {})[way] = case.line.partition("=")[2]
        else:
            shown[kind] = case.line
    shown["LatteTransformer3DModel"] = WAN[""]  # tests/parity/test_models.py
    found = table()
    assert {k: v["line"] for k, v in found["models"].items()} | found["autoencoders"] == shown
    for kind, entry in found["models"].items():
        assert [*inspect.signature(getattr(diffusers, kind).forward).parameters][1:] == entry["takes"]


def doubled(rows: set[int], same: bool, dim: int, x: Any) -> Any:
    """Two samples of what has one, the second the `same`; `rows`: lengths of dims that are samples and more."""
    if isinstance(x, Tensor) and x.ndim and x.shape[dim] in rows:
        other = torch.randn(x.shape).to(x.dtype) if x.is_floating_point() and not same else x
        return torch.cat([x, other], dim)
    return x


def known_models() -> list[str]:
    return [name for name in known.CASES | known.MORE if name in table()["models"]]


@pytest.mark.parametrize("name", keep_short(known_models(), only=["LTXVideoTransformer3DModel", "UNetMotionModel"]))
def test_halves_of_a_batch_are_the_batch(name: str) -> None:
    """Every argument of a known class is cut that has to be, and no other."""
    case = (known.CASES | known.MORE)[name]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model, rows = case.build().eval(), {1, 12} if "(b t)" in case.line else {1}
        given = {
            k: pytree.tree_map(partial(doubled, rows, k.endswith("_ids"), int(k.endswith("llama3"))), v)
            for k, v in case.inputs().items()
        }
        share = SharedBatch(model, {"": case.line}, SimpleNamespace(size=2))  # type: ignore[arg-type]
        expect = tensors_in(model(**given, return_dict=False))
        own = [share.part((), given, rank) for rank in (0, 1)]
        halves = [tensors_in(share.forward(*args, **kwargs)) for args, kwargs in own]
    for whole, *parts in zip(expect, *halves):
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)


def test_features_in_lists_are_cut_and_tables_of_positions_are_not() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, features: Any = None, table: Any = None) -> Tensor:
            return x

    share = SharedBatch(Model(), {"": "x=b s c"}, SimpleNamespace(size=2))  # type: ignore[arg-type]
    features, table = [torch.randn(4, 3, 2)], (torch.randn(4, 6), torch.randn(4, 6))
    _, kwargs = share.part((), {"x": torch.randn(4, 3, 2), "features": features, "table": table}, 1)
    assert torch.equal(kwargs["features"][0], features[0][2:])
    assert kwargs["table"][0] is table[0]


def by_halves(_: DeviceMesh, sizes: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("guidance", "sp"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        single, pipe = made("ltx"), made("ltx")
        expect = sampled(single, "ltx")
        dsp.parallelize(pipe, mesh)
        torch.testing.assert_close(sampled(pipe, "ltx"), expect, rtol=1e-5, atol=1e-5)
        with pytest.raises(RuntimeError, match="has no gradient: call the pipeline under"):
            pipe.transformer(hidden_states=torch.zeros(2, 4, 4))
        other = dsp.parallelize(made("wan"), mesh)
        with pytest.raises(ValueError, match="called with a batch of 1, which 2 groups cannot share"):
            sampled(other, "wan")
    with pytest.raises(ValueError, match="this mesh has two axes"):
        dsp.parallelize(made("wan"), init_device_mesh("cpu", sizes))
    with pytest.raises(ValueError, match="mesh must be 1-D"):
        dsp.parallelize(wan_transformer(), mesh)


@pytest.mark.parametrize("sizes", [slow((2, 1)), slow((2, 2)), long((2, 3))])
def test_guidance_by_halves_of_the_ranks_gives_the_video_of_one_process(
    whole_world: Any, sizes: tuple[int, int]
) -> None:
    whole_world(by_halves, sizes[0] * sizes[1], sizes)


class NoKnownPart:
    def __init__(self) -> None:
        self.components = {"transformer": nn.Linear(2, 2), "scheduler": None}


def test_a_part_that_is_not_known_is_named(caplog: pytest.LogCaptureFixture) -> None:
    pipe = made("wan")
    pipe.transformer_2 = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4
    )
    kinds = [type(part.module).__name__ for part in parts_of(pipe, None) or ()]
    assert sorted(kinds) == ["Method", "Method", "WanTransformer3DModel"]
    assert "transformer_2 (AutoencoderTiny)" in caplog.text
    for part in parts_of(pipe, None) or ():
        part.place()
    with pytest.raises(ValueError, match="this AutoencoderKLWan is already parallelized"):
        parts_of(pipe.vae, None)
    with pytest.raises(NotationError, match=r"give stages to each of its parts, .*transformer"):
        parts_of(pipe, WAN)
    with pytest.raises(NotationError, match=r"none of its parts \(transformer\)"):
        parts_of(NoKnownPart(), None)


def test_a_forward_that_changed_is_told(caplog: pytest.LogCaptureFixture) -> None:
    other = {"forward": lambda self, video, cond: None}
    kind = type("WanTransformer3DModel", (diffusers.WanTransformer3DModel,), other)
    kind.__module__ = "diffusers.models"
    model = kind.__new__(kind)
    assert stages_for(model) == WAN
    assert "it also takes video, cond and it takes no hidden_states, timestep" in caplog.text


def denoised(model: Any, steps: int) -> tuple[Tensor, list[int]]:
    """A sampler's loop with guidance, and how often the last block ran up to each step."""
    draw = torch.Generator().manual_seed(0)
    x, *texts = (torch.randn(*shape, generator=draw) for shape in ((1, 4, 2, 6, 4), (1, 5, 16), (1, 5, 16)))
    ran, counts = [], []
    model.blocks[-1].attn1.to_q.register_forward_hook(lambda *_: ran.append(1))
    with torch.no_grad():
        for i in range(steps):
            t, found = torch.tensor([1000.0 * (1 - i / steps)]), []
            for name, text in zip(("cond", "uncond"), texts):
                with model.cache_context(name):
                    found.append(model(x, t, text, return_dict=False)[0])
            x = x - (found[1] + 3 * (found[0] - found[1])) / steps
            counts.append(len(ran))
    return x, counts


def cached(mesh: DeviceMesh, threshold: float, steps: int) -> int:
    """Blocks are skipped by a number, read of what is sharded: the same on all ranks as on one process."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for parallel in (False, True):
            torch.manual_seed(0)
            model = wan_transformer(heads=2)
            model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=threshold))
            if parallel:
                dsp.parallelize(model, mesh, WAN)
            found.append(denoised(model, steps))
    (expect, wanted), (got, counts) = found
    torch.testing.assert_close(got, expect, rtol=1e-4, atol=1e-4)
    steps = [[b - a for a, b in itertools.pairwise(ran)] for ran in (counts, wanted)]  # to plan is to run it, too
    assert steps[0] == steps[1]
    return sum(steps[1])


@pytest.mark.parametrize(("n", "threshold", "steps"), [long(2, 0.1, 100), slow(3, 0.05, 20)])
def test_a_first_block_cache_decides_alike(ranks: Any, n: int, threshold: float, steps: int) -> None:
    ran = ranks(cached, n, threshold, steps)[0]
    assert 0 < ran < 2 * (steps - 1)


def saved(folder: Path) -> None:
    """A tiny pipeline, with its text encoder and tokenizer, as published ones are stored."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    words = Tokenizer(WordLevel({"<pad>": 0, "<unk>": 1, "a": 2, "boat": 3, "in": 4, "storm": 5}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    pipe = made("ltx")
    pipe.register_modules(
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>"),
        text_encoder=T5EncoderModel(T5Config(vocab_size=8, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)),
    )
    for part in (pipe.vae, pipe.transformer, pipe.text_encoder):
        part.to(torch.bfloat16)
    pipe.save_pretrained(folder)


@pytest.mark.slow
def test_the_readmes_pipeline_runs_as_a_user_runs_it(tmp_path: Path) -> None:
    """Word for word but for the clip's size, in new processes: on two ranks what one makes."""
    readme = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```text\n(import torch, dsp\nfrom diffusers.*?)```", readme, re.S)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved(tmp_path / "Lightricks/LTX-Video")
    small = "num_frames=9, height=32, width=64, num_inference_steps=2, output_type='np'"
    code = code.replace("num_frames=161, height=512, width=704", small)
    assert small in code
    keep = 'import numpy\nnumpy.save(f"{mesh.size()}", video)\ntorch.distributed.destroy'
    code = code.replace("torch.distributed.destroy", keep)
    for n in (1, 2):
        (tmp_path / "video.py").write_text(code.replace("(2,)", f"({n},)"))
        command = [sys.executable, "-m", "dsp.cluster.launch", "--nproc-per-node", str(n), "video.py"]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = launched(command, cwd=tmp_path, env=env)
        assert not done.returncode, done.stderr
    one, two = (np.load(tmp_path / f"{n}.npy") for n in (1, 2))
    assert one.shape == (9, 32, 64, 3)
    assert one.std() > 0.01
    np.testing.assert_allclose(two, one, atol=0.02)  # in bf16
