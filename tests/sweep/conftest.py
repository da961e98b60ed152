"""The sweep that the tests train."""

import pytest

from experiments.sweep.plan import Axis, Spec
from tests.train.small import SMALL, text_file


@pytest.fixture(scope="package")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Spec:
    home = tmp_path_factory.mktemp("sweep")
    keys = (*SMALL, "train.steps=4", "train.save_every=2", f"data.source={text_file(home)}", f"data.cache_dir={home}")
    vary = (Axis("seed", ("0", "1")), Axis("optim.lr", ("3e-3", "1e15")))
    return Spec("tiny", (*keys, "position=bam+ssmax", "optim.name=radam"), vary, ())
