"""Means add up before they are divided; a resumed log has no step twice; FLOPs and words of the progress display."""

import io
import json
import math
import os

import jax.numpy as jnp
import pytest

from bampath import config, progress
from bampath.checkpoint import SaveError
from bampath.command import heedless
from bampath.flops import Flops, body_parameters, peak_flops, train_flops_per_token
from bampath.metrics import Mean, Writer, read
from bampath.progress import Progress, Speed, summary
from bampath.step import build_model, declare


def test_means_are_weighted_by_their_counts():
    merged = Mean(jnp.float32(6), jnp.float32(2)).merge(Mean(jnp.float32(4), jnp.float32(8))).merge(Mean.zero())
    assert merged.value() == 1.0
    assert math.isnan(Mean.zero().value())


def records(path):
    return [(r["kind"], r["step"], r.get("loss")) for r in read(path / "metrics.jsonl")]


def test_a_resumed_log_is_cut_at_its_step(tmp_path):
    with Writer(tmp_path) as writer:
        for step in (1, 2, 3, 4):
            writer.write("train", step, {"loss": jnp.float32(step / 3)})
        writer.write("eval", 4, {"loss": math.nan})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 5, "lo')  # the process died here
    assert records(tmp_path)[-1] == ("eval", 4, None)
    with Writer(tmp_path, resumed_step=2) as writer:
        writer.write("train", 3, {"loss": 1 / 3, "note": "again"})
    assert records(tmp_path) == [
        ("train", 1, float(jnp.float32(1 / 3))),
        ("train", 2, float(jnp.float32(2 / 3))),
        ("train", 3, 1 / 3),
    ]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["note"] == "again"


@pytest.mark.parametrize("line", ["junk", "[1]", '{"kind": "train"}', "\\0\\0"])
def test_a_damaged_line_is_named(tmp_path, line):
    """Also by a run that would be resumed, which says so instead of losing the records."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"kind": "train", "step": 1, "loss": 2.0}}\n{line}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 is no record: .*; delete the line"):
        Writer(tmp_path, 1)
    assert line in path.read_text()


def test_a_run_that_starts_anew_starts_its_log_anew(tmp_path):
    with Writer(tmp_path) as writer:
        writer.write("train", 1, {"loss": 1.0})
    with Writer(tmp_path):
        pass
    assert records(tmp_path) == []


def test_tensorboard_gets_the_same_numbers(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    with Writer(tmp_path, tensorboard=True) as writer:
        writer.write("train", 3, {"loss": 0.5, "note": "text is left out"})
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, seen = file.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        seen += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
        data = data[16 + size :]
    assert seen == [("train/loss", 3, 0.5)]


def test_progress_shows_both_conventions_of_mfu():
    shown = summary({"loss": 2.5, "tokens_per_second": 12_345.6, "mfu": 0.412, "mfu_full": 0.45})
    assert shown == "loss 2.5000  tok/s 12,346  MFU 41.2%  (45.0% counting all pairs)"
    assert "MFU" not in summary({"loss": 2.5})


def test_flops_count_what_is_multiplied():
    shape = config.get("l12").model
    body = body_parameters(shape)
    assert body == pytest.approx(121.13e6, rel=1e-4)
    assert body - 32_768 * 768 == pytest.approx(96.0e6, rel=1e-3)
    flops = train_flops_per_token(shape, body, 512)
    assert flops.causal == 6 * (body - 32_768 * 768) + 6 * 12 * 768 * 512
    assert flops.full - flops.causal == 6 * 12 * 768 * 512
    tied = config.get("l12", "model.tie_embeddings=true").model
    assert train_flops_per_token(tied, body_parameters(tied), 512) == flops


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("cpu", None),
    ],
)
def test_peak_by_device_kind(kind, peak):
    assert peak_flops(kind) == peak


def test_speed_leaves_out_compilation_and_pauses(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    speed = Speed(1000, Flops(causal=1e6, full=2e6), peak=1e10)
    assert speed.at(1) == {}
    now[0] += 4
    with speed.paused():
        now[0] += 50
    assert speed.at(5) == {"tokens_per_second": 1000.0, "mfu": pytest.approx(0.1), "mfu_full": pytest.approx(0.2)}
    assert speed.seconds_per_step == 1.0
    assert "mfu" not in Speed(1000, Flops(1, 2), None).at(1)


VALUES = {"loss": 2.5, "grad_norm": 0.25, "lr": 1e-3, "tokens_per_second": 12345.6, "mfu": 0.41}


def test_plain_lines_where_no_terminal_is():
    out = io.StringIO()
    with Progress(200, out) as shown:
        shown.show(10, VALUES, 2.0)
        shown.say("[evaluated]")
    assert out.getvalue() == (
        "step  10/200  loss 2.5000  grad 0.25  lr 1.00e-03  tok/s 12,346  MFU 41.0%  6:20 left\n[evaluated]\n"
    )
    assert progress.duration(3723) == "1:02:03"


def test_a_bar_in_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    with Progress(200, out) as shown:
        shown.show(10, VALUES, 2.0)
        shown.say("[evaluated]")
    assert "loss 2.5000" in out.getvalue()
    assert " 10/200" in out.getvalue()
    assert "[evaluated]" in out.getvalue()


def test_every_option_of_the_decoder_is_counted() -> None:
    """By formula as by tracing: biases, QK-norm, grouped heads and tied embeddings."""
    for options in (
        (),
        ("model.qkv_bias=true",),
        ("model.qk_norm=true", "model.kv_heads=2", "model.tie_embeddings=true"),
    ):
        tiny = config.get("tiny", "position=nope", *options)
        assert body_parameters(tiny.model) == declare(build_model(tiny)).count, options


def test_a_board_that_cannot_be_written_is_named_and_keeps_nobody_waiting(tmp_path, monkeypatch):
    (tmp_path / "tensorboard").write_text("not a folder")
    with pytest.raises(SaveError, match=r"tensorboard could not be written: File exists"):
        Writer(tmp_path, tensorboard=True)
    (tmp_path / "tensorboard").unlink()
    with open("/dev/full", "wb", buffering=0) as full, Writer(tmp_path, tensorboard=True) as writer:
        writer.write("train", 1, {"loss": 1.0})
        writer._board._file.close()
        monkeypatch.setattr(writer._board, "_file", full)
        with pytest.raises(SaveError, match=r"tensorboard could not be written: No space left on device"):
            writer.write("train", 2, {"loss": 1.0})
        writer.write("train", 3, {"loss": 1.0})  # it has ended: nothing waits, nothing is written
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_run_goes_on_when_nobody_reads_its_lines_any_more():
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as out, Progress(9, heedless(out)) as shown:
        shown.show(1, {"loss": 2.0}, None)
        assert os.read(read_end, 100) == b"step 1/9  loss 2.0000\n"
        os.close(read_end)
        for step in (2, 3):
            shown.show(step, {"loss": 2.0}, None)
        shown.say("done")


def test_many_lines_at_once_may_have_no_reader():
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as out:
        heedless(out).writelines(f"line {number}\n" for number in range(20_000))


def test_a_step_that_is_no_number_is_no_record(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": "x"}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1 is no record"):
        Writer(tmp_path, resumed_step=3)
