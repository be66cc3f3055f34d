"""`StrictSettings`: the base class of settings that a user fills in."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from twostroke.errors import ConfigError, TwostrokeError, did_you_mean, shown


class StrictSettings:
    """A dataclass that refuses an unknown keyword and names the most similar field."""

    error: ClassVar[type[TwostrokeError]] = ConfigError
    display_name: ClassVar[str] = ""  # the name in errors, if not the name of the class

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        class_name = cls.display_name or cls.__name__
        if args:
            raise cls.error(
                f"{class_name} takes its settings by name: write {known[0]}=…, not a bare "
                f"{shown(args[0])}"
            )
        for name in settings:
            if name not in known:
                hint = did_you_mean(name, known) or f"; the settings are {', '.join(known)}"
                raise cls.error(f"{class_name} has no setting {shown(name)}{hint}")
        return super().__new__(cls)

    def _refuse(self, name: str, expected: str) -> None:
        raise self.error(f"{name} must be {expected}, not {shown(getattr(self, name))}")

    def _check_int(
        self, name: str, low: int, high: int | None = None, optional: bool = False
    ) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if not is_int or value < low or (high is not None and value > high):
            bound = f"of at least {low}" if high is None else f"from {low} to {high}"
            self._refuse(name, f"a whole number {bound}" + (" or None" if optional else ""))

    def _check_number(self, name: str, low: float, high: float, expected: str) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:  # NaN fails every comparison
            self._refuse(name, expected)

    def _check_bools(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "True or False")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            hint = did_you_mean(value, choices) if isinstance(value, str) else ""
            expected = f"one of {', '.join(choices)}"
            raise self.error(f"{name} must be {expected}, not {shown(value)}{hint}")
