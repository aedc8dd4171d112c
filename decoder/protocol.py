"""What OpenAI's clients send: request documents, strictly checked, as plans for the serving loop.

A field that would change the output and is not supported is refused, never ignored; fields that only label a request
(``user``, ``metadata``, …) are taken and dropped.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from decoder.chat import ROLES, Chat
from decoder.knobs import Terms
from decoder.sampling import SamplingParams
from decoder.text import Text

MAX_CHOICES = 128
MAX_STOPS = 16
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's
UNLIMITED_TOKENS = 4096  # of a chat answer without a limit, from a model without one


class ApiError(Exception):
    """An answer in OpenAI's error shape."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.message, self.status, self.kind, self.param, self.code = message, status, kind, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON document."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Lenity(_Strict):
    """Our own field. A caller can only tighten: ``max_loss`` is a share of the pool's loss budget (0: lossless)."""

    max_loss: float = 1.0
    strategy: str | None = None
    rule: str | None = None
    traffic_class: str | None = None


class _JsonSchema(_Strict):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class _ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class _Common(_Strict):
    """What both endpoints take."""

    model: str
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    response_format: _ResponseFormat | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Extensions that other servers know too.
    top_k: Annotated[int | None, Field(ge=-1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    min_tokens: Annotated[int | None, Field(ge=0)] = None
    repetition_penalty: float | None = None
    lenity: Lenity | None = None
    # Labels: they change nothing.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    # Fields of the API that are not supported, and the values that mean "not asked for".
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}


class CompletionRequest(_Common):
    """``POST /v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {"echo": (False,), "suffix": ("",)}


class _Part(_Strict):
    type: str
    text: str | None = None


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[Any] | None = None


class ChatRequest(_Common):
    """``POST /v1/chat/completions``."""

    messages: list[_Message]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Any = None

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": (),
        "web_search_options": (),
    }


@dataclass(frozen=True)
class Plan:
    """A checked request: prompts as token ids, and how each of their ``n`` outputs is made."""

    chat: bool
    prompts: list[list[int]]
    params: SamplingParams
    n: int
    terms: Terms
    traffic_class: str
    pinned: bool
    structured: bool
    stream: bool
    include_usage: bool
    top_logprobs: int | None
    seeds: list[int] = field(default_factory=list)

    def choices(self) -> list[tuple[list[int], SamplingParams]]:
        """Prompt and parameters of every output, in the order of their indices."""
        prompts = [prompt for prompt in self.prompts for _ in range(self.n)]
        return [(p, replace(self.params, seed=s)) for p, s in zip(prompts, self.seeds, strict=True)]


class Planner:
    """Makes plans for one model."""

    def __init__(
        self,
        text: Text,
        *,
        model: str,
        context: int | None,
        classes: tuple[str, ...] = ("default",),
        refusal: Callable[[str, str | None, str | None], tuple[str, str] | None],
    ):
        """``refusal`` of a traffic class, a strategy and a rule: `LeaseReader.refusal`."""
        self.text, self.chat = text, Chat(text)
        self.model, self.context, self.classes = model, context, classes
        self._refusal = refusal

    def completion(self, body: bytes) -> Plan:
        """A plan of ``POST /v1/completions``; raises ApiError."""
        request = _parse(CompletionRequest, body)
        self._check(request)
        if request.best_of not in (None, 1) and request.best_of != request.n:
            _refuse("best_of other than n is not supported", "best_of")
        raw = request.prompt
        if isinstance(raw, str):
            prompts = [self.text.encode(raw)]
        elif raw and all(isinstance(item, int) for item in raw):
            prompts = [raw]  # type: ignore[list-item]
        else:
            prompts = [self.text.encode(item) if isinstance(item, str) else list(item) for item in raw]  # type: ignore[arg-type]
        if not prompts or not all(prompts):
            _refuse("prompt must not be empty", "prompt")
        limit = request.max_tokens or DEFAULT_COMPLETION_TOKENS
        return self._plan(request, prompts, limit, request.logprobs, chat=False)

    def chat_completion(self, body: bytes) -> Plan:
        """A plan of ``POST /v1/chat/completions``; raises ApiError."""
        request = _parse(ChatRequest, body)
        self._check(request)
        if request.top_logprobs is not None and not request.logprobs:
            _refuse("top_logprobs needs logprobs: true", "top_logprobs")
        try:
            prompt = self.chat.prompt([_message(m, i) for i, m in enumerate(request.messages)])
        except ValueError as e:
            _refuse(str(e), "messages")
        if not prompt:
            _refuse("messages make an empty prompt", "messages")
        limit = request.max_completion_tokens or request.max_tokens
        if limit is None:
            limit = UNLIMITED_TOKENS if self.context is None else max(1, self.context - len(prompt))
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        return self._plan(request, [prompt], limit, logprobs, chat=True)

    def _check(self, request: _Common) -> None:
        if request.model != self.model:
            message = f"the model {request.model!r} does not exist; this worker serves {self.model!r}"
            raise ApiError(message, status=404, param="model", code="model_not_found")
        for name, harmless in request.UNSUPPORTED.items():
            value = getattr(request, name)
            if value is not None and value not in harmless:
                _refuse(f"{name}: not supported by this server", name)
        for name, off in (("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1)):
            if getattr(request, name) not in (None, off):
                _refuse(f"{name} is not supported: leave it out or set it to {off}", name)
        if request.stream_options is not None and not request.stream:
            _refuse("stream_options needs stream: true", "stream_options")

    def _plan(
        self, request: _Common, prompts: list[list[int]], limit: int, logprobs: int | None, *, chat: bool
    ) -> Plan:
        if self.context is not None:
            longest = max(map(len, prompts))
            if longest >= self.context:
                message = f"the prompt has {longest} tokens; the model reads {self.context}, its answer included"
                raise ApiError(message, param="messages" if chat else "prompt", code="context_length_exceeded")
            limit = min(limit, self.context - min(map(len, prompts)))
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        if len(stop) > MAX_STOPS or not all(stop):
            _refuse(f"stop must be at most {MAX_STOPS} strings that are not empty", "stop")
        n = request.n or 1
        seed = secrets.randbits(62) if request.seed is None else request.seed
        try:
            params = SamplingParams(
                temperature=1.0 if request.temperature is None else request.temperature,
                top_k=max(0, request.top_k or 0),
                top_p=1.0 if request.top_p is None else request.top_p,
                max_tokens=limit,
                logit_bias=_bias(request.logit_bias or {}),
                min_p=request.min_p or 0.0,
                min_tokens=request.min_tokens or 0,
                stop=tuple(stop),
                logprobs=logprobs,
            )
        except ValueError as e:
            _refuse(str(e), None)
        traffic_class, terms = self._terms(request.lenity or Lenity())
        return Plan(
            chat=chat,
            prompts=prompts,
            params=params,
            n=n,
            terms=terms,
            traffic_class=traffic_class,
            pinned=terms.lossless,
            structured=self._json(request.response_format),
            stream=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            top_logprobs=logprobs,
            seeds=[_seed(seed, i) for i in range(n * len(prompts))],
        )

    def _terms(self, asked: Lenity) -> tuple[str, Terms]:
        name = asked.traffic_class or self.classes[0]
        if name not in self.classes:
            message = f"traffic class {name!r} is not served here; there is: {', '.join(self.classes)}"
            _refuse(message, "lenity.traffic_class")
        if not 0 <= asked.max_loss <= 1:
            message = (
                "max_loss is a share of the pool's loss budget, from 0 (lossless) to 1 (all of it): a caller can only "
                f"tighten, so not {asked.max_loss:g}"
            )
            _refuse(message, "lenity.max_loss")
        refusal = self._refusal(name, asked.strategy, asked.rule)
        if refusal is not None:
            _refuse(refusal[1], f"lenity.{refusal[0]}")
        return name, Terms(share=asked.max_loss, rule=asked.rule, strategy=asked.strategy)

    @staticmethod
    def _json(wanted: _ResponseFormat | None) -> bool:
        """Whether the whole answer is JSON: one structured span. Nothing forces it to be JSON."""
        if wanted is None or wanted.type == "text":
            return False
        if wanted.type == "json_schema":
            if wanted.json_schema is None:
                _refuse("response_format of type json_schema needs json_schema", "response_format.json_schema")
            if wanted.json_schema.strict:
                message = (
                    "json_schema.strict is not supported: answers are not constrained to a schema; set it to false and "
                    "check what comes"
                )
                _refuse(message, "response_format.json_schema.strict")
        return True


_M = TypeVar("_M", bound=_Common)


def _parse(model: type[_M], body: bytes) -> _M:
    try:
        return model.model_validate_json(body)
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False)[0]
        where = [str(part) for part in first["loc"]]
        param = ".".join(part for part in where if part.isidentifier() or part.isdigit()) or None
        if first["type"] == "extra_forbidden":
            raise ApiError(f"unknown field: {param}", param=param, code="unknown_parameter") from e
        if first["type"] == "json_invalid":
            raise ApiError(f"the body is not JSON: {first['msg']}") from e
        raise ApiError(f"{param or 'request'}: {first['msg']}", param=param) from e


def _message(message: _Message, index: int) -> dict[str, str]:
    where = f"messages.{index}"
    if message.role not in ROLES:
        _refuse(f"role {message.role!r} is unknown; there is: {', '.join(ROLES)}", f"{where}.role")
    if message.tool_calls:
        _refuse("tool_calls are not supported", f"{where}.tool_calls")
    content = message.content
    if isinstance(content, list):
        if any(part.type != "text" or part.text is None for part in content):
            _refuse("only content parts of type text are supported", f"{where}.content")
        content = "".join(part.text or "" for part in content)
    return {"role": message.role, "content": content or ""}


def _bias(asked: dict[str, float]) -> dict[int, float]:
    """OpenAI's bias: -100 bans a token, exactly."""
    bias = {}
    for token, value in asked.items():
        if not token.isdecimal() or not -100 <= value <= 100:
            _refuse("logit_bias maps token ids to numbers from -100 (never) to 100", "logit_bias")
        bias[int(token)] = -math.inf if value == -100 else value
    return bias


def _seed(seed: int, index: int) -> int:
    """The seed of output ``index``: the caller's own for the first, one made from it for every other."""
    if index == 0:
        return seed % (1 << 63)
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()) >> 1


def _refuse(message: str, param: str | None) -> NoReturn:
    raise ApiError(message, param=param)
