"""`ThinkingState`: the progress of a request through its reasoning, from its written tokens.

    before ─▶ the opening tag ─▶ inside ─▶ the closing tag, or a forced one ─▶ over

Tags are searched in the bytes of the tokens, because several token sequences may spell a tag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twostroke.request import Thinking


class ThinkingState:
    """The reasoning state of one request."""

    def __init__(
        self, settings: Thinking, token_bytes: Callable[[int], bytes], before_grammar: bool
    ) -> None:
        """`before_grammar`: text that does not begin with an opening tag belongs to a grammar."""
        self._settings = settings
        self._token_bytes = token_bytes
        self._before_grammar = before_grammar
        self._longest = max(map(len, settings.ends))
        self._written = b""  # the last bytes, as many as a tag has
        self._num_forced = 0
        self._count = 0  # tokens of reasoning
        self.inside = settings.is_open
        self.over = before_grammar and not (settings.is_open or settings.start_ids)
        self.refused = False  # a token other than the forced token was written

    @property
    def start_ids(self) -> Sequence[int]:
        """Tokens that open the reasoning."""
        return self._settings.start_ids

    @property
    def left(self) -> int | None:
        """Number of tokens before the end is forced; None: no limit."""
        budget = self._settings.budget
        return None if budget is None else max(0, budget - self._count)

    @property
    def forced(self) -> int | None:
        """The token that must come next, or None."""
        ids = self._settings.forced_ids
        return ids[self._num_forced] if self.inside and self.left == 0 else None

    def advance(self, tokens: Sequence[int]) -> Sequence[int]:
        """Advance by written tokens. Return the tokens after the reasoning, or without
        reasoning."""
        for n, token in enumerate(tokens):
            if not (self.inside or self.over):
                self._look_for_start(token)
            elif self.inside:
                self._think(token)
                continue
            if self.over:
                return tokens[n:]
        return ()

    def _look_for_start(self, token: int) -> None:
        self._written += self._token_bytes(token)
        starts, written = self._settings.starts, self._written.lstrip()
        if self._before_grammar:
            self.inside = token in self.start_ids
            self.over = not self.inside
        else:
            self.inside = written.startswith(starts)
            self.over = not self.inside and not any(one.startswith(written) for one in starts)

    def _think(self, token: int) -> None:
        forced = self.forced
        if forced is not None:
            self.refused |= token != forced
            self._num_forced += 1
            self.over = self._num_forced == len(self._settings.forced_ids)
        else:
            self._count += 1
            self._written = self._written[-self._longest :] + self._token_bytes(token)
            self.over = any(end in self._written for end in self._settings.ends)
        self.inside = not self.over
