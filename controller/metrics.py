"""What the controller exports to Prometheus; every metric is in the table of `docs/metrics.md`.

Counters are exported and ratios are left to queries (a ratio of two rates is right over any window, an exported ratio
over none). The values are read from the newest `PoolView` at scrape time, so a class that is gone leaves no series. A
controller that does not lead a pool exports nothing of its classes.
Labels are bounded: pools and classes come from the policies, arms and states from fixed lists, and of classes beyond
`MAX_CLASSES` and of other names beyond `MAX_NAMES` nothing is exported. No request ids.
"""

from __future__ import annotations

import contextlib
import platform
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from controller.view import ARMS, STATES, Board, ClassView, PoolView

MAX_CLASSES = 64
MAX_NAMES = 32
OVERRIDES = ("freeze", "lossless")
SIGNALS = ("draft", "mix", "cost", "quality")
TICK_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

Samples = Iterable[tuple[tuple[str, ...], float | None]]


@dataclass(frozen=True)
class Family:
    """One metric: name, kind, help, label names, and how its samples are read from a view (None is not exported)."""

    name: str
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    help: str
    labels: tuple[str, ...]
    read: Callable[[PoolView], Samples]

    def collect(self, views: Iterable[PoolView]) -> CounterMetricFamily | GaugeMetricFamily:
        """The family with the samples of ``views``."""
        family = self.kind(self.name, self.help, labels=self.labels)
        for view in views:
            for labels, value in self.read(view):
                if value is not None:
                    family.add_metric(labels, value)
        return family


class ControllerMetrics(Collector):
    """The controller's metrics in ``registry``, following every view published on ``board``.

    Without a board, `update` is called once per tick and pool, from any thread.
    """

    def __init__(self, registry: CollectorRegistry, board: Board | None = None) -> None:
        self._lock = threading.Lock()
        self._views: dict[str, PoolView] = {}
        self._ticks = Counter("lenity_ticks", "Ticks of the control loop.", ["pool"], registry=registry)
        self._tick_seconds = Histogram(
            "lenity_tick_seconds", "Time that a tick took.", ["pool"], buckets=TICK_BUCKETS, registry=registry
        )
        self._files = Gauge(
            "lenity_policy_files_rejected", "Policy files that are refused and govern no pool.", registry=registry
        )
        build = Gauge("lenity_build_info", "1, with the versions that run.", ["version", "python"], registry=registry)
        build.labels(_version(), platform.python_version()).set(1)
        registry.register(self)
        if board is not None:
            board.listen(self.update)

    def update(self, view: PoolView) -> None:
        """Count one tick and show ``view`` from now on."""
        self._ticks.labels(view.pool).inc()
        self._tick_seconds.labels(view.pool).observe(view.tick_seconds)
        with self._lock:
            self._views[view.pool] = view

    def forget(self, pool: str) -> None:
        """Show ``pool`` no longer."""
        with self._lock:
            self._views.pop(pool, None)
        for metric in (self._ticks, self._tick_seconds):
            with contextlib.suppress(KeyError):
                metric.remove(pool)

    def files_rejected(self, count: int) -> None:
        """Show how many policy files are refused and govern no pool (`PolicySet.rejected`)."""
        self._files.set(count)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """The families, read from the newest views."""
        with self._lock:
            views = [self._views[name] for name in sorted(self._views)]
        for family in FAMILIES:
            yield family.collect(views)

    def describe(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """The families without samples, so that the registry knows their names before the first tick."""
        for family in FAMILIES:
            yield family.collect(())


def _per_pool(name: str, help: str, read: Callable[[PoolView], float | None], kind: type = GaugeMetricFamily) -> Family:
    return Family(name, kind, help, ("pool",), lambda view: [((view.pool,), read(view))])


def _per_class(name: str, help: str, read: Callable[[ClassView], float | None]) -> Family:
    return _by_class(name, help, (), lambda c: [((), read(c))])


def _by_class(
    name: str,
    help: str,
    labels: tuple[str, ...],
    read: Callable[[ClassView], Samples],
    kind: type = GaugeMetricFamily,
) -> Family:
    """A family with the labels ``pool``, ``class`` and ``labels``, where ``read`` gives the values of the last."""

    def samples(view: PoolView) -> Samples:
        for c in view.classes[:MAX_CLASSES] if view.leader else ():
            for values, value in read(c):
                yield (view.pool, c.traffic_class, *values), value

    return Family(name, kind, help, ("pool", "class", *labels), samples)


def _count(name: str, help: str, key: str) -> Family:
    return _by_class(name, help, (), lambda c: [((), c.counters.get(key, 0.0))], CounterMetricFamily)


def _requests(c: ClassView) -> Samples:
    return [((arm,), c.counters.get(f"requests.{arm}", 0.0)) for arm in ARMS]


def _scores(prefix: str) -> Callable[[ClassView], Samples]:
    """Samples by (metric, arm) of the counters ``<prefix>.<arm>.<metric>``; a metric's name may contain dots."""

    def read(c: ClassView) -> Samples:
        parts = sorted(key.split(".", 2) for key in c.counters if key.startswith(f"{prefix}."))
        metrics = sorted({p[2] for p in parts if len(p) == 3 and p[1] in ARMS})[:MAX_NAMES]
        return [((m, arm), c.counters.get(f"{prefix}.{arm}.{m}", 0.0)) for m in metrics for arm in ARMS]

    return read


def _state(c: ClassView) -> Samples:
    known = c.state if c.state in STATES else "other"
    return [((state,), float(state == known)) for state in (*STATES, "other")]


def _speedups(c: ClassView) -> Samples:
    return [(("plain",), c.predicted_speedup_plain), (("lossless",), c.predicted_speedup_lossless)]


def _override(c: ClassView) -> Samples:
    return [((kind,), float(c.override == kind)) for kind in OVERRIDES]


def _detected(c: ClassView) -> Samples:
    return [((signal,), c.counters.get(f"detected.{signal}", 0.0)) for signal in SIGNALS]


def _drawn(c: ClassView) -> Samples:
    lease = c.lease
    return [] if lease is None else [(("holdback",), lease.holdback), (("fork",), lease.fork)]


def _touches(c: ClassView) -> Samples:
    return [(("allowed",), c.touches_per_request_allowed), (("seen",), c.touches_per_request_seen)]


def _version() -> str:
    try:
        return version("lenity")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


_COUNTER = CounterMetricFamily

FAMILIES: tuple[Family, ...] = (
    _by_class("lenity_requests", "Finished requests.", ("arm",), _requests, CounterMetricFamily),
    _count("lenity_touches", "Tokens that leniency accepted and lossless verification would have rejected.", "touches"),
    _count("lenity_lenient_touches", "Touches of requests whose leniency was kept.", "lenient_touches"),
    _count("lenity_tokens", "Emitted tokens.", "tokens"),
    _count("lenity_target_passes", "Forward passes of the target model.", "target_passes"),
    _count("lenity_drafted_tokens", "Drafted tokens.", "drafted"),
    _count("lenity_examined_tokens", "Drafted tokens whose accept test was evaluated.", "examined"),
    _count("lenity_accepted_tokens", "Drafted tokens that were accepted.", "accepted"),
    _count("lenity_request_seconds", "Time spent on finished requests.", "request_seconds"),
    _count("lenity_forks", "Paired forks that ran to their end.", "forks"),
    _count("lenity_fork_target_passes", "Target passes that forks cost.", "fork_target_passes"),
    _by_class("lenity_detected_changes", "Changes detected.", ("signal",), _detected, CounterMetricFamily),
    _by_class("lenity_scores", "Quality scores received.", ("metric", "arm"), _scores("scores"), CounterMetricFamily),
    _by_class(
        "lenity_score_sum", "Sum of quality scores.", ("metric", "arm"), _scores("score_sum"), CounterMetricFamily
    ),
    _by_class("lenity_state", "1 for the state that the class is in, 0 for the others.", ("state",), _state),
    _by_class("lenity_override", "1 while an operator's order holds.", ("order",), _override),
    _per_class("lenity_theta", "Leniency knob in use, 0 is lossless.", lambda c: c.theta),
    _per_class("lenity_rho", "Mixing weight of the accept rule in use.", lambda c: c.rho),
    _per_class("lenity_block_length_tokens", "Draft tokens per round in use.", lambda c: c.g),
    _by_class("lenity_touches_per_request", "Touches per request: allowed and seen.", ("which",), _touches),
    _by_class("lenity_predicted_speedup_ratio", "Predicted speed over another way.", ("against",), _speedups),
    _per_class("lenity_budget_remaining_ratio", "Share of the error budget left, may be < 0.", lambda c: c.remaining),
    _per_class("lenity_budget_loss", "Loss that the window's budget allows, in requests.", lambda c: c.budget),
    _per_class("lenity_budget_spent_loss", "Loss spent in the window: estimate, in requests.", lambda c: c.spent),
    _per_class(
        "lenity_budget_spent_upper_loss", "Loss spent in the window: upper bound, in requests.", lambda c: c.spent_upper
    ),
    _per_class("lenity_max_loss_ratio", "Mean loss that the policy tolerates.", lambda c: c.max_loss),
    _per_class("lenity_loss_per_touch_upper", "Upper bound on the loss per touch, U_kappa.", lambda c: c.u_kappa),
    _by_class(
        "lenity_loss_per_touch_lower",
        "Lower bound on the loss per touch by a paging rule's long window; 0 while it has too few labels.",
        ("window",),
        lambda c: [((window,), lower) for window, lower in list(c.burn_lower.items())[:MAX_NAMES]],
    ),
    _by_class("lenity_drawn_ratio", "Share of touched requests drawn for holdback or a fork.", ("what",), _drawn),
    _per_class("lenity_window_requests", "Requests in the budget's window.", lambda c: c.requests_in_window),
    _per_class("lenity_evidence_forks", "Paired forks that count as evidence now.", lambda c: c.forks_matured),
    _per_class("lenity_labels_needed", "Labelled requests needed for a measurement.", lambda c: c.labels_needed),
    _by_class(
        "lenity_burn_rate",
        "Budget burn rate over a window; 1 spends exactly the plan.",
        ("window",),
        lambda c: [((window,), rate) for window, rate in list(c.burn.items())[:MAX_NAMES]],
    ),
    _by_class(
        "lenity_alert_firing",
        "1 while the alert fires.",
        ("alert",),
        lambda c: [((alert.name,), float(alert.firing)) for alert in c.alerts[:MAX_NAMES]],
    ),
    _per_class("lenity_lease_epoch", "Fencing epoch of the newest lease.", lambda c: c.lease_epoch),
    _per_class("lenity_lease_seq", "Sequence number of the newest lease in its epoch.", lambda c: c.lease_seq),
    _per_class("lenity_lease_ttl_seconds", "Time that a lease stays valid.", lambda c: c.lease_ttl_s),
    _per_pool(
        "lenity_dead_letters", "Stream entries refused as malformed.", lambda v: v.dead_letters, CounterMetricFamily
    ),
    _per_pool("lenity_stream_lag_entries", "Stream entries not read yet.", lambda v: v.stream_lag),
    _per_pool("lenity_telemetry_age_seconds", "Time since the newest telemetry.", lambda v: v.last_telemetry_age_s),
    _per_pool("lenity_last_tick_timestamp_seconds", "When the loop last ticked, in Unix seconds.", lambda v: v.time),
    _per_pool("lenity_tick_interval_seconds", "How often the loop means to tick.", lambda v: v.interval_s),
    _per_pool("lenity_policy_revision", "Active policy revision.", lambda v: v.policy_revision),
    _per_pool(
        "lenity_policy_rejected", "1 while the newest policy edit is refused.", lambda v: v.policy_rejected is not None
    ),
    _per_pool("lenity_leader", "1 on the controller that leads the pool.", lambda v: v.leader),
    _per_pool("lenity_leader_epoch", "Fencing epoch of this controller.", lambda v: v.epoch),
    _per_pool("lenity_controllers", "Controllers that are there for the pool.", lambda v: v.controllers),
    _per_pool("lenity_entries_lost", "Entries gone before they were read.", lambda v: v.entries_lost, _COUNTER),
    _per_pool("lenity_blocks_missing", "Block numbers that have not come.", lambda v: v.blocks_missing),
    _per_pool("lenity_handler_failures", "Entries that no handler took.", lambda v: v.handler_failures, _COUNTER),
    _per_pool("lenity_ticks_missed", "Ticks that did not run in time.", lambda v: v.ticks_missed, _COUNTER),
    _per_pool("lenity_tick_failures", "Ticks in which a pool failed.", lambda v: v.tick_failures, _COUNTER),
    _per_pool("lenity_spooled_ticks", "Ticks on disk while the database is away.", lambda v: v.spooled_ticks),
    _per_pool("lenity_rows_lost", "Ticks whose rows found no place.", lambda v: v.rows_lost, _COUNTER),
    _per_pool("lenity_degraded", "How many things do not work at the moment.", lambda v: len(v.degraded)),
)
