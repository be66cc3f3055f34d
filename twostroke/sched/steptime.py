"""How long a step takes, learnt from the steps that ran. No torch here."""

from __future__ import annotations

from twostroke.plan import PhaseWork

WEIGHT = 0.1  # of the newest step in a moving average


class StepTimes:
    """Moving averages: decode-only steps by batch size (in powers of two), and what a prefill
    token adds. It says nothing of what it has not seen."""

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}  # bits of the batch size → seconds a step
        self._prefill_token_s: float | None = None

    def add(self, prefill: PhaseWork, decode: PhaseWork, seconds: float) -> None:
        if not prefill.tokens:
            bits = decode.rows.bit_length()
            old = self._decode_s.get(bits, seconds)
            self._decode_s[bits] = old + WEIGHT * (seconds - old)
            return
        own = self.decode_only(decode) if decode.rows else 0.0
        if own is not None:
            each = max(0.0, seconds - own) / prefill.tokens
            old = each if self._prefill_token_s is None else self._prefill_token_s
            self._prefill_token_s = old + WEIGHT * (each - old)

    def decode_only(self, decode: PhaseWork) -> float | None:
        """A step of these slots and nothing else; None before any such step was seen."""
        known, bits = self._decode_s, decode.rows.bit_length()
        if bits in known or not known:
            return known.get(bits)
        return known[min(known, key=lambda seen: abs(seen - bits))]

    def predict(self, prefill: PhaseWork, decode: PhaseWork) -> float | None:
        own = self.decode_only(decode) if decode.rows else 0.0
        if own is None or not prefill.tokens:
            return own
        each = self._prefill_token_s
        return None if each is None else own + each * prefill.tokens
