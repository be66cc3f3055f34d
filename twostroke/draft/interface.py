"""`Drafter`: guesses the next tokens of texts. `DraftModel`: a drafter that runs a model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from twostroke.request import EngineRequest


class DraftOffer(NamedTuple):
    """Drafted tokens. `keys` and `priors` have an entry for each token, for `Survival`."""

    drafter: str
    tokens: tuple[int, ...]
    keys: tuple[Hashable, ...]
    priors: tuple[float, ...]
    # The keys that a draft model knows before it drafts the tokens. `Survival` counts them too.
    known_keys: tuple[Hashable, ...] = ()


class Text(Protocol):
    """A request as a drafter sees it."""

    @property
    def engine_request(self) -> EngineRequest: ...

    @property
    def tokens(self) -> Sequence[int]:
        """The prompt and the output so far."""
        ...

    @property
    def num_prompt(self) -> int: ...

    @property
    def salt(self) -> str:
        """Only requests with the same salt may see each other's texts."""
        ...

    @property
    def prediction(self) -> Sequence[int]: ...


class DraftRow(NamedTuple):
    """A request for which a drafter may propose tokens."""

    state: Any  # from `Drafter.open`
    max_tokens: int
    # Returns, for the offer so far, whether another token is worth its cost. None: it always is.
    goes_on: Callable[[DraftOffer], bool] | None = None


class Drafter(Protocol):
    name: str

    def open(self, text: Text) -> Any | None:
        """Begin to draft for a request. Return its state; None if the drafter cannot draft."""
        ...

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftOffer | None]:
        """Return for each row a guess of the tokens after the end of its text."""
        ...

    def close(self, text: Text) -> None:
        """End a request, which has written this text."""
        ...


class DraftModel(Drafter, Protocol):
    """A drafter that runs a model, so its drafts take time (`sched/model_drafter.py`). Before the
    first draft for a row the model must have computed the text of the row."""

    def backlog(self, state: Any) -> int | None:
        """Return the number of tokens that are not computed; None if the model cannot draft."""
        ...

    def known_keys(self, state: Any, count: int) -> tuple[Hashable, ...]:
        """Return the keys of the next `count` drafted tokens, known before they are drafted."""
        ...

    def step_s(self, states: Sequence[Any]) -> float:
        """Return the expected seconds of drafting one token for each row; 0: unknown."""
        ...

    def catch_up_s(self, state: Any) -> float:
        """Return the expected seconds of computing the backlog; 0: unknown."""
        ...

    def max_chunk(self, state: Any, limit_s: float) -> int:
        """Return how many tokens of the backlog the model can compute in `limit_s`."""
        ...

    def catch_up(self, states: Sequence[tuple[Any, int]]) -> None:
        """Compute a number of tokens of the backlog of each row, without drafting."""
        ...

    def take_seconds(self) -> float:
        """Return the seconds that the model ran since the last call."""
        ...

    def pause(self, text: Text) -> None:
        """Free the memory of a preempted request."""
        ...

    def reset_prefixes(self) -> None:
        """Drop every cached prefix."""
        ...

    def audit(self) -> None:
        """Assert that the bookkeeping is consistent."""
        ...
