# `dcdm serve` in a container; docs/serving.md says how to run it.
FROM python:3.11-slim

# PyTorch's build for CPUs; for a GPU, give the index of a CUDA build: --build-arg TORCH_INDEX=https://…
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /app

# PyTorch is a layer of its own: a change of the source does not download it again.
COPY constraints.txt ./
RUN python -m pip install --extra-index-url "$TORCH_INDEX" -c constraints.txt torch

COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN python -m pip install -c constraints.txt ".[serve]"

RUN useradd --create-home --uid 10001 dcdm
USER dcdm

EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]

# Without DCDM_API_KEY in the environment the server refuses to listen beyond the container.
ENTRYPOINT ["dcdm", "serve", "/model", "--host", "0.0.0.0", "--port", "8000"]
