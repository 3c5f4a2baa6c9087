"""What Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from polytoken.server.turn import Turn

_LATENCY: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counts of one server. Every server has a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        kept: Any = {"registry": self.registry}
        self.responses = Counter("polytoken_http_responses", "Answers by path and status.", ["path", "status"], **kept)
        self.turns = Counter("polytoken_turns", "Generating calls by model and end.", ["model", "end"], **kept)
        self.prompt = Counter("polytoken_prompt_tokens", "Prompt tokens.", ["model"], **kept)
        self.cached = Counter(
            "polytoken_cached_prompt_tokens", "Prompt tokens restored, not computed.", ["model"], **kept
        )
        self.generated = Counter("polytoken_generated_tokens", "New tokens.", ["model"], **kept)
        self.forwards = Counter("polytoken_forwards", "Forwards of the network.", ["model"], **kept)
        self.drafted = Counter("polytoken_drafted_tokens", "Tokens that were drafted.", ["model"], **kept)
        self.accepted = Counter("polytoken_accepted_drafts", "Drafts that were accepted.", ["model"], **kept)
        self.ttft = Histogram(
            "polytoken_time_to_first_token_seconds", "From the call to its first token.", ["model"],
            buckets=_LATENCY, **kept,
        )  # fmt: skip
        self.duration = Histogram(
            "polytoken_turn_seconds", "From the call to its end.", ["model"], buckets=_LATENCY, **kept
        )
        self.open = Gauge("polytoken_open_turns", "Generating calls in progress.", **kept)
        self.loaded = Gauge("polytoken_loaded_models", "Models in memory.", **kept)

    def count(self, model: str, turn: Turn, seconds: float) -> None:
        """Add a turn that is over."""
        self.turns.labels(model, turn.end).inc()
        self.duration.labels(model).observe(seconds)
        if turn.first_token is not None:
            self.ttft.labels(model).observe(turn.first_token)
        for member in turn.members:
            self.prompt.labels(model).inc(member.prompt_tokens)
            self.cached.labels(model).inc(member.cached_tokens)
            self.generated.labels(model).inc(member.tokens)
            if member.result is not None:
                self.forwards.labels(model).inc(member.result.forwards)
                self.drafted.labels(model).inc(float(member.result.extra.get("drafted_tokens", 0)))
                self.accepted.labels(model).inc(float(member.result.extra.get("accepted_drafts", 0)))

    def text(self, engines: Mapping[str, Mapping[str, Any]]) -> bytes:
        """The exposition, with what the engines say of themselves now."""
        collector = _Engines(engines)
        self.registry.register(collector)
        try:
            return generate_latest(self.registry)
        finally:
            self.registry.unregister(collector)


class _Engines(Collector):
    """Numbers of the lanes' own statistics, one gauge per name."""

    def __init__(self, engines: Mapping[str, Mapping[str, Any]]) -> None:
        self._engines = engines

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        gauges: dict[str, GaugeMetricFamily] = {}
        for model, statistics in self._engines.items():
            for name, value in statistics.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    gauge = gauges.get(name)
                    if gauge is None:
                        text = f"The lane's {name.replace('_', ' ')}."
                        gauge = gauges[name] = GaugeMetricFamily(f"polytoken_engine_{name}", text, labels=["model"])
                    gauge.add_metric([model], float(value))
        return gauges.values()
