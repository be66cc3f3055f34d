"""`DeviceSampler`: samples with options other than temperature, top-k, top-p and min-p.

    take      for a new row: its bans, biases and penalties are sent to the device, once
    draw      logits ─▶ adjusted logits, in fp32 ─▶ tokens    one small table and the masks are sent
    advance   writes the tokens to the step's results and to the rows, and counts them

No call waits for the device, and the host does not loop over the requests. Exception: if a request
has longer lists than `kernels/sampling_table.py` has room for, `torch_sampling.py` adjusts its
logits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from twostroke.exec import torch_sampling
from twostroke.exec.executor import Masks
from twostroke.exec.token_mask import mask_of, mask_words
from twostroke.kernels import sampling_table
from twostroke.kernels.records import DrawParams
from twostroke.kernels.sampling_table import SamplingState
from twostroke.plan import NewRow

ALWAYS = 2**62
FOREVER = 2**31 - 1

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32 | np.uint32 | np.int64 | np.float32]
LogprobTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class SamplingKernels(Protocol):
    """The sampling kernels of a backend; `kernels/reference_sampling.py` defines them."""

    def adjust_logits(
        self,
        logits: torch.Tensor,
        samples: torch.Tensor,
        state: SamplingState,
        masks: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor: ...

    def sample(
        self,
        logits: torch.Tensor,
        params: DrawParams[torch.Tensor],
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def advance_tokens(
        self, samples: torch.Tensor, drawn: torch.Tensor, state: SamplingState, out: torch.Tensor
    ) -> None: ...

    def token_logprobs(
        self, logits: torch.Tensor, which: torch.Tensor, tokens: torch.Tensor, count: int
    ) -> LogprobTensors: ...


class Drawn(NamedTuple):
    samples: torch.Tensor  # [NUM_FIELDS, n]
    tokens: torch.Tensor  # [n] int32; -1: the logits were NaN or infinite


class _Rows(NamedTuple):
    """Rows whose logits `torch_sampling.py` adjusts."""

    rows: dict[int, NewRow]
    tokens: torch.Tensor


class DeviceSampler:
    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        tokens: torch.Tensor,
        kernels: SamplingKernels,
        device: torch.device,
    ) -> None:
        """`tokens`: the tokens of the rows, [rows, positions] int32, to which `advance` writes.

        All persistent memory is allocated here: for each row two bytes for each token of the
        vocabulary, and some 40 KB."""
        self.tokens, self._kernels, self._device = tokens, kernels, device
        self._vocab_size, self._words = vocab_size, mask_words(vocab_size)
        self._state = SamplingState(
            tokens,
            torch.empty(max_rows, vocab_size, dtype=torch.int16, device=device),
            torch.empty(max_rows, self._words, dtype=torch.int32, device=device),
            torch.empty(max_rows, sampling_table.LISTS_WIDTH, dtype=torch.int32, device=device),
        )
        self._no_masks = torch.empty(0, self._words, dtype=torch.int32, device=device)
        self._special_until = np.zeros(max_rows, np.int64)  # position
        # Fields of the table for each row: FLAGS, NUM_BIASES, NUM_BANS; and the penalties.
        self._wants = np.zeros((3, max_rows), np.int32)
        self._penalties = np.zeros((3, max_rows), np.float32)
        self._zero_counts = np.zeros(vocab_size, np.int16)  # scratch of `_count`, otherwise zero
        # Requests that `torch_sampling` adjusts: with too long lists, or with replaced tokens.
        self.rows: dict[int, NewRow] = {}
        self._new: dict[int, NewRow] = {}  # the newest request of each row

    # ── rows ────────────────────────────────────────────────────────────────────────────────

    def take(self, new: NewRow) -> None:
        """Send the options of a request with a new row to the device, once."""
        row, params = new.row, new.params
        self.rows.pop(row, None)
        self._new[row] = new
        self._special_until[row] = _special_until(new)
        self._wants[:, row] = 0
        if self._special_until[row] <= len(new.tokens):
            return
        bias, bans = params.logit_bias or {}, _bans(new)
        longest = max((len(ban.prefix) for ban in bans), default=0)
        if (
            len(bias) > sampling_table.MAX_BIASES
            or len(bans) > sampling_table.MAX_BANS
            or longest > sampling_table.MAX_BAN_PREFIX
        ):
            self.rows[row] = new
            return
        flags = 0
        if params.penalised:
            flags |= sampling_table.PENALISED
            self._penalties[:, row] = (
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
            self._count(new)
        if params.allowed_token_ids is not None:
            flags |= sampling_table.ALLOWED_IDS
            allowed = mask_of(params.allowed_token_ids, self._vocab_size)
            bits = self._pinned_copy(allowed.view(np.int32))
            self._state.allowed[row].copy_(bits, non_blocking=True)
        if bias or bans:
            lists = self._pinned_copy(_lists(bias, bans))
            self._state.lists[row].copy_(lists, non_blocking=True)
        self._wants[:, row] = flags, len(bias), len(bans)

    def rewrite(self, row: int) -> None:
        """From now on compute a row's penalties from its tokens: counted tokens were replaced."""
        if self._new[row].params.penalised:
            self.rows[row] = self._new[row]

    def _count(self, new: NewRow) -> None:
        """Count the tokens so far. `advance` counts the later tokens."""
        tokens, counts = np.array(new.tokens, np.int64), self._zero_counts
        written, times = np.unique(tokens[new.num_prompt :], return_counts=True)
        counts[written] = np.minimum(times, sampling_table.MAX_WRITTEN)
        counts[tokens[: new.num_prompt]] |= sampling_table.IN_PROMPT
        line = self._state.counts[new.row].zero_()
        ids, values = (
            self._pinned_copy(part).to(self._device, non_blocking=True)
            for part in (tokens, counts[tokens])
        )
        line.scatter_(0, ids, values)  # repeated ids have equal values
        counts[tokens] = 0

    # ── samples ─────────────────────────────────────────────────────────────────────────────

    def special(self, rows: Ints, positions: Ints) -> Ints:
        """Return the indices of the samples that need `draw`, in addition to those with a mask."""
        return np.flatnonzero(positions < self._special_until[rows])

    def draw(
        self,
        logits: torch.Tensor,
        which: Ints,
        rows: Ints,
        positions: Ints,
        masks: Masks,
        params: DrawParams[Numbers],
        drafted: Collection[int] = (),
    ) -> Drawn:
        """Draw a token for each of the rows `which` of `logits`, [S, V], which do not change.
        `rows`, `positions` and `params` have an entry for each of these samples. The keys of
        `masks` are rows of `logits`. `drafted`: rows with drafts. The drafts are not counted yet,
        so penalties of these rows are computed from their tokens."""
        host, at = self._pinned(sampling_table.NUM_FIELDS, len(which)), sampling_table
        table = host.numpy()
        numbers, bits = table.view(np.float32), table.view(np.uint32)
        table[at.SAMPLE], table[at.ROW], table[at.POSITION] = which, rows, positions
        table[at.MASK] = -1
        table[at.FLAGS : at.REPETITION] = self._wants[:, rows]
        numbers[at.REPETITION : at.TEMPERATURE] = self._penalties[:, rows]
        numbers[at.TEMPERATURE], table[at.TOP_K] = params.temperature, params.top_k
        numbers[at.TOP_P], numbers[at.MIN_P] = params.top_p, params.min_p
        bits[at.KEY0], bits[at.KEY1] = params.key0, params.key1
        allowed = self._no_masks
        if masks:
            lines = self._pinned(len(masks), self._words)
            to = lines.numpy().view(np.uint32)
            for n, (index, mask) in enumerate(masks.items()):
                to[n] = mask
                table[at.MASK, which == index] = n
            allowed = lines.to(self._device, non_blocking=True)
        samples = host.to(self._device, non_blocking=True)
        adjusted = torch.empty(
            len(which), self._vocab_size, dtype=torch.float32, device=self._device
        )
        self._kernels.adjust_logits(logits, samples, self._state, allowed, adjusted)
        state: torch_sampling.SamplerState = self
        if drafted:
            penalised = [row for row in drafted if self._new[row].params.penalised]
            state = _Rows({row: self._new[row] for row in penalised} | self.rows, self.tokens)
        if state.rows:
            self._adjust_from_tokens(state, adjusted, logits, which, rows, positions, masks)
        tokens = torch.empty(len(which), dtype=torch.int32, device=self._device)
        settings = samples.view(torch.float32)
        draw_params = DrawParams(
            temperature=settings[at.TEMPERATURE],
            top_k=samples[at.TOP_K],
            top_p=settings[at.TOP_P],
            min_p=settings[at.MIN_P],
            key0=samples[at.KEY0],
            key1=samples[at.KEY1],
        )
        self._kernels.sample(adjusted, draw_params, out=tokens)
        return Drawn(samples, tokens)

    def _adjust_from_tokens(
        self,
        state: torch_sampling.SamplerState,
        adjusted: torch.Tensor,
        logits: torch.Tensor,
        which: Ints,
        rows: Ints,
        positions: Ints,
        masks: Masks,
    ) -> None:
        lines = [n for n, row in enumerate(rows.tolist()) if row in state.rows]
        samples = which[lines].tolist()
        own = {n: masks[index] for n, index in enumerate(samples) if index in masks}
        allowed = torch_sampling.mask_tensors(own, self._vocab_size, self._device)
        found = logits[samples].float()
        torch_sampling.adjust(
            found, rows[lines].tolist(), positions[lines].tolist(), state, allowed
        )
        adjusted[lines] = found

    def advance(self, drawn: Drawn, out: torch.Tensor) -> None:
        """Write the final tokens to `out`, [S], by sample, and to their rows."""
        self._kernels.advance_tokens(drawn.samples, drawn.tokens, self._state, out)

    def logprobs(
        self, logits: torch.Tensor, which: Ints, tokens: torch.Tensor, count: int
    ) -> LogprobTensors:
        """Return `token_logprobs` of the lines `which` of raw logits, on the device."""
        host = self._pinned(len(which))
        host.numpy()[:] = which
        lines = host.to(self._device, non_blocking=True)
        return self._kernels.token_logprobs(logits, lines, tokens, count)

    def warm(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Launch every kernel of the sampler once."""
        nothing = np.zeros(1, np.int64)
        drawn = self.draw(logits, nothing, nothing, nothing, {}, DrawParams(*(nothing,) * 6))
        self.advance(drawn, tokens)
        self.logprobs(logits, nothing, tokens, 1)

    # ── to the device ───────────────────────────────────────────────────────────────────────

    def _pinned(self, *shape: int) -> torch.Tensor:
        """Return pinned memory. Torch reuses a pinned buffer only after its copies have run."""
        return torch.empty(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")

    def _pinned_copy(self, values: npt.NDArray[np.int16 | np.int32 | np.int64]) -> torch.Tensor:
        host = torch.from_numpy(values)
        return host.pin_memory() if self._device.type == "cuda" else host


class _Ban(NamedTuple):
    """A token that is banned at positions [first, until), if `prefix` precedes it."""

    token: int
    first: int
    until: int
    prefix: Sequence[int] = ()


def _bans(new: NewRow) -> list[_Ban]:
    bans = []
    if new.params.min_tokens:
        until = new.num_prompt + new.params.min_tokens
        bans += [_Ban(token, 0, until) for token in sorted(new.stop_ids)]
    for *prefix, last in new.bad_words_ids:  # tokens of the prompt are not part of a bad word
        bans.append(_Ban(last, new.num_prompt + len(prefix), FOREVER, prefix))
    return bans


def _lists(bias: dict[int, float], bans: list[_Ban]) -> npt.NDArray[np.int32]:
    lists = np.zeros(sampling_table.LISTS_WIDTH, np.int32)
    lists[: len(bias)] = list(bias)
    values = lists.view(np.float32)[sampling_table.BIAS_VALUES :]
    values[: len(bias)] = list(bias.values())
    fields = lists[sampling_table.BAN_TOKEN :].reshape(-1, sampling_table.MAX_BANS)
    for n, (token, first, until, prefix) in enumerate(bans):
        fields[: 4 + len(prefix), n] = token, first, until, len(prefix), *prefix
    return lists


def _special_until(new: NewRow) -> int:
    """Return the position from which sampling needs only temperature, top-k, top-p and min-p."""
    params = new.params
    if (
        params.penalised
        or params.logit_bias
        or params.allowed_token_ids is not None
        or new.bad_words_ids
    ):
        return ALWAYS
    return new.num_prompt + params.min_tokens if new.stop_ids else 0
