"""The dashboard, the alert rules and the documented queries use only series of a server."""

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import choose_encoder
from promql_parser import Call, MatchOp, MatrixSelector, VectorSelector

from sglang_qspec.cpu.install import install_kernels
from sglang_qspec.engine.telemetry.metrics import STATES, DraftMetrics
from test import promql

FOLDER = Path(__file__).parents[1] / "docs" / "dashboards"
DASHBOARD = json.loads((FOLDER / "qspec.json").read_text())
GROUPS = yaml.safe_load((FOLDER / "qspec-rules.yaml").read_text())["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

PAGE = (FOLDER.parent / "observability.md").read_text()

EXPRESSIONS = {
    **{
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in PANELS
        for target in panel["targets"]
    },
    **{rule.get("alert") or rule["record"]: rule["expr"] for rule in RULES},
    **{
        f"page {number}": expression
        for number, expression in enumerate(re.findall(r"`([^`]*sglang:[^`]*[({][^`]*)`", PAGE))
    },
}
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
OF_A_COUNTER = {"rate", "increase"}
OF_A_GAUGE = {"avg_over_time"}
FUNCTIONS = OF_A_COUNTER | OF_A_GAUGE | {"histogram_quantile"}
"""Functions of PromQL whose use this file checks."""


@dataclass(frozen=True)
class Series:
    """The series of one name; `is_counter` also for the parts of a histogram."""

    labels: frozenset[str]
    is_counter: bool


Exported = dict[str, Series]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The series that SGLang's collectors and QSPEC's create in the processes of a server."""
    registry = CollectorRegistry()
    with pytest.MonkeyPatch.context() as patch:
        # Each collector imports the classes when it is created.
        for kind in ("Counter", "Gauge", "Histogram", "Summary"):
            own = partial(getattr(prometheus_client, kind), registry=registry)
            patch.setattr(prometheus_client, kind, own)
        create_collectors(tmp_path_factory.mktemp("model"), registry)
    found = {}
    owners: dict[str, Any] = dict(registry._names_to_collectors)
    for name, owner in owners.items():
        (family,) = owner.describe()
        if family.type == "gauge" or name != family.name:
            extra = {"le"} if name.endswith("_bucket") else set()
            found[name] = Series(frozenset(owner._labelnames) | extra, family.type != "gauge")
    recorded = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
    for name, expression in recorded.items():
        labels = promql.result_labels(promql.parse(expression), lambda name: found[name].labels)
        assert labels is not None
        found[name] = Series(labels, is_counter=False)
    return found


def create_collectors(folder: Path, registry: CollectorRegistry) -> None:
    """Create the collectors as a server does that uses priorities, which adds a label.

    `folder` gets the configuration of a model.
    """
    install_kernels()
    from sglang.srt.observability.metrics_collector import (
        SchedulerMetricsCollector,
        TokenizerMetricsCollector,
        tokenizer_metric_labels,
    )
    from sglang.srt.runtime_context import SpawnRanks, create_context, use_context
    from sglang.srt.server_args import ServerArgs
    from transformers import LlamaConfig

    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    args = ServerArgs(
        model_path=str(folder),
        device="cpu",
        enable_metrics=True,
        enable_priority_scheduling=True,
        skip_tokenizer_init=True,
    )
    args.resolve_once()
    with use_context(create_context(args, role="scheduler", ranks=SpawnRanks(0, 0))):
        scheduler = SchedulerMetricsCollector.init_new(
            server_args=args,
            enable_priority_scheduling=True,
            enable_lora=False,
            enable_hierarchical_cache=False,
        )
        DraftMetrics(scheduler.collector.labels, registry)
        TokenizerMetricsCollector(labels=tokenizer_metric_labels())


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_uses_exported_series_and_their_labels(exported: Exported, name: str) -> None:
    node = promql.parse(EXPRESSIONS[name])
    for selector in promql.parts(node, VectorSelector):
        assert selector.name in exported
        known = exported[selector.name].labels | promql.SCRAPED
        assert {matcher.name for matcher in selector.matchers.matchers} <= known
    promql.result_labels(node, lambda metric: exported[metric].labels)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_function_gets_the_kind_of_series_that_it_is_for(exported: Exported, name: str) -> None:
    node = promql.parse(EXPRESSIONS[name])
    calls = promql.parts(node, Call)
    assert {call.func.name for call in calls} <= FUNCTIONS
    instant = [selector.name for selector in promql.parts(node, VectorSelector)]
    for call in calls:
        if call.func.name == "histogram_quantile":
            _, buckets = call.args
            names = [selector.name or "" for selector in promql.parts(buckets, VectorSelector)]
            assert all(each.endswith("_bucket") for each in names)
            assert "le" in (promql.result_labels(buckets, lambda m: exported[m].labels) or ())
        else:
            (ranged,) = promql.parts(call, MatrixSelector)
            metric = ranged.vector_selector.name or ""
            assert exported[metric].is_counter == (call.func.name in OF_A_COUNTER)
            instant.remove(metric)
    # The present value of a counter says nothing.
    assert not any(exported[metric or ""].is_counter for metric in instant)


def test_a_legend_names_labels_of_its_series(exported: Exported) -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            node = promql.parse(target["expr"])
            labels = promql.result_labels(node, lambda metric: exported[metric].labels) or ()
            assert set(re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"])) <= set(labels)
            # All series of a query without labels in its legend would have the same name.
            assert "{{" in target["legendFormat"] or not labels


def test_every_state_that_an_expression_selects_exists() -> None:
    for expression in EXPRESSIONS.values():
        for selector in promql.parts(promql.parse(expression), VectorSelector):
            family = (selector.name or "").removeprefix("sglang:qspec_").removesuffix("_state")
            for matcher in selector.matchers.matchers:
                if matcher.name == "state":
                    assert set(matcher.value.split("|")) <= set(STATES[family][0])


def test_the_dashboard_selects_the_data_source_and_the_servers(exported: Exported) -> None:
    source, servers = DASHBOARD["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == (
        "datasource",
        "datasource",
        "prometheus",
    )
    assert (servers["name"], servers["type"], servers["allValue"]) == ("instance", "query", ".*")
    query = re.fullmatch(r"label_values\(([\w:]+), instance\)", servers["query"]["query"])
    assert query is not None
    assert query[1] in exported
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for panel in [servers, *PANELS]:
        assert panel["datasource"] == chosen
    for panel in PANELS:
        for target in panel["targets"]:
            for selector in promql.parts(promql.parse(target["expr"]), VectorSelector):
                matchers = [(m.name, m.op, m.value) for m in selector.matchers.matchers]
                assert ("instance", MatchOp.Re, "$instance") in matchers


def test_the_dashboard_fits_one_screen_without_overlaps_and_without_plugins() -> None:
    assert {panel["type"] for panel in PANELS} <= {"stat", "timeseries"}
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        taken |= cells
    # Grafana has 24 columns.  24 lines of 38 pixels fit a screen of 1080.
    assert taken == {(x, y) for x in range(24) for y in range(24)}


def test_every_panel_says_what_it_shows_and_every_query_has_its_own_letter() -> None:
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"].endswith(".")
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == list("ABCDE"[: len(letters)])


def test_an_override_names_a_series_of_its_panel() -> None:
    states = {state for names, _ in STATES.values() for state in names}
    for panel in PANELS:
        legends = {target["legendFormat"] for target in panel["targets"]}
        named = {o["matcher"]["options"] for o in panel["fieldConfig"]["overrides"]}
        assert named <= (states if legends == {"{{state}}"} else legends)


@pytest.mark.parametrize("rule", [r for r in RULES if "alert" in r], ids=lambda r: r["alert"])
def test_an_alert_says_what_happened_and_what_to_do(
    exported: Exported, rule: dict[str, Any]
) -> None:
    assert rule.keys() - {"for"} == {"alert", "expr", "labels", "annotations"}
    assert re.fullmatch(r"\d+[mh]", rule.get("for", "0m"))
    assert rule["labels"] == {"severity": "warning"}
    assert rule["annotations"].keys() == {"summary", "description"}
    labels = promql.result_labels(
        promql.parse(rule["expr"]), lambda metric: exported[metric].labels
    )
    text = " ".join(rule["annotations"].values())
    assert "$labels.instance" in rule["annotations"]["summary"]
    assert set(re.findall(r"\$labels\.(\w+)", text)) <= set(labels or ())


@pytest.mark.parametrize(
    "wrong",
    [
        "rate(sglang:qspec_passes_total[1m]",
        "rate(sglang:qspec_passes_total[1 m])",
        "sum by source (sglang:qspec_source_paused)",
        "sum by (state) (sglang:qspec_source_paused)",
        "sglang:qspec_source_paused / sglang:qspec_live_requests",
        "sglang:qspec_source_paused and on (state) sglang:qspec_sidecar_state",
        "sglang:qspec_live_requests{instance=~$instance}",
        "sglang:qspec_live_requests sglang:qspec_trie_tokens",
    ],
)
def test_wrong_promql_is_found(exported: Exported, wrong: str) -> None:
    with pytest.raises(ValueError):
        promql.result_labels(promql.parse(wrong), lambda metric: exported[metric].labels)


def test_the_rules_have_one_group_with_unique_names() -> None:
    assert [group.keys() for group in GROUPS] == [{"name", "rules"}]
    names = [rule.get("alert") or rule["record"] for rule in RULES]
    assert len(set(names)) == len(names)
    assert all(
        rule.keys() >= {"expr"} and ("alert" in rule) != ("record" in rule) for rule in RULES
    )


@pytest.mark.parametrize("accept", ["", OPENMETRICS, OPENMETRICS + ";escaping=allow-utf-8"])
def test_prometheus_stores_the_names_of_the_dashboard(accept: str) -> None:
    """For `OPENMETRICS`, which Prometheus 2 sends, prometheus_client replaces colons."""
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    assert all((FOLDER / name).is_file() for name in config["rule_files"])
    (job,) = config["scrape_configs"]
    (rule,) = job["metric_relabel_configs"]
    assert (rule["source_labels"], rule["target_label"]) == (["__name__"], "__name__")
    registry = CollectorRegistry()
    Counter("sglang:qspec_passes", "Passes.", registry=registry)
    encode, _ = choose_encoder(accept)
    sent = re.findall(r"^\w\S+_total", encode(registry).decode(), re.MULTILINE)
    stored = [
        re.sub(rf"^(?:{rule['regex']})$", rule["replacement"].replace("$", "\\"), name)
        for name in sent
    ]
    assert stored == ["sglang:qspec_passes_total"]


def test_the_documentation_explains_every_alert() -> None:
    explained = re.findall(r"^\| `(QSpec\w+)` ", PAGE, re.MULTILINE)
    assert explained == [rule["alert"] for rule in RULES if "alert" in rule]
