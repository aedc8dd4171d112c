"""The HTTP side over a batch without models: status codes, error shapes, streams, callers who hang up, blindness."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from decoder.protocol import Planner
from decoder.server import MAX_BODY, Frontend, HttpServer, Judging, create_app
from decoder.text import Text
from storage.records import RequestRecord
from tests.support_serving import Batch, Bench, Bytes

ASK = {"model": "m", "prompt": "hi", "max_tokens": 3}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


TOKEN = "a-token-of-the-judges"


class Site:
    """The application over a bench; its loop is turned by a thread unless ``held``."""

    def __init__(self, batch: Batch | None = None, queue_size: int = 2, judged: bool = False):
        self.bench = Bench(batch, queue_size, judged=judged)
        self.serving = self.bench.serving
        tokens = [bytes([i]) for i in range(256)]
        tokens[7] = "é".encode()
        reader = self.serving._reader
        self.planner = Planner(Text(Bytes(tokens)), model="m", context=100, refusal=reader.refusal)
        self.app = create_app(
            Frontend(
                self.serving, self.planner, reader, self.serving._report.metrics, pool="p", wall=lambda: 1000.0,
                judging=None if self.bench.branches is None else Judging(self.bench.branches, TOKEN),
            )
        )  # fmt: skip

    @asynccontextmanager
    async def client(self, held: bool = False) -> AsyncIterator[httpx.AsyncClient]:
        thread = threading.Thread(target=self.serving.run)
        if not held:
            thread.start()
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
                yield client
        finally:
            if not held:
                await asyncio.to_thread(self.serving.drain, 5.0)
                thread.join(5)


def post(path: str, body: Any, site: Site | None = None) -> httpx.Response:
    """One request to a fresh site."""

    async def main() -> httpx.Response:
        async with (site or Site()).client() as client:
            return (
                await client.post(path, content=body) if isinstance(body, bytes) else await client.post(path, json=body)
            )

    return asyncio.run(main())


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The documents of an event stream, which must end well."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]" and response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line) for line in lines[:-1]]


def test_a_completion_has_the_text_the_usage_and_what_decoding_cost():
    answer = post("/v1/completions", ASK | {"n": 2}).json()
    assert [c["text"] for c in answer["choices"]] == ["ééé"] * 2
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    lenity = answer["lenity"]
    assert [lenity[k] for k in ("drafted", "accepted", "target_passes", "lease")] == [8, 2, 2, [0, 0]]
    assert lenity["requests"] == [f"{answer['id']}.{i}" for i in range(2)]


def test_the_request_ids_of_the_answer_are_those_of_the_records():
    site = Site()
    answer = post("/v1/chat/completions", CHAT, site).json()
    assert [r.request_id for r in site.bench.records(RequestRecord)] == answer["lenity"]["requests"]


def test_nothing_in_an_answer_depends_on_the_arm():
    def told(**outcome: Any) -> str:
        text = post("/v1/chat/completions", CHAT, Site(Batch(**outcome))).text
        document = json.loads(text)
        return text.replace(document["id"], "")

    plain = told()
    for arm in ("lenient", "holdback"):
        assert told(arm=arm, touches=1, first_touch_at=1.0, label_drawn=True) == plain
    assert told(accepted=3) != plain  # negative control


def test_a_chat_is_streamed_in_parts_and_ends_with_its_costs():
    first, *parts, last, usage = events(
        post("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}})
    )
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(p["choices"][0]["delta"]["content"] for p in parts) == "ééé" and len(parts) == 3
    assert last["choices"][0]["finish_reason"] == "stop" and last["lenity"]["target_passes"] == 1
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 3
    assert {d["object"] for d in (first, *parts, last, usage)} == {"chat.completion.chunk"}
    assert "usage" in first and first["usage"] is None


def test_the_outputs_of_a_stream_are_told_apart_and_the_costs_come_once():
    chunks = events(post("/v1/completions", ASK | {"stream": True, "n": 2}))
    for i in range(2):
        assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) == "ééé"
    assert ["lenity" in c for c in chunks].count(True) == 1 and "lenity" in chunks[-1]


def test_the_log_probabilities_of_a_stream_come_with_their_parts():
    """Each part has those of the tokens that begin in it; one token a round here."""
    whole = post("/v1/completions", ASK | {"logprobs": 0}).json()["choices"][0]["logprobs"]
    chunks = events(post("/v1/completions", ASK | {"logprobs": 0, "stream": True}))
    told = [c["choices"][0]["logprobs"] for c in chunks]
    assert [t and t["tokens"] for t in told] == [["é"], ["é"], ["é"], None]
    assert [t["text_offset"] for t in told[:3]] == [[0], [1], [2]]
    assert {k: [x for t in told[:3] for x in t[k]] for k in whole} == whole
    chat = events(post("/v1/chat/completions", CHAT | {"logprobs": True, "stream": True}))
    said = [c["choices"][0] for c in chat]
    assert [s["logprobs"] and [t["token"] for t in s["logprobs"]["content"]] for s in said] == [
        None,
        *[["é"]] * 3,
        None,
    ]


def test_judges_get_both_texts_of_a_fork_and_nobody_else_does():
    async def main() -> None:
        site = Site(Batch(fork_drawn=True), judged=True)
        async with site.client() as client:
            name = (await client.post("/v1/completions", json=ASK)).json()["lenity"]["requests"][0]
            await until(lambda: site.bench.branches.size == 1)
            path, judge = f"/v1/quality/branches/{name}", {"authorization": f"Bearer {TOKEN}"}
            for headers in ({}, {"authorization": TOKEN}, {"authorization": "Bearer no"}):
                refused = await client.get(path, headers=headers)
                assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
            answer = await client.get(path, headers=judge)
            assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
            found = answer.json()
            assert found["request_id"] == name and found["prompt"] == "hi"
            texts = {b["branch"]: b["text"] for b in found["branches"]}
            assert texts == {"served": "ééé", "fork": "\x01\x02"} and set(found) == {"request_id", "prompt", "branches"}
            assert (await client.get(path, headers=judge)).json() == found  # the order was drawn once
            missing = await client.get("/v1/quality/branches/other", headers=judge)
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "branches_not_found")
        async with Site().client() as closed:
            assert (await closed.get(path, headers=judge)).status_code == 404

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_decoder_refuses_is_a_400_in_a_stream_too(stream):
    class Picky(Batch):
        def add(self, *args: Any) -> None:
            raise ValueError("logit_bias masks every token")

    refused = post("/v1/completions", ASK | {"stream": stream}, Site(Picky()))
    assert refused.status_code == 400
    assert refused.json()["error"] == {
        "message": "logit_bias masks every token", "type": "invalid_request_error", "param": None, "code": None,
    }  # fmt: skip


def test_a_fault_of_ours_is_a_500_without_its_details():
    batch = Batch()
    batch.fails = 1
    failed = post("/v1/completions", ASK, Site(batch))
    assert failed.status_code == 500 and "memory" not in failed.text
    assert failed.json()["error"]["type"] == "server_error"


def test_a_fault_in_the_middle_of_a_stream_is_said_in_the_stream():
    class Breaks(Batch):
        def step(self) -> Any:
            if self.knobs:
                raise RuntimeError("out of memory")
            return super().step()

    chunks = events(post("/v1/completions", ASK | {"stream": True}, Site(Breaks())))
    assert chunks[0]["choices"][0]["text"] == "é" and chunks[-1]["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("/v1/completions", b"{", 400), ("/v1/completions", b" " * (MAX_BODY + 1), 413), ("/v1/embeddings", {}, 404),
     ("/v1/models", {}, 405), ("/v1/completions", ASK | {"n": 5}, 400)],
)  # fmt: skip
def test_every_refusal_has_the_shape_of_an_error(path, body, status):
    refused = post(path, body)
    assert refused.status_code == status and set(refused.json()["error"]) == {"message", "type", "param", "code"}


def test_a_full_queue_is_a_429_that_says_when_to_come_back():
    async def main() -> None:
        site = Site(queue_size=0)
        async with site.client(held=True) as client:
            asked = [asyncio.create_task(client.post("/v1/completions", json=ASK)) for _ in range(2)]
            await until(lambda: site.serving._taken == 2)
            refused = await client.post("/v1/completions", json=ASK)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
            site.bench.turns()
            assert [(await task).status_code for task in asked] == [200, 200]

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_who_hangs_up_frees_its_row(stream):
    async def main() -> None:
        site = Site(Batch(1))
        gone = asyncio.Event()
        messages = [{"type": "http.request", "body": json.dumps(ASK | {"stream": stream, "max_tokens": 90}).encode()}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
            "query_string": b"", "headers": [], "http_version": "1.1", "scheme": "http", "root_path": "",
        }  # fmt: skip
        call = asyncio.create_task(site.app(scope, receive, send))
        await until(lambda: site.serving._taken == 1)
        for _ in range(3):
            site.serving.turn()
        assert site.bench.batch.rows == 1
        gone.set()
        await call
        site.serving.turn()
        assert site.bench.batch.rows == 0 and site.serving._taken == 0
        assert [r.finish_reason for r in site.bench.records(RequestRecord)] == ["cancelled"]

    asyncio.run(main())


def test_while_draining_everything_new_and_the_health_check_are_503():
    async def main() -> None:
        site = Site()
        async with site.client() as client:
            healthy = await client.get("/healthz")
            assert healthy.status_code == 200 and healthy.json()["status"] == "ok"
        async with site.client(held=True) as client:
            refused, unhealthy = await client.post("/v1/completions", json=ASK), await client.get("/healthz")
            assert (refused.status_code, unhealthy.status_code) == (503, 503)
            assert refused.json()["error"]["code"] == "draining" and "retry-after" in refused.headers

    asyncio.run(main())


def test_models_health_and_metrics_can_be_read():
    async def main() -> None:
        async with Site().client() as client:
            models = (await client.get("/v1/models")).json()["data"]
            assert [m["id"] for m in models] == ["m"]
            assert (await client.get("/v1/models/m")).json() == models[0]
            assert (await client.get("/v1/models/a/b")).json()["error"]["code"] == "model_not_found"
            assert (await client.get("/healthz")).json()["leases"] == {"default": "lossless: no lease"}
            await client.post("/v1/completions", json=ASK)
            metrics = (await client.get("/metrics")).text
            assert 'lenity_worker_requests_total{arm="untouched",class="default"} 1.0' in metrics

    asyncio.run(main())


def test_an_address_that_is_taken_is_an_error_and_port_0_takes_a_free_one():
    site = Site()
    server = HttpServer(site.app, "127.0.0.1", 0)
    try:
        server.start()
        with pytest.raises(OSError, match="in use"):
            HttpServer(site.app, *server.address)
    finally:
        server.close()


async def until(predicate: Callable[[], bool]) -> None:
    """Let the loop run until ``predicate`` is true."""
    for _ in range(5000):
        if predicate():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen within 5000 turns")
