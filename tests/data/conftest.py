"""Token caches of these tests go to a folder that is deleted afterwards."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def token_cache(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("token-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAMPATH_CACHE", str(folder))
        yield folder
