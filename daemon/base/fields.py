"""Checked access to the fields of a message or an etcd value that somebody else wrote."""

import base64
from collections.abc import Mapping
from typing import Any, TypeVar

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.pair import Pair

T = TypeVar("T")
MAX_INTEGER = 2**63 - 1
MAX_TEXT_BYTES = 4096


class Fields:
    """The fields of one JSON object.

    Every accessor checks type and range, and raises a DaemonError that names the field that is missing or wrong.

    Args:
        values: The object.
        what: What the object is, for the error text.
    """

    def __init__(self, values: Mapping[str, Any], what: str) -> None:
        self._values = values
        self._what = what

    def integer(self, name: str, low: int = 0, high: int = MAX_INTEGER) -> int:
        """Return the integer field `name`."""
        value = self._values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._wrong(name, f"an integer from {low} to {high}")
        return value

    def optional_integer(self, name: str, low: int = 0, high: int = MAX_INTEGER) -> int | None:
        """Return the integer field `name`, None when it is null or missing."""
        return None if self._values.get(name) is None else self.integer(name, low, high)

    def number(self, name: str, low: float = 0.0, high: float = 1e9) -> float:
        """Return the field `name`, an integer or float."""
        value = self._values.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise self._wrong(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Return the number in the field `name`, None when it is null or missing."""
        return None if self._values.get(name) is None else self.number(name)

    def numbers(self, name: str, count: int) -> list[float]:
        """Return the field `name`, an even number of at most `count` numbers."""
        values = self._values.get(name)
        if not isinstance(values, list) or len(values) > count or len(values) % 2:
            raise self._wrong(name, f"an even number of at most {count} numbers")
        return [Fields({name: value}, self._what).number(name) for value in values]

    def text(self, name: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
        """Return the text field `name`, 1 to `max_bytes` bytes of printable UTF-8."""
        value = self._values.get(name)
        # A NUL or a lone surrogate is valid JSON, but not printable, and no file name, key or header can hold it.
        if isinstance(value, str) and value and value.isprintable() and len(value.encode()) <= max_bytes:
            return value
        raise self._wrong(name, f"printable text of 1 to {max_bytes} bytes")

    def optional_text(self, name: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
        """Return the text field `name`, "" when it is empty, null or missing."""
        return "" if self._values.get(name) in ("", None) else self.text(name, max_bytes)

    def secret(self, name: str) -> str | None:
        """Return the text field `name`, None when it is null or missing; what it is instead is in no message."""
        value = self._values.get(name)
        if value is None or isinstance(value, str):
            return value
        raise DaemonError(f"{self._what}: field '{name}' must be text")

    def flag(self, name: str) -> bool:
        """Return the boolean field `name`."""
        return self._of(name, bool, "true or false")

    def optional_flag(self, name: str) -> bool:
        """Return the boolean field `name`, False when it is null or missing."""
        return False if self._values.get(name) is None else self.flag(name)

    def object(self, name: str) -> dict[str, Any]:
        """Return the field `name`, a JSON object."""
        return self._of(name, dict, "an object")

    def objects(self, name: str) -> list[dict[str, Any]]:
        """Return the field `name`, a list of JSON objects."""
        value = self._of(name, list, "a list of objects")
        if not all(isinstance(item, dict) for item in value):
            raise self._wrong(name, "a list of objects")
        return value

    def integers(self, name: str, high: int = MAX_INTEGER) -> list[int]:
        """Return the field `name`, a list of integers."""
        value = self._values.get(name)
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= high for item in value):
            raise self._wrong(name, f"a list of integers from 0 to {high}")
        return value

    def binary(self, name: str, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
        """Return the bytes that the field `name` holds as base64, at most `max_bytes` of them."""
        text = self.text(name, max_bytes=2 * max_bytes)
        try:
            value = base64.b64decode(text, validate=True)
        except ValueError:
            value = None
        if value is None or len(value) > max_bytes:
            raise self._wrong(name, f"at most {max_bytes} bytes as base64")
        return value

    def pair(self) -> Pair:
        """Return the fields `generation` (0 is an import) and `step`."""
        return self.integer("generation"), self.integer("step")

    def optional_pair(self, name: str) -> Pair | None:
        """Return the object `name` of a generation and a step, None when it is null or missing."""
        if self._values.get(name) is None:
            return None
        return Fields(self.object(name), f"{self._what}, {name}").pair()

    def _of(self, name: str, kind: type[T], wanted: str) -> T:
        value = self._values.get(name)
        if not isinstance(value, kind):
            raise self._wrong(name, wanted)
        return value

    def _wrong(self, name: str, wanted: str) -> DaemonError:
        got = repr(self._values[name])[:80] if name in self._values else "nothing"
        return DaemonError(f"{self._what}: field '{name}' must be {wanted}, got {got}")


def printable(text: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return `text` as `Fields.text` takes it: "?" for what is not printable, cut off at `max_bytes`."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[:max_bytes])
    return shown.encode()[:max_bytes].decode(errors="ignore")
