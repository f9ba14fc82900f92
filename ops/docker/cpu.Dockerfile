# API processes, and workers whose ranks run on CPUs. Build from the top folder:
#   docker build --file ops/docker/cpu.Dockerfile --tag furrow:cpu .
# Without torch and without a compiler: models of C++ alone. Embeddings, rerankers, images and a few types need an image
# with `[torch]`.
FROM python:3.12-slim AS wheel

ARG PIP_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /build
COPY constraints.txt ./
RUN pip install --constraint constraints.txt click ziglang
COPY pyproject.toml setup.py README.md ./
COPY control control
COPY api api
COPY worker worker
COPY ops ops
RUN python -m ops.wheels "$(uname -m)-linux" --out /wheels

FROM python:3.12-slim

ARG PIP_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

RUN useradd --create-home --uid 10001 furrow && install --directory --owner furrow /models

WORKDIR /build
COPY constraints.txt ./
COPY --from=wheel /wheels /wheels
RUN pip install --constraint constraints.txt /wheels/*.whl

# Downloaded models are kept where a volume can be mounted.
ENV HF_HOME=/models FURROW_LOG_FORMAT=json
USER furrow
WORKDIR /home/furrow
CMD ["furrow", "--help"]
