from __future__ import annotations

import pytest
from canvas_serving import load_diffusion, load_modilify

from polytoken.checkpoint.runtime import Runtime


@pytest.fixture(scope="session")
def modilify(tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    return load_modilify(tmp_path_factory.mktemp("modilify"))


@pytest.fixture(scope="session")
def diffusion(tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    return load_diffusion(tmp_path_factory.mktemp("diffusion"))


@pytest.fixture(scope="session")
def runtimes(modilify: Runtime, diffusion: Runtime) -> dict[str, Runtime]:
    return {"modilify": modilify, "block": diffusion, "rolled": diffusion}
