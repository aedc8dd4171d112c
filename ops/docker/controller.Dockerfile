# The controller, without torch. Build from the root of the repository:
#   docker build -f ops/docker/controller.Dockerfile -t lenity-controller .
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY controller controller
COPY decoder decoder
COPY policies policies
COPY storage storage
RUN python -m venv /opt/lenity \
    && /opt/lenity/bin/pip install --no-cache-dir '.[postgres,otel]' \
    # The bundled models are for workers.
    && rm -r /opt/lenity/lib/python*/site-packages/decoder/demo/models

FROM python:${PYTHON}-slim
COPY --from=build /opt/lenity /opt/lenity
RUN useradd --system --uid 10001 --user-group --home-dir /var/lib/lenity --create-home lenity
ENV PATH=/opt/lenity/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    MPLCONFIGDIR=/tmp/matplotlib \
    LENITY_CONTROLLER_HOST=0.0.0.0 \
    LENITY_LOG_FORMAT=json
USER 10001:10001
WORKDIR /var/lib/lenity
EXPOSE 8470
# Alive means that the process answers; whether it can act is what /readyz says.
HEALTHCHECK --interval=10s --timeout=3s --start-period=15s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8470/healthz', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["lenity"]
CMD ["controller"]
