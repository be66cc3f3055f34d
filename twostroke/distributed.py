"""vLLM's module with the function that frees memory between two engines."""

from __future__ import annotations

import gc


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines without references."""
    gc.collect()
