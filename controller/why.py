"""A decision in plain words with its numbers: why a class decodes as it does, and what to do about it.

Pure: from the newest view of a class, and where there is one the decision that it shows, to sentences. The command
line, the API and the page show the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from controller.view import ClassView
from policies.scalars import format_duration

# What a person can do about it, by reason code.
ADVICE: Mapping[str, str] = {
    "fast_burn": "Look at what changed when the burn began (decisions, alerts, policy revisions, scorer version). "
    "Nothing needs to be done to protect quality: decoding is lossless until the cooldown is over.",
    "exhausted": "Find what cost the budget before opening it again. It comes back by itself as old requests leave the "
    "window; an operator may reset or adjust it once the cause is gone.",
    "floor": "Look at why served answers score so low; decoding is lossless, so leniency is not the cause any more.",
    "pull_back": "Nothing at once: leniency shrinks by itself. If the loss is new, find out what changed.",
    "labels_missing": "See whether the scorer runs and its labels arrive; until then leniency shrinks.",
    "no_traffic": "See whether the workers run and reach the stream.",
    "few_labels": "Send labels for the requests that GET /v1/quality/wanted lists.",
    "waiting_for_labels": "Nothing: it goes on with the next labels. More labels make it faster.",
    "unproven": "Nothing: it goes on once the labels of the last step have come.",
    "quality_alarm": "Look at what changed for the worse: answers that leniency touched have begun to lose more.",
    "learning": "Nothing: it opens once enough rounds are measured.",
    "disabled": "Raise max_loss in the policy to allow leniency.",
    "frozen": "Resume it when the reason for the freeze is gone.",
    "forced_lossless": "Resume it when the reason for it is gone.",
}


@dataclass(frozen=True)
class Why:
    """One class: a headline, sentences with the numbers, when it may change by itself, and what to do."""

    pool: str
    traffic_class: str
    state: str
    reason: str
    headline: str
    sentences: tuple[str, ...]
    returns: str | None
    advice: str | None
    time: float


def explain(pool: str, view: ClassView, decision: Mapping[str, Any] | None, now: float) -> Why:
    """Why ``view`` is as it is; ``decision`` is a row of `History.decisions`, None where the history cannot be read."""
    mode = "plain" if view.g == 0 else "lossless" if view.theta == 0 or view.rho == 0 else "lenient"
    headline = f"{pool} / {view.traffic_class} decodes {mode}: {view.state}, {_words(view.reason)}."
    sentences = [view.explanation, _order(view), _budget(view)]
    if view.max_loss > 0:
        sentences.append(_allowed(view))
    sentences.append(_knobs(view))
    policy = (decision or {}).get("inputs", {}).get("policy", {})
    firing = [a for a in view.alerts if a.firing]
    sentences += [f"Alert {a.name}: {a.detail.rstrip('.')}." for a in firing]
    return Why(
        pool,
        view.traffic_class,
        view.state,
        view.reason,
        headline,
        tuple(s for s in sentences if s),
        _returns(view, policy, now),
        ADVICE.get(view.reason),
        now if decision is None else float(decision.get("unix_time", now)),
    )


def _words(reason: str) -> str:
    return reason.replace("_", " ")


def _order(v: ClassView) -> str:
    """An operator's order where something else is the first reason."""
    if v.override is None or v.reason in ("frozen", "forced_lossless"):
        return ""
    return f"Besides, {v.override_who} ordered {v.override}: {v.override_why}."


def _budget(v: ClassView) -> str:
    if v.max_loss <= 0:
        return ""
    window = f" of {format_duration(v.window_s)}" if v.window_s > 0 else ""
    left = f"{max(0.0, v.remaining):.1%} of the error budget is left"
    over = f", {-v.remaining:.0%} overspent" if v.remaining < 0 else ""
    return (
        f"{left}{over}: at most {v.spent_upper:.2f} of {v.budget:.2f} requests' worth of quality are spent in the "
        f"window{window} ({v.requests_in_window} requests, {v.max_loss:.3g} loss each tolerated)."
    )


def _allowed(v: ClassView) -> str:
    proof = (
        f"{v.forks_matured} compared answers bound the loss per touch at {v.u_kappa:.3g}"
        if v.u_kappa < 1
        else "without enough compared answers every touch counts as a loss"
    )
    seen = "" if v.touches_per_request_seen is None else f"; lately there were {v.touches_per_request_seen:.3g}"
    more = "" if v.labels_needed is None else f" About {v.labels_needed} more labels are needed for the next step."
    return f"{v.touches_per_request_allowed:.3g} touches per request are allowed, since {proof}{seen}.{more}"


def _knobs(v: ClassView) -> str:
    mu = "∞" if v.mu is None else f"{v.mu:.3g}"
    text = f"Each round drafts {v.g} tokens with theta {v.theta:.3g} (mu {mu}, rho {v.rho:.3g}, rule {v.rule})"
    if v.predicted_speedup_plain is None:
        return text + "; its speed is not known yet."
    lossless = "" if v.predicted_speedup_lossless is None else f" and {v.predicted_speedup_lossless:.2f}× lossless"
    return text + f", predicted {v.predicted_speedup_plain:.2f}× as fast as plain decoding{lossless}."


def _returns(v: ClassView, policy: Mapping[str, Any], now: float) -> str | None:
    """When leniency may come back by itself."""
    if v.reason in ("frozen", "forced_lossless"):
        return "Only when an operator resumes it."
    if v.reason not in ("fast_burn", "exhausted", "floor"):
        return None
    known = {"start", "stop"} <= set(policy)
    share = (policy["start"] + policy["stop"]) / 2 if known else None
    sentences = []
    if v.held_until is not None and v.held_until > now:
        left = format_duration(max(1.0, round(v.held_until - now)))
        sentences.append(f"Not before {datetime.fromtimestamp(v.held_until, UTC):%H:%M:%S} UTC, in {left}.")
    if v.reason != "exhausted":
        sentences.append("Later if it goes on: the cooldown begins anew with every tick that still sees it.")
    if share is None or v.remaining < share:
        window = format_duration(v.window_s) if v.window_s > 0 else "the window"
        least = "enough of the budget" if share is None else f"{share:.1%} of the budget"
        sentences.append(f"When {least} is left again, as old requests leave the window; after {window} at the latest.")
    if v.override == "lossless":
        sentences.append("Besides, an operator has to resume it.")
    return " ".join(sentences)
