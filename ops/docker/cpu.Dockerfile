# API processes, and workers whose ranks run on CPUs. Build from the top folder:
#   docker build --file ops/docker/cpu.Dockerfile --tag furrow:cpu .
# PyPI's torch for Linux brings gigabytes of CUDA libraries. An index that has the CPU build keeps the image small:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=https://… …
FROM python:3.12-slim

ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

RUN useradd --create-home --uid 10001 furrow && install --directory --owner furrow /models

WORKDIR /build
# torch first, and by its exact version: this layer is kept until that changes, and what needs torch finds it there.
COPY constraints.txt ./
RUN pip install "$(grep '^torch==' constraints.txt)" "$(grep '^numpy==' constraints.txt)"

COPY pyproject.toml setup.py README.md ./
COPY control control
COPY api api
COPY worker worker
COPY ops ops
RUN pip install --constraint constraints.txt . && rm -rf build

# Downloaded models are kept where a volume can be mounted.
ENV HF_HOME=/models FURROW_LOG_FORMAT=json
USER furrow
WORKDIR /home/furrow
CMD ["furrow", "--help"]
