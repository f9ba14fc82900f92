# Workers whose ranks run on NVIDIA GPUs. Build from the top folder:
#   docker build --file ops/docker/gpu.Dockerfile --tag furrow:gpu .
# PyPI's torch for Linux brings its own CUDA and NCCL libraries; the driver comes from the host through the NVIDIA
# Container Toolkit, so no CUDA base image is needed.
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
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

# Triton compiles its launchers with a C compiler when a kernel is first used.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 furrow && install --directory --owner furrow /models

WORKDIR /build
# torch first, and by its exact version: this layer is kept until that changes, and what needs torch finds it there.
COPY constraints.txt ./
RUN pip install "$(grep '^torch==' constraints.txt)" "$(grep '^numpy==' constraints.txt)"

COPY --from=wheel /wheels /wheels
RUN pip install --constraint constraints.txt "$(ls /wheels/*.whl)[torch]"

# `utility` brings nvidia-smi, with which an agent counts GPUs without touching one.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Downloaded models are kept where a volume can be mounted.
ENV HF_HOME=/models FURROW_LOG_FORMAT=json
USER furrow
WORKDIR /home/furrow
CMD ["furrow", "--help"]
