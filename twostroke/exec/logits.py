"""Rare sampling options of the native executor, applied in numpy to one line of logits at a time.

`torch_sampling.py` defines all options and their order. This module applies masks, bans and biases;
the native sampler then applies penalties and draws. A test compares the two.

A client may ban thousands of tokens and words for each of many rows, and all streams wait while the
bans of a step are applied. So `RowBans` prepares arrays and sets once for a request, and the rows
of a request with n > 1 share them (`BanTable`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.exec.token_mask import Mask, unpack_mask
from twostroke.plan import NewRow

Line = npt.NDArray[np.float32]  # [vocabulary]
Ints = npt.NDArray[np.int32]
NEG_INF = np.float32("-inf")
NEVER_PLAIN = 2**62


def plain_from(request: NewRow) -> int:
    """Return the position from which the request has no bans and biases."""
    params = request.params
    if params.logit_bias or params.allowed_token_ids is not None or request.bad_words_ids:
        return NEVER_PLAIN
    return request.num_prompt + params.min_tokens if request.stop_ids else 0


class RowBans:
    """The bans and biases of a request."""

    def __init__(self, request: NewRow, vocab_size: int) -> None:
        params = request.params
        self.made_for = request
        bias = params.logit_bias or {}
        self._biased = np.array(list(bias), np.int64)
        self._biases = np.array(list(bias.values()), np.float32)
        self._not_allowed: npt.NDArray[np.bool_] | None = None
        if params.allowed_token_ids is not None:
            self._not_allowed = np.ones(vocab_size, np.bool_)
            self._not_allowed[np.array(params.allowed_token_ids, np.int64)] = False
        self._stop_ids = np.array(sorted(request.stop_ids), np.int64)
        words = request.bad_words_ids
        self._bad_tokens = np.array([word[0] for word in words if len(word) == 1], np.int64)
        # The last tokens of longer words: number of tokens before → those tokens → last tokens.
        self._bad_ends: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for *start, last in words:
            if start:
                ends = self._bad_ends.setdefault(len(start), {})
                ends.setdefault(tuple(start), []).append(last)

    def are_of(self, request: NewRow) -> bool:
        made_for = self.made_for
        return (
            made_for.params is request.params
            and made_for.bad_words_ids is request.bad_words_ids
            and made_for.stop_ids == request.stop_ids
        )

    def apply(
        self, line: Line, request: NewRow, position: int, tokens: Ints, allowed: Mask | None
    ) -> None:
        """Apply bans and biases in place. `tokens`: known up to `position`."""
        if allowed is not None:
            line[~unpack_mask(allowed, len(line))] = NEG_INF
        line[self._biased] += self._biases
        if self._not_allowed is not None:
            line[self._not_allowed] = NEG_INF
        written = position - request.num_prompt
        if written < request.params.min_tokens:
            line[self._stop_ids] = NEG_INF
        line[self._bad_tokens] = NEG_INF
        for before, ends in self._bad_ends.items():
            if before <= written:
                lasts = ends.get(tuple(tokens[position - before : position].tolist()))
                if lasts is not None:
                    line[lasts] = NEG_INF


class BanTable:
    """The bans of all rows."""

    def __init__(self) -> None:
        self._by_row: dict[int, RowBans] = {}

    def bans_of(self, row: int, request: NewRow, vocab_size: int) -> RowBans:
        found = self._by_row.get(row)
        if found is None or not found.are_of(request):
            others = self._by_row.values()
            found = next((one for one in others if one.are_of(request)), None)
            found = self._by_row[row] = found or RowBans(request, vocab_size)
        return found

    def forget(self, rows: tuple[int, ...]) -> None:
        for row in rows:
            self._by_row.pop(row, None)

    def clear(self) -> None:
        self._by_row.clear()

    def __len__(self) -> int:
        return len(self._by_row)
