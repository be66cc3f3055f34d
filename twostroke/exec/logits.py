"""Rare sampling options of the native executor, applied in numpy to one line of logits at a time.

`torch_sampling.py` defines the same in torch, and the order: bans and biases here, then the rest,
which the native sampler does. A test compares the two.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.exec.token_mask import Mask, unpack_mask
from twostroke.plan import NewRow

Line = npt.NDArray[np.float32]  # [vocabulary]
Ints = npt.NDArray[np.int32]
NEVER = np.float32("-inf")
NEVER_PLAIN = 2**62


def plain_from(request: NewRow) -> int:
    """Return the first position from which on the request bans and biases no token."""
    params = request.params
    if params.logit_bias or params.allowed_token_ids is not None or request.bad_words_ids:
        return NEVER_PLAIN
    return request.num_prompt + params.min_tokens if request.stop_ids else 0


def apply_bans(
    line: Line, request: NewRow, position: int, tokens: Ints, allowed: Mask | None
) -> None:
    """Apply bans and biases in place. `tokens` are the tokens of the request, known up to
    `position`."""
    params = request.params
    if allowed is not None:
        line[~unpack_mask(allowed, len(line))] = NEVER
    if params.logit_bias:
        line[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float32)
    if params.allowed_token_ids is not None:
        allowed_ids = list(params.allowed_token_ids)
        values = line[allowed_ids]
        line[:] = NEVER
        line[allowed_ids] = values
    written = position - request.num_prompt
    if written < params.min_tokens and request.stop_ids:
        line[list(request.stop_ids)] = NEVER
    for *start, last in request.bad_words_ids:
        before = len(start)
        if before <= written and tokens[position - before : position].tolist() == start:
            line[last] = NEVER
