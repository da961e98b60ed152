"""How the trained comparison reads the longest prompts."""

import argparse
from typing import Any
from unittest.mock import Mock

import pytest

from experiments.bam_h200 import cells, measure
from experiments.bam_h200.config import SIZES, Cell


def test_far_rows_are_read_whole_where_keys_are_carried() -> None:
    """Wherever the part stands in a spec, and if only some layers have it."""
    asked = SIZES["small"].asked
    for scheme in ("path", "bam+ssmax+path(rank=8)", "fox+path", "rope,path", "3*bam+ssmax,path+fox"):
        assert cells.far_chunk(scheme, asked) > 524_288
    for scheme in ("bam+ssmax", "rope", "fox", "2*rope,nope"):
        assert cells.far_chunk(scheme, asked) == 32_768


@pytest.mark.parametrize(("case", "chunk"), [("fox(bias=5)+path", 2048), ("rope", 32_768)])
def test_the_far_question_takes_the_chunk_of_its_scheme(case: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, parent = list[Any](), Mock()
    parent.recv.return_value, parent.send = "go", sent.append
    worker = cells.Worker.__new__(cells.Worker)
    worker.parent, worker.asked, worker.tokenizer, worker.tokens = parent, SIZES["tiny"].asked, Mock(), 9
    worker.reader = argparse.Namespace(params=None, chunk=0)  # type: ignore[assignment]
    facts = {"case": case, "seed": 0, "mix": "retrieval", "size": "tiny", "benchmark": "passkey"}
    worker.kept = (Cell(case, 0, size="tiny"), "params", [{**facts, "length": 512, "correct": 1}])
    found = {"benchmark": "passkey", "length": 1024, "answer_loss": 1 / 3, "depths": [{"key": "12345", "depth": 0.5}]}
    monkeypatch.setattr(measure, "far", lambda *_: [found])
    worker.ask_far()
    assert (worker.reader.chunk, worker.reader.params) == (chunk, "params")
    assert sent[-1][2][1:] == [{**facts, **found, "answer_loss": 0.333333333, "depths": [{"depth": 0.5}]}]
