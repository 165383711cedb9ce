"""YAML without its surprises: what PyYAML reads in silence here is read as YAML 1.2 reads it, or is an error.

Under PyYAML's YAML 1.1 rules ``1e-6`` is text, ``on`` is true, ``012`` is 10, ``1:30`` is 90, and of two equal keys the last
wins.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from megatron_trace.config.errors import ConfigError, brief, shown

_RESOLVERS: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:int", r"^[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.inf|\.nan)$",
        "-+.0123456789",
    ),
)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader with the YAML 1.2 core scalars and unique text keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep=deep)
        except (ConfigError, yaml.YAMLError):
            raise
        except (ValueError, KeyError, AttributeError, TypeError, OverflowError) as error:  # such as !!int abc
            kind = node.tag.rsplit(":", 1)[-1]
            raise ConfigError(f"{self._at(node)}: {shown(node.value)} is no {kind}; write a plain value") from error
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise ConfigError(f"{self._at(node)}: {brief(node.value)} has more than 64 bits; write a smaller number")
        return value

    def _at(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first_line: dict[str, int] = {}
        for key_node, _ in node.value:
            key = key_node.value
            line = key_node.start_mark.line + 1
            if key_node.tag != "tag:yaml.org,2002:str":
                raise ConfigError(f"{self.name}:{line}: key {shown(key)} is not text; put it in quotes")
            if key in first_line:
                raise ConfigError(
                    f"{self.name}:{line}: {key}: given twice (first in line {first_line[key]}); keep one of the two"
                )
            first_line[key] = line
        return super().construct_mapping(node, deep=deep)


for _tag, _pattern, _first in _RESOLVERS:
    _StrictLoader.add_implicit_resolver(_tag, re.compile(_pattern), [c if c != "\0" else "" for c in _first])


def parse(text: str, *, source: str) -> Any:
    """Parse one YAML document; ``source`` is the name used in messages. Raises ConfigError, one line with line and column."""
    try:
        loader = _StrictLoader(text)
        loader.name = source
        node = loader.get_single_node()
        # deep: an alias inside its own anchor is then an error, not a value without end
        return None if node is None else loader.construct_object(node, deep=True)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(f"{source}{where}: not valid YAML: {error.problem}; mend the line or quote the value") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply; a setting is a value, a list or a section") from error
