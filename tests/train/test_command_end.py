"""How commands end: one line and a status, not a traceback."""

import subprocess
import sys

import pytest

from bampath.command import fail_gracefully


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
