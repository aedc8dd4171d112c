"""The worker's HTTP side, as OpenAI's clients speak it: completions, chat completions, models, health, metrics.

Handlers run in one event loop and only parse, wait and render; decoding happens in the thread of `Serving`. What a
caller is told never depends on the arm of its request.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import structlog
import uvicorn
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from decoder.branches import BranchStore
from decoder.knobs import LeaseReader
from decoder.protocol import ApiError, Plan, Planner
from decoder.render import Renderer
from decoder.request import Completion, TokenLogprob
from decoder.request import Request as DecoderRequest
from decoder.serving import Busy, Draining, Job, Serving
from decoder.spans import SpanTracker
from decoder.text import Text, TextStream
from decoder.worker import Scoring, WorkerMetrics

log = structlog.get_logger(__name__)

MAX_BODY = 4 << 20  # bytes of a request
RETRY_DRAINING = 5  # seconds


class _Event(NamedTuple):
    """Something that happened to one output (-1: to the connection)."""

    output: int
    kind: Literal["tokens", "finished", "failed", "gone"]
    value: Any = None


@dataclass(frozen=True)
class _Listener:
    """Brings what the decoding thread says about one output to the event loop."""

    index: int
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[_Event]

    def _put(self, kind: Literal["tokens", "finished", "failed"], value: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, _Event(self.index, kind, value))
        except RuntimeError:  # the loop is closed: nobody waits any more
            log.debug("server: an answer came after the end", what=kind)

    def tokens(self, ids: list[int], logprobs: list[TokenLogprob]) -> None:
        self._put("tokens", (ids, logprobs))

    def finished(self, completion: Completion) -> None:
        self._put("finished", completion)

    def failed(self, error: Exception) -> None:
        self._put("failed", error)


@dataclass(frozen=True)
class Judging:
    """The branches of forked requests, for who has the token."""

    store: BranchStore
    token: str

    def check(self, authorization: str) -> None:
        """Raise ApiError unless the header names the token."""
        if not hmac.compare_digest(authorization.encode(), f"Bearer {self.token}".encode()):
            headers = {"www-authenticate": "Bearer"}
            raise ApiError("a judge's bearer token is needed", status=401, kind="authentication_error", headers=headers)

    def answer(self, request_id: str, text: Text) -> dict[str, Any]:
        """Both texts of a request, in random order; nothing says which arm was served. Raises ApiError."""
        kept = self.store.get(request_id)
        if kept is None:
            message = f"no branches of {request_id!r}: never forked, forked elsewhere, not run yet, or too old"
            raise ApiError(message, status=404, code="branches_not_found")
        branches = [{"branch": name, "text": text.decode(ids)[:length]} for name, ids, length in kept.outputs]
        return {"request_id": request_id, "prompt": text.decode(kept.prompt_ids), "branches": branches}


class Frontend:
    """Makes jobs of requests and answers of what comes back."""

    def __init__(
        self,
        serving: Serving,
        planner: Planner,
        reader: LeaseReader,
        metrics: WorkerMetrics,
        *,
        pool: str,
        scoring: Scoring | None = None,
        judging: Judging | None = None,
        wall: Callable[[], float] = time.time,
    ):
        self.serving, self.planner, self.reader, self.metrics = serving, planner, reader, metrics
        self.pool, self._scoring, self.judging, self._wall = pool, scoring, judging, wall

    async def answer(self, request: Request, plan: Plan) -> Response:
        """Decode ``plan`` and answer; raises ApiError."""
        events: asyncio.Queue[_Event] = asyncio.Queue()
        answer = Renderer(plan, self.planner, created=int(self._wall()), name=uuid.uuid4().hex)
        self._submit(self._jobs(plan, answer.request_ids, events))
        watch = asyncio.create_task(_watch(request.receive, events))
        streaming = False
        try:
            # The status depends on the first event: what cannot be decoded is refused properly, in a stream too.
            event = await events.get()
            if plan.stream and event.output >= 0 and event.kind != "failed":
                streaming = True
                return EventStream(self._chunks(plan, answer, events, event), lambda: self._leave(watch, answer))
            done: dict[int, Completion] = {}
            while event.kind == "finished":
                done[event.output] = event.value
                if len(done) == len(answer.request_ids):
                    return JSONResponse(answer.whole([done[i] for i in range(len(done))]))
                event = await events.get()
            if event.kind == "failed":
                raise _failure(event.value)
            return Response(status_code=499)  # the caller hung up: nobody reads it
        finally:
            if not streaming:
                self._leave(watch, answer)

    def _submit(self, jobs: list[Job]) -> None:
        try:
            self.serving.submit(jobs)
        except Busy as e:
            headers = {"retry-after": str(e.retry_after)}
            raise ApiError(str(e), status=429, kind="rate_limit_error", code="queue_full", headers=headers) from e
        except Draining as e:
            raise _draining(e) from e
        except ValueError as e:
            raise ApiError(str(e), param="n") from e

    def _jobs(self, plan: Plan, request_ids: list[str], events: asyncio.Queue[_Event]) -> list[Job]:
        loop = asyncio.get_running_loop()
        terms = replace(plan.terms, forks=self._scoring is not None or self.judging is not None)
        text = self.planner.text
        return [
            Job(
                request=DecoderRequest(
                    request_id=request_ids[i],
                    prompt_ids=prompt_ids,
                    params=params,
                    traffic_class=plan.traffic_class,
                    pinned=plan.pinned,
                    structured=plan.structured,
                    spans=None if plan.pinned or plan.structured else SpanTracker(text.piece),
                    detokenize=text.decode if params.stop else None,
                ),
                terms=terms,
                listener=_Listener(i, loop, events),
                scoring=self._scoring,
                streaming=plan.stream,
            )
            for i, (prompt_ids, params) in enumerate(plan.choices())
        ]

    def _leave(self, watch: asyncio.Task[None], answer: Renderer) -> None:
        """The connection is over: whatever still decodes for it is given up."""
        watch.cancel()
        if answer.open:
            self.serving.cancel(answer.open)

    async def _chunks(
        self, plan: Plan, answer: Renderer, events: asyncio.Queue[_Event], event: _Event
    ) -> AsyncIterator[dict[str, Any]]:
        """The documents of a stream, in order."""
        texts = [TextStream(self.planner.text, plan.params.stop) for _ in answer.request_ids]
        pending: list[list[TokenLogprob]] = [[] for _ in texts]  # of tokens whose text was not shown yet
        begun: set[int] = set()
        while event.kind in ("tokens", "finished"):
            i = event.output
            if i not in begun:
                begun.add(i)
                for chunk in answer.begin(i):
                    yield chunk
            said = texts[i]
            if event.kind == "tokens":
                ids, logprobs = event.value
                pending[i] += logprobs
                told = said.tokens + len(ids) - len(pending[i])
                part = said.push(ids)
                if part:
                    n = said.begun - told if logprobs else 0
                    yield answer.part(i, part, pending[i][:n], said.starts[told : told + n])
                    del pending[i][:n]
            else:
                completion: Completion = event.value
                text, told = said.finish(completion.text_length), said.tokens - len(pending[i])
                yield answer.end(i, text, completion, pending[i], said.starts[told:])
                if not answer.open:
                    if plan.include_usage:
                        yield answer.usage_chunk()
                    return
            event = await events.get()
        if event.kind == "failed":
            yield _failure(event.value).body()


class EventStream(Response):
    """Server-sent events of JSON documents, and ``[DONE]``; ``leave`` is called when it is over, however it ends."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], leave: Callable[[], None]):
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._chunks, self._leave = chunks, leave

    def init_headers(self, headers: Any = None) -> None:
        """No content length: it is not known."""
        self.body = b""
        super().init_headers(headers)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self._chunks:
                body = b"data: " + _dump(chunk) + b"\n\n"
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        finally:
            self._leave()


def create_app(frontend: Frontend) -> FastAPI:
    """The routes."""
    app = FastAPI(openapi_url=None)
    serving, planner = frontend.serving, frontend.planner
    born = int(time.time())
    card = {"id": planner.model, "object": "model", "created": born, "owned_by": "lenity"}

    async def decode(request: Request, plan: Callable[[bytes], Plan]) -> Response:
        if serving.draining:
            raise _draining(Draining("the worker is stopping"))
        body = await _body(request)
        # Reading a long prompt takes longer than the others who wait should notice.
        made = plan(body) if len(body) < 1 << 15 else await asyncio.to_thread(plan, body)
        return await frontend.answer(request, made)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await decode(request, planner.completion)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await decode(request, planner.chat_completion)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != planner.model:
            raise ApiError(f"the model {name!r} does not exist", status=404, param="model", code="model_not_found")
        return JSONResponse(card)

    @app.get("/v1/quality/branches/{request_id:path}")
    async def branches(request: Request, request_id: str) -> Response:
        judging = frontend.judging
        if judging is None:
            raise ApiError("no judge is let in here: give the worker --judge-token-file", status=404)
        judging.check(request.headers.get("authorization", ""))
        return JSONResponse(judging.answer(request_id, planner.text), headers={"cache-control": "no-store"})

    @app.get("/healthz")
    async def healthz() -> Response:
        state = {"status": "draining" if serving.draining else "ok", "pool": frontend.pool, "model": planner.model}
        return JSONResponse(state | {"leases": frontend.reader.state}, status_code=503 if serving.draining else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(frontend.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        shaped = ApiError(str(error.detail), status=error.status_code)
        return JSONResponse(shaped.body(), status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def fault(_: Request, error: Exception) -> Response:
        return JSONResponse(_failure(error).body(), status_code=500)

    return app


class HttpServer:
    """Uvicorn in a thread of its own, on a socket that is bound already."""

    def __init__(self, app: FastAPI, host: str, port: int):
        """Raises OSError if the address cannot be used; port 0 takes a free one."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=1024)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", server_header=False, timeout_graceful_shutdown=5
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="http", daemon=True
        )

    def start(self) -> None:
        """Accept connections."""
        self._thread.start()

    def close(self, timeout: float = 10.0) -> None:
        """Close what is idle, wait for the rest."""
        self._server.should_exit = True
        self._thread.join(timeout)
        self._socket.close()


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise ApiError(f"the request is larger than {MAX_BODY} bytes", status=413)
        parts.append(part)
    return b"".join(parts)


async def _watch(receive: Callable[[], Awaitable[Any]], events: asyncio.Queue[_Event]) -> None:
    """Say when the caller hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    events.put_nowait(_Event(-1, "gone"))


def _draining(error: Exception) -> ApiError:
    headers = {"retry-after": str(RETRY_DRAINING)}
    return ApiError(str(error), status=503, kind="server_error", code="draining", headers=headers)


def _failure(error: Exception) -> ApiError:
    """How a caller is told; faults of ours keep their details in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Draining):
        return _draining(error)
    if isinstance(error, ValueError):
        return ApiError(str(error))
    return ApiError("the worker failed to serve this request", status=500, kind="server_error")


def _dump(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
