"""Checkpoints are whole or passed over, read back bit for bit, and refuse another model."""

import json
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bampath import checkpoint
from bampath.checkpoint import CheckpointError, Saver

FACTS = {"config": {"model": {"dim": 8}}, "data": {"step": 3}, "tokenizer": "bytes-259-v1", "elapsed": 1.5}


def model(layers=2, dim=8, scheme="bam", seed=0):
    rng = np.random.default_rng(seed)
    layer = lambda: {
        "attention": {
            "query": jnp.asarray(rng.normal(size=(dim, 2, 4)), jnp.float32),
            "position": {scheme: {"theta": jnp.asarray(rng.normal(size=2), jnp.float32)}},
        }
    }
    params = {f"layer_{i}": layer() for i in range(layers)}
    state = (jax.tree.map(jnp.zeros_like, params), (jnp.int32(7), jax.random.key_data(jax.random.key(1))))
    return params, state


def save(run, *steps, keep=2, keep_every=0, **options):
    with Saver(run, keep=keep, keep_every=keep_every) as saver:
        for step in steps:
            saver.save(step, *model(seed=step, **options), FACTS)


def test_restored_is_what_was_saved_even_if_the_arrays_were_donated_at_once(tmp_path):
    params, state = model(seed=5)
    want = jax.tree.map(np.array, (params, state))
    with Saver(tmp_path) as saver:
        saver.save(5, params, state, FACTS)
        overwrite = jax.jit(lambda t: jax.tree.map(lambda x: x * 0 - 1, t), donate_argnums=0)
        overwrite(overwrite(params))
    like = jax.eval_shape(lambda: model(seed=5))
    chex.assert_trees_all_equal(checkpoint.restore(tmp_path, *like), want)
    chex.assert_trees_all_equal(checkpoint.read_params(tmp_path), want[0])
    chex.assert_trees_all_equal(checkpoint.read_params(tmp_path, like=like[0]), want[0])


def test_info_tells_everything_without_reading_an_array(tmp_path):
    save(tmp_path, 5)
    shutil.rmtree(tmp_path / "checkpoints/00000005/params/d")  # the arrays' values
    path = tmp_path / "checkpoints/00000005"
    info = json.loads((path / "checkpoint.json").read_text())
    info["files"] = {}
    (path / "checkpoint.json").write_text(json.dumps(info))
    found = checkpoint.describe(path)
    assert (found.step, found.config, found.data, found.tokenizer) == (
        5, FACTS["config"], FACTS["data"], "bytes-259-v1",
    )  # fmt: skip
    query = found.params[1]
    assert (query.name, query.shape, query.dtype, query.bytes) == ("layer_0/attention/query", (8, 2, 4), "float32", 256)
    assert "cpu" in query.placement.lower()
    assert {"jax", "orbax-checkpoint"} <= set(found.versions)


def test_only_the_arrays_asked_for_are_read(tmp_path):
    save(tmp_path, 5)
    found = checkpoint.read_params(tmp_path, only=lambda name: "/position/" in name)
    assert set(found["layer_0"]["attention"]) == {"position"}
    chex.assert_trees_all_equal(
        found["layer_1"]["attention"]["position"], model(seed=5)[0]["layer_1"]["attention"]["position"]
    )
    assert checkpoint.read_params(tmp_path, only=lambda name: False) == {}


def test_the_last_ones_and_every_nth_are_kept(tmp_path):
    save(tmp_path, 10, 20, 30, 40, 50, keep=2, keep_every=20)
    assert [path.name for path in checkpoint.steps(tmp_path / "checkpoints")] == ["00000020", "00000040", "00000050"]


def damage_marker(path):
    (path / "checkpoint.json").unlink()


def damage_json(path):
    (path / "checkpoint.json").write_text("{")


def damage_file(path):
    victim = next(p for p in sorted((path / "params").rglob("*")) if p.is_file() and p.stat().st_size > 50)
    victim.write_bytes(victim.read_bytes()[:-1])


def damage_missing(path):
    next(p for p in sorted((path / "state").rglob("*")) if p.is_file()).unlink()


@pytest.mark.parametrize("damage", [damage_marker, damage_json, damage_file, damage_missing])
def test_a_damaged_checkpoint_is_passed_over_and_left_alone(tmp_path, damage):
    save(tmp_path, 10, 20)
    broken = tmp_path / "checkpoints/00000020"
    damage(broken)
    before = sorted(broken.rglob("*"))
    heard = []
    assert checkpoint.latest(tmp_path, heard.append).name == "00000010"
    assert "00000020" in heard[0]
    assert checkpoint.find(tmp_path).name == "00000010"
    with pytest.raises(CheckpointError, match="00000020"):
        checkpoint.describe(broken)
    assert sorted(broken.rglob("*")) == before


def test_damaged_newer_ones_never_cost_the_last_complete_one(tmp_path):
    save(tmp_path, 10, 20, 30, keep=1)
    save(tmp_path, 40, 50, keep=3)
    for step in (40, 50):
        damage_file(tmp_path / f"checkpoints/{step:08d}")
    with Saver(tmp_path, keep=1) as saver:
        saver.wait()
        assert checkpoint.latest(tmp_path, lambda _: None).name == "00000030"
        saver.save(40, *model(), FACTS)  # a folder that is not complete may be replaced
        with pytest.raises(CheckpointError, match="complete"):
            saver.save(40, *model(), FACTS)
    assert checkpoint.latest(tmp_path, lambda _: None).name == "00000040"


def test_a_copy_elsewhere_can_be_read_by_its_own_path(tmp_path):
    save(tmp_path / "run", 10)
    shutil.copytree(tmp_path / "run/checkpoints/00000010", tmp_path / "best")
    assert checkpoint.describe(tmp_path / "best").step == 10
    chex.assert_trees_all_equal(checkpoint.read_params(tmp_path / "best"), model(seed=10)[0])


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"layers": 3}, r"layer_2/attention/position/bam/theta float32\[2\] is only in this model"),
        ({"layers": 1}, r"layer_1/attention/position/bam/theta float32\[2\] is only in the checkpoint"),
        ({"dim": 16}, r"query is float32\[8, 2, 4\] in the checkpoint and float32\[16, 2, 4\] in this model"),
        ({"scheme": "alibi"}, r"position/bam/theta float32\[2\] is only in the checkpoint"),
    ],
)
def test_another_depth_width_or_scheme_is_refused_with_the_first_differences(tmp_path, other, difference):
    save(tmp_path, 10)
    with pytest.raises(CheckpointError, match=difference):
        checkpoint.restore(tmp_path, *jax.eval_shape(lambda: model(**other)))
    with pytest.raises(CheckpointError, match=difference):
        checkpoint.read_params(tmp_path, like=jax.eval_shape(lambda: model(**other)[0]))


def test_another_optimiser_is_refused(tmp_path):
    save(tmp_path, 10)
    params, state = jax.eval_shape(model)
    with pytest.raises(CheckpointError, match="this optimiser"):
        checkpoint.restore(tmp_path, params, state[1])


def test_missing_places_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.find(tmp_path / "nowhere")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoint.find(tmp_path)
    assert checkpoint.latest(tmp_path) is None
    with pytest.raises(ValueError, match="keep=0"):
        Saver(tmp_path, keep=0)


def test_saved_on_eight_devices_restored_on_fewer(tmp_path):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("data")))}
    with Saver(tmp_path) as saver:
        saver.save(1, params, {"count": jnp.int32(1)}, FACTS)
    assert "data" in checkpoint.describe(tmp_path).params[0].placement
    small = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    for sharding in (NamedSharding(small, P("b", "a")), jax.sharding.SingleDeviceSharding(jax.devices()[3])):
        like = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)}
        with jax.set_mesh(small):
            got = checkpoint.read_params(tmp_path, like=like)["w"]
        assert got.sharding.is_equivalent_to(sharding, 2)
        np.testing.assert_array_equal(got, np.arange(64.0).reshape(8, 8))
    assert isinstance(checkpoint.read_params(tmp_path)["w"], np.ndarray)


def test_a_background_save_that_fails_is_heard_of_and_never_chosen(tmp_path, monkeypatch):
    def full(self):
        raise OSError("No space left on device")

    save(tmp_path, 10)
    monkeypatch.setattr(Saver, "_describe_files", full)
    saver = Saver(tmp_path)
    saver.save(20, *model(), FACTS)
    with pytest.raises(OSError, match="No space left"):
        saver.wait()
    assert checkpoint.latest(tmp_path, lambda _: None).name == "00000010"


@pytest.mark.parametrize("text", ["[]", "3", '{"files": []}', '{"files": {}}', '{"files": {}, "format": 1}', "{"])
def test_a_description_that_is_something_else_is_passed_over(text, tmp_path):
    folder = tmp_path / "checkpoints/00000007"
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_text(text)
    heard = []
    assert checkpoint.latest(tmp_path, heard.append) is None
    assert "00000007: its checkpoint.json is damaged" in heard[0]


def test_arrays_that_cannot_be_read_name_their_checkpoint(tmp_path):
    with Saver(tmp_path) as saver:
        path = saver.save(1, {"w": jnp.ones(3)}, {}, FACTS)
    (path / "params/manifest.ocdbt").write_bytes(bytes((path / "params/manifest.ocdbt").stat().st_size))
    with pytest.raises(CheckpointError, match=r"00000001 is damaged: .*move it away to use the one before it"):
        checkpoint.read_params(tmp_path)
