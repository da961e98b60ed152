"""How commands end: one line and a status, not a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bampath.command import Stop, end_with_status, fail_gracefully, file_to_write, folder_to_make


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("--samples 0 must be at least 1"), 2, "error: --samples 0 must be at least 1"),
        (FileNotFoundError("nowhere does not exist"), 2, "error: nowhere does not exist"),
        (ImportError("lm_eval is not installed"), 2, "error: lm_eval is not installed"),
        (FloatingPointError("the loss is nan"), 1, "error: the loss is nan"),
        (KeyboardInterrupt(), 130, "--resume goes on"),
    ],
)
def test_what_fails_is_a_line_and_a_status(error, status, line, capsys):
    def main(argv):
        raise error

    with pytest.raises(SystemExit) as end:
        fail_gracefully(main, [], "--resume goes on")
    assert end.value.code == status
    assert capsys.readouterr().err.strip() == line


def test_mistakes_of_the_code_keep_their_traceback():
    with pytest.raises(KeyError):
        fail_gracefully(lambda argv: {}["x"], [])


def test_a_place_for_results_is_looked_at_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    assert file_to_write(tmp_path / "new/deep/out.json", "--out") == tmp_path / "new/deep/out.json"
    assert file_to_write(tmp_path / "file", "--out") == tmp_path / "file"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert file_to_write("~/out.json", "--out") == tmp_path / "out.json"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]  # nothing was made
    for path, words in (
        (tmp_path, "is not an ordinary file"),
        (Path(os.devnull), "is not an ordinary file"),
        (tmp_path / "file/out.json", "file is not a folder"),
    ):
        with pytest.raises(ValueError, match=f"--out {path}.*{words}"):
            file_to_write(path, "--out")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with pytest.raises(ValueError, match="no permission to be written"):
        file_to_write(tmp_path / "out.json", "--out")


def test_what_signals_did_comes_back_after_an_interrupt_that_was_waited_for(capsys):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with Stop() as stop:
        assert stop.by == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.by == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert {number: signal.getsignal(number) for number in before} == before
    assert "interrupt again to stop at once" in capsys.readouterr().err


def test_an_output_that_lacks_a_letter_does_not_end_a_command():
    code = "from bampath.command import fail_gracefully; fail_gracefully(lambda argv: print('8 × 128 – ü'), [])"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "8 \\xd7 128 \\u2013 \\xfc\n"), done.stderr


def test_an_interrupt_before_a_command_looks_after_it_is_a_line(capsys):
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        end_with_status(main)
    assert (end.value.code, capsys.readouterr().err) == (130, "\nstopped\n")
    with pytest.raises(SystemExit) as end:
        end_with_status(lambda: 3)
    assert end.value.code == 3


def test_what_launch_compile_cannot_know_is_refused_without_jax():
    code = """
import sys
from launch.compile import main
for arguments in (["--config", "tinny", "--topology", "v5e:4x4"], ["--config", "tiny", "--topology", "v9:1x1"],
                  ["--config", "tiny", "--topology", "v5e:4"], ["--config", "tiny", "--topology", "v5p:2x0x2"]):
    assert main(arguments) == 2, arguments
assert "jax" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    for line, words in zip(
        lines, ("did you mean tiny?", "'v9:1x1' is not of one of", "such as v5e:4x4", "such as v5p:4x4x4"), strict=True
    ):
        assert words in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("bampath.inspect", ["nowhere"]),
        ("bampath.generate", ["nowhere", "--prompt", "a"]),
        ("bampath.evaluation.passkey", ["nowhere"]),
        ("bampath.evaluation.perplexity", ["nowhere"]),
        ("bampath.data.prepare", ["source=nowhere"]),
        ("bampath.convert", ["import", "nowhere", "--out", "also-nowhere"]),
        ("experiments.sweep", ["--config", "tiny", "--vary", "seed=9..1"]),
        ("launch.run", ["--on", "local", "--config", "nothing"]),
        ("launch.compile", ["--config", "tiny", "--topology", "v9:1x1"]),
        ("experiments.train", ["--config", "nothing"]),
    ],
)
def test_commands_refuse_with_status_2(module, arguments, tmp_path):
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("end", ["fail_gracefully(main, [])", "end_with_status(lambda: main([]))"])
def test_a_command_goes_on_when_nobody_reads_any_more(end, tmp_path):
    """What it is for is done, and its status says so, wherever the reader goes: `| head -1`."""
    code = f"""
from pathlib import Path
from bampath.command import end_with_status, fail_gracefully
def main(argv):
    for line in range(100_000):
        print(line, flush=line % 1000 == 0)
    Path({str(tmp_path / "done")!r}).touch()
    return 0
{end}
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 0)
    assert (tmp_path / "done").exists()


def test_what_is_printed_last_may_find_nobody(tmp_path):
    """The pipe breaks when Python ends and writes what it still holds."""
    code = (
        "import time; from bampath.command import fail_gracefully as f\nf(lambda _: [print('x'), time.sleep(0.5)], [])"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_a_link_to_nowhere_is_no_folder_to_make(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "x")
    with pytest.raises(FileExistsError, match="link is a link to what is not there; choose another folder"):
        folder_to_make(tmp_path / "link")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "empty")
    folder_to_make(tmp_path / "other")
