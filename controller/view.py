"""What the loop shows to the outside: plain immutable snapshots, and the board that hands them out.

After each tick the loop builds one `PoolView` and calls `Board.publish`; the API, the event stream and the metrics read
only these. Times are Unix seconds on the loop's steady clock, durations seconds, ratios fractions (0.2 is 20%).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from storage.records import Lease

STATES = (
    "certified",
    "measured",
    "insufficient data",
    "uncertified",
    "breached",
    "no traffic",
    "disabled",
)

ARMS = ("untouched", "lenient", "holdback")


@dataclass(frozen=True, kw_only=True)
class AlertView:
    """One alert of a class: its name, whether it fires now, and one sentence that says why."""

    name: str
    firing: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimate with its interval; ``None`` where a side has no bound. Bounds on loss are anytime-valid at the
    policy's confidence, the others 95% by normal approximation."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class ClassView:
    """One traffic class as of one tick; ``None`` means not known yet, except for ``mu``, where it means infinity.

    ``state`` is one of `STATES`. ``counters`` are cumulative and never fall while the controller runs; the keys are
    ``requests.<arm>``, ``touches``, ``lenient_touches``, ``tokens``, ``target_passes``, ``drafted``, ``examined``,
    ``accepted``, ``request_seconds``, ``forks``, ``fork_target_passes``, ``detected.<signal>``,
    ``scores.<arm>.<metric>`` and ``score_sum.<arm>.<metric>`` with the arms of `ARMS` (a forked branch counts under the
    arm that it stands for). A missing key reads as 0.

    ``estimates`` are named ``acceptance``, ``tokens_per_pass``, ``touches_per_token``, ``loss`` (per request of the
    window) and ``loss_per_touch``. ``positions`` is the probability to accept at each drafted position, given that it
    is examined. ``frontier`` are pairs (touches per token, speed against plain decoding), both ascending;
    ``frontier_at`` is where the knobs in use stand and ``frontier_allowed`` how many touches per token are allowed.
    ``override`` is what an operator ordered, ``freeze`` or ``lossless``, with who and why.
    """

    traffic_class: str
    state: str
    reason: str
    explanation: str
    rule: str
    g: int
    theta: float
    rho: float
    mu: float | None
    lease_epoch: int
    lease_seq: int
    lease_ttl_s: float
    acceptance: float | None = None
    block_efficiency: float | None = None
    tokens_per_second: float | None = None
    predicted_speedup_plain: float | None = None
    predicted_speedup_lossless: float | None = None
    touches_per_request_allowed: float = 0.0
    touches_per_request_seen: float | None = None
    u_kappa: float = 1.0
    spent: float = 0.0
    spent_upper: float = 0.0
    budget: float = 0.0
    remaining: float = 1.0
    burn: Mapping[str, float] = field(default_factory=dict)
    burn_lower: Mapping[str, float] = field(default_factory=dict)  # loss per touch at least, by long window
    alerts: tuple[AlertView, ...] = ()
    forks_matured: int = 0
    labels_needed: int | None = None
    quality_lenient: float | None = None
    quality_lossless: float | None = None
    requests_in_window: int = 0
    max_loss: float = 0.0
    metric: str = ""
    window_s: float = 0.0
    confidence: float = 0.0
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    positions: tuple[float, ...] = ()
    frontier: tuple[tuple[float, float], ...] = ()
    frontier_at: tuple[float, float] | None = None
    frontier_allowed: float | None = None
    seconds_per_request: float | None = None
    seconds_to_first_token: float | None = None
    lease: Lease | None = None
    held_until: float | None = None  # when the cooldown ends, in Unix seconds; it moves while the burn goes on
    override: str | None = None
    override_who: str | None = None
    override_why: str | None = None
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PoolView:
    """One pool as of one tick.

    ``tick_seconds`` is how long the last tick took, ``interval_s`` how often the loop means to tick (readiness turns
    false after two of them without a tick). ``policy_rejected`` is the reason why the newest edit of the policy was
    refused (the last good revision stays active), ``degraded`` lists in plain words what does not work at the moment.

    ``leader`` is False on a controller that waits; ``holder`` names the one that leads, and ``controllers`` counts both
    kinds. ``entries_lost`` were trimmed or deleted unread, ``blocks_missing`` are numbers that workers gave out and
    that have not come, ``handler_failures`` entries that could not be handled; ``ticks_missed`` and ``tick_failures``
    are of this process. While ``database_away``, ``spooled_ticks`` wait on disk; ``rows_lost`` ticks found no place.
    """

    pool: str
    policy_revision: int
    policy_source: str
    policy_rejected: str | None
    epoch: int
    leader: bool
    time: float
    tick_seconds: float
    interval_s: float
    last_telemetry_age_s: float | None
    stream_lag: int
    dead_letters: int
    classes: tuple[ClassView, ...]
    degraded: tuple[str, ...] = ()
    holder: str = ""
    controllers: int = 1
    entries_lost: int = 0
    blocks_missing: int = 0
    handler_failures: int = 0
    ticks_missed: int = 0
    tick_failures: int = 0
    database_away: bool = False
    spooled_ticks: int = 0
    rows_lost: int = 0


@dataclass(frozen=True)
class Wanted:
    """A request that is worth a label: touched, its label drawn and missing, times in Unix seconds.

    ``branches`` are those without a score, ``served`` and ``fork``, in random order; which arm each stands for is not
    told. After ``deadline`` a label is worth nothing.
    """

    request_id: str
    traffic_class: str
    branches: tuple[str, ...]
    touched_at: float
    deadline: float


class BoardFull(Exception):
    """There are as many event streams open as the board allows."""


class Board:
    """Thread-safe holder of the newest view of each pool.

    ``publish`` may be called from any thread and never blocks on readers. Each event stream is a `Subscription` that
    keeps only the newest view per pool, so a slow reader costs a bounded amount of memory and nobody waits for it.
    """

    def __init__(self, max_subscriptions: int = 64) -> None:
        self._lock = threading.Lock()
        self._views: dict[str, PoolView] = {}
        self._subscriptions: set[Subscription] = set()
        self._listeners: tuple[Callable[[PoolView], None], ...] = ()
        self._max = max_subscriptions
        self._closed = False

    def publish(self, view: PoolView) -> None:
        """Replace the view of ``view.pool``, call the listeners, and wake the event streams."""
        with self._lock:
            self._views[view.pool] = view
            subscriptions = list(self._subscriptions)
            listeners = self._listeners
        for listener in listeners:
            listener(view)
        for subscription in subscriptions:
            subscription._offer(view)

    def remove(self, pool: str) -> None:
        """Forget a pool; whoever listens keeps what it was shown."""
        with self._lock:
            self._views.pop(pool, None)

    def listen(self, listener: Callable[[PoolView], None]) -> None:
        """Call ``listener`` with every view from now on, in the publishing thread; it must be quick and not raise."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def pools(self) -> list[PoolView]:
        """The newest view of every pool, by name."""
        with self._lock:
            return [self._views[name] for name in sorted(self._views)]

    def pool(self, name: str) -> PoolView | None:
        """The newest view of one pool, None if it has none."""
        with self._lock:
            return self._views.get(name)

    def subscribe(self) -> Subscription:
        """A subscription for the running event loop, primed with every view there is; raises `BoardFull`."""
        with self._lock:
            if len(self._subscriptions) >= self._max:
                raise BoardFull(f"{self._max} event streams are open")
            subscription = Subscription(self, asyncio.get_running_loop(), dict(self._views), closed=self._closed)
            self._subscriptions.add(subscription)
        return subscription

    def close(self) -> None:
        """End every event stream now and at once from here on, so that none of them holds up a shutdown."""
        with self._lock:
            self._closed = True
            subscriptions = list(self._subscriptions)
        for subscription in subscriptions:
            subscription._offer(None)

    @property
    def subscribers(self) -> int:
        """How many event streams are open."""
        with self._lock:
            return len(self._subscriptions)

    def _remove(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscriptions.discard(subscription)


class Subscription:
    """One event stream's place on the board; a context manager that leaves the board at its end."""

    def __init__(
        self, board: Board, loop: asyncio.AbstractEventLoop, pending: dict[str, PoolView], *, closed: bool
    ) -> None:
        self._board, self._loop, self._pending, self._closed = board, loop, pending, closed
        self._wake = asyncio.Event()
        if pending or closed:
            self._wake.set()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc: object) -> None:
        self._board._remove(self)

    async def next(self) -> list[PoolView] | None:
        """Wait for news and return the newest view of each pool that changed; None once the board is closed."""
        await self._wake.wait()
        self._wake.clear()
        if self._closed:
            return None
        views, self._pending = list(self._pending.values()), {}
        return views

    def _offer(self, view: PoolView | None) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and its streams with it
            self._loop.call_soon_threadsafe(self._accept, view)

    def _accept(self, view: PoolView | None) -> None:
        if view is None:
            self._closed = True
        else:
            self._pending[view.pool] = view
        self._wake.set()
