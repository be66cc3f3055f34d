"""The arguments of the sampling kernels of every backend: a table of the samples to draw, and the
state that requests keep on the device from step to step. `reference_sampling` defines the kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# The fields of the table [NUM_FIELDS, samples] of int32. A field marked fp32 holds the bits of an
# fp32 number.
(
    SAMPLE,  # row of the step's logits
    ROW,  # the request's row in `SamplingState`
    POSITION,  # of the new token in its sequence
    MASK,  # row of the step's masks; -1: none
    FLAGS,
    NUM_BIASES,
    NUM_BANS,
    REPETITION,  # fp32, like all fields below except TOP_K and the keys
    FREQUENCY,
    PRESENCE,
    TEMPERATURE,
    TOP_P,
    MIN_P,
    TOP_K,
    KEY0,  # uint32
    KEY1,
) = range(16)
NUM_FIELDS = 16

# Bits of FLAGS.
PENALISED = 1
ALLOWED_IDS = 2  # the row has a list of allowed tokens

# A count: bit 15 is set if the token is in the prompt; the other bits say how often the token is in
# the output, at most MAX_WRITTEN.
IN_PROMPT = -(2**15)
MAX_WRITTEN = 2**15 - 1

# Capacities of a row's lists. If a request needs longer lists, `exec/torch_sampling.py` adjusts its
# logits.
MAX_BIASES = 512
MAX_BANS = 256
MAX_BAN_PREFIX = 12  # tokens of a bad word before its last one

# The layout of a row's lists, in int32s: the tokens of the biases, the values of the biases (fp32),
# then one array for each field of the bans. A ban holds at positions [from, until) after the tokens
# of its prefix.
BIAS_VALUES = MAX_BIASES
BAN_TOKEN = 2 * MAX_BIASES
BAN_FROM = BAN_TOKEN + MAX_BANS
BAN_UNTIL = BAN_FROM + MAX_BANS
BAN_LENGTH = BAN_UNTIL + MAX_BANS
BAN_PREFIX = BAN_LENGTH + MAX_BANS  # the first tokens of all prefixes, then the second tokens, …
LISTS_WIDTH = BAN_PREFIX + MAX_BAN_PREFIX * MAX_BANS


class SamplingState(NamedTuple):
    """The state of requests on the device: each tensor has a row for each running request. If a
    request does not use a tensor, its row is not read and may hold anything."""

    tokens: Tensor  # [rows, positions] int32: prompt and output
    counts: Tensor  # [rows, vocabulary] int16: IN_PROMPT, and the count in the output
    allowed: Tensor  # [rows, ⌈vocabulary / 32⌉] int32: token t is bit t % 32 of word t // 32
    lists: Tensor  # [rows, LISTS_WIDTH] int32
