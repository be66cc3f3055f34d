"""What no GPU has run as yet, though tests without one hold it: refused on a GPU, unless the
environment says TWOSTROKE_UNTRIED=1. It leaves the list when its check in `tests/gpu` has passed on
a card."""

from __future__ import annotations

import os
from collections.abc import Iterable

from twostroke.config import KV_8_BIT, EngineConfig
from twostroke.errors import ConfigError
from twostroke.model.formats import Format

VARIABLE = "TWOSTROKE_UNTRIED"


def allowed() -> bool:
    return os.environ.get(VARIABLE, "") not in ("", "0")


def keeps_blocks(on_triton: bool) -> bool:
    """Whether the blocks of a GGUF file stay packed; else they are dequantised."""
    return on_triton and allowed()


def check_untried(config: EngineConfig, formats: Iterable[Format], ranks_share: bool) -> None:
    """Raises `ConfigError`. `ranks_share`: several ranks are on one GPU."""
    untried = {
        "weights of 4 or 8 bits": any(one.is_untried for one in formats),
        f"kv_cache_dtype={config.kv_cache_dtype!r}": config.kv_cache_dtype in KV_8_BIT,
        "prefill_quantization and decode_quantization": config.phases_differ,
        "kv_eviction": config.kv_eviction is not None,
        "several engines": config.engines_on_host > 1 or config.kv_sharing != "none",
        "several ranks on one GPU": ranks_share,
    }
    found = [name for name, wanted in untried.items() if wanted]
    if found and not allowed():
        raise ConfigError(
            f"not tried on a GPU as yet: {', '.join(found)}; leave it out, use device='cpu', or "
            f"set {VARIABLE}=1 in the environment to try it all the same"
        )
