"""The configuration: layers, strictness, messages."""

import os
import re

import pytest
import torch

from tests.support.paths import ROOT
from tests.support.refusals import refused
from tests.support.slow import keep_short
from zoo.training import UserError
from zoo.training import config as cfg
from zoo.training.config_text import help_text, to_yaml
from zoo.training.task_lookup import create_task

CONFIGS = sorted(ROOT.glob("configs/*.yaml"))
NOT_LONG = [path for path in CONFIGS if path.stem != "protein"]


@pytest.fixture
def load(tmp_path):
    """Load a configuration from the text of a file and command line arguments."""

    def load(text="", *arguments):
        (tmp_path / "run.yaml").write_text(text)
        return cfg.load([str(tmp_path / "run.yaml"), *arguments])

    return load


def test_layers_and_types(load):
    config = load("train: {steps: 7, batch: 2}\noptim:\n  lr: 3e-4\n", "train.steps=9", "optim.betas=[0.8,0.9]")
    assert (config.train.steps, config.train.batch, config.train.seed) == (9, 2, 0)
    assert config.optim.lr == 3e-4
    assert config.optim.betas == [0.8, 0.9]
    assert isinstance(config.train, cfg.Train)
    assert config.name == "run"  # the file's
    assert load("", "name=other").name == "other"


@pytest.mark.parametrize("number", [1 << 63, -(10**30)])
def test_an_integer_of_more_than_64_bits_is_refused_for_every_option(load, number):
    """torch, ranges and files of others raise errors of their own for them."""
    wholes = [key for key, value, _ in cfg.leaves(cfg.defaults("digits")) if type(value) is int]
    assert "train.seed" in wholes
    for key, text in [*((key, number) for key in wholes), ("model.overrides", f"{{depth: [{number}]}}")]:
        refused(rf"{re.escape(key)}=.*2\^63", load, "", f"{key}={text}", error=UserError)


@pytest.mark.parametrize(
    ("text", "arguments", "parts"),
    [
        # who is to blame, which key, what is valid
        ("train: {stpes: 1}", [], ["run.yaml", "train.stpes", "did you mean 'steps'", "batch"]),
        ("", ["train.stpes=1"], ["command line", "train.stpes", "did you mean 'steps'"]),
        ("trian: {steps: 1}", [], ["run.yaml", "'trian'", "did you mean 'train'"]),
        ("train: {steps: many}", [], ["run.yaml", "train.steps", "many", "Integer"]),
        ("", ["train.steps=1.5"], ["command line", "train.steps", "1.5"]),
        ("", ["train.steps=true"], ["command line", "train.steps"]),
        ("", ["train.steps=null"], ["command line", "train.steps", "None"]),
        ("train: 3", [], ["run.yaml", "'train' is a section"]),
        ("", ["optim.betas=[a,b]"], ["command line", "optim.betas"]),
        ("", ["optim.betas=[0.9]"], ["optim.betas", "expected 2 values"]),
        ("", ["optim.betas=[0.9,1]"], ["optim.betas", "[0, 1)"]),
        ("", ["train.steps="], ["train.steps=", "null"]),
        ("", ["train.steps 3=4"], ["'train.steps 3' is not a key"]),
        ("", ["train.steps=[1"], ["command line"]),
        ("train: [", [], ["run.yaml", "YAML"]),
        ("- 1", [], ["run.yaml", "top level"]),
        ("train: {steps: 1}\ntrain: {steps: 2}", [], ["run.yaml", "train"]),
        ("", ["train.precision=fp16"], ["train.precision=fp16", "fp32, bf16"]),
        ("", ["train.precision=bf61"], ["did you mean 'bf16'"]),
        ("", ["train.batch=0"], ["train.batch=0", "at least 1"]),
        ("", ["objective.label_dropout=2"], ["objective.label_dropout", "at most 1"]),
        ("", ["data.name=digit"], ["data.name=digit", "did you mean 'digits'", "video_folder"]),
        ("data: {name: video_folder, digit: 3}", [], ["run.yaml", "data.digit", "path"]),
        ("", ["data.name=video_folder"], ["data.path"]),
        ("train: {steps: '${oc.env:HOME}'}", [], ["run.yaml", "oc.env"]),
        ("train: {steps: '${nothing}'}", [], ["run.yaml", "nothing"]),
        ("name: ../elsewhere", [], ["name='../elsewhere'"]),
    ],
)
def test_errors_say_where_and_what(load, text, arguments, parts):
    with pytest.raises(UserError) as error:
        load(text, *arguments)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("optim.lr=.nan", "optim.lr=nan: must be at least 0"),
        ("optim.betas=[.nan,0]", r"expected numbers in \[0, 1\)"),
        ("train.steps=-1", "at least 1"),
        ("train.timeout=0", "at least 1"),
        ("name=..", "plain folder name"),
        ("name=" + "x" * 201, "at most 200 bytes"),
        ("train.steps=" + "[" * 3000, "command line"),
        ("parallel.save_exchanges=true", "needs train.checkpoint_activations=stages, not none"),
        ("data.speed=[2,1]", "slowest and then the fastest"),
        ("data.speed=[-1,1]", "neither negative"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(load, argument, said):
    with pytest.raises(UserError, match=said) as error:
        load("", argument)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400


def test_unreadable_files_are_refused(tmp_path):
    for i, (text, said) in enumerate(
        [
            (b"name: a\0b", "not a readable YAML file"),
            (b"\xff\xfe\x00", "not a readable YAML file"),
            (b"# " + b"x" * (2 << 20), "has 2,097,154 bytes, where at most 1,048,576"),
        ]
    ):
        (tmp_path / f"{i}.yaml").write_bytes(text)
        with pytest.raises(UserError, match=said) as error:
            cfg.load([str(tmp_path / f"{i}.yaml")])
        assert str(error.value).isprintable()
    os.mkfifo(tmp_path / "fifo.yaml")
    with pytest.raises(UserError, match="is not a regular file"):
        cfg.load([str(tmp_path / "fifo.yaml")])


def test_a_file_builds_on_another_and_that_on_a_third(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "one.yaml").write_text("train: {steps: 1, batch: 2, seed: 3}")
    (tmp_path / "two.yaml").write_text("base: one.yaml\ntrain: {steps: 2, batch: 4}")
    (tmp_path / "more/three.yaml").write_text("base: ../two.yaml\ntrain: {steps: 3}")
    found = cfg.load([str(tmp_path / "more/three.yaml"), "eval.every=7"])
    assert (found.train.steps, found.train.batch, found.train.seed, found.eval.every) == (3, 4, 3, 7)
    assert found.name == "three"
    (tmp_path / "one.yaml").write_text("base: more/three.yaml")
    with pytest.raises(UserError, match=r"base: .*three.yaml -> .*two.yaml -> .*one.yaml -> .*three.yaml: these files"):
        cfg.load([str(tmp_path / "more/three.yaml")])
    (tmp_path / "one.yaml").write_text("train: {stepz: 1}")
    with pytest.raises(UserError, match=r"one.yaml: unknown key 'train.stepz'"):
        cfg.load([str(tmp_path / "two.yaml")])
    for base, message in (("none.yaml", r"none.yaml: no such file"), ("[a, b]", r"two.yaml: base: expected the path")):
        (tmp_path / "two.yaml").write_text(f"base: {base}")
        with pytest.raises(UserError, match=message):
            cfg.load([str(tmp_path / "two.yaml")])


TYPED = ["8.10", "2026_11_29", "yes", "010", "1e10", "10:13", "2026-11-29", "0x1f", "off", "1_000"]


@pytest.mark.parametrize("text", TYPED)
def test_an_option_that_takes_texts_takes_what_was_typed(load, text):
    for config in (load("", f"name={text}"), load(f"name: {text}"), load(f"name: '{text}'")):
        assert config.name == text
    for config in (load("", f"lora.targets=[{text}, x]"), load(f"lora:\n  targets:\n  - {text}\n  - x")):
        assert config.lora.targets == [text, "x"]


def test_a_text_on_the_command_line_is_no_yaml(load):
    for text in ("a #1", "[a", "{a}", "a: b", "*a", "'a'", "~", "- a"):
        assert load("", f"name={text}").name == text
    assert load("", "name=null").name == "run"
    assert load("", "train={steps: 3}", "train.batch=2").train.steps == 3


@pytest.mark.parametrize(
    ("key", "text"),
    [("train.seed", "010"), ("train.seed", "-010"), ("optim.lr", "010"), ("train.steps", "1:30"),
     ("train.clip", "1:30.5"), ("optim.betas", "[0, 010]"), ("model.overrides", "{hidden: 064}"),
     ("model.overrides.hidden", "064"), ("parallel.overlap", "010")],
)  # fmt: skip
def test_a_number_in_base_eight_or_sixty_is_refused(load, key, text):
    outer, _, inner = key.partition(".")
    file = f"{outer}: {{{inner}: {text}}}" if "." not in inner else f"{outer}: {{overrides: {{hidden: {text}}}}}"
    for arguments in (("", f"{key}={text}"), (file,)):
        with pytest.raises(UserError, match=f"{outer}.*reads this number as .*without leading zeros and colons"):
            load(*arguments)
    assert load("", "train.seed=0x10", "train.steps=1_000", "optim.lr=1e-2").train.seed == 16


def test_missing_file_and_no_file(tmp_path):
    (tmp_path / "demo.yaml").write_text("")
    with pytest.raises(UserError, match=r"dmo\.yaml: no such file: did you mean '.*demo\.yaml'"):
        cfg.load([str(tmp_path / "dmo.yaml")])
    with pytest.raises(UserError, match=r"expected one configuration file, got none\nusage"):
        cfg.load(["train.steps=3"])


def test_the_environment_is_not_read(load, monkeypatch):
    monkeypatch.setenv("STEPS", "5")
    with pytest.raises(UserError, match=r"Unsupported interpolation type oc\.env"):
        load("train: {steps: '${oc.env:STEPS}'}")
    assert load("train: {steps: 5, batch: '${train.steps}'}").train.batch == 5


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("", "wandb.api_key=0123456789"),
        ("wandb: {api_key: hunter2hunter2}", None),
        ("", "wandb.entity=" + "0123456789abcdef" * 2 + "01234567"),
        ("", "model.overrides.auth_token=hunter2hunter2"),
        ("model: {overrides: {password: hunter2hunter2}}", None),
        ("", "name=hf_abcdefghijklmnopqrstuvwxyz"),
    ],
)
def test_secrets_are_refused_and_not_echoed(load, text, argument):
    with pytest.raises(UserError, match="looks like a secret") as error:
        load(text, *([argument] if argument else []))
    assert not re.search("hunter2|0123456789|abcdefghij", str(error.value))


SECRETS = [
    "sk-proj-" + "aB3_" * 10, "sk-ant-api03-" + "x7Y-" * 10, "github_pat_11" + "A0b1" * 10, "ghs_" + "a1B2" * 9,
    "ghu_" + "a1B2" * 9, "glpat-" + "Zz9_" * 5, "xoxb-1234567890-" + "aB1" * 8, "AIza" + "Sy0-_" * 7,
    "ASIA" + "A1B2" * 4,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc", "https://user:hunter2@host/x", "-----BEGIN RSA PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----",
]  # fmt: skip


@pytest.mark.parametrize("secret", SECRETS)
def test_forms_of_secrets_are_refused_in_files_and_in_arguments(load, secret):
    for arguments in (
        ("", f"wandb.entity={secret}"),
        (f"wandb: {{entity: '{secret}'}}",),
        (f"data: {{path: '{secret}'}}",),
    ):
        with pytest.raises(UserError, match="looks like a secret") as error:
            load(*arguments)
        assert secret not in str(error.value)


def test_words_that_only_resemble_secrets_pass(load):
    for name in (
        "sk-5",
        "risk_assessment_of_long_runs_2026",
        "task-embedding-of-long-videos",
        "hf-weights-of-the-long-run",
        "a:b@c",
    ):
        assert load("", f"name={name}").name == name
    assert load("", "init.weights=/data/hf-weights").init.weights == "/data/hf-weights"
    assert load("", "name=tokens-64k").name == "tokens-64k"
    assert load("model: {overrides: {tokens: 5}}").model.overrides == {"tokens": 5}


@pytest.mark.parametrize(
    ("parallel", "world", "expected"),
    [
        ((1, 1, None), 6, (1, 1, 6)),
        ((1, 2, None), 6, (1, 2, 3)),
        ((2, 2, 2), 8, (2, 2, 2)),
        ((1, 2, 4), 6, r"dp_replicate=1 x dp_shard=2 x sp=4 = 8 != world 6"),
        ((1, 4, None), 6, r"dp_replicate=1 x dp_shard=4 = 4 does not divide the 6 ranks"),
    ],
)
def test_mesh_sizes(parallel, world, expected):
    sizes = cfg.Parallel(*parallel)
    if isinstance(expected, tuple):
        assert cfg.mesh_shape(sizes, world) == expected
    else:
        with pytest.raises(UserError, match=expected):
            cfg.mesh_shape(sizes, world)


def test_yaml_reads_back(load, tmp_path):
    config = load(
        "model: {overrides: {hidden: 48, patch: [1, 2, 2]}}", "optim.eps=1e-8", "data.speed=[1,2]", "name=a b"
    )
    for comments in (False, True):
        (tmp_path / "saved.yaml").write_text(to_yaml(config, comments=comments))
        assert cfg.load([str(tmp_path / "saved.yaml")]) == config


def test_every_option_is_explained():
    text = re.sub(r"\n +# ", " ", help_text(["help=1"]))  # notes are wrapped
    for data in cfg.TASKS:
        for key, _, metadata in cfg.leaves(cfg.defaults(data)):
            assert metadata["help"], key
    for key, _, metadata in cfg.leaves(cfg.Config()):
        line = next(line for line in text.split("\n") if metadata["help"] in line)
        assert line.strip().startswith(key.split(".")[-1] + ":")


@pytest.mark.parametrize(
    "path",
    keep_short(CONFIGS, only=[p for p in CONFIGS if p.stem in ("demo", "video", "evoformer_demo")], in_slow=NOT_LONG),
    ids=lambda path: path.stem,
)
def test_shipped_configs_are_sound(path):
    """Each loads, is short, and names a model that fits its data."""
    assert 30 <= len(path.read_text().splitlines()) <= 70
    config = cfg.load([str(path), "dry_run=true"])
    if getattr(config.data, "buckets", None) == []:
        config.data.buckets = ["16x32x32"]  # the user's folder would say
    task = create_task(config)
    with torch.device("meta"):
        model = task.model()
        terms = task.objective(model)(**task.example(model))
    for loss, weight in terms.values() if isinstance(terms, dict) else [terms]:
        assert loss.shape == weight.shape
        assert len(loss) == config.train.batch
    assert task.validation_samples % (config.parallel.dp_replicate * config.parallel.dp_shard) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.name=transformer3d"], "no model 'transformer3d'; did you mean 'transformer2d'"),
        (["model.size=3bb"], "no size '3bb'; did you mean '3b'"),
        (["model.overrides.hiden=48"], "no option 'hiden'; did you mean 'hidden'"),
        (["model.overrides.hidden=big"], "takes hidden: int, not 'big'"),
        (["model.overrides.hidden=50"], "hidden=50"),
        (["model.overrides.in_channels=4"], "the data has 1 channels and the model takes 4"),
        (["model.overrides.num_classes=7"], "the data has 10 classes and the model 7"),
        (["objective.name=iddpm", "objective.shift=3"], "objective.shift is an option of objective.name="),
        (["objective.min_snr=5"], "objective.min_snr is an option of objective.name=iddpm, not of rectified_flow"),
        (
            ["objective.name=iddpm", "objective.prediction=clean"],
            "objective.prediction=clean: a model of objective.name=iddpm predicts noise or velocity; set one of them",
        ),
        (["objective.prediction=noise"], "objective.name=rectified_flow predicts velocity or clean"),
        (["model.overrides.num_classes=null", "sample.guidance=2"], "sample.guidance=2.0 needs a model that is told"),
        (["model.overrides.caption_channels=8"], "captions have 26 channels and the model takes 8: set model."),
    ],
)
def test_a_model_that_does_not_fit(arguments, message):
    demo = next(str(path) for path in CONFIGS if path.stem == "demo")
    with pytest.raises(UserError, match=re.escape(message)), torch.device("meta"):
        create_task(cfg.load([demo, *arguments])).model()


def test_samples_are_drawn_at_the_levels_of_training():
    demo = next(str(path) for path in CONFIGS if path.stem == "demo")
    task = create_task(cfg.load([demo, "objective.shift=3", "objective.shift_cells=100", "objective.levels=uniform"]))
    levels = []
    task.sampler((8, 5, 10))(
        lambda x, timestep: levels.append(timestep[0].item() / 1000) or x, torch.zeros(1, 1, 1, 1, 1), 4
    )
    trained = task.objective(torch.nn.Identity()).sample_timestep(torch.tensor([0.75, 0.5, 0.25]), 8 * 5 * 10)
    assert levels == pytest.approx([1.0, *trained.tolist()])  # a shift of 3 x 2
    velocity = create_task(cfg.load([demo, "objective.name=iddpm", "objective.prediction=velocity"]))
    assert velocity.sampler((1, 1, 1)).keywords == {"velocity": True}
    assert velocity.objective(torch.nn.Identity()).velocity


def test_a_model_that_needs_captions(tmp_path):
    path = tmp_path / "clips.yaml"
    path.write_text(
        "model: {name: stdit, size: test, overrides: {in_channels: 3}}\ndata: {name: video_folder, path: x}"
    )
    with pytest.raises(UserError, match="needs context, context_mask, fps, height, width, which this data"):
        create_task(cfg.load([str(path)])).model()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_help_of_every_file_whether_or_not_the_data_are_there(path):
    text = help_text([str(path), "help=1"])
    assert "\ndata:\n  name:" in text
    assert all(len(line) <= 120 for line in text.split("\n") if "#" in line)


def test_a_wheel_has_configurations_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(cfg, "PACKAGED", tmp_path / "wheel")
    monkeypatch.chdir(tmp_path)
    for where, steps in (("wheel/configs", 3), ("configs", 4)):  # one that is here comes first
        (tmp_path / where).mkdir(parents=True)
        (tmp_path / where / "own.yaml").write_text(f"train: {{steps: {steps}}}")
        assert cfg.load(["configs/own.yaml"]).train.steps == steps
