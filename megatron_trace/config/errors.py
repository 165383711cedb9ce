"""Configuration errors: one line for each problem, naming the field, the value and what would be right."""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_MAX_SHOWN = 60
_PLAIN_NUMBER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?")
"""Text that, without quotes, the reader takes for a number."""


class ConfigError(ValueError):
    """A configuration that cannot run. ``str()`` is one line for each problem; ``problems`` holds them apart."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


def shown(value: object) -> str:
    """``value`` as it is quoted in a message: on one line, shortened when long."""
    return brief(repr(value))


def brief(text: str) -> str:
    """``text`` on one line, shortened when long."""
    text = " ".join(text.split())
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def describe(error: ValidationError, root: type[BaseModel]) -> ConfigError:
    """Turn what pydantic found in a ``root`` into a ``ConfigError``."""
    details = error.errors(include_url=False)
    return ConfigError([_line(detail, root) for detail in details if not _follows(detail, details)])


def _follows(detail: ErrorDetails, details: Sequence[ErrorDetails]) -> bool:
    """Whether a list is only too short because entries of it were refused, which is already said of them."""
    location = detail["loc"]
    return detail["type"] == "too_short" and any(
        len(other["loc"]) > len(location) and other["loc"][: len(location)] == location for other in details
    )


def _line(detail: ErrorDetails, root: type[BaseModel]) -> str:
    path = dotted(detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"{path}={shown(detail['input'])}: unknown key; {_suggestion(detail['loc'], root)}"
    if detail["type"] == "missing":
        return f"{path}: required and not given; add it to the file or give {path}=VALUE"
    return f"{path}={shown(detail['input'])}: {_remedy(detail)}"


def dotted(location: Sequence[int | str]) -> str:
    """``("guidance", "layers", 2)`` as ``guidance.layers[2]``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _remedy(detail: ErrorDetails) -> str:
    context: dict[str, Any] = detail.get("ctx", {})
    given = detail["input"]
    match detail["type"]:
        case "int_type":
            return _whole_number(given)
        case "float_type":
            return _number(given)
        case "bool_type":
            return "must be true or false"
        case "string_type":
            return "must be text; put it in quotes"
        case "tuple_type" | "list_type":
            return _list(given)
        case "dict_type" | "model_type" | "model_attributes_type":
            return "must be a section: indented key: value lines"
        case "finite_number":
            return "must be a finite number"
        case "greater_than":
            return f"must be greater than {_limit(context['gt'])}"
        case "greater_than_equal":
            return f"must be at least {_limit(context['ge'])}"
        case "less_than":
            return f"must be less than {_limit(context['lt'])}"
        case "less_than_equal":
            return f"must be at most {_limit(context['le'])}"
        case "literal_error":
            return _one_of(given, [word.strip("' ") for word in str(context["expected"]).replace(" or ", ",").split(",")])
        case "value_error":
            return str(context["error"])
        case "string_pattern_mismatch":
            return f"must match {context['pattern']}"
        case "too_short":
            return f"must have at least {context['min_length']} entries"
        case _:
            message = detail["msg"]
            return message[0].lower() + message[1:]


def _one_of(given: object, choices: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(given), choices, n=1)
    return f"must be one of {', '.join(choices)}" + (f"; did you mean {near[0]}?" if near else "")


def _whole_number(given: object) -> str:
    """What to write instead of a number that is not a plain integer, such as 1e3 or 012."""
    if isinstance(given, float) and given.is_integer():
        return f"must be an integer; write {int(given)}"
    if isinstance(given, str) and given.isdecimal() and len(given) < _MAX_SHOWN:
        return f"must be an integer; write {int(given)} without quotes or leading zeros"
    return "must be an integer"


def _number(given: object) -> str:
    try:
        value = float(given) if isinstance(given, str) else None
    except ValueError:
        value = None
    if value is None:
        return "must be a number"
    if not math.isfinite(value):
        return "must be a finite number"
    return f"must be a number; write {given if _PLAIN_NUMBER.fullmatch(str(given)) else value} without quotes"


def _list(given: object) -> str:
    """How one entry is written as a list."""
    if isinstance(given, (str, int, float)):
        return f"must be a list; write [{brief(str(given))}]"
    return "must be a list in brackets"


def _limit(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _suggestion(location: Sequence[int | str], root: type[BaseModel]) -> str:
    """The nearest known name: in the same section first, then under the same name anywhere."""
    prefix = [part for part in location[:-1] if isinstance(part, str)]
    name = str(location[-1])
    section = _section_at(prefix, root)
    known = list(section.model_fields)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {'.'.join([*prefix, near[0]])}?"
    everywhere = list(_all_paths(root))
    same = [path for path in everywhere if path.rsplit(".", 1)[-1] == name]
    if not same:
        same = difflib.get_close_matches(name, [path.rsplit(".", 1)[-1] for path in everywhere], n=1, cutoff=0.8)
        same = [path for path in everywhere if same and path.rsplit(".", 1)[-1] == same[0]]
    if same:
        return f"did you mean {' or '.join(same)}?"
    where = f"section {'.'.join(prefix)}" if prefix else "a configuration"
    return f"{where} knows {', '.join(known)}"


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The section class an annotation stands for, or None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        found = [section_type(arg) for arg in typing.get_args(annotation)]
        return next((item for item in found if item is not None), None)
    return None


def _section_at(path: Sequence[str], root: type[BaseModel]) -> type[BaseModel]:
    current = root
    for part in path:
        inner = section_type(current.model_fields[part].annotation)
        assert inner is not None, f"{part} is no section of {current.__name__}"
        current = inner
    return current


def _all_paths(root: type[BaseModel], prefix: str = "") -> Iterable[str]:
    for name, info in root.model_fields.items():
        yield f"{prefix}{name}"
        inner = section_type(info.annotation)
        if inner is not None:
            yield from _all_paths(inner, prefix=f"{prefix}{name}.")
