"""What a report computes from a run: charts, headline, health, comparison, and the page it makes of them."""

from __future__ import annotations

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import Row, config, write_run

from megatron_trace.diagnostics.analysis import analyse
from megatron_trace.diagnostics.compare import differences, method_means, with_distinct_names
from megatron_trace.diagnostics.replay import NoEvidenceError, attribute
from megatron_trace.diagnostics.report import render
from megatron_trace.diagnostics.run_data import read_run


def test_charts_hold_the_recorded_curves(tmp_path: Path) -> None:
    a = analyse(read_run(write_run(tmp_path)))
    keys = [chart.key for chart in a.charts]
    assert keys[:4] == ["reward", "accuracy", "dlogp", "kl"]
    assert {"clip", "rho_max", "ess", "flips", "coverage", "speed", "phases", "warmup"} <= set(keys)
    assert a.missing == ("Entropy",) and a.zero == ("Skipped and non-finite",)
    accuracy = a.chart("accuracy")
    assert accuracy is not None
    assert accuracy.curves[0].points == ((0.0, 0.5), (10.0, 0.52), (20.0, 0.54), (30.0, 0.56), (40.0, 0.58))
    phases = a.chart("phases")
    assert phases is not None and [c.name for c in phases.curves] == ["rollout", "train", "refit"]
    truncation = a.chart("rho_max")
    assert truncation is not None and truncation.level == ("truncation", 5.0)


def test_entropy_appears_when_recorded_and_an_absent_phase_took_no_time(tmp_path: Path) -> None:
    def change(record: Row) -> None:
        record["policy"]["entropy"] = 1.5
        if record["step"] == 3:
            record["seconds"]["evaluate"] = 9.0

    a = analyse(read_run(write_run(tmp_path, change_step=change)))
    entropy, phases = a.chart("entropy"), a.chart("phases")
    assert a.missing == () and entropy is not None and {v for _, v in entropy.curves[0].points} == {1.5}
    assert phases is not None
    evaluate = dict(next(c for c in phases.curves if c.name == "evaluate").points)
    assert (evaluate[2.0], evaluate[3.0]) == (0.0, 9.0)


def test_headline_and_health_by_value(tmp_path: Path) -> None:
    a = analyse(read_run(write_run(tmp_path)))
    assert a.headline["reward_first"] == 0.305
    assert a.headline["reward_recent"] == pytest.approx(0.3 + 0.005 * 35.5)
    assert a.headline["guidance_bytes"] == 80 * 40 * 4000
    assert a.headline["seconds_per_step"] == pytest.approx(1.23 + 0.3 * (1 + 0.1 * 40 / 40), rel=1e-3)
    assert a.health["updates skipped"] == 0
    assert a.health["largest importance weight"] == pytest.approx(1.2 * 1.2)
    assert a.health["tokens clipped (mean share)"] == pytest.approx(0.01)


def test_everything_is_strict_json(tmp_path: Path) -> None:
    def change(record: Row) -> None:
        if record["step"] == 2:
            record["reward"] = float("nan")

    values = analyse(read_run(write_run(tmp_path, change_step=change))).to_dict()
    again = json.loads(json.dumps(values, allow_nan=False))
    assert again == values
    reward = next(chart for chart in values["charts"] if chart["key"] == "reward")
    assert reward["curves"][0]["points"][1] == [2.0, None]
    assert len(values["evidence"][0]["sites"]) == 12 and values["evidence"][0]["sites"][0]["relative_error"]["qat"] == 0.016


def test_settings_that_differ_are_found_by_dotted_name() -> None:
    a, b = config(run={"name": "a"}), config(run={"name": "b"}, guidance={"bits": 4, "layers": "all", "sites": ["k"]})
    found = differences({"a": a, "b": b})
    assert found == {
        "guidance.bits": {"a": 1, "b": 4},
        "guidance.sites": {"a": ["fc1_in", "k", "v"], "b": ["k"]},
        "guidance.prompt_tokens": {"a": True, "b": None},
    }


def test_runs_of_one_name_are_told_apart_and_methods_compared(tmp_path: Path) -> None:
    runs = [analyse(read_run(write_run(tmp_path / name))) for name in "ab"]
    first, second = with_distinct_names(runs)
    assert first.run.name != second.run.name and str(tmp_path / "a") in first.run.name
    means = method_means([first, second])
    assert list(means) == [0, 2]
    assert means[2]["qat"] == {first.run.name: 0.02, second.run.name: 0.02}


class Page(HTMLParser):
    """Collects ids, links and tag balance."""

    VOID = frozenset({"meta", "line", "rect", "circle", "polyline", "polygon"})

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.open: list[str] = []
        self.headings = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"]] if values.get("id") else []  # type: ignore[list-item]
        self.targets += [values["href"]] if tag == "a" else []  # type: ignore[list-item]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Page:
    reader = Page()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))
    assert {t.removeprefix("#") for t in reader.targets} <= set(reader.ids)
    return reader


@pytest.mark.parametrize("case", ["healthy", "nothing", "nan", "one", "summary", "compare", "qat"])
def test_a_page_is_balanced_self_contained_and_free_of_nan_whatever_the_run(tmp_path: Path, case: str) -> None:
    def spoil(record: Row) -> None:
        record["policy"] = {"tokens": 0.0, "dlogp_mean": float("nan"), "ess": None}
        record |= {"reward": float("inf"), "seconds": {}, "sites": {}, "tokens_per_second": None}

    run = tmp_path / "<run> & 'co'"
    if case == "nothing":
        run.mkdir()
        (run / "metrics.jsonl").write_text("")
    elif case == "qat":
        precision = {"rollout": "nvfp4", "trainer_forward": "qat", "bf16_layers": []}
        write_run(run, settings=config(precision=precision))
    else:
        write_run(run, change_step=spoil if case == "nan" else None, steps=1 if case == "one" else 40, finished=case != "nan")
    if case == "summary":
        (run / "metrics.jsonl").unlink()
        (run / "config.json").unlink()
    analyses = [analyse(read_run(run))]
    if case == "compare":
        analyses = with_distinct_names([*analyses, analyse(read_run(write_run(tmp_path / "b", steps=3, finished=False)))])
    text = render(analyses)
    parsed(text)
    assert not re.search(r"(https?:)?//(?!www\.w3\.org/2000/svg)[\w.]+\.\w", text), "a network address"
    assert "src=" not in text and "@import" not in text and "url(" not in text
    drawing = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r'="[^"]*\b(nan|inf)\b', drawing)
    assert "<run>" not in text


def test_a_finding_stands_in_the_page_with_its_place(tmp_path: Path) -> None:
    import synthetic_runs

    text = render([analyse(read_run(synthetic_runs.with_wrong_recorded_scale(tmp_path)))])
    assert text.index("The recorded scale of fc1_in (routed-expert input) of layer 3") < text.index('id="curves"')


def test_attribution_lists_measured_and_computed_figures(tmp_path: Path) -> None:
    a = analyse(read_run(write_run(tmp_path)))
    result = attribute(a, updates_newer=0)
    (entry,) = result["evidence"]
    assert entry["totals"]["flips"]["nearest"] == pytest.approx(0.01) and entry["totals"]["adjacent_share"] == 1.0
    assert not entry["site_switches_measured"]
    row = next(r for r in entry["sites"] if (r["layer"], r["site"]) == (1, "fc1_in"))
    assert row["code_share_nearest"] == pytest.approx(400 / 2400)
    assert row["code_share_run"] == pytest.approx(400 / 2400)
    assert set(result["measured"]) | set(result["computed"]) <= {*row, "guided"}
    with pytest.raises(NoEvidenceError, match="measured policies 0, 2 updates newer"):
        attribute(a, updates_newer=5)


def test_attribution_needs_evidence(tmp_path: Path) -> None:
    with pytest.raises(NoEvidenceError, match="evidence.enabled=true"):
        attribute(analyse(read_run(write_run(tmp_path, finished=False))))


def spoiled(value: Any, rng: random.Random, share: float) -> Any:
    """``value`` with some leaves and branches replaced by things that do not belong there."""
    if rng.random() < share:
        return rng.choice([None, "x", [], {}, float("nan"), float("-inf"), -1, True, [None], {"a": None}])
    if isinstance(value, dict):
        return {key: spoiled(item, rng, share) for key, item in value.items()}
    return [spoiled(item, rng, share) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("seed", range(24))
def test_no_spoiled_file_stops_a_report(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    run = write_run(tmp_path, steps=12, change_summary=lambda values: values.update(steps=12))
    for name in ("config.json", "summary.json"):
        (run / name).write_text(json.dumps(spoiled(json.loads((run / name).read_text()), rng, 0.04)))
    lines = [spoiled(json.loads(line), rng, 0.04) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    a = analyse(read_run(run))
    json.dumps(a.to_dict(), allow_nan=False)
    parsed(render([a]))
    parsed(render(with_distinct_names([a, a])))
    if a.evidence:
        json.dumps(attribute(a), allow_nan=False)
