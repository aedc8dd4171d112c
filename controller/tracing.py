"""Optional OpenTelemetry traces of the control loop: a span a tick and pool, one inside it for each of its phases.

Off unless `open_traces` was called; then `traced` costs one comparison. Nothing is traced per token or per request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from policies.errors import LenityError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

SERVICE_NAME = "lenity-controller"

P = ParamSpec("P")
R = TypeVar("R")


class _OfPool(Protocol):
    pool: str


S = TypeVar("S", bound=_OfPool)

_tracer: Tracer | None = None


def traced(name: str) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """A span called ``name`` around each call of a method, with its object's pool; errors are recorded in it."""

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if _tracer is None:
                return method(self, *args, **kwargs)
            with _tracer.start_as_current_span(name, attributes={"lenity.pool": self.pool}):
                return method(self, *args, **kwargs)

        return call

    return decorate


@contextmanager
def open_traces(endpoint: str | None, *, exporter: SpanExporter | None = None) -> Iterator[None]:
    """Trace inside the block to ``endpoint`` (OTLP over HTTP, such as http://collector:4318/v1/traces) or ``exporter``.

    None traces nothing. Spans are sent in the background and what cannot be sent is dropped; the loop never waits, and
    at the end what is left is sent within seconds. Raises LenityError when the extra is not installed.
    """
    global _tracer  # noqa: PLW0603  the one tracer of the process
    if endpoint is None and exporter is None:
        yield
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
    except ImportError as e:
        raise LenityError(f"traces need {e.name}; install it with: pip install 'lenity[otel]'") from e
    processor: Any = (
        SimpleSpanProcessor(exporter)
        if exporter is not None
        else BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=3))
    )
    provider = TracerProvider(resource=Resource.create({"service.name": SERVICE_NAME}), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    _tracer = provider.get_tracer("lenity")
    try:
        yield
    finally:
        _tracer = None
        provider.shutdown()
