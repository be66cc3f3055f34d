"""A model of every family, read from its Hugging Face folder in parts: two and four ranks write
what one writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.equivalence.harness import Written, assert_same, run
from tests.equivalence.rank_threads import RankThreads, run_model
from tests.equivalence.rows import TOLERANCE, random_model
from tests.equivalence.test_families import VARIANTS, VOCAB, Variant
from twostroke.engine.core import EngineCore
from twostroke.model.describe.hf_config import load_hf_config, names_in_hf
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.weights.safetensors import SafetensorsWeights

PROMPTS = [[(7 * n * n + 3 * n + size) % VOCAB for n in range(size)] for size in (3, 21)]
TOKENS = 5
# One of each family; of two variants of one, the later says more of it.
FAMILIES = {variant.family.model_type: variant for variant in VARIANTS}


@dataclass(frozen=True)
class Model:
    spec: ModelSpec
    weights: SafetensorsWeights


class Models:
    """Each is made, and run on one rank, once."""

    def __init__(self, folder: Path) -> None:
        alone = RankThreads(1, folder)
        self.of = cache(lambda name: _model(FAMILIES[name], folder / name))
        self.written = cache(lambda name: written(alone, self.of(name)))


def _model(variant: Variant, folder: Path) -> Model:
    random_model(variant.described()).save_pretrained(folder)
    spec, config = load_hf_config(folder / "config.json")
    return Model(spec, SafetensorsWeights(folder, spec, names_in_hf(config)))


def written(threads: RankThreads, model: Model) -> list[Written]:
    def use(core: EngineCore) -> list[Written]:
        return run(core, PROMPTS, TOKENS)

    return run_model(threads, model.spec, model.weights, use, max_model_len=64)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module", params=[2, 4])
def threads(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RankThreads]:
    ranks = RankThreads(request.param, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_write_what_one_writes(threads: RankThreads, models: Models, family: str) -> None:
    assert_same(models.written(family), written(threads, models.of(family)), tau=2 * TOLERANCE)
