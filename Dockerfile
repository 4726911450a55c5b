# Baton's images: `docker build --target cpu .`, `--target cuda .` and `--target router .`;
# docs/how-to/deploy/index.md says how to run them. All hold what requirements/ pins by hashes, and no model:
# the first start gets one, or a volume brings it. That of a router has neither torch nor Ray.

# To pin the very bytes: --build-arg PYTHON_IMAGE=python:…@sha256:…
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

# What all builds start from: the sources and no packages yet.
FROM ${PYTHON_IMAGE} AS sources
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/baton
ENV PATH=/opt/baton/bin:$PATH
WORKDIR /src
# Dependencies are a layer of their own: they change seldom, and take most of the time.
COPY requirements ./requirements

# TORCH_INDEX_URL: an index with torch's CPU builds. No file is installed whose hash is not in the
# lock, whichever index has it. An index with a password belongs in the secret, a pip.conf:
# `docker build --secret id=pip,src=pip.conf`. It is in no layer.
FROM sources AS build-cpu
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --require-hashes --no-deps --requirement requirements/cpu.lock \
    --extra-index-url "${TORCH_INDEX_URL}"
COPY . .
RUN pip install --no-deps --no-build-isolation --no-index .

# EXTRAS: nixl adds that transport.
FROM sources AS build-cuda
ARG EXTRAS=""
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --require-hashes --no-deps --requirement requirements/cuda.lock \
    ${EXTRAS:+--requirement "requirements/${EXTRAS}.lock"}
COPY . .
RUN pip install --no-deps --no-build-isolation --no-index .

FROM sources AS build-router
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --require-hashes --no-deps --requirement requirements/router.lock
COPY . .
RUN pip install --no-deps --no-build-isolation --no-index .

# tini reaps what a worker's libraries leave behind.
FROM ${PYTHON_IMAGE} AS runtime
RUN apt-get update \
    && apt-get install --yes --no-install-recommends 'tini=0.19.*' \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 baton \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/baton \
        --shell /usr/sbin/nologin baton \
    && install --directory --owner=10001 --group=10001 --mode=0750 \
        /var/lib/baton /var/cache/baton
# The root file system may be read-only: all that is written lies in /var/lib/baton (files and
# batches of users), /var/cache/baton (models, kernels) and /tmp (a run: logs, sockets).
ENV PATH=/opt/baton/bin:$PATH \
    HOME=/var/lib/baton \
    BATON_DATA_DIR=/var/lib/baton/data \
    BATON_CACHE_DIR=/var/cache/baton \
    HF_HOME=/var/cache/baton/huggingface \
    TRITON_CACHE_DIR=/var/cache/baton/triton \
    MPLCONFIGDIR=/tmp/matplotlib \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1
WORKDIR /var/lib/baton
USER 10001:10001
# Those of compose.yaml and of the chart; `baton serve` itself listens on loopback unless it is told.
EXPOSE 8000 8001
# Of BATON_HTTP's port, by TLS where there are certificates; whose they are is not for it to ask. The
# first start gets a model and builds kernels.
HEALTHCHECK --interval=10s --timeout=6s --start-period=30m --retries=3 \
    CMD ["python", "-I", "-c", "import os, ssl, urllib.request as r; env = os.environ.get; port = env('BATON_HTTP', ':8000').rpartition(':')[2]; s = 's' if env('BATON_TLS__FOLDER') or env('BATON_TLS__CERTIFICATE') else ''; r.build_opener(r.ProxyHandler({}), r.HTTPSHandler(context=ssl._create_unverified_context())).open(f'http{s}://127.0.0.1:{port}/health', timeout=5)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "baton"]
CMD ["serve"]

FROM runtime AS router
COPY --from=build-router /opt/baton /opt/baton
CMD ["router"]

# The compiler stays: kernels are built at the first start, for the CPU that is there (and Triton
# builds its launchers with it). KubeRay and the chart's launchers need openssl for Ray's certificates.
FROM runtime AS workers
USER 0:0
RUN apt-get update \
    && apt-get install --yes --no-install-recommends 'g++=4:12.2.*' 'openssl=3.0.*' \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001

FROM workers AS cuda
# What the container runtime of NVIDIA is to bring along: the driver. CUDA itself comes with torch.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/baton /opt/baton

# The last one is what `docker build .` makes.
FROM workers AS cpu
COPY --from=build-cpu /opt/baton /opt/baton
