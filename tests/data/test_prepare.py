"""The command that prepares text: what it refuses, and what it leaves behind then."""

import os
from pathlib import Path

import pytest

from bampath.data.prepare import main


@pytest.mark.parametrize(
    ("lines", "message"), [([], "has no documents"), (['{"text": ""}'] * 2, "all 2 documents of source .* are empty")]
)
def test_no_data_set_is_made_of_nothing(lines: list[str], message: str, tmp_path: Path):
    path = tmp_path / "empty.jsonl"
    path.write_text("\n".join(lines))
    arguments = [f"source={path}", "split=none", "--shards", str(tmp_path / "set"), "--workers", "1"]
    with pytest.raises(ValueError, match=message):
        main(arguments)
    assert not (tmp_path / "set").exists()
    path.write_text('{"text": "some"}')
    main(arguments)  # into the same folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shard-mb", "0"], "^--shard-mb 0 must be at least 1$"),
        (["--workers", "-1"], "^--workers -1 must be at least 1, or 0"),
        (["--shards", "FILE"], "FILE is a file, so it cannot be the folder of a data set"),
        (["--shards", "FILE/set"], r"the folder .*FILE/set cannot be made \(Not a directory\); choose another"),
    ],
)
def test_options_of_the_command_are_named(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    with pytest.raises((ValueError, OSError), match=message):
        main(["source=sotu", "--shards", "set", *arguments])
    assert os.listdir() == ["FILE"]
