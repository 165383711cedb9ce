"""From a YAML file and ``key=value`` overrides to a checked ``RunConfig``."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_trace.config import strict_yaml
from megatron_trace.config.errors import ConfigError, brief, describe, shown
from megatron_trace.config.schema import RunConfig
from megatron_trace.config.validation import check

BASE_KEY = "base"
MAX_DEPTH = 16
"""Sections that a key of an override may go down."""


def load(path: str | Path, overrides: Iterable[str] = (), *, planned_only: bool = False) -> RunConfig:
    """Read ``path``, apply dotted ``key=value`` overrides and check everything.

    A file may name one other file (relative to itself) as ``base``; sections merge, lists and scalars replace. Raises
    ConfigError with one line for each problem. ``planned_only`` leaves out the limits of this version's trainer and engine
    (``validation.unsupported``): the configuration can be planned, and must not be run.
    """
    return from_mapping(apply_overrides(read_mapping(path), overrides), planned_only=planned_only)


def from_mapping(values: Mapping[str, Any], *, planned_only: bool = False) -> RunConfig:
    """Check plain nested dicts and return the configuration; raises ConfigError with one line for each problem."""
    try:
        config = RunConfig.model_validate(dict(values))
    except ValidationError as error:
        raise describe(error, RunConfig) from error
    check(config, planned_only=planned_only)
    return config


def provenance(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, str]:
    """Where each given setting comes from: dotted name -> path of the file, or ``command line``; all others are defaults."""
    own = _read_file(Path(path))
    name = own.pop(BASE_KEY, None)
    found: dict[str, str] = {}
    if name is not None:
        read_mapping(path)
        base_path = Path(path).parent / name
        found |= {key: str(base_path) for key, _ in leaves(_read_file(base_path))}
    found |= {key: str(path) for key, _ in leaves(own)}
    for override in overrides:
        found |= {key: "command line" for key, _ in leaves(apply_overrides({}, [override]))}
    return found


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting of nested sections: (dotted name, value)."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, prefix=f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The file's settings over those of its ``base``, if it names one."""
    values = _read_file(Path(path))
    if BASE_KEY not in values:
        return values
    name = values.pop(BASE_KEY)
    if not isinstance(name, str):
        raise ConfigError(f"{BASE_KEY}={shown(name)}: must be the path of one YAML file")
    base_path = Path(path).parent / name
    base = _read_file(base_path)
    if BASE_KEY in base:
        raise ConfigError(f"{BASE_KEY}={name}: {base_path} has a {BASE_KEY} of its own; only one level is allowed")
    return _merge(base, values)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text; give the path of a YAML file") from error
    except ValueError as error:  # no path at all, such as one with a NUL byte
        raise ConfigError(f"{shown(str(path))}: cannot be read ({error}); give the path of a YAML file") from error
    values = strict_yaml.parse(text, source=str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds {shown(values)}; must hold sections with indented key: value lines")
    return values


def _merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def apply_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """``values`` with each ``section.key=value`` set; the value is read as YAML. Raises ConfigError on bad or repeated ones."""
    result = copy.deepcopy(dict(values))
    seen: set[str] = set()
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.split(".")
        if not equals or not all(parts) or len(parts) > MAX_DEPTH:
            raise ConfigError(f"{brief(override)}: not an override; write section.key=value")
        if key in seen:
            raise ConfigError(f"{override}: {key} is given twice on the command line; keep one")
        seen.add(key)
        _set(result, parts, strict_yaml.parse(text, source=brief(override)))
    return result


def _set(values: dict[str, Any], parts: list[str], value: Any) -> None:
    current = values
    for depth, part in enumerate(parts[:-1], start=1):
        inner = current.setdefault(part, {})
        if not isinstance(inner, dict):
            outer = ".".join(parts[:depth])
            raise ConfigError(
                f"{'.'.join(parts)}={shown(value)}: {outer} is the value {shown(inner)}, not a section; set {outer} itself"
            )
        current = inner
    current[parts[-1]] = value
