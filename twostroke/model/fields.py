"""Fields of a model's files, read with their types and ranges checked.

`Fields` reads config.json, the JSON files around it and the metadata of a GGUF file. Every refusal
is a `ModelError` that names the file, the field, its value and the expected value.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

from twostroke.errors import ModelError, did_you_mean

MAX_JSON_BYTES: Final = 256 << 20  # ten times the largest known file, a tokenizer.json
REQUIRED: Final[Any] = object()

_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxlist = _SHORT.maxdict = 4


def shown(value: Any) -> str:
    """Return a short `repr` of a value, for a message."""
    return _SHORT.repr(value)


def read_json(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file; {} for a missing file with `missing_ok`."""
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
    """The entries of one object in a file. An entry that is null counts as missing.

    An entry without a default is required. The bounds `low` and `high` are inclusive, `above` is
    exclusive.
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
        """`where`: the file, for messages. `prefix`: precedes each field's name in `entries`.
        `aliases`: usual name → name in the file. `path`: the objects of the file around these
        entries. `switches`: the path of each two-valued field that has been read → its other
        value. All `Fields` derived from these share `switches`."""
        self.where = where
        self.prefix = prefix
        self.switches = {} if switches is None else switches
        self._entries = entries
        self._aliases = aliases
        self._path = path

    def __contains__(self, name: str) -> bool:
        return self.value(name) is not None

    def is_null(self, name: str) -> bool:
        """Return whether the entry is present and null, for fields where null has a meaning."""
        return self.name_in_file(name) in self._entries and self.value(name) is None

    def overridden_by(self, other: Fields) -> Fields:
        """Return these entries, replaced by the entries of `other` where it has them."""
        where = other.where if other._entries else self.where
        entries = {**self._entries, **other._entries}
        return Fields(where, entries, "", self._aliases, self._path, self.switches)

    def with_defaults(self, entries: Mapping[str, Any]) -> Fields:
        """Return these entries with defaults for the missing ones. A null entry is not missing."""
        named = {self.name_in_file(name): value for name, value in entries.items()}
        entries = {**named, **self._entries}
        return Fields(self.where, entries, self.prefix, self._aliases, self._path, self.switches)

    def names(self) -> list[str]:
        return [name for name in self._entries if name.startswith(self.prefix)]

    def name_in_file(self, name: str) -> str:
        """Return the name of a field in the file."""
        return self.prefix + self._aliases.get(name, name)

    def value(self, name: str) -> Any:
        """Return the unchecked value of an entry; None if it is missing."""
        return self._entries.get(self.name_in_file(name))

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
        # NaN is in no range. In Python a bool is an int; in a file it is not.
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
            self.refuse(
                name, expected, did_you_mean(value, known) if isinstance(value, str) else ""
            )
        return value

    def nested(self, name: str) -> Fields:
        """Return the object in a field; an empty one if the field is missing."""
        value = self.value(name)
        if value is not None and not isinstance(value, dict):
            self.refuse(name, "an object")
        own = self.name_in_file(name)
        where, path = f"{self.where}: {own}", (*self._path, own)
        return Fields(where, value or {}, path=path, switches=self.switches)

    def items(self, name: str, kind: type | tuple[type, ...], what: str) -> list[Any]:
        """Return a list whose entries all have one of the given types; [] if it is missing."""
        value = self.value(name)
        if value is None:
            return []
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, list) or not set(map(type, value)) <= set(kinds):
            self.refuse(name, f"a list of {what}")
        return value

    def refuse(self, name: str, expected: str, hint: str = "") -> NoReturn:
        raise ModelError(
            f"{self.where}: {self.name_in_file(name)} must be {expected}, not "
            f"{shown(self.value(name))}{hint or '.'}"
        )

    def _note_switch(self, name: str, other: Any) -> None:
        self.switches[*self._path, self.name_in_file(name)] = other

    def _integer(self, name: str, value: Any, low: int, high: int, default: Any) -> Any:
        expected = f"a whole number from {low} to {high}"
        if value is None:
            return self._default(name, default, expected)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(name, expected)
        return value

    def _default(self, name: str, default: Any, expected: str) -> Any:
        if default is REQUIRED:
            own = " (the name that this model_type uses)" if name in self._aliases else ""
            raise ModelError(
                f"{self.where}: has no {self.name_in_file(name)}{own}, which must be {expected}. "
                "The file is incomplete; fetch it again, or use another conversion of the model."
            )
        return default


def listed_names(names: Iterable[str]) -> str:
    """Return `'a', 'b', 'c' and 4 more`."""
    names = list(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(shown, names[:3])) + more
