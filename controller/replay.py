"""From everything a decision rests on to its lease, as one pure function; and how that is stored and played again.

`Inputs` holds the curve, the seconds per batch bucket, the allowance, what was held before, and the orders in force.
`solve_for` turns them into knobs, `lease_of` into the lease: the controller decides with the very same function, so a
stored decision replays to the same lease bit for bit. Curves are rounded to 13 bits of mantissa *before* they are
solved (a relative 1e-4, far below their standard errors) and keep by-depth values of the levels that the solver looked
at, so that a decision takes about ten kilobytes.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from controller.cascade import CascadeCurve, Option, cascade_option
from controller.curve import Curve, F, Ints, Settings
from controller.solve import Solution, choose, frontier, gain_noise, plan_for, within_reach
from policies.errors import SolveError
from storage.records import MAX_DEPTH, CapRow, Decision, KnobRow, Lease, Trial

if TYPE_CHECKING:
    from policies.model import ClassPolicy

DEFAULT_G = 4  # block length while nothing has been measured
MIN_GAIN = 0.01  # a new block length must be faster by this, and by as many standard errors as NOISE_FACTOR says
NOISE_FACTOR = 0.25
LEAVE_PLAIN = 0.03  # drafting must be faster by this where nothing is drafted
FEW_FACTOR = 1.0  # the same while too few rounds are known since a change
CAP_SHARES = (0.0, 0.25, 0.5, 0.75)
MOST_EXPLORED = 4.0  # where nothing is drafted, rounds with one draft are up to this many times as frequent
REPEAT_S = 60.0  # a decision is worth storing at least this often
READ_ONLY = 1e-6  # knob of a cascade that is only to say how sure its drafts are: at 0 it would draft nothing
_DROPPED_BITS = 11  # of the 23 of a float32's mantissa
_CASCADES = ("cascade", "cascade_trial")
_PACKED = ("curve", "trial", "fence", "frozen", *_CASCADES)  # in a form of their own
_COLUMNS = ("threshold", "share", "share_se", "seconds_per_token", "seconds_se")
_ARRAYS = ("reach", "touches", "reach_se", "touches_se")

Seconds = tuple[tuple[float, ...], tuple[float, ...], float]  # draft, verify, overhead of a round, by block length


@dataclass(frozen=True)
class Fence:
    """What makes a lease the newest one: the controller's epoch, the lease's number, the policy revision, its ttl."""

    epoch: int
    seq: int
    revision: int
    ttl: float


@dataclass(frozen=True)
class Traced(Curve):
    """A curve that remembers which levels' by-depth values were looked at."""

    used: set[int] = field(default_factory=set)

    def tokens_by_depth(self, level: Ints) -> F:
        """As `Curve.tokens_by_depth`."""
        self.used.update(int(v) for v in np.unique(level))
        return super().tokens_by_depth(level)

    def at(self, level: int, depth: float, pessimism: float = 0.0) -> tuple[F, F]:
        """As `Curve.at`."""
        self.used.add(int(level))
        return super().at(level, depth, pessimism)

    @classmethod
    def of(cls, curve: Curve) -> Traced:
        """The curve, rounded."""
        arrays: dict[str, Any] = {name: rounded(getattr(curve, name)) for name in (*_ARRAYS, "by_depth", "n_eff")}
        arrays["starts"] = rounded(curve.shift)
        return cls(settings=curve.settings, **arrays)


@dataclass(frozen=True)
class TrialInputs:
    """A rule on trial: the share of requests that get it, what it may touch per token, and its curve."""

    share: float
    strategy: str
    rule: str
    d_allowed: float
    curve: Traced


@dataclass(frozen=True)
class CascadeInputs:
    """A sequence cascade, leased or on trial: the share of requests that get it, the touches per request that it may
    cause, and its curve, None while too few of its answers are known."""

    share: float
    strategy: str
    rule: str
    allowed: float
    curve: CascadeCurve | None

    def option(self, x: Inputs, share: float = 1.0) -> Option | None:
        """The best threshold within ``share`` of what is allowed; None where nothing may be believed."""
        if self.curve is None or not x.learnt:
            return None
        return cascade_option(
            self.strategy,
            self.curve,
            allowed=share * self.allowed,
            max_theta=x.limits["max_theta"],
            holdback=x.holdback,
        )


@dataclass(frozen=True)
class Inputs:
    """Everything a lease rests on.

    ``curve`` is None while too little is measured to solve; ``learnt`` says that enough rounds are known for leniency.
    ``held`` are block lengths in use and ``frozen`` the table that may only be tightened, both by batch bucket;
    ``plain`` are the buckets that decode plainly for one interval, to be measured.
    """

    now: float
    fence: Fence
    pool: str
    traffic_class: str
    rule: str
    limits: dict[str, Any]  # the policy's, see `limits_of`
    d_allowed: float
    holdback: float
    fork: float
    label: float
    learnt: bool
    curve: Traced | None
    seconds: dict[int, Seconds]
    held: dict[int, int]
    widest: int
    strategy: str = "speculative"
    plain: tuple[int, ...] = ()
    frozen: tuple[KnobRow, ...] | None = None
    trial: TrialInputs | None = None
    cascade: CascadeInputs | None = None  # leased: its rounds are lossless
    cascade_trial: CascadeInputs | None = None


@dataclass(frozen=True)
class Solved:
    """Knobs by batch bucket, limits by share of the budget, the solution that touches most, and that of the trial.

    ``option`` and ``trial_option`` are a cascade's best threshold, leased and on trial.
    """

    table: tuple[KnobRow, ...]
    caps: tuple[CapRow, ...]
    solution: Solution | None
    trial: Solution | None = None
    trial_table: tuple[KnobRow, ...] = ()
    option: Option | None = None
    trial_option: Option | None = None


def limits_of(policy: ClassPolicy) -> dict[str, Any]:
    """What a lease takes from the policy."""
    names = ("max_theta", "g_max", "explore", "strategies", "rules", "structured", "label_deadline_s")
    return {name: getattr(policy, name) for name in names}


def solve_for(x: Inputs) -> Solved:
    """The knobs; raises SolveError as `controller.solve.solve` does."""
    if x.curve is None or not x.seconds:
        return Solved((KnobRow(1, min(DEFAULT_G, x.limits["g_max"]), 0.0, 0.0),), (), None)
    max_theta, g_max = x.limits["max_theta"], x.limits["g_max"]
    g_max = min(g_max, max(within_reach(x.curve, g_max), *x.held.values(), 0))
    d_allowed = x.d_allowed if x.learnt and x.cascade is None else 0.0
    plan = plan_for(x.curve, d_allowed=d_allowed, max_theta=max_theta, g_max=g_max)
    table, solutions = [], []
    for rows, seconds in x.seconds.items():
        found = plan.pick(*seconds)
        held = x.held.get(rows)
        if held is not None and held != found.g:
            current = plan.pick(*seconds, fixed_g=held)
            factor = NOISE_FACTOR if x.learnt else FEW_FACTOR
            noise = max(MIN_GAIN if held else LEAVE_PLAIN, factor * gain_noise(x.curve, current, found))
            found = current if x.frozen is not None else choose(current, found, noise)
        solutions.append(found)
        table.append(KnobRow(rows, found.g, found.theta, found.rho, found.depth))
    g = table[0].g
    caps = []
    for share in CAP_SHARES:
        front = frontier(x.curve, d_allowed=d_allowed * share, max_theta=max_theta, g_max=g_max)
        caps.append(CapRow(share, *front.knobs(x.curve, g)))
    most = max(solutions, key=lambda s: s.touches_per_token_upper)
    solved = _with_cascades(x, Solved(tuple(table), tuple(caps), most))
    if x.trial is None or not x.learnt:
        return solved
    trial = plan_for(x.trial.curve, d_allowed=x.trial.d_allowed, max_theta=max_theta, g_max=g_max)
    tried = {at: trial.pick(*seconds) for at, seconds in x.seconds.items()}
    knobs = tuple(KnobRow(at, s.g, s.theta, s.rho, s.depth) for at, s in tried.items())
    return replace(solved, trial=max(tried.values(), key=lambda s: s.touches_per_token_upper), trial_table=knobs)


def _with_cascades(x: Inputs, solved: Solved) -> Solved:
    """The cascades' thresholds: the leased one's in place of the rounds' knobs, that of the one on trial beside them.
    The target's own rounds keep the block lengths."""
    rounds = solved.table
    if x.cascade is not None:
        option = x.cascade.option(x)
        some = [x.cascade.option(x, share) for share in CAP_SHARES]
        knobs = [(0.0, 0.0) if o is None else (o.theta, 1.0) for o in some]
        caps = tuple(CapRow(share, *knob, MAX_DEPTH) for share, knob in zip(CAP_SHARES, knobs, strict=True))
        solved = replace(solved, table=_believing(rounds, 0.0 if option is None else option.theta), caps=caps)
        solved = replace(solved, option=option)
    if x.cascade_trial is not None and x.learnt:
        option = x.cascade_trial.option(x)
        table = _believing(rounds, READ_ONLY if option is None else option.theta)
        solved = replace(solved, trial_table=table, trial_option=option)
    return solved


def _believing(rounds: tuple[KnobRow, ...], theta: float) -> tuple[KnobRow, ...]:
    return tuple(KnobRow(row.batch, row.g, theta, float(theta > 0)) for row in rounds)


def lease_of(x: Inputs, solved: Solved | None = None) -> Lease:
    """The lease that these inputs lead to. Raises SolveError as `solve_for` does."""
    solved = solved or solve_for(x)
    table = knobs_of(x, solved)
    table = tuple(replace(row, g=0, theta=0.0, rho=0.0) if row.batch in x.plain else row for row in table)
    lenient = not x.plain and solved.solution is not None and solved.solution.theta > 0
    lenient = lenient or (solved.option is not None and not x.plain)
    trial, tried = None, x.cascade_trial or x.trial
    if tried is not None and solved.trial_table and not x.plain:
        trial = Trial(tried.share, tried.strategy, tried.rule, solved.trial_table)
    measured = lenient or trial is not None
    limits = x.limits
    return Lease(
        pool=x.pool,
        traffic_class=x.traffic_class,
        epoch=x.fence.epoch,
        seq=x.fence.seq,
        policy_revision=x.fence.revision,
        issued=x.now,
        ttl=x.fence.ttl,
        rule=x.rule,
        table=table,
        caps=solved.caps,
        holdback=x.holdback if measured else 0.0,
        fork=x.fork if measured else 0.0,
        label=x.label if measured else 0.0,
        explore=_explore(x, table),
        strategy=x.strategy,
        strategies=tuple(dict.fromkeys((*limits["strategies"], "plain"))),
        rules=tuple(limits["rules"]),
        structured=limits["structured"],
        label_deadline=limits["label_deadline_s"],
        trial=trial,
    )


def knobs_of(x: Inputs, solved: Solved) -> tuple[KnobRow, ...]:
    """The knobs by batch bucket, no more lenient than the frozen ones; plain intervals come on top."""
    return solved.table if x.frozen is None else tuple(_tightened(row, x.frozen) for row in solved.table)


def _tightened(row: KnobRow, before: tuple[KnobRow, ...]) -> KnobRow:
    """A row no more lenient than the one that served such a batch before."""
    was = next((b for b in before if row.batch <= b.batch), before[-1])
    if (row.theta, row.rho, row.depth) <= (was.theta, was.rho, was.depth):
        return replace(row, g=was.g)
    return replace(was, batch=row.batch)


def _explore(x: Inputs, table: tuple[KnobRow, ...]) -> float:
    """Probability that a row drafts one more. Each row tosses it and one longer block slows down all rows, so it is
    the policy's share of rounds over the rows. Where nothing is drafted, the only rounds that would notice a draft
    that has become good, a share of time is meant: a draft that is cheap is tried more often."""
    share, rows = float(x.limits["explore"]), x.widest
    held = next((row for row in table if rows <= row.batch), table[-1])
    seconds = next((s for at, s in x.seconds.items() if rows <= at), None) or next(iter(x.seconds.values()), None)
    if held.g == 0 and not x.plain and seconds is not None:
        draft, verify, overhead = seconds
        plain, more = verify[0] + overhead, draft[1] + verify[1] - verify[0]
        share *= min(MOST_EXPLORED, max(1.0, plain / max(more, 1e-9)))
    return float(min(1.0, share) / rows)


# -- stored and played again -------------------------------------------------------------------------------------------


def rounded(values: F) -> F:
    """Values with 12 bits of mantissa, as float64; zero stays zero, and the order of values stays."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    kept = (bits + (1 << (_DROPPED_BITS - 1))) & ~np.uint32((1 << _DROPPED_BITS) - 1)
    return kept.view(np.float32).astype(np.float64)


def pack(x: Inputs) -> dict[str, Any]:
    """JSON-able `Inputs`."""
    plain = {f.name: getattr(x, f.name) for f in fields(x) if f.name not in _PACKED}
    plain["limits"] = {k: list(v) if isinstance(v, tuple) else v for k, v in x.limits.items()}
    plain["seconds"] = [[rows, _text(np.asarray((*d, *v, o)), "<f8"), len(d)] for rows, (d, v, o) in x.seconds.items()]
    plain["held"] = [[rows, g] for rows, g in x.held.items()]
    plain["fence"] = asdict(x.fence)
    plain["frozen"] = None if x.frozen is None else [asdict(row) for row in x.frozen]
    plain["curve"] = None if x.curve is None else _pack_curve(x.curve)
    plain["trial"] = None
    if x.trial is not None:
        named = {f.name: getattr(x.trial, f.name) for f in fields(x.trial) if f.name != "curve"}
        plain["trial"] = named | {"curve": _pack_curve(x.trial.curve)}
    plain |= {name: _pack_cascade(getattr(x, name)) for name in _CASCADES}
    return plain


def unpack(packed: Mapping[str, Any]) -> Inputs:
    """The inputs that `pack` wrote."""
    values = dict(packed)
    values["limits"] = {k: tuple(v) if isinstance(v, list) else v for k, v in packed["limits"].items()}
    values["seconds"] = {int(rows): _seconds(_array(text, "<f8"), int(n)) for rows, text, n in packed["seconds"]}
    values["held"] = {int(rows): int(g) for rows, g in packed["held"]}
    values["fence"] = Fence(**packed["fence"])
    values["plain"] = tuple(packed["plain"])
    values["frozen"] = None if packed["frozen"] is None else tuple(KnobRow(**row) for row in packed["frozen"])
    values["curve"] = None if packed["curve"] is None else _unpack_curve(packed["curve"])
    if packed["trial"] is not None:
        values["trial"] = TrialInputs(**(packed["trial"] | {"curve": _unpack_curve(packed["trial"]["curve"])}))
    values |= {name: _unpack_cascade(packed.get(name)) for name in _CASCADES}
    return Inputs(**values)


def replay(decision: Decision) -> Lease:
    """The lease of a stored decision, computed again; raises SolveError for one that holds no inputs."""
    packed = decision.inputs.get("solve")
    if packed is None:
        raise SolveError("this decision was stored without its inputs, by an older controller; it cannot be replayed")
    return lease_of(unpack(packed))


def significant(previous: Decision | None, decision: Decision) -> bool:
    """Whether a decision is worth storing after ``previous``, the last stored one of its class.

    The lease changed in more than its number, time and fork probability, or state or reason did, or a minute passed.
    """
    if previous is None or decision.time - previous.time >= REPEAT_S or decision.time < previous.time:
        return True
    if (decision.state, decision.reason) != (previous.state, previous.reason):
        return True

    def content(lease: Lease) -> Lease:
        return replace(lease, seq=0, issued=0.0, fork=0.0)

    return content(decision.lease) != content(previous.lease)


def _pack_curve(curve: Traced) -> dict[str, Any]:
    """A rounded curve: all levels at full depth, and those that were looked at by depth."""
    used = sorted(curve.used)
    return {
        "theta": _text(curve.settings.theta, "<f8"),
        "levels": curve.settings.levels,
        "shape": list(curve.reach.shape),
        "arrays": [_text(getattr(curve, name), "<f4") for name in _ARRAYS],
        "n_eff": _text(curve.n_eff, "<f4"),
        "starts": _text(curve.shift, "<f4"),
        "used": used,
        "by_depth": _text(curve.by_depth[used], "<f4"),
    }


def _unpack_curve(packed: Mapping[str, Any]) -> Traced:
    rows, columns = (int(v) for v in packed["shape"])
    arrays: dict[str, Any] = {
        name: _array(text, "<f4").reshape(rows, columns) for name, text in zip(_ARRAYS, packed["arrays"], strict=True)
    }
    by_depth = np.repeat(arrays["reach"][:, None, :], columns, axis=1)
    by_depth[packed["used"]] = _array(packed["by_depth"], "<f4").reshape(-1, columns, columns)
    settings = Settings(theta=_array(packed["theta"], "<f8"), levels=int(packed["levels"]))
    n_eff = _array(packed["n_eff"], "<f4")
    if "starts" in packed:
        arrays["starts"] = _array(packed["starts"], "<f4")
    return Traced(settings=settings, by_depth=by_depth, n_eff=n_eff, used=set(packed["used"]), **arrays)


def _pack_cascade(x: CascadeInputs | None) -> dict[str, Any] | None:
    """A cascade with every bit of its curve's numbers."""
    if x is None:
        return None
    named: dict[str, Any] = {f.name: getattr(x, f.name) for f in fields(x) if f.name != "curve"}
    if x.curve is None:
        return named | {"curve": None}
    return named | {"curve": [_text(getattr(x.curve, n), "<f8") for n in _COLUMNS], "answers": x.curve.answers}


def _unpack_cascade(packed: Mapping[str, Any] | None) -> CascadeInputs | None:
    if packed is None:
        return None
    values = dict(packed)
    answers = values.pop("answers", 0)
    if values["curve"] is not None:
        columns = {n: _array(text, "<f8") for n, text in zip(_COLUMNS, values["curve"], strict=True)}
        values["curve"] = CascadeCurve(**columns, answers=int(answers))
    return CascadeInputs(**values)


def _text(values: F, dtype: str) -> str:
    """Base64 of zlib of the little-endian bytes, the first bytes of all values first."""
    raw = np.ascontiguousarray(values, dtype=dtype).reshape(-1)
    planes = raw.view(np.uint8).reshape(-1, raw.itemsize).T
    return base64.b64encode(zlib.compress(np.ascontiguousarray(planes).tobytes(), 9)).decode()


def _array(text: str, dtype: str) -> F:
    size = np.dtype(dtype).itemsize
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8).reshape(size, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype).astype(np.float64)


def _seconds(values: F, lengths: int) -> Seconds:
    numbers = [float(v) for v in values]
    return tuple(numbers[:lengths]), tuple(numbers[lengths:-1]), numbers[-1]
