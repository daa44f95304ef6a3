# The aggregator: consumes queries, talks to model servers, publishes results. No torch in it.
# Built from the root of the checkout, see docker-compose.yml.
FROM python:3.11-slim-bookworm AS dependencies
RUN python3 -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir uv==0.13.9
ENV UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never
RUN /opt/uv/bin/uv venv --python python3 /opt/venv
WORKDIR /src
COPY pyproject.toml ./
COPY ops/constraints/ ops/constraints/
RUN --mount=type=cache,target=/root/.cache/uv \
    /opt/uv/bin/uv pip install --python /opt/venv --compile-bytecode \
        --constraints ops/constraints/torch.txt --requirements pyproject.toml --extra aggregator

# In a folder of its own, so that new code is a small layer on top of all that changes rarely.
FROM dependencies AS code
COPY README.md LICENSE ./
COPY protos/ protos/
COPY aggregator/ aggregator/
# The model server's code is part of the same distribution; its engines' packages are not installed.
COPY model_server/ model_server/
RUN --mount=type=cache,target=/root/.cache/uv \
    /opt/uv/bin/uv pip install --python /opt/venv --target /opt/app --compile-bytecode --no-deps \
        --build-constraints ops/constraints/build.txt .

FROM python:3.11-slim-bookworm
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin app
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=code /opt/app /opt/app
COPY ops/docker/healthy.py /opt/healthy.py
ENV PATH=/opt/app/bin:/opt/venv/bin:$PATH PYTHONPATH=/opt/app PYTHONUNBUFFERED=1 \
    AGGREGATOR_METRICS_LISTEN=0.0.0.0:9464
USER 10001
EXPOSE 9464
ENTRYPOINT ["aggregator"]
CMD ["run"]
