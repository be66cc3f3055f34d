"""What no GPU has run as yet is refused there by name, and only there."""

from __future__ import annotations

import pytest

from twostroke.config import EngineConfig
from twostroke.engine.untried import VARIABLE, check_untried, keeps_blocks
from twostroke.errors import ConfigError
from twostroke.model.w8a8 import W8Format


def test_each_is_named_and_nothing_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    check_untried(EngineConfig(model="m"), (), ranks_share=False)
    for settings, name in (
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8"),
        ({"kv_eviction": "sinks"}, "kv_eviction"),
        ({"decode_quantization": "int4"}, "prefill_quantization and decode_quantization"),
        ({"engines_on_host": 2}, "several engines"),
    ):
        with pytest.raises(ConfigError, match=f"{name}.*{VARIABLE}=1"):
            check_untried(EngineConfig(model="m", **settings), (), ranks_share=False)
    with pytest.raises(ConfigError, match="several ranks on one GPU"):
        check_untried(EngineConfig(model="m"), (), ranks_share=True)
    with pytest.raises(ConfigError, match="weights of 4 or 8 bits"):
        check_untried(EngineConfig(model="m"), (W8Format("int8"),), ranks_share=False)
    check_untried(EngineConfig(model="m"), (W8Format("fp8"),), ranks_share=False)
    assert not keeps_blocks(True)


def test_who_asks_for_it_may_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    check_untried(EngineConfig(model="m", kv_eviction="sinks"), (), ranks_share=True)
    assert (keeps_blocks(True), keeps_blocks(False)) == (True, False)
