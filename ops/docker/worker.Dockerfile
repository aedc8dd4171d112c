# The worker. Build from the root of the repository; TORCH_ARGS chooses another build of torch than pip's default one,
# for instance one for CPUs only, as pytorch.org lists them:
#   docker build -f ops/docker/worker.Dockerfile -t lenity-worker .
#   docker build -f ops/docker/worker.Dockerfile -t lenity-worker --build-arg TORCH_ARGS="--index-url URL" .
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG TORCH=2.13.0
ARG TORCH_ARGS=
WORKDIR /src
RUN python -m venv /opt/lenity \
    && /opt/lenity/bin/pip install --no-cache-dir ${TORCH_ARGS} "torch==${TORCH}"
COPY pyproject.toml README.md LICENSE ./
COPY controller controller
COPY decoder decoder
COPY policies policies
COPY storage storage
RUN /opt/lenity/bin/pip install --no-cache-dir '.[worker]'

FROM python:${PYTHON}-slim
COPY --from=build /opt/lenity /opt/lenity
RUN useradd --system --uid 10001 --user-group --home-dir /var/lib/lenity --create-home lenity
ENV PATH=/opt/lenity/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    MPLCONFIGDIR=/tmp/matplotlib \
    LENITY_WORKER_SERVE=0.0.0.0:8000 \
    LENITY_LOG_FORMAT=json
USER 10001:10001
WORKDIR /var/lib/lenity
EXPOSE 8000
# 503 while draining, so that nothing new is sent here.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["lenity"]
CMD ["worker"]
