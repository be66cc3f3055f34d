"""What a model's files say about it, read with its types and ranges checked.

`Fields` reads config.json, the JSON files around it and the metadata of a GGUF file. Every refusal
is a `ModelError` that names the file, the field, its value and what was expected.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

from twostroke.errors import ModelError, nearest

MAX_JSON_BYTES: Final = 256 << 20  # tokenizer.json, by far the largest, has a tenth of it
REQUIRED: Final[Any] = object()

_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxlist = _SHORT.maxdict = 4


def shown(value: Any) -> str:
    """A value of a file as a message quotes it: `repr`, but never long."""
    return _SHORT.repr(value)


def read_json(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    """The JSON object in a file; {} if there may be none and there is none."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path}: has more than {MAX_JSON_BYTES} bytes. Fetch it again.")
        content = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise
    except RecursionError:
        raise ModelError(f"{path}: cannot be read as JSON (it is nested too deeply).") from None
    except (ValueError, OSError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: cannot be read as JSON ({error}). Fetch it again.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, not {shown(content)}. Fetch it again.")
    return content


class Fields:
    """The entries of one object in a file. A null is as if the entry were not there.

    Without a default an entry must be there. `low` and `high` are allowed themselves, `above` is
    not.
    """

    def __init__(
        self,
        where: str,
        entries: Mapping[str, Any],
        prefix: str = "",
        aliases: Mapping[str, str] = MappingProxyType({}),
        path: tuple[str, ...] = (),
        switches: dict[tuple[str, ...], Any] | None = None,
    ) -> None:
        """`where` is the file; `prefix` comes before each field's name in `entries`, which has
        some under another name, their alias. `path`: the objects of the file that these entries
        are in. `switches`: fields of two values that have been read, by their paths, with the
        value that they do not have; all that is made from these fields shares it."""
        self.where = where
        self.prefix = prefix
        self.switches = {} if switches is None else switches
        self._entries = entries
        self._aliases = aliases
        self._path = path

    def __contains__(self, name: str) -> bool:
        return self.value(name) is not None

    def given_as_null(self, name: str) -> bool:
        """Whether the entry is there and null, where that says something of its own."""
        return self.called(name) in self._entries and self.value(name) is None

    def over(self, other: Fields) -> Fields:
        """These entries with those of `other` in their place where it has any."""
        where = other.where if other._entries else self.where
        entries = {**self._entries, **other._entries}
        return Fields(where, entries, "", self._aliases, self._path, self.switches)

    def with_defaults(self, entries: Mapping[str, Any]) -> Fields:
        """These entries over others, which count where nothing is said, not even null."""
        named = {self.called(name): value for name, value in entries.items()}
        entries = {**named, **self._entries}
        return Fields(self.where, entries, self.prefix, self._aliases, self._path, self.switches)

    def names(self) -> list[str]:
        return [name for name in self._entries if name.startswith(self.prefix)]

    def called(self, name: str) -> str:
        """What the file calls a field."""
        return self.prefix + self._aliases.get(name, name)

    def value(self, name: str) -> Any:
        """As it is, unchecked; None if it is not there."""
        return self._entries.get(self.called(name))

    def integer(self, name: str, low: int, high: int, default: Any = REQUIRED) -> Any:
        value = self._integer(name, self.value(name), low, high, default)
        if high - low == 1:
            self._note_switch(name, low + high - value)
        return value

    def number(
        self,
        name: str,
        *,
        high: float,
        above: float | None = None,
        low: float = 0.0,
        default: Any = REQUIRED,
    ) -> Any:
        value = self.value(name)
        bounds = f"from {low:g} to {high:g}"
        if above is not None:
            bounds, low = f"above {above:g} and at most {high:g}", above
        expected = f"a number {bounds}"
        if value is None:
            return self._default(name, default, expected)
        # NaN is in no range. A bool is an int to Python, but not to whoever wrote the file.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or value == above:
            self.refuse(name, expected)
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.value(name)
        if value is None:
            value = default
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        self._note_switch(name, not value)
        return value

    def string(self, name: str, default: Any = REQUIRED, longest: int = 1 << 20) -> Any:
        value = self.value(name)
        expected = f"a text of at most {longest} characters"
        if value is None:
            return self._default(name, default, expected)
        if not isinstance(value, str) or len(value) > longest:
            self.refuse(name, expected)
        return value

    def choice(self, name: str, known: Collection[str], default: Any = REQUIRED) -> Any:
        value = self.value(name)
        expected = f"one of {', '.join(sorted(known))}"
        if value is None:
            return self._default(name, default, expected)
        if not isinstance(value, str) or value not in known:
            self.refuse(name, expected, nearest(value, known) if isinstance(value, str) else "")
        return value

    def nested(self, name: str) -> Fields:
        """The object in a field, empty if there is none."""
        value = self.value(name)
        if value is not None and not isinstance(value, dict):
            self.refuse(name, "an object")
        own = self.called(name)
        where, path = f"{self.where}: {own}", (*self._path, own)
        return Fields(where, value or {}, path=path, switches=self.switches)

    def items(self, name: str, kind: type | tuple[type, ...], what: str) -> list[Any]:
        """A list whose every entry is of one kind, empty if there is none."""
        value = self.value(name)
        if value is None:
            return []
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, list) or not set(map(type, value)) <= set(kinds):
            self.refuse(name, f"a list of {what}")
        return value

    def refuse(self, name: str, expected: str, hint: str = "") -> NoReturn:
        raise ModelError(
            f"{self.where}: {self.called(name)} must be {expected}, not "
            f"{shown(self.value(name))}{hint or '.'}"
        )

    def _note_switch(self, name: str, other: Any) -> None:
        self.switches[*self._path, self.called(name)] = other

    def _integer(self, name: str, value: Any, low: int, high: int, default: Any) -> Any:
        expected = f"a whole number from {low} to {high}"
        if value is None:
            return self._default(name, default, expected)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(name, expected)
        return value

    def _default(self, name: str, default: Any, expected: str) -> Any:
        if default is REQUIRED:
            own = " (its model_type's name for it)" if name in self._aliases else ""
            raise ModelError(
                f"{self.where}: has no {self.called(name)}{own}, which must be {expected}. The "
                "file is incomplete; fetch it again, or use another conversion of the model."
            )
        return default


def listed_names(names: Iterable[str]) -> str:
    """`'a', 'b', 'c' and 4 more`."""
    names = list(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(shown, names[:3])) + more
