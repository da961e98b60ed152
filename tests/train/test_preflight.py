"""`--dry-run` meets what a run would meet, changes nothing, and estimates memory near what a compiler needs."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from bampath import config as configs
from bampath import memory, preflight, runs
from bampath.lock import RunLock
from bampath.memory import Memory
from bampath.sharding import AXES, mesh_of
from bampath.step import build_model, declare, init_state, optimizer_of
from experiments import train
from tests.scale import small as step_small
from tests.train.small import SMALL, small, text_file

PODS = json.loads((Path(__file__).parents[2] / "experiments/pod_compile/results.json").read_text())["rows"]
PODS = [row for row in PODS if "memory_bytes" in row]
ROWS = [pytest.param(row, id=row["case"], marks=[pytest.mark.slow] if i else []) for i, row in enumerate(PODS)]


def estimated(config):
    mesh = AbstractMesh(
        tuple(getattr(config.mesh, axis) for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )
    return memory.estimate(config, declare(build_model(config)), mesh)


@pytest.mark.parametrize("row", ROWS)
def test_the_estimate_is_near_what_the_compiler_of_a_pod_placed(row):
    """The rows of experiments/pod_compile, in which a TPU's compiler placed every buffer."""
    found = estimated(configs.get(row["config"], *row["overrides"]))
    assert preflight.verdict(found, row["memory_bytes"]) is None, found.total / row["memory_bytes"]
    assert preflight.verdict(found, 2 * row["memory_bytes"]) is True
    assert preflight.verdict(found, row["memory_bytes"] / 2) is False


def test_the_state_is_exact():
    config = step_small.small("mesh.fsdp=2", "mesh.tensor=2")
    model = build_model(config)
    state = init_state(config, model, optimizer_of(config, declare(model)))
    device = mesh_of(config).devices.flat[0]
    shards = [s.data.nbytes for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards if s.device == device]
    assert estimated(config).state == sum(shards)


@pytest.mark.parametrize(("remat", "placed"), [("none", 1_466_019_840), ("attention", 1_012_118_528)])
def test_the_estimate_of_a_small_model_is_near_too(remat, placed):
    """`launch.compile --topology v5e:2x2 --no-search` with these keys (libtpu of JAX 0.10.2) placed so many bytes."""
    keys = ["model.layers=4", "position=rope", f"model.remat={remat}", "data.batch_size=64", "mesh.fsdp=4"]
    found = estimated(configs.get("bam-120m", *keys, "train.accumulate=1"))
    assert 0.9 < found.total / placed < 1.15
    assert preflight.verdict(found, placed) is None


def test_deep_models_are_traced_for_two_periods_only():
    config = memory.local_config(small("model.layers=6", "position=rope,nope", "model.attention_impl=none"))
    assert memory.layer_period(config) == 2
    assert memory.saved_bytes(config, "none") == memory._per_row(config, "none")
    assert memory.layer_period(small("model.layers=3")) == 1
    assert memory.layer_period(small("model.layers=3", "position=2*rope,nope")) == 3


@pytest.mark.parametrize(
    ("position", "found"), [("path(rank=full)+fox", True), ("3*rope,path", True), ("bam+ssmax", False), ("rope", False)]
)
def test_layers_with_products_are_seen(position, found):
    assert memory.has_path(small(f"position={position}", "model.layers=4")) is found


def test_what_is_saved_with_full_recomputation_is_the_stream_and_the_loss():
    """Per token: the input of every layer, what the final norm saves, the loss's gradient; at most a few streams."""
    shallow, deep = (
        memory._per_row(memory.local_config(small(f"model.layers={n}", "position=nope")), "full") for n in (1, 4)
    )
    stream = 24 * 16 * 4
    assert (deep - shallow) / 3 == pytest.approx(stream, rel=0.2)
    assert shallow < 8 * stream


def test_verdicts_leave_room_for_error():
    needed = Memory(state=400, gradients=300, saved=500, working=100, loss=50, head=0, gathered=0, accumulated=0)
    assert needed.total == 1000
    limits = {None: None, 849: False, 850: None, 1399: None, 1400: True}
    assert {limit: preflight.verdict(needed, limit) for limit in limits} == limits
    assert replace(needed, gradients=700, accumulated=700).total == 400 + 700 + 700
    assert replace(needed, head=60, gathered=20).total == 400 + 500 + max(50 + 60, 100 + 20)
    assert "IT DOES NOT FIT (state" in preflight.in_words(needed, 100, False)
    assert "TOO CLOSE TO TELL" in preflight.in_words(needed, 1000, None)


@pytest.fixture
def texts(tmp_path):
    return [f"data.source={text_file(tmp_path)}", f"data.cache_dir={tmp_path / 'cache'}"]


def dry(*arguments):
    return train.main(["--config", "tiny", *SMALL, "--dry-run", *arguments])


def test_text_that_is_not_tokenised_is_looked_at_and_nothing_is_made(texts, tmp_path, capsys):
    assert dry(*texts, "--run-dir", str(tmp_path / "run"), "train.eval_every=2") == 0
    out = capsys.readouterr().out
    size = sum(path.stat().st_size for path in (tmp_path / "text").iterdir())
    what = (
        f"not tokenised yet, which the run does first; all of it has 20 documents, {size:,} characters, {size:,} tokens"
    )
    assert out.count(f"{tmp_path / 'text'}: {what}") == 2  # to train and held out
    assert "memory      about " in out
    assert "it fits" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]


def test_text_that_is_tokenised_is_counted(tmp_path, capsys):
    from bampath.data import load_corpus

    config = small(f"data.source={text_file(tmp_path)}", f"data.cache_dir={tmp_path / 'cache'}")
    corpus = load_corpus(config.data)
    assert dry(f"data.source={tmp_path / 'text'}", f"data.cache_dir={tmp_path / 'cache'}", "train.steps=100") == 0
    out = capsys.readouterr().out
    rows = -(-len(corpus.tokens) // 24)
    assert (
        f"{len(corpus.tokens):,} tokens, {rows:,} rows of 24; the run goes through them {400 / rows:.3g} times" in out
    )
    assert "first batch" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.source=nowhere"], "no file, folder or glob"),
        (["mesh.data=4", "data.batch_size=12", "model.heads=2"], None),
        (
            ["mesh.fsdp=16", "data.batch_size=16"],
            "is a mesh of 16 devices, but there are 8; if they are elsewhere, --device-memory GIB says what each",
        ),
        (["mesh.tensor=4"], "model.heads=2 is not divisible by mesh.tensor=4"),
        (["--init-from", "nowhere"], "nowhere does not exist"),
        (["--device-memory", "8", "mesh.fsdp=16", "data.batch_size=16"], "16 devices cannot be pretended"),
        (["model.vocab_size=100"], "259 ids, but model.vocab_size=100"),
    ],
)
def test_what_a_run_would_refuse(texts, arguments, message, capsys):
    own = {entry.partition("=")[0] for entry in arguments}
    rest = [entry for entry in (*SMALL, *texts) if entry.partition("=")[0] not in own]
    status = train.main(["--config", "tiny", "--dry-run", *rest, *arguments])
    error = capsys.readouterr().err
    assert status == (2 if message else 0), error
    assert (message or "") in error


def test_folders_and_checkpoints_are_looked_at(texts, tmp_path, capsys):
    runs_own = tmp_path / "run"
    runs_own.mkdir()
    runs.write_config(small("position=rope"), runs_own)
    assert dry(*texts, "--run-dir", str(runs_own)) == 2
    assert "is not empty" in capsys.readouterr().err
    assert dry(*texts, "--run-dir", str(runs_own), "--resume") == 2
    assert "model.position: saved 'rope', now 'bam+ssmax'" in capsys.readouterr().err
    with RunLock(runs_own) as lock:
        lock.take()
        before = (runs_own / "lock").read_text()
        assert dry(*texts, "--run-dir", str(runs_own), "--resume", "position=rope") == 2
        assert f"is being written by {before.strip()}: two would destroy" in capsys.readouterr().err
        assert (runs_own / "lock").read_text() == before
    assert dry(*texts, "--run-dir", str(runs_own), "--resume", "position=rope") == 0


def test_what_does_not_fit_has_a_status_of_its_own(texts, capsys):
    assert dry(*texts, "--device-memory", "0.0001") == train.DOES_NOT_FIT
    out = capsys.readouterr().out
    assert "devices     elsewhere, with 0.0001 GiB each: those below are pretended" in out
    assert "IT DOES NOT FIT" in out
    assert train.main(["--config", "tiny", "--device-memory", "1"]) == 2
    assert "--device-memory is for --dry-run" in capsys.readouterr().err
