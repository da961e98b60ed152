"""Configurations: typed overrides, refusals that name what is right, JSON that reads back, the papers' numbers."""

import dataclasses
import json

import pytest

from bampath import config
from bampath.config import Config, ModelConfig, OptimConfig, TrainConfig


def model(**changes):
    values = {"vocab_size": 64, "dim": 48, "layers": 2, "heads": 6, "kv_heads": 0, "head_dim": 0, "mlp_dim": 96}
    return ModelConfig(**{**values, "position": "rope", "train_length": 32, **changes})


@pytest.mark.parametrize("name", config.names())
def test_every_named_configuration_survives_json(name):
    built = config.named(name)
    assert config.from_json(config.to_json(built)) == built
    assert config.get(name) == built
    assert all(f"{key} " in config.describe(built) for key in ("model.dim", "data.source", "optim.lr", "train.steps"))


def test_the_papers_recipes():
    bam = config.get("bam-120m")
    shape = bam.model
    assert (shape.dim, shape.layers, shape.heads, shape.head_dim, shape.mlp_dim) == (768, 12, 16, 48, 1536)
    assert (shape.vocab_size, shape.norm_eps, shape.init, shape.tie_embeddings) == (32_768, 1e-5, "torch", False)
    o = bam.optim
    assert (o.name, o.b1, o.b2, o.eps, o.lr, o.lr * o.lr_end) == ("radam", 0.9, 0.95, 1e-8, 1e-3, 1e-4)
    assert (o.weight_decay, o.warmup_steps, o.clip_norm, o.schedule) == (0.1, 0, 1.0, "cosine")
    assert bam.data.batch_size * bam.data.sequence_length == 589_824
    path = config.get("path-760m")
    assert path.optim.lr * path.optim.lr_start == path.optim.lr * path.optim.lr_end == pytest.approx(3e-5)
    tokens = path.data.batch_size * path.data.sequence_length
    assert tokens * path.train.steps == pytest.approx(50e9, rel=1e-3)
    assert tokens * path.optim.warmup_steps == pytest.approx(1e9, rel=1e-3)
    assert (path.model.init, path.model.init_std, path.optim.weight_decay) == ("normal", 0.02, 0.01)
    assert config.get("llama1b").model.kv_heads == 8
    assert config.get("bam-432m") == config.get("l14.1")
    assert config.get("bam-1.1b") == config.get("l24")


def test_overrides_are_read_as_the_type_of_their_field():
    got = config.get(
        "tiny", "position=rope", "train.steps=1_000", "optim.lr=3e-4", "model.qk_norm=true",
        "model.attention_impl=xla", "model.dtype=bfloat16", "data.retrieval.share=0.25",
    )  # fmt: skip
    assert (got.model.position, got.train.steps, got.optim.lr) == ("rope", 1000, 3e-4)
    assert (got.model.qk_norm, got.model.attention_impl, got.model.dtype) == (True, "xla", "bfloat16")
    assert got.data.retrieval.share == 0.25
    assert config.get("tiny", "model.attention_impl=none").model.attention_impl is None
    assert config.get("tiny", "optim.lr=1").optim.lr == 1.0


def test_what_follows_from_another_key_keeps_following_it():
    got = config.get("bam-120m", "model.heads=12", "data.sequence_length=1024")
    assert (got.model.kv_heads, got.model.head_dim, got.model.train_length) == (12, 64, 1024)
    fixed = config.get("bam-120m", "data.sequence_length=1024", "model.train_length=512", "model.kv_heads=4")
    assert (fixed.model.train_length, fixed.model.kv_heads) == (512, 4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stpes=5", r"unknown key 'train.stpes'; did you mean train.steps\? There are: train.steps, "),
        ("trian.steps=5", r"did you mean train.steps\?"),
        ("steps=5", r"did you mean train.steps\?"),
        ("data.retrieval.shar=1", r"did you mean data.retrieval.share"),
        ("train.steps=many", r"train.steps='many' is not an int"),
        ("train.steps=1.5", r"train.steps='1.5' is not an int"),
        ("model.qk_norm=maybe", r"model.qk_norm='maybe' is not a bool; write true or false"),
        ("optim.name=radm", r"optim.name='radm' is not one of radam, adamw, muon; did you mean radam\?"),
        ("position=bamm", r"unknown part 'bamm' \(did you mean 'bam'\?\)"),
        ("train.steps", r"has no '='"),
        ("model.heads=5", r"model.dim=64 is not divisible by model.heads=5"),
        ("model.kv_heads=3", r"model.heads=4 is not divisible by model.kv_heads=3"),
        ("train.accumulate=3", r"data.batch_size=8 is not divisible by train.accumulate=3"),
        ("train.steps=0", r"train.steps=0 must be greater than 0"),
        ("train.seed=4294967296", r"train.seed=4294967296 must be below 2\^32"),
        ("train.steps=9999999999", r"train.steps=9999999999 must be below 2\^31"),
        ("optim.warmup_steps=9999999999", r"optim.warmup_steps=9999999999 must be below 2\^31"),
        ("data.prefetch=1000000000", r"data.prefetch=1000000000 must be at most 4096"),
        ("optim=3", r"optim is a section: set its keys one by one, optim.name, optim.lr"),
        ("data.retrieval=1", r"data.retrieval is a section: .*data.retrieval.share"),
        ("optim.decay_steps=5", r"optim.decay_steps=5 has no effect with optim.schedule=cosine .*wsd.*leave it at 0"),
        ("optim.muon_steps=3", r"optim.muon_steps=3 has no effect with optim.name=adamw"),
        ("optim.muon_momentum=0.9", r"optim.muon_momentum=0.9 has no effect with optim.name=adamw"),
        ("optim.muon_dtype=bfloat16", r"optim.muon_dtype=bfloat16 has no effect with optim.name=adamw"),
        ("model.init_std=0.1", r"model.init_std=0.1 has no effect with model.init=torch"),
        ("optim.b2=0.5", r"b2 > 0.6"),
        ("optim.schedule=wsd", r"decay_steps"),
    ],
)
def test_refusals_name_the_key_the_value_and_what_would_be_right(override, message):
    with pytest.raises(ValueError, match=message):
        config.get("tiny", *(["optim.name=radam"] if "b2" in override else []), override)


def test_a_key_set_twice_and_an_unknown_name_are_refused():
    with pytest.raises(ValueError, match=r"model.position is set twice: 'rope' and 'nope'"):
        config.get("tiny", "position=rope", "model.position=nope")
    with pytest.raises(ValueError, match=r"no configuration is called 'bam120m'; did you mean bam-120m\?"):
        config.get("bam120m")


@pytest.mark.parametrize(
    ("path", "value", "error"),
    [
        (("model", "dim"), "64", TypeError),
        (("model", "dim"), True, TypeError),
        (("model", "dims"), 64, ValueError),
        (("optim", "name"), "sgd", ValueError),
        (("train", "tensorboard"), 1, TypeError),
        (("data", "retrieval"), [1], TypeError),
    ],
)
def test_json_of_another_shape_is_refused(path, value, error):
    values = json.loads(config.to_json(config.get("tiny")))
    values[path[0]][path[1]] = value
    with pytest.raises(error, match=f"{path[0]}.{path[1]}"):
        config.from_json(json.dumps(values))


@pytest.mark.parametrize(
    ("text", "why"), [('{"a"', "Expecting"), ("[]", "not a list"), ('{"model": 3}', "model=3"), ("", "Expecting value")]
)
def test_a_file_that_holds_no_configuration_is_named(tmp_path, text, why):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"config.json holds no configuration: .*{why}"):
        config.read(tmp_path / "config.json")


def test_values_are_checked_when_built_and_cannot_change():
    built = model()
    assert (built.kv_heads, built.head_dim) == (6, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.dim = 3
    with pytest.raises(ValueError, match=r"model.init='zeros' is not one of torch, normal"):
        model(init="zeros")
    with pytest.raises(ValueError, match=r"model.layers=0"):
        model(layers=0)
    with pytest.raises(ValueError, match=r"optim.b1=1.0 must be in \[0, 1\)"):
        OptimConfig(b1=1.0)
    with pytest.raises(ValueError, match=r"clip_positional=False has no effect with optim.clip_norm=0"):
        OptimConfig(clip_norm=0, clip_positional=False)
    with pytest.raises(ValueError, match="keep=0"):
        TrainConfig(keep=0)
    assert Config(model=built) == Config(model=model())


def test_help_lists_every_key_once():
    text = config.reference()
    for key in ("model.heads", "data.retrieval.share", "optim.prior_lr", "train.accumulate"):
        assert text.count(f"  {key} ") == 1
    assert "float32 | bfloat16 = 'float32'" in text
    assert "position is short for model.position" in text


def test_describe_marks_what_was_changed():
    text = config.describe(config.get("tiny", "train.steps=7"), config.named("tiny"))
    marked = [line for line in text.splitlines() if line.startswith("*")]
    assert len(marked) == 1
    assert "train.steps" in marked[0]
    assert "(was 200)" in marked[0]


@pytest.mark.parametrize("override", ["optim.lr=nan", "optim.lr=inf", "model.norm_eps=nan", "optim.weight_decay=nan"])
def test_numbers_that_are_not_finite_are_refused(override: str) -> None:
    with pytest.raises(ValueError, match=override.partition("=")[0].partition(".")[2]):
        config.get("tiny", override)
