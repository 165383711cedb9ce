"""Writes ``docs/config.md`` (or the JSON schema, for editors) from the schema: ``python -m megatron_trace.config.docs``."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_trace.config.errors import section_type
from megatron_trace.config.schema import RunConfig
from megatron_trace.config.validation import RULES, SUPPORT_RULES, Rule

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m megatron_trace.config.docs > docs/config.md`; edit the docstrings in megatron_trace/config. -->

One YAML file describes a run; `section.key=value` on the command line overrides one setting. A file may name one other file as
`base`, relative to itself: sections merge, lists and scalars replace, and the base may not have a base of its own.

Unknown keys, repeated keys, wrong types and broken rules are errors of one line each, and the launcher ends with exit code 2
before a model is built. Scalars are read by the rules of YAML 1.2: `1e-6` is a number, `on` is text, `012` is refused where a
number is meant.

    python -m megatron_trace.config FILE [key=value ...]     checks a file and starts nothing; --show prints every setting
    python -m megatron_trace.config.docs --json-schema       prints a JSON schema for editors
"""

_LIMITS = """\
A run is refused where one of these is broken; the planner (`tools/plan.py`) judges such a layout all the same and says so.

"""
_BOUNDS = (("minimum", ">= {}"), ("exclusiveMinimum", "> {}"), ("maximum", "<= {}"), ("exclusiveMaximum", "< {}"))


def markdown() -> str:
    """The whole text of ``docs/config.md``."""
    parts = [_INTRODUCTION]
    parts += [_section(name, kind) for name, kind in _sections(RunConfig)]
    always = [rule for rule in RULES if rule not in SUPPORT_RULES]
    parts.append(_rule_list("Rules between settings", "", always))
    parts.append(_rule_list("Limits of this version", _LIMITS, SUPPORT_RULES))
    return "\n".join(parts)


def _rule_list(title: str, introduction: str, rules: Sequence[Rule]) -> str:
    return f"## {title}\n\n{introduction}" + "\n".join(f"* {inspect.getdoc(rule)}" for rule in rules) + "\n"


def json_schema() -> str:
    """JSON schema of a configuration file."""
    return json.dumps(RunConfig.model_json_schema(), indent=2) + "\n"


def _sections(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Each section with its dotted name, an outer one before those inside it."""
    for name, info in kind.model_fields.items():
        inner = section_type(info.annotation)
        if inner is not None:
            yield f"{prefix}{name}", inner
            yield from _sections(inner, prefix=f"{prefix}{name}.")


def _section(name: str, kind: type[BaseModel]) -> str:
    schema = kind.model_json_schema()
    rows = [
        f"| `{field}` | {_type(schema['properties'][field])} | {_default(info)} | {_cell(info.description)} |"
        for field, info in kind.model_fields.items()
        if section_type(info.annotation) is None
    ]
    head = f"## {name}\n\n{_cell(inspect.getdoc(kind))}\n"
    if not rows:
        return head
    return head + "\n| key | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _type(schema: dict[str, Any]) -> str:
    """A JSON schema type in words: integer >= 1, one of a, b, list of integer."""
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    words = {"string": "text", "boolean": "true or false", "object": "mapping"}
    kind = words.get(schema["type"], schema["type"])
    return " ".join([kind, *(text.format(schema[key]) for key, text in _BOUNDS if key in schema)])


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True, validated_data={})
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def _cell(text: str | None) -> str:
    return " ".join((text or "").replace("``", "`").replace("|", "\\|").split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json-schema", action="store_true", help="print the JSON schema instead of the Markdown page")
    arguments = parser.parse_args()
    print(json_schema() if arguments.json_schema else markdown(), end="")


if __name__ == "__main__":
    main()
