"""docs/config.md says what the schema says."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel

from megatron_trace.config import RunConfig
from megatron_trace.config.docs import json_schema, markdown
from megatron_trace.config.errors import section_type


def test_committed_page_is_up_to_date(repository: Path) -> None:
    assert (repository / "docs" / "config.md").read_text() == markdown(), (
        "run: python -m megatron_trace.config.docs > docs/config.md"
    )


def _undocumented(section: type[BaseModel]) -> list[str]:
    found = []
    for name, info in section.model_fields.items():
        if not info.description:
            found.append(f"{section.__name__}.{name}")
        inner = section_type(info.annotation)
        if inner is not None:
            found += _undocumented(inner)
    return found


def test_every_setting_is_documented() -> None:
    assert _undocumented(RunConfig) == []


def test_page_has_a_row_for_every_setting() -> None:
    text = markdown()
    assert "| `top_p` | number > 0 <= 1 | `1.0` |" in text
    assert '| `layers` | `latter_half`, `all` or list of integer >= 0 | `"latter_half"` |' in text
    assert "## task.arithmetic" in text


def test_json_schema_refuses_unknown_keys() -> None:
    schema = json.loads(json_schema())
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["RolloutSection"]["additionalProperties"] is False
    assert "max_new_tokens" in schema["$defs"]["RolloutSection"]["required"]
