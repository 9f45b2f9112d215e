"""JSON files of numbers that people write by hand: read key by key, and refused with the place and the remedy."""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ..errors import FileError

LARGEST = 1e18


class FileFields:
    """One JSON object of a file; `close` refuses the keys that nobody asked for.

    Args:
        value: The parsed value, an object if the file is right.
        source: The file, for messages.
        path: Where in the file the object stands, as `tensors[3]`; empty at the top.
    """

    def __init__(self, value: object, *, source: str, path: str = "") -> None:
        self.source, self.path = source, path
        if not isinstance(value, dict):
            raise FileError(f"{source}: {path or 'the file'} is {shown(value)}: write an object, {{…}}")
        self._values: Mapping[str, Any] = value
        self._known: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Return whether the key is there."""
        return key in self._values

    def wrong(self, key: str, remedy: str) -> FileError:
        """Return the error that names a key, its value and the remedy."""
        if key not in self._values:
            return FileError(f"{self.source}: {self._at(key)} is missing: {remedy}")
        return FileError(f"{self.source}: {self._at(key)} = {shown(self._values[key])}: {remedy}")

    def number(self, key: str, what: str, *, positive: bool = False) -> float:
        """Return a finite number, at least zero or more than that; `what` says what to write, with the unit."""
        remedy = f"write {what}, a number {'above 0' if positive else 'of at least 0'}"
        return float(self._checked(key, lambda value: is_number(value) and (value or not positive), remedy))

    def numbers(self, key: str, what: str) -> tuple[float, ...]:
        """Return a list of at least one finite number of at least zero."""
        return tuple(map(float, self._list(key, is_number, f"{what}, numbers of at least 0")))

    def integer(self, key: str, what: str, *, minimum: int = 0) -> int:
        """Return an integer of at least `minimum`."""
        remedy = f"write {what}, an integer of at least {minimum}"
        found: int = self._checked(
            key, lambda value: isinstance(value, int) and is_number(value) and value >= minimum, remedy
        )
        return found

    def text(self, key: str, what: str) -> str:
        """Return a text (`is_text`)."""
        found: str = self._checked(key, is_text, f"write {what}, a string")
        return found

    def texts(self, key: str, what: str) -> tuple[str, ...]:
        """Return a list of at least one text."""
        return tuple(self._list(key, is_text, f"{what}, strings"))

    def lists(self, key: str, what: str) -> tuple[tuple[str, ...], ...]:
        """Return a list of at least one list of at least one text."""
        return tuple(map(tuple, self._list(key, is_texts, f"lists of {what}, strings")))

    def null(self, key: str) -> bool:
        """Return whether `null` stands there."""
        return key in self._values and self._take(key) is None

    def flag(self, key: str, what: str) -> bool:
        """Return a truth value."""
        found: bool = self._checked(key, lambda value: isinstance(value, bool), f"write true or false: {what}")
        return found

    def object(self, key: str, what: str) -> "FileFields":
        """Return the object below a key."""
        value = self._checked(key, lambda value: isinstance(value, dict), f"write {what}, an object {{…}}")
        return FileFields(value, source=self.source, path=self._at(key))

    def objects(self, key: str, what: str) -> "list[FileFields]":
        """Return the objects of the list below a key, at least one."""
        values = self._take(key)
        if not isinstance(values, list) or not values:
            raise self.wrong(key, f"write a list of at least one of {what}")
        return [
            FileFields(value, source=self.source, path=f"{self._at(key)}[{index}]")
            for index, value in enumerate(values)
        ]

    def keys(self) -> tuple[str, ...]:
        """Return all keys, for objects whose keys are names, which are texts."""
        for key in self._values:
            if not is_text(key):
                raise self.wrong(key, "write a name as the key, a string")
        return tuple(self._values)

    def version(self, supported: int) -> None:
        """Refuse a `version` other than the supported one; a file without the key has it."""
        if "version" not in self._values:
            return
        found = self._take("version")
        if isinstance(found, bool) or found != supported:
            raise self.wrong("version", f"this release reads version {supported}: leave the key out or update")

    def ignore(self, keys: Collection[str]) -> None:
        """Let keys stand that are for human readers."""
        self._known.update(keys)

    def close(self) -> None:
        """Refuse keys that were never asked for."""
        for key in self._values:
            if key not in self._known:
                known = ", ".join(sorted(self._known))
                raise self.wrong(key, f"no such key here, remove it; known are {known}")

    def _checked(self, key: str, right: Callable[[Any], Any], remedy: str) -> Any:
        value = self._take(key)
        if not right(value):
            raise self.wrong(key, remedy)
        return value

    def _list(self, key: str, right: Callable[[Any], bool], what: str) -> list[Any]:
        def all_right(values: Any) -> bool:
            return isinstance(values, list) and bool(values) and all(map(right, values))

        found: list[Any] = self._checked(key, all_right, f"write a list of {what}")
        return found

    def _take(self, key: str) -> Any:
        self._known.add(key)
        return self._values.get(key)

    def _at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


def is_number(value: object) -> bool:
    """Return whether this is a number between 0 and 1e18."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST


def is_text(value: object) -> bool:
    """Return whether this is a string that is not empty and can be written as UTF-8: no half of a surrogate pair."""
    return isinstance(value, str) and bool(value) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def is_texts(value: object) -> bool:
    """Return whether this is a list of at least one text."""
    return isinstance(value, list) and bool(value) and all(map(is_text, value))


def shown(value: object) -> str:
    """Return a value for a message, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"


def read_object(path: Path) -> FileFields:
    """Return the object that a JSON file consists of.

    Raises:
        FileError: The file cannot be read, is not JSON, has one key twice, or is no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except FileError as error:
        raise FileError(f"{path}: {error}") from error
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}: name a file that can be read") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not JSON: {error}") from error
    return FileFields(value, source=str(path))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FileError(f'key "{twice}" stands twice in one object: remove one')
    return found
