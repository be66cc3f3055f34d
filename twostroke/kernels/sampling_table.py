"""The arguments of the sampling kernels of every backend: a table of the samples to draw, and the
state that requests keep on the device from step to step. `reference_sampling` defines the kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# Lines of the table [NUM_COLUMNS, samples] of int32; those marked fp32 hold the bits of one.
(
    SAMPLE,  # row of the step's logits
    ROW,
    POSITION,  # where the token will stand
    MASK,  # row of the step's masks; -1: none
    FLAGS,
    NUM_BIASES,
    NUM_BANS,
    REPETITION,  # fp32, as all below but TOP_K and the keys
    FREQUENCY,
    PRESENCE,
    TEMPERATURE,
    TOP_P,
    MIN_P,
    TOP_K,
    KEY0,  # uint32
    KEY1,
) = range(16)
NUM_COLUMNS = 16

# Bits of FLAGS.
PENALISED = 1
ALLOWED_IDS = 2  # the row has a list of allowed tokens

IN_PROMPT = -(2**15)  # bit 15 of a count; the others: how often the token was written, at most …
MAX_WRITTEN = 2**15 - 1

# Capacities of a row's lists. A request that needs more is adjusted by `exec/torch_sampling.py`.
MAX_BIASES = 512
MAX_BANS = 256
MAX_BAN_PREFIX = 12  # tokens of a bad word before its last one

# A row's lists, in int32s: tokens and values (fp32) of biases, then of the bans each field in turn.
# A ban holds at positions [from, until) after the tokens of its prefix.
BIAS_VALUES = MAX_BIASES
BAN_TOKEN = 2 * MAX_BIASES
BAN_FROM = BAN_TOKEN + MAX_BANS
BAN_UNTIL = BAN_FROM + MAX_BANS
BAN_LENGTH = BAN_UNTIL + MAX_BANS
BAN_PREFIX = BAN_LENGTH + MAX_BANS  # first tokens of all prefixes, then second ones, …
LISTS_WIDTH = BAN_PREFIX + MAX_BAN_PREFIX * MAX_BANS


class SamplingState(NamedTuple):
    """One line for each row. A tensor that a row does not use is not read, and may hold
    anything."""

    tokens: Tensor  # [rows, positions] int32: those before the next one to draw
    counts: Tensor  # [rows, vocabulary] int16: IN_PROMPT, and how often written
    allowed: Tensor  # [rows, ⌈vocabulary / 32⌉] int32: token t is bit t % 32 of word t // 32
    lists: Tensor  # [rows, LISTS_WIDTH] int32
