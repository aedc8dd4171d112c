"""What each alert says to a person. `page` is for a quality objective at stake, `ticket` for speed or evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AlertText:
    """Severity, one line, and a few plain sentences; ``{{ }}`` is filled by Prometheus, ``<name>`` by the policy."""

    severity: Literal["page", "ticket"]
    summary: str
    description: str


_WHERE = "Pool {{ $labels.pool }}, class {{ $labels.class }}"
_POOL = "Pool {{ $labels.pool }}"

TEXTS: dict[str, AlertText] = {
    "LenityBudgetBurn": AlertText(
        "page",
        _WHERE + ": the quality budget burns more than <factor> times as fast as planned",
        "Over <long> at least {{ $value | humanize }} times the planned loss (<plan> a request) was spent, and over"
        " <short> it still goes on. This is a lower bound. Lenity decodes this class losslessly until its cooldown is"
        " over and the budget has recovered.",
    ),
    "LenityBudgetLow": AlertText(
        "ticket",
        _WHERE + ": {{ $value | humanizePercentage }} of the quality budget is left",
        "Less than <limit> of the window's budget is left, counted at its upper bound. Lenity has shrunk leniency and"
        " goes on shrinking it while the budget falls.",
    ),
    "LenityBudgetExhausted": AlertText(
        "page",
        _WHERE + ": the quality budget is used up",
        "{{ $value | humanizePercentage }} of the window's budget is left, and at <limit> leniency stops. Lenity"
        " decodes this class losslessly until the window has recovered.",
    ),
    "LenityFloorBreached": AlertText(
        "page",
        _WHERE + ": served answers score below the policy's floor",
        "The mean score of what was served in the window is below <floor>. Lenity decodes this class losslessly, so"
        " what keeps the score low is not leniency: look at the target, the prompts and the scorer.",
    ),
    "LenityTelemetryStale": AlertText(
        "ticket",
        _WHERE + ": no requests are seen",
        "No telemetry of served requests has come for a while, although leniency is leased. Either there is no traffic,"
        " or workers cannot reach the stream. Lenity holds leniency where it is and does not widen it.",
    ),
    "LenityLabelsStale": AlertText(
        "ticket",
        _WHERE + ": no quality labels come, so leniency is not certified by any",
        "Forks were drawn and none was labelled within <deadline>. Missing labels count as lost answers, so leniency"
        " shrinks by itself to what is certified without labels.",
    ),
    "LenityPolicyRejected": AlertText(
        "ticket",
        _POOL + ": the newest edit of the policy is refused",
        "The last good revision stays in force. The controller's log, its page and `lenity status` name file, line and"
        " key.",
    ),
    "LenityLeaderless": AlertText(
        "ticket",
        _POOL + ": no controller leads the pool",
        "Controllers run, and none of them holds the pool's lease. Workers turn lossless when their lease ends and keep"
        " serving with the last block length.",
    ),
    "LenityControllerDown": AlertText(
        "ticket",
        _POOL + ": no controller reports on it",
        "No controller exports this pool. Workers turn lossless when their lease ends and keep serving with the last"
        " block length.",
    ),
    "LenityTicksLate": AlertText(
        "ticket",
        _POOL + ": the control loop ticks less than half as often as it should",
        "{{ $value | humanizePercentage }} of the planned ticks happen. Leases may end before they are renewed, and"
        " workers are lossless meanwhile.",
    ),
    "LenityDegraded": AlertText(
        "ticket",
        _POOL + ": the controller works without {{ $value }} of the things it needs",
        "`/readyz` and the page name them: the stream, the database or leases. Lenity goes on from memory where it"
        " can.",
    ),
    "LenityDeadLetters": AlertText(
        "ticket",
        _POOL + ": {{ $value | humanize }} stream entries were set aside in 15 minutes",
        "They were malformed, out of range or not readable, and count for nothing; the rest of the traffic is"
        " processed. The controller's log says why.",
    ),
    "LenityAcceptanceCollapse": AlertText(
        "ticket",
        _WHERE + ": {{ $value | humanizePercentage }} of examined draft tokens are accepted",
        "That is less than 0.6 of the day's average. Lenity shortens blocks, down to plain decoding, so that nothing"
        " gets slower than without drafts; the gain is lost until the cause is found.",
    ),
    "LenityWorkerLossless": AlertText(
        "ticket",
        "Worker {{ $labels.instance }} of pool {{ $labels.pool }} obeys no lease",
        "It decodes losslessly with the last block length: it has seen no valid lease for 5 minutes, or cannot do what"
        " the lease asks for.",
    ),
    "LenityTelemetryDropped": AlertText(
        "ticket",
        "Worker {{ $labels.instance }} of pool {{ $labels.pool }} drops telemetry",
        "{{ $value | humanize }} entries in 15 minutes: its buffer was full, since the stream was slow or away."
        " Decoding went on. What was dropped is missing from the"
        " estimates; forks among it count as lost at their deadline.",
    ),
}
