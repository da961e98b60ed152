"""What the compiled programs contain: which collectives, how often, and of what."""

import json
import re
from functools import cache
from pathlib import Path

import jax
import pytest

from bampath.sharding import make_mesh
from bampath.step import abstract_state, build_model, declare, make_train_step, optimizer_of
from launch import compile as command
from launch import program as program_of
from launch.chips import Chip, DoesNotFit, chip_of
from launch.hlo import Collective, collectives, summary
from launch.program import Program, abstract_batch, compile_step, wanted_bytes
from launch.roofline import estimate
from tests.scale.small import LENGTH, MESHES, ROWS, small

HEAD_DIM, DIM, LAYERS = 6, 16, 3


@cache
def program(mesh: str, *overrides: str) -> Program:
    config = small("position=bam+ssmax", *MESHES[mesh], *overrides)
    return compile_step(config, jax.devices()[: config.mesh.size], platform="cpu")


def holding(found: list[Collective], *dims: int) -> list[tuple[Collective, tuple[int, ...]]]:
    """The results of collectives that have these dimensions, in any place."""
    pairs = [(one, shape) for one in found for shape in one.shapes]
    return [(one, shape) for one, shape in pairs if all(n in shape for n in dims)]


def test_data_parallel_training_only_adds_gradients_up() -> None:
    found = program("8 data").collectives
    assert {(one.op, one.axes) for one in found} == {("all-reduce", ("data",))}
    assert not holding(found, LENGTH)  # no activation moves


def test_no_query_key_or_value_moves_along_batch_or_heads() -> None:
    found = program("2×4").collectives
    assert not holding(found, LENGTH, HEAD_DIM)
    moved = holding(found, LENGTH)
    # What moves is the residual stream [rows, T, dim], whose products are sums over heads and over the MLP's width.
    assert {shape for _, shape in moved} == {(ROWS // 2, LENGTH, DIM)}
    assert {one.axes for one, _ in moved} == {("tensor",)}


def test_gradients_of_priors_are_one_small_sum() -> None:
    for mesh, heads, rows in (("8 data", 4, ("data",)), ("2×4", 1, ("fsdp",))):
        sums = [one for one in program(mesh).collectives if one.axes == rows and (heads,) in one.shapes]
        assert {one.op for one in sums} == {"all-reduce"}
        assert sum(shape == (heads,) for one in sums for shape in one.shapes) == 3  # theta_alpha, theta_beta, scale
        assert all(one.times == 1 for one in sums)


@pytest.mark.slow
def test_parameters_are_gathered_and_their_gradients_added_up_over_fsdp() -> None:
    found = program("8 fsdp").collectives
    gathered = [one for one in found if one.op == "all-gather"]
    assert {one.axes for one in gathered} == {("fsdp",)}
    assert not holding(found, LENGTH)
    # query, key, value, out, gate, up, down, embedding, head; forward, and not again in the backward pass
    assert sum(len(one.shapes) * one.times for one in gathered) <= 2 * 9


def test_weights_are_cast_before_they_are_gathered() -> None:
    config = small("position=rope", "model.dtype=bfloat16", *MESHES["8 fsdp"])
    mesh = make_mesh(config.mesh, jax.devices()[:8])
    model = build_model(config)
    declared = declare(model)
    optimizer = optimizer_of(config, declared)
    step = make_train_step(config, model, declared, optimizer, mesh)
    text = step.lower(abstract_state(config, model, optimizer, mesh), abstract_batch(config, mesh)).compile().as_text()
    assert len(re.findall(r" all-gather\(", text)) >= 9
    assert len(re.findall(r" all-gather\(%param", text)) == 1  # the embedding, which is gathered in its own type


def test_context_moves_keys_forward_and_their_gradients_back() -> None:
    found = program("context 4").collectives
    chunk = LENGTH // 8
    keys = [pair for pair in holding(found, LENGTH, HEAD_DIM) if pair[0].op == "all-gather"]
    assert keys
    assert all(one.axes == ("context",) for one in found)
    queries = [pair for pair in holding(found, chunk, HEAD_DIM) if pair[0].op == "collective-permute"]
    assert queries


@pytest.mark.slow
def test_collectives_in_a_loop_over_layers_count_once_per_layer() -> None:
    loop = program("2×4", f"model.layers={LAYERS}", "model.scan=true").collectives
    stream = [one for one, _ in holding(loop, ROWS // 2, LENGTH, DIM) if one.times > 1]
    assert stream
    assert {one.times for one in stream} == {LAYERS}


BOUND = """%condition.1 (p: (s32[], f32[8,4])) -> pred[] {
  %n = s32[]{:T(128)} constant(5), backend_config={}
"""
HLO = """HloModule step

%body.1 (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %a = f32[8,4]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %t = (s32[], f32[8,4]) tuple(%i, %a)
}

%condition.1 (p: (s32[], f32[8,4])) -> pred[] {
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %w = (s32[], f32[8,4]) while(%t0), condition=%condition.1, body=%body.1, backend_config={"known_trip_count":{"n":"5"}}
  %g = (bf16[2,4], bf16[4,4]) all-gather-start(%y), channel_id=2, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %s = f32[2,4]{1,0} reduce-scatter(%z), channel_id=3, replica_groups=mesh['a'=2,'b'=2] {'a','b'}, dimensions={0}
  ROOT %p = f32[8,4]{1,0} collective-permute(%g2), channel_id=4, source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
}
"""


def test_the_text_of_a_program_is_read_right() -> None:
    found = collectives(HLO, {"x": 2, "y": 2})
    by_op = {one.op: one for one in found}
    assert by_op["all-reduce"] == Collective("all-reduce", ("y",), 2, ((8, 4),), 128, 5)
    assert by_op["all-gather"] == Collective("all-gather", ("x",), 2, ((4, 4),), 32, 1)
    assert by_op["reduce-scatter"] == Collective("reduce-scatter", ("x", "y"), 4, ((2, 4),), 32, 1)
    assert by_op["collective-permute"] == Collective("collective-permute", ("y",), 2, ((8, 4),), 128, 1)
    assert [one.moved_bytes for one in (by_op["all-reduce"], by_op["all-gather"])] == [5 * 128, 16]
    assert [by_op[op].moved_bytes for op in ("reduce-scatter", "collective-permute")] == [96, 128]
    assert summary(found)[0] == {"op": "all-reduce", "axes": "y", "count": 5, "moved_bytes": 640}


GPU = """HloModule step

ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %r = ((bf16[8,4]{1,0}, f32[4]{0}), (bf16[2,4]{1,0}, f32[1]{0})) reduce-scatter-start(%x, %y), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  %a = ((f32[6]{0}), f32[6]{0}) all-reduce-start(%z), channel_id=2, replica_groups=[1,4]<=[4], to_apply=%add
  ROOT %p = ((s32[3]{0}, f32[8]{0}), (s32[3]{0}, f32[8]{0})) collective-permute-start(%v, %w), channel_id=3, source_target_pairs={{0,1},{1,0}}
}
"""  # noqa: E501


def test_what_gpu_programs_start_counts_by_its_results() -> None:
    by_op = {one.op: (one.shapes, one.result_bytes) for one in collectives(GPU, {"x": 4})}
    assert by_op == {
        "reduce-scatter": (((2, 4), (1,)), 20),
        "all-reduce": (((6,),), 24),
        "collective-permute": (((3,), (8,)), 44),
    }


def test_a_loop_that_says_nothing_turns_as_its_condition_does() -> None:
    silent = HLO.replace(', backend_config={"known_trip_count":{"n":"5"}}', "")
    spoken = silent.replace(BOUND.splitlines()[0] + "\n", BOUND)
    assert collectives(silent, {"x": 2, "y": 2})[0].times == 1
    assert collectives(spoken, {"x": 2, "y": 2}) == collectives(HLO, {"x": 2, "y": 2})


def test_one_asynchronous_collective_in_three_fusions_counts_once() -> None:
    gather = "  %g = bf16[4,4] all-gather(%y), channel_id=2, replica_groups={{0,2},{1,3}}, dimensions={0}\n}\n\n"
    names = ("fused_computation.7", "async_collective_fusion.8", "fused_computation.9")
    parts = "".join(f"%{name} (p: bf16[2,4]) -> bf16[4,4] {{\n{gather}" for name in names)
    calls = "".join(f"  %f{i} = bf16[4,4] fusion(%g), kind=kOutput, calls=%{name}\n" for i, name in enumerate(names))
    text = HLO.replace("%body.1 (p", parts + "%body.1 (p").replace("  ROOT %t", calls + "  ROOT %t")
    found = [one for one in collectives(text, {"x": 2, "y": 2}) if one.op == "all-gather"]
    assert [(one.axes, one.times) for one in found] == [(("x",), 1), (("x",), 5)]


def test_groups_that_are_not_understood_are_an_error() -> None:
    with pytest.raises(ValueError, match="part of a mesh axis"):
        collectives(HLO.replace("{'a','b'}", "{'a':(1)2}"), {"x": 2, "y": 2})


def test_one_device_has_nothing_to_do_with_a_mesh() -> None:
    config = small("position=bam+ssmax")
    model = build_model(config)
    declared = declare(model)
    optimizer = optimizer_of(config, declared)
    step = make_train_step(config, model, declared, optimizer)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    array = lambda dtype: jax.ShapeDtypeStruct((ROWS, LENGTH), dtype, sharding=one)
    batch = {name: array("int32") for name in ("tokens", "targets", "segment_ids")} | {"weights": array("float32")}
    text = step.lower(abstract_state(config, model, optimizer, None), batch).as_text()
    for word in ("sharding_constraint", "manual_computation", "all_gather", "all_reduce"):
        assert word not in text


# ---- The command's decisions ----


def test_the_command_chooses_a_mesh_and_says_so() -> None:
    config, chosen = command.resolve("bam-1.1b", ["position=path+fox"], 256)
    assert (config.mesh.data, config.mesh.fsdp, config.mesh.size) == (16, 16, 256)
    assert config.data.batch_size == 1280  # the next multiple of 256 after 1,152
    assert command.rows_of(config) == 5
    assert {"mesh.fsdp=16", "model.remat=attention", "data.batch_size=1280"} <= set(chosen)
    kept, chosen = command.resolve("bam-1.1b", ["mesh.tensor=4", "mesh.data=4", "model.remat=full"], 16)
    assert (kept.mesh.tensor, kept.mesh.fsdp, kept.model.remat) == (4, 1, "full")
    assert not any(line.startswith(("mesh", "model.remat", "data")) for line in chosen)
    with pytest.raises(ValueError, match="the mesh has 8 devices, but the topology has 16"):
        command.resolve("bam-120m", ["mesh.data=8"], 16)
    with pytest.raises(ValueError, match=r"mesh\.data='x' is not an int"):
        command.resolve("bam-120m", ["mesh.data=x"], 16)
    with pytest.raises(ValueError, match=r"unknown key 'mesh\.rows'.*mesh\.data"):
        command.resolve("bam-120m", ["mesh.rows=2"], 16)
    with pytest.raises(ValueError, match=r"data\.batch_size=100 is not divisible by the 16"):
        command.resolve("bam-120m", ["data.batch_size=100"], 16)


def compile_up_to(limit: int, tried: list[int]):  # type: ignore[no-untyped-def]
    """A compiler for which more than `limit` rows per device do not fit."""

    def compile_for(config, quick):  # type: ignore[no-untyped-def]
        assert quick  # what does not fit costs little to find out
        tried.append(command.rows_of(config))
        if command.rows_of(config) > limit:
            raise DoesNotFit("too large", 2.0**30 * (4 + command.rows_of(config)))
        return Program(121_130_000, 2**28, 2**28, 2**30, 1e9, {}, [], 1.0, 1.0)

    return compile_for


@pytest.mark.parametrize("limit", [0, 1, 7, 11, 12, 15])
def test_the_largest_batch_that_fits_is_found(limit: int) -> None:
    config, _ = command.resolve("bam-120m", ["data.batch_size=256", "mesh.data=16"], 16)
    chip, tried = chip_of("v5e:4x4"), []  # type: Chip, list[int]
    row = command.check(config, chip, "v5e:4x4", compile_up_to(limit, tried), search=True)
    assert row["fits"] is False
    assert row["largest_batch"] == (limit * 16 or None)
    assert len(tried) == len(set(tried)) <= 8
    text = command.report(row)
    assert "DOES NOT FIT: it needs 20.00 GiB of 15.75 GiB" in text
    assert (f"data.batch_size={limit * 16}:" in text) if limit else ("nor does one row per chip" in text)


@pytest.mark.parametrize(
    ("wanted", "full", "fits", "efforts"),
    [
        (13.6, False, True, ["quick"]),
        (13.6, True, True, ["quick", "full"]),
        (13.8, False, True, ["quick", "full"]),  # too close to tell
        (18.1, False, True, ["quick", "full"]),
        (18.2, True, False, ["quick"]),
        (None, False, False, ["quick"]),
    ],
)
def test_what_is_near_the_limit_is_compiled_as_a_run_does(
    wanted: float | None, full: bool, fits: bool, efforts: list[str]
) -> None:
    tried: list[str] = []

    def compile_for(config, quick):  # type: ignore[no-untyped-def]
        tried.append("quick" if quick else "full")
        if quick and (wanted is None or wanted > 15.75):
            raise DoesNotFit("too large", wanted and wanted * 2.0**30)
        peak = round((wanted if quick else 15) * 2**30)
        return Program(121_130_000, 2**28, 2**28, peak, 1e9, {}, [], 1.0, 1.0, 1.0, quick)

    config, _ = command.resolve("bam-120m", [], 16)
    row = command.check(config, chip_of("v5e:4x4"), "v5e:4x4", compile_for, search=False, full=full)
    assert (row["fits"], tried) == (fits, efforts)
    assert row.get("quick") == ((tried[-1] == "quick") if fits else None)


@pytest.mark.parametrize(
    ("message", "gibibytes"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.50G of 15.75G hbm. Exceeded by 1.8G",
            17.5,
        ),
        (
            "Ran out of memory on HBM, the total memory required for HLO temporaries (400.00G) exceeds available HBM",
            400,
        ),
        ("RESOURCE_EXHAUSTED: something else", None),
    ],
)
def test_what_a_compiler_says_it_needs_is_read(message: str, gibibytes: float | None) -> None:
    assert wanted_bytes(message) == (None if gibibytes is None else gibibytes * 2**30)


def test_what_is_compiled_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def compile_step(config, devices, quick):  # type: ignore[no-untyped-def]
        return compile_up_to(7, [])(config, quick)

    monkeypatch.setattr(program_of, "compile_step", compile_step)
    config, _ = command.resolve("bam-120m", ["data.batch_size=256", "mesh.data=16"], 16)
    command.check(config, chip_of("v5e:4x4"), "v5e:4x4", command.compiler([]), search=True)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "compiling   16 rows per chip, with the least effort: needs 20.00 GiB, does not fit (0 s)"
    assert "compiling   7 rows per chip, with the least effort: 1.00 GiB (0 s)" in said


def test_a_report_of_a_real_program() -> None:
    config = small("position=bam+ssmax", *MESHES["2×4"])
    row = command.check(config, chip_of("v6e:2x4"), "v6e:2x4", lambda _, quick: program("2×4"), search=False)
    assert row["fits"] is True
    assert row["collective_bytes_per_device"] > 0
    text = command.report(row)
    assert "fsdp 2 × tensor 4" in text
    assert "all-reduce" in text
    assert "assumed" in text


def test_the_roofline_adds_up() -> None:
    config = small("position=bam+ssmax", "model.remat=full", *MESHES["2×4"])
    chip = Chip("test", "TPU v5 lite", 2**34, 1e12, 1e11)
    moved = [Collective("all-gather", ("fsdp",), 2, ((10**6,),), 2 * 10**9, 1)]
    speed = estimate(config, chip, 10_000, moved)
    tokens, peak = ROWS * LENGTH, 8 * 197e12
    pairs = 6 * 1 * 4 * HEAD_DIM * LENGTH  # causal attention, FLOP per token
    multiplied = 10_000 - 80 * DIM
    assert speed.model_flops == tokens * (6 * multiplied + pairs)
    assert speed.matmul_seconds == pytest.approx(tokens * 8 * multiplied / peak)
    assert speed.attention_seconds == pytest.approx(tokens * pairs * 4 / 3 / (0.5 * peak))
    assert speed.optimizer_seconds == pytest.approx(4 * 10_000 / 8 * 7 / 1e12)
    assert speed.collective_seconds == pytest.approx(1e9 / 1e11)
    assert speed.fastest == pytest.approx(0.01)
    assert speed.slowest == pytest.approx(0.01 + speed.compute_seconds)
    assert speed.mfu(speed.slowest) < speed.mfu(speed.fastest) < 1


@pytest.mark.parametrize(("more", "efforts"), [((), [True]), (("--full",), [True, False])])
def test_the_command_from_its_line_to_its_status(more, efforts, monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    tried: list[bool] = []

    def compile_step(config, devices, quick):  # type: ignore[no-untyped-def]
        tried.append(quick)
        if command.rows_of(config) > 5:
            raise DoesNotFit("too large", 2.0**35)
        return Program(121_130_000, 2**28, 2**28, 2**30, 1e9, {}, [], 1.0, 1.0, 1.0, quick)

    monkeypatch.setattr(program_of, "compile_step", compile_step)
    monkeypatch.setattr(program_of, "topology_devices", lambda name: [None] * 256)
    words = ["--topology", "v5e:16x16", "--config", "bam-1.1b", "position=path+fox", "--output", str(tmp_path / "row")]
    assert command.main([*words, *more]) == 0
    assert tried == efforts
    out = capsys.readouterr().out
    assert "chosen: data.batch_size=1280" in out
    assert "256 chips as data 16 × fsdp 16" in out
    assert json.loads((tmp_path / "row").read_text())["fits"] is True
    assert command.main([*words, "data.batch_size=2560"]) == 3
    assert "the largest batch that fits is data.batch_size=1280:" in capsys.readouterr().out


def test_unknown_topologies_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--topology", "v9:2x2", "--config", "tiny"]) == 2
    assert "'v9:2x2' is not of one of the chips v5e, v5p, v6e" in capsys.readouterr().err


def test_results_without_a_place_are_refused_before_anything_is_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing" / "row.json"
    assert command.main(["--topology", "v5e:2x2", "--config", "tiny", "--output", str(missing)]) == 2
    assert f"--output {missing}: there is no folder {missing.parent}" in capsys.readouterr().err
    assert command.main(["--topology", "v5e:2x2", "--config", "tiny", "--output", str(tmp_path)]) == 2
    assert f"--output {tmp_path} is not an ordinary file" in capsys.readouterr().err
