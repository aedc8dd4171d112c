"""A real worker process on the bundled pair, asked by the real `openai` client over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from storage.embedded import EmbeddedServer
from storage.records import CapRow, ForkRecord, KnobRow, Lease, RequestRecord, TokenBlock, Trial, from_fields
from storage.stream import LeaseStore, connect, telemetry_key
from tests.support import wait_until

ROOT = Path(__file__).parents[2]
LEASE = Lease(
    pool="demo", traffic_class="default", epoch=1, seq=1, policy_revision=1, issued=0.0, ttl=600.0, rule="token_v3",
    table=(KnobRow(8, 4, 0.8, 1.0),), caps=(CapRow(0.5, 0.3, 1.0),), holdback=0.3, fork=1.0, label=0.0,
    strategies=("speculative", "bild", "sequence_cascade"), rules=("token_v3", "threshold"),
    trial=Trial(0.0, "sequence_cascade", "confidence_min", (KnobRow(8, 4, 0.3, 1.0),)),
)  # fmt: skip
QUESTION = "Question: Leo starts with 20 books. Leo doubles the books. How many books has Leo in the end?\nAnswer:"
CHAT: Any = [{"role": "user", "content": QUESTION}]
NEVER_ENDS = {"2": -100}  # the end token is banned
ROWS, QUEUE = 2, 1


class Site(NamedTuple):
    """A worker that serves, and what it says to the stream."""

    client: openai.OpenAI
    url: str
    process: subprocess.Popen[str]
    stream: Any

    def records(self, kind: type) -> list[Any]:
        entries = [from_fields(fields) for _, fields in self.stream.xrange(telemetry_key("demo"))]
        return [entry for entry in entries if isinstance(entry, kind)]

    def record(self, answer: Any) -> RequestRecord:
        """The record of an answer with one output, once it has arrived."""
        [name] = answer.lenity["requests"]
        return wait_until(lambda: next((r for r in self.records(RequestRecord) if r.request_id == name), None))

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(name)))


@contextmanager
def serving(directory: Path, *options: str) -> Iterator[Site]:
    """A worker process with a lease; its log is in ``directory/worker.log``."""
    log = directory / "worker.log"
    with EmbeddedServer(directory / "valkey") as server, log.open("w") as out:
        stream = connect(server.url)
        LeaseStore(stream).write(LEASE)
        command = [sys.executable, "-m", "decoder.cli", "worker", "--redis-url", server.url, "--worker-id", "w1"]
        command += ["--serve", "127.0.0.1:0", "--max-rows", str(ROWS), "--queue", str(QUEUE), *options]
        process = subprocess.Popen(
            command, cwd=ROOT, stderr=out, stdout=out, text=True, env=os.environ | {"LC_ALL": "C"}
        )
        try:
            said = wait_until(lambda: listening(log, process), timeout=90, every=0.05)
            url = f"http://127.0.0.1:{said['port']}"
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
                yield Site(client, url, process, stream)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(10)


def listening(log: Path, process: subprocess.Popen[str]) -> dict[str, Any] | None:
    assert process.poll() is None, log.read_text()
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    return next((line for line in lines if line["event"] == "worker: listening"), None)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with serving(tmp_path_factory.mktemp("site")) as running:
        yield running


def complete(site: Site, **options: Any) -> Any:
    lenity = options.pop("lenity", {"max_loss": 0})
    given = {"model": "demo", "prompt": QUESTION, "max_tokens": 60, "temperature": 0} | options
    return site.client.completions.create(**given, extra_body={"lenity": lenity})


def test_both_endpoints_streamed_or_not_give_one_text_for_one_seed(site):
    whole = complete(site, temperature=1, seed=5)
    said: dict[str, Any] = {"model": "demo", "seed": 5, "max_tokens": 60, "extra_body": {"lenity": {"max_loss": 0}}}
    chat = site.client.chat.completions.create(messages=CHAT, **said)
    parts = list(site.client.chat.completions.create(messages=CHAT, stream=True, **said))
    text = whole.choices[0].text
    assert text and chat.choices[0].message.content == text
    assert "".join(p.choices[0].delta.content or "" for p in parts) == text
    assert len(parts) > 4 and parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert parts[-1].lenity["drafted"] == whole.lenity["drafted"] > 0
    assert whole.usage.completion_tokens > whole.lenity["target_passes"]


def test_outputs_of_one_request_differ_and_repeat(site):
    first, again = (complete(site, temperature=1, seed=5, n=3) for _ in range(2))
    texts = [c.text for c in first.choices]
    assert len(set(texts)) == 3 and texts == [c.text for c in again.choices]
    assert texts[0] == complete(site, temperature=1, seed=5).choices[0].text
    assert len(first.lenity["requests"]) == 3


def test_a_stop_string_that_is_split_over_tokens_ends_the_text_before_it(site):
    text = complete(site).choices[0].text
    for stop in (text[9:14], text[-1], text[3:30]):
        ended = complete(site, stop=["never said", stop])
        parts = list(complete(site, stop=[stop], stream=True))
        assert ended.choices[0].text == text[: text.index(stop)] and ended.choices[0].finish_reason == "stop"
        assert "".join(p.choices[0].text for p in parts) == ended.choices[0].text


def test_max_tokens_ends_the_text_with_its_reason(site):
    ended = complete(site, max_tokens=5)
    assert (ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("length", 5)


def test_logprobs_are_those_of_the_tokens_in_the_text(site):
    given = complete(site, logprobs=2)
    choice = given.choices[0]
    end = "<eos>"
    assert "".join(choice.logprobs.tokens).removesuffix(end) == choice.text
    for token, value, top in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert max(top, key=top.get) == token and top[token] == pytest.approx(value, abs=1e-6) and value <= 0
    chat = site.client.chat.completions.create(
        model="demo",
        messages=CHAT,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body={"lenity": {"max_loss": 0}},
    )
    content = chat.choices[0].logprobs.content
    assert "".join(t.token for t in content).removesuffix(end) == chat.choices[0].message.content
    assert [t.logprob for t in content] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
    assert all(len(t.top_logprobs) == 2 and bytes(t.bytes).decode() == t.token for t in content)


@pytest.mark.parametrize("stop", [None, "has"])
def test_streamed_logprobs_come_with_the_parts_they_belong_to(site, stop):
    whole = complete(site, logprobs=1, stop=stop).choices[0]
    parts = [p.choices[0] for p in complete(site, logprobs=1, stop=stop, stream=True)]
    with_them = [p for p in parts if p.logprobs is not None]
    assert [t for p in with_them for t in p.logprobs.tokens] == whole.logprobs.tokens
    assert [v for p in with_them for v in p.logprobs.token_logprobs] == whole.logprobs.token_logprobs
    assert [at for p in with_them for at in p.logprobs.text_offset] == whole.logprobs.text_offset
    shown = 0
    for p in parts:
        offsets = p.logprobs.text_offset if p.logprobs is not None else []
        shown += len(p.text)
        assert all(shown - len(p.text) <= at <= shown for at in offsets)  # the end token begins where the text ends
    assert len(with_them) > 3


def test_a_banned_token_never_comes_out(site):
    free = complete(site)
    banned = complete(site, logit_bias=NEVER_ENDS, max_tokens=100)
    assert banned.choices[0].finish_reason == "length" and banned.choices[0].text.startswith(free.choices[0].text)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"echo": True}, "echo"),
        ({"prompt": QUESTION * 40}, "prompt"),
        ({"prompt": [5, 99999]}, None),
        ({"logit_bias": {"99999": 1}}, None),
        ({"lenity": {"rule": "lenience"}}, "lenity.rule"),
        ({"lenity": {"strategy": "cascade"}}, "lenity.strategy"),
        ({"lenity": {"max_loss": 2}}, "lenity.max_loss"),
    ],
)
def test_what_cannot_be_served_is_a_400_that_names_the_field(site, options, param):
    with pytest.raises(openai.BadRequestError) as refused:
        complete(site, **options)
    assert refused.value.param == param


def test_the_model_list_names_the_model(site):
    assert [m.id for m in site.client.models.list()] == ["demo"]
    with pytest.raises(openai.NotFoundError):
        complete(site, model="other")


def test_a_caller_can_tighten_the_lease_and_never_loosen_it(site):
    asked = {
        "the lease": ({}, ("token_v3", 0.8, 1.0, "speculative")),
        "half of the loss": ({"max_loss": 0.5}, ("token_v3", 0.3, 1.0, "speculative")),
        "less than any cap": ({"max_loss": 0.4}, ("token_v3", 0.0, 0.0, "speculative")),
        "lossless": ({"max_loss": 0}, ("lossless", 0.0, 0.0, "speculative")),
        "the lossless rule": ({"rule": "lossless"}, ("lossless", 0.0, 0.0, "speculative")),
        "the rule of the lease": ({"rule": "token_v3"}, ("token_v3", 0.8, 1.0, "speculative")),
        "no drafts": ({"strategy": "plain"}, ("lossless", 0.0, 0.0, "plain")),
        "a rule without knobs": ({"rule": "threshold"}, ("lossless", 0.0, 0.0, "speculative")),
        "a cascade without knobs": ({"strategy": "bild"}, ("lossless", 0.0, 0.0, "bild")),
        "what is tried": ({"strategy": "sequence_cascade"}, ("confidence_min", 0.3, 1.0, "sequence_cascade")),
    }
    for what, (lenity, expected) in asked.items():
        answer = complete(site, lenity=lenity, temperature=1)
        record = site.record(answer)
        assert answer.lenity["lease"] == [1, 1], what
        assert (record.rule, record.theta, record.rho, record.strategy) == expected, what
        assert record.fork_prob == 0.0  # nothing here could score a fork
        assert (answer.lenity["drafted"] == 0) == (what == "no drafts"), what
        assert (record.confidence is not None) == (record.draft_s > 0) == (what == "what is tried")


def test_json_answers_are_never_touched_and_the_lease_alone_touches_many(site):
    """Twenty requests each way: 0.8 of token_v3 touches more than one in five here, and pinned positions none."""

    def touched(**options: Any) -> int:
        answers = [
            site.client.chat.completions.create(model="demo", messages=CHAT, seed=i, max_tokens=60, **options)
            for i in range(20)
        ]
        return sum(site.record(answer).touches > 0 for answer in answers)

    assert touched(response_format={"type": "json_object"}) == 0
    assert touched() >= 2


def test_a_full_queue_is_a_429_and_hanging_up_frees_the_rows(site):
    cancelled = site.metric("lenity_worker_cancelled_requests_total")
    stream = complete(site, n=ROWS + QUEUE, max_tokens=400, logit_bias=NEVER_ENDS, stream=True)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError) as refused:
        complete(site)
    assert int(refused.value.response.headers["retry-after"]) >= 1
    stream.close()
    wait_until(lambda: site.metric("lenity_worker_cancelled_requests_total") == cancelled + ROWS + QUEUE, timeout=20)
    assert complete(site).choices[0].finish_reason == "stop"
    assert site.metric("lenity_worker_running_requests") == 0


def test_sigterm_finishes_what_runs_refuses_what_is_new_and_exits_with_0(tmp_path):
    with serving(tmp_path, "--scorer", "json", "--traffic-class", "default") as site:
        stream = complete(site, max_tokens=200, logit_bias=NEVER_ENDS, stream=True, temperature=1, lenity={})
        parts = [next(iter(stream))]
        site.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{site.url}/healthz").status_code == 503, timeout=20)
        with pytest.raises(openai.InternalServerError) as refused:
            complete(site)
        assert refused.value.status_code == 503 and refused.value.code == "draining"
        parts += list(stream)
        assert parts[-1].choices[0].finish_reason == "length"
        assert site.process.wait(30) == 0
        [record] = site.records(RequestRecord)
        assert record.tokens == 200 and record.finish_reason == "length"
        blocks = site.records(TokenBlock)
        assert sum(int(b.round_emitted.sum()) for b in blocks) == 200
        # A drawn fork that there was no time for is said, not forgotten.
        forks = site.records(ForkRecord)
        assert len(forks) == int(record.fork_drawn)


def test_callers_at_once_all_get_the_answer_they_would_get_alone(site):
    alone = [complete(site, temperature=1, seed=i).choices[0].text for i in range(3)]
    together: dict[int, str] = {}

    def ask(i: int) -> None:
        together[i] = complete(site, temperature=1, seed=i).choices[0].text

    threads = [threading.Thread(target=ask, args=[i]) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [together[i] for i in range(3)] == alone
