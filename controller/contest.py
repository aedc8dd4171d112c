"""Rules compete: another rule or strategy that the policy lists is tried on a share of requests, and may take over.

Loss per touch differs between accept rules by two orders of magnitude, and only requests that a rule has touched tell
its own. So one *candidate* at a time gets a small share of the requests (`Lease.trial`). Its touches are charged like
all others: one each until it has evidence. It takes over when its own *bound* on loss per touch buys more speed for the
same budget than the leased rule gets now; the incumbent is judged by its estimate, so that a takeover has to be clear.
Once it has enough labels, a candidate whose estimate looks faster gets a larger share, so that its bound may follow;
one that would not even if its estimate were a standard error too high, or that found no time to win, is retired until
something has changed (the model, the traffic, the scorer) or a few windows have passed.

A strategy competes in the same way under the name of its arm (`controller.intake.arm_of`). Its seconds are measured on
other requests than those it is compared with, so a takeover also has to be clear of their standard error, and one that
would not be faster if no touch lost anything is retired without waiting for labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from controller.cascade import ERRORS
from controller.governor import Allowance, Governor
from controller.track import U_FLOOR

TRIAL_SHARE, LARGER_SHARE = 0.1, 0.3  # of the requests
GAIN = 0.03  # a candidate must be faster by this
ENOUGH = 2  # times the policy's minimum of labels, from which a candidate is judged by its estimate too
LONGEST = 2.0  # windows that a trial may take, and after which a retired rule may be tried again

SURE = 3.0  # standard errors by which the best that a strategy could do must be too slow, to be retired at once

Pace = Callable[[str, float], float | None]  # rule, touches per token -> seconds per token; None while unknown
Error = Callable[[str, float], float]  # the same -> standard error of its gain over what is leased, seconds per token


@dataclass(frozen=True)
class Verdict:
    """What became of the contest at one decision: the rule on trial with its touches per request, and any news.

    ``reason`` is ``rule_trial`` or ``rule_switched`` when something began or ended, with a sentence and the numbers.
    """

    trial: str | None = None
    tau: float = 0.0
    share: float = 0.0
    reason: str = ""
    explanation: str = ""
    numbers: dict[str, Any] | None = None


class Contest:
    """Which rule is tried when. Times are steady seconds."""

    def __init__(self) -> None:
        self.trial: str | None = None
        self.share = TRIAL_SHARE
        self._began = 0.0
        self._retired: dict[str, float] = {}

    def renew(self) -> None:
        """The model, the traffic or the scorer has changed: every rule may be tried again."""
        self._retired.clear()

    def decide(
        self,
        governor: Governor,
        rules: Sequence[str],
        allowance: Allowance,
        pace: Pace,
        now: float,
        error: Error | None = None,
    ) -> Verdict:
        """Start, go on with, or end a trial; a switch has been made in ``governor`` when it is told.

        ``error`` is given when the rule on trial belongs to another strategy than the leased one. While an operator's
        order stands nothing is tried and nothing changes.
        """
        window_s = governor.policy.window_s
        self._retired = {rule: at for rule, at in self._retired.items() if now - at < LONGEST * window_s}
        if self.trial is not None and (self.trial not in rules or self.trial == governor.rule):
            self.trial = None
        if governor.standing.order is not None:
            return Verdict()
        room = allowance.remaining >= (governor.policy.start + governor.policy.stop) / 2
        calm = allowance.state == "measured" and room and allowance.reason != "quality_alarm"
        if self.trial is None:
            waiting = [r for r in rules if r != governor.rule and r not in self._retired]
            ready = calm and allowance.forks_matured >= governor.policy.min_labels
            if not waiting or not ready:
                return Verdict()
            self.trial, self._began, self.share = waiting[0], now, TRIAL_SHARE
            governor.note("rule_trial")
            _, tau = governor.candidate(self.trial, self.share, allowance.fork, now)
            said = f"{self.trial} is tried on {TRIAL_SHARE:.0%} of the requests beside {governor.rule}."
            numbers = {"rule": governor.rule, "trial": self.trial}
            return Verdict(self.trial, tau, self.share, "rule_trial", said, numbers)
        return self._judge(governor, self.trial, allowance, pace, now, error)

    def leave(self, governor: Governor, back: str, said: str, numbers: dict[str, Any], now: float) -> Verdict:
        """Retire what is leased, by its measured cost, and lease ``back`` again."""
        self._retired[governor.rule] = now
        self._retired.pop(back, None)
        if self.trial is not None:
            governor.track(self.trial).tau = 0.0
        self.trial = None
        governor.switch(back, now)
        return Verdict(reason="rule_switched", explanation=said, numbers=numbers)

    def _judge(
        self, governor: Governor, trial: str, allowance: Allowance, pace: Pace, now: float, error: Error | None
    ) -> Verdict:
        r, tau = governor.candidate(trial, self.share, allowance.fork, now)
        policy, known = governor.policy, governor.track(trial).sequences.planning(now)
        upper = max(r.per_touch, known.upper_per_touch(1 - policy.confidence))
        numbers: dict[str, Any] = {
            "rule": governor.rule,
            "trial": trial,
            "share": self.share,
            "labels": r.labelled,
            "per_touch": r.per_touch,
            "u_kappa": upper,
            "incumbent_per_touch": allowance.per_touch,
        }
        promising = r.labelled < ENOUGH * policy.min_labels
        if r.labelled >= policy.min_labels and r.measured:
            plan = r.allowed / (1 - policy.holdback) / allowance.mean_length
            least = max(U_FLOOR, (known.bound.total + 1 - math.sqrt(known.squares + 1)) / known.touches)
            surely, likely, perhaps = (pace(trial, plan / loss) for loss in (upper, r.per_touch, least))
            ours = pace(governor.rule, allowance.d_allowed)
            if surely is not None and likely is not None and perhaps is not None and ours is not None:
                numbers |= {"seconds_per_token": surely, "incumbent_seconds_per_token": ours}
                noise = 0.0
                if error is not None:  # it starts at the touches that were seen, and must not be slower there
                    start = min(tau, r.tau_seen) / allowance.mean_length
                    first = pace(trial, start)
                    surely = surely if first is None else max(surely, first)
                    numbers["seconds_per_token"] = surely
                    noise = ERRORS * error(trial, start)
                if surely < ours * (1 - GAIN) - noise:
                    return self._take_over(governor, trial, numbers, now)
                better = likely < ours * (1 - GAIN)
                promising = promising or perhaps < ours * (1 - GAIN)
                self.share = LARGER_SHARE if better and r.labelled >= ENOUGH * policy.min_labels else self.share
        if error is not None:
            best, ours = pace(trial, 1.0), pace(governor.rule, allowance.d_allowed)
            if best is not None and ours is not None:
                numbers |= {"best_seconds_per_token": best, "incumbent_seconds_per_token": ours}
                hopeless = best - SURE * error(trial, 1.0) > ours * (1 - GAIN)
                promising = promising and not hopeless
        late = now - self._began > LONGEST * policy.window_s
        if not promising or late:
            self.trial = None
            self._retired[trial] = now
            governor.track(trial).tau = 0.0
            why = ", and its time is over" if late else ""
            said = (
                f"{trial} is retired after {r.labelled} labels: a touch of it loses about {r.per_touch:.3g}, at most "
            )
            said += f"{upper:.3g}{why}; {governor.rule} stays."
            return Verdict(reason="rule_trial", explanation=said, numbers=numbers)
        return Verdict(trial, tau, self.share, numbers=numbers)

    def _take_over(self, governor: Governor, trial: str, numbers: dict[str, Any], now: float) -> Verdict:
        before = governor.rule
        governor.switch(trial, now)
        self.trial = None
        self._retired[before] = now
        gain = numbers["incumbent_seconds_per_token"] / numbers["seconds_per_token"] - 1
        said = (
            f"{trial} takes over from {before}: a touch of it loses at most {numbers['u_kappa']:.3g} against "
            f"{numbers['incumbent_per_touch']:.3g}, which makes the same budget {gain:.0%} faster."
        )
        return Verdict(reason="rule_switched", explanation=said, numbers=numbers)

    def to_state(self) -> list[Any]:
        """JSON-able state that continues exactly."""
        return [self.trial, self.share, self._began, [list(item) for item in self._retired.items()]]

    @classmethod
    def from_state(cls, state: list[Any]) -> Contest:
        """The contest that `to_state` described."""
        self = cls()
        self.trial, self.share, self._began, retired = state
        self._retired = dict(retired)
        return self
