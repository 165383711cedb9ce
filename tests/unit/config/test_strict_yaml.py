"""Scalars and keys that plain PyYAML misreads."""

from __future__ import annotations

import pytest
import yaml

from megatron_trace.config import ConfigError
from megatron_trace.config.strict_yaml import parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E+3", 1000.0),
        ("-2.5e-3", -0.0025),
        (".5", 0.5),
        ("5.", 5.0),
        ("1_000", 1000),
        ("0", 0),
        ("-7", -7),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("on", "on"),
        ("yes", "yes"),
        ("012", "012"),
        ("0x10", "0x10"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("'1e-6'", "1e-6"),
        ("e5", "e5"),
        ("1e", "1e"),
    ],
)
def test_scalars_are_read_as_written(text: str, value: object) -> None:
    read = parse(text, source="here")
    assert read == value
    assert type(read) is type(value)


def test_plain_pyyaml_misreads_what_this_reader_does_not() -> None:
    assert yaml.safe_load("1e-6") == "1e-6"
    assert yaml.safe_load("on") is True
    assert yaml.safe_load("012") == 10
    assert yaml.safe_load("{a: 1, a: 2}") == {"a": 2}


def test_nested_values_keep_their_structure() -> None:
    assert parse("a:\n  b: [1, 2e0, x]\n  c: {d: null}\n", source="here") == {"a": {"b": [1, 2.0, "x"], "c": {"d": None}}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "run.yaml:3: a: given twice (first in line 1); keep one"),
        ("s:\n  a: 1\n  a: 2\n", "run.yaml:3: a: given twice (first in line 2); keep one"),
        ("1: x\n", "run.yaml:1: key '1' is not text; put it in quotes"),
        ("true: x\n", "run.yaml:1: key 'true' is not text; put it in quotes"),
        ("a: b: c\n", "run.yaml:1:5: not valid YAML: mapping values are not allowed here; mend the line or quote the value"),
        ("a: !!python/name:os.system x\n", "run.yaml:1:4: not valid YAML"),
        ("a: [1\n", "run.yaml:2:1: not valid YAML"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2:1: not valid YAML"),
        ("a: \x00\n", "run.yaml: not valid YAML"),
    ],
)
def test_errors_are_one_line_with_their_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, source="run.yaml")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
