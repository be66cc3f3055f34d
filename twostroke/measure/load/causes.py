"""The causes of the gaps between tokens that a client saw, from a twostroke server's records.

A client's gap contains one or more gaps of the server, because an event may bring several tokens.
The server's records have the causes of its gaps (`observe/blame.py`). The rest of the client's gap
was spent in HTTP, in the network or in the client: its cause is `outside`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from twostroke.measure.load.definitions import Sample
from twostroke.observe.record import steps_between

CAUSES = ("decode", "prefill", "preemption", "host", "communication", "drafting", "outside")
UNKNOWN = "not known"
EARLY_S = 0.0005  # an event may seem to precede its token by this much
Seconds = dict[str, float]  # by cause


class CausedGap(NamedTuple):
    """A gap between two events of one stream, with the seconds of each cause."""

    at_s: float  # when it ended, on the client's clock
    gap_s: float
    parts: Seconds | None  # None: the server's records do not include the gap

    @property
    def cause(self) -> str:
        """The cause with the most seconds."""
        return UNKNOWN if self.parts is None else max(self.parts, key=self.parts.__getitem__)


def caused_gaps(samples: Sequence[Sample], records: dict[str, Any] | None) -> list[CausedGap]:
    """Return every gap of the samples. Without records the causes are unknown."""
    found = records or {"steps": [], "requests": []}
    steps = {step["step"]: step for step in found["steps"]}
    requests = {_answer_id(one["request_id"]): one for one in found["requests"] if one["n"] == 1}
    gaps = []
    for sample in samples:
        known = requests.get(sample.request_id) if sample.request_id else None
        parts = _parts(sample, known, steps) if known else iter([None] * len(sample.itls_s))
        for at_s, gap_s, part in zip(sample.content_s[1:], sample.itls_s, parts, strict=True):
            gaps.append(CausedGap(at_s, gap_s, part))
    return gaps


def summary(gaps: Sequence[CausedGap]) -> dict[str, Any] | None:
    """Return the seconds of all gaps by cause, or None if no cause is known."""
    known = [gap.parts for gap in gaps if gap.parts is not None]
    if not known:
        return None
    seconds = {cause: sum(parts[cause] for parts in known) for cause in CAUSES}
    return {"known_share": len(known) / len(gaps), "seconds": seconds}


def _answer_id(request_id: str) -> str:
    return request_id.rsplit("-", 1)[0]  # a record's id ends in the number of the choice


def _parts(
    sample: Sample, request: dict[str, Any], steps: dict[int, Any]
) -> Iterator[Seconds | None]:
    token_s, token_step = request["token_s"], request["token_step"]
    if not token_s or not sample.content_s:
        yield from [None] * len(sample.itls_s)
        return
    if len(token_s) == len(sample.content_s):
        tokens = list(range(len(token_s)))
    else:
        # Some tokens have no event. Match by time: the last event belongs to the last token.
        shift = sample.content_s[-1] - token_s[-1]
        tokens = [
            max(0, bisect_right(token_s, at_s - shift + EARLY_S) - 1) for at_s in sample.content_s
        ]
    for (first, last), gap_s in zip(pairwise(tokens), sample.itls_s, strict=True):
        parts = dict.fromkeys(CAUSES, 0.0)
        known = True
        for n in range(first + 1, last + 1):
            between = steps_between(token_step[n - 1], token_step[n])
            known = known and all(number in steps for number in between)
            if token_step[n] not in between:  # the tokens come from two engines
                parts["preemption"] += token_s[n] - token_s[n - 1]
            for cause, seconds in _of_token(between, steps).items():
                parts[cause] += seconds
        if not known:
            yield None
            continue
        parts["outside"] = max(0.0, gap_s - sum(parts.values()))
        yield parts


def _of_token(between: range, steps: dict[int, Any]) -> Seconds:
    """Return the seconds by cause between two tokens. The last step wrote the second token; in
    the steps before, the request had no slot."""
    found = dict.fromkeys(CAUSES, 0.0)
    for number in between:
        since = steps[number]["since_s"] if number in steps else {}
        for cause, seconds in since.items():
            lost = number != between[-1] and cause != "host"
            found["preemption" if lost else cause] += seconds
    return found
