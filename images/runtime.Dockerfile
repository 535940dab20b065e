# The GPU image: CUDA, SGLang with the torch that it pins, Ray, and clusterkit's node side.
# `clusterkit setup --build-image` builds it on a host (30 GB of disk, half an hour). Made for the classic builder, and
# for networks behind a proxy:
#   proxies             --build-arg http_proxy=… https_proxy=… no_proxy=…  (Docker keeps them out of the image)
#   package mirrors     --build-arg APT_MIRROR=… PIP_INDEX_URL=… PIP_FIND_LINKS=…
#   own certificates    the context's site/ca.pem (may be empty)
#   wheels by hand      the context's wheels/ (may be empty)
ARG CUDA_BASE
FROM ${CUDA_BASE} AS system
ARG APT_MIRROR=
COPY site/ /opt/clusterkit/site/
# devel, not runtime: SGLang's and FlashInfer's kernels are compiled where they first run. libibverbs and rdma-core
# are what NCCL reaches InfiniBand through; libnuma is SGLang's.
RUN set -eu; \
    site=/opt/clusterkit/site/ca.pem; \
    if [ -s "$site" ]; then echo "Acquire::https::CAInfo \"$site\";" >/etc/apt/apt.conf.d/99site; fi; \
    if [ -n "$APT_MIRROR" ]; then \
      . /etc/os-release; \
      rm -f /etc/apt/sources.list.d/ubuntu.sources; \
      for suite in "$VERSION_CODENAME" "$VERSION_CODENAME-updates" "$VERSION_CODENAME-security"; do \
        echo "deb $APT_MIRROR $suite main universe"; \
      done >/etc/apt/sources.list; \
    fi; \
    # NVIDIA's own repository is not needed: CUDA is in the base already.
    rm -f /etc/apt/sources.list.d/cuda*; \
    apt-get update -q; \
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
      build-essential ca-certificates git ibverbs-providers iproute2 libibverbs1 libnuma1 libsndfile1 ninja-build \
      procps python3 python3-dev python3-venv rdma-core; \
    rm -rf /etc/apt/apt.conf.d/99site /var/lib/apt/lists/* /var/cache/apt/archives/*.deb /var/cache/apt/*.bin

FROM system AS packages
ARG CUDA_PYTHON
ARG RAY_VERSION
ARG SGLANG_VERSION
ARG SGLANG_KERNEL_VERSION
ARG TORCH_VERSION
ARG TRANSFORMERS_VERSION
ARG PIP_INDEX_URL=
ARG PIP_FIND_LINKS=
COPY wheels/ /opt/wheels/
RUN set -eu; \
    found=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
    [ "$found" = "$CUDA_PYTHON" ] || { echo "the base has Python $found instead of $CUDA_PYTHON" >&2; exit 1; }; \
    site=/opt/clusterkit/site/ca.pem; \
    if [ -s "$site" ]; then export PIP_CERT="$site"; fi; \
    [ -n "$PIP_INDEX_URL" ] || unset PIP_INDEX_URL; \
    export PIP_FIND_LINKS="/opt/wheels $PIP_FIND_LINKS" PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1; \
    python3 -m venv /opt/clusterkit/venv; \
    # One resolution for all: nothing may move torch or transformers away from what SGLang was built with.
    /opt/clusterkit/venv/bin/pip install -q \
      "torch==$TORCH_VERSION" "sglang==$SGLANG_VERSION" "sglang-kernel==$SGLANG_KERNEL_VERSION" \
      "transformers==$TRANSFORMERS_VERSION" "ray[default]==$RAY_VERSION" \
      'pydantic>=2.10' 'pyyaml>=6.0' 'numpy>=2.0' 'safetensors>=0.6' 'zstandard>=0.23' 'tensorboard>=2.19' 'wandb>=0.19' \
      'httpx>=0.27' 'bm25s>=0.2' 'pyarrow>=18' 'aiohttp>=3.12' 'orjson>=3.10' 'math-verify[antlr4_13_2]>=0.8'

FROM system
COPY --from=packages /opt/clusterkit/venv /opt/clusterkit/venv
COPY node/ /opt/clusterkit/node/
ENV PATH=/opt/clusterkit/venv/bin:/usr/local/nvidia/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONPATH=/opt/clusterkit/node PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /root
CMD ["ray", "--version"]
