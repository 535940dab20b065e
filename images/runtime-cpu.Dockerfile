# Ray and clusterkit's node side on machines without a GPU: trying things out, tests, a head node that only manages.
# `clusterkit setup --build-image` builds it on a host. Made for the classic builder, and for networks behind a proxy:
#   proxies             --build-arg http_proxy=… https_proxy=… no_proxy=…  (Docker keeps them out of the image)
#   package mirrors     --build-arg APT_MIRROR=… PIP_INDEX_URL=… PIP_FIND_LINKS=…
#   own certificates    the context's site/ca.pem (may be empty)
#   wheels by hand      the context's wheels/ (may be empty)
ARG CPU_BASE
FROM ${CPU_BASE} AS system
ARG APT_MIRROR=
COPY site/ /opt/clusterkit/site/
RUN set -eu; \
    site=/opt/clusterkit/site/ca.pem; \
    if [ -s "$site" ]; then echo "Acquire::https::CAInfo \"$site\";" >/etc/apt/apt.conf.d/99site; fi; \
    if [ -n "$APT_MIRROR" ]; then \
      . /etc/os-release; \
      rm -f /etc/apt/sources.list.d/debian.sources; \
      echo "deb $APT_MIRROR $VERSION_CODENAME main" >/etc/apt/sources.list; \
    fi; \
    apt-get update -q; \
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
      ca-certificates iproute2 procps python3 python3-venv; \
    rm -rf /etc/apt/apt.conf.d/99site /var/lib/apt/lists/* /var/cache/apt/archives/*.deb /var/cache/apt/*.bin

FROM system AS packages
ARG CPU_PYTHON
ARG RAY_VERSION
ARG TORCH_CPU_VERSION
ARG TORCH_CPU_INDEX=
ARG WITH_TORCH=1
ARG PIP_INDEX_URL=
ARG PIP_FIND_LINKS=
COPY wheels/ /opt/wheels/
RUN set -eu; \
    found=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
    [ "$found" = "$CPU_PYTHON" ] || { echo "the base has Python $found instead of $CPU_PYTHON" >&2; exit 1; }; \
    site=/opt/clusterkit/site/ca.pem; \
    if [ -s "$site" ]; then export PIP_CERT="$site"; fi; \
    [ -n "$PIP_INDEX_URL" ] || unset PIP_INDEX_URL; \
    export PIP_FIND_LINKS="/opt/wheels $PIP_FIND_LINKS" PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1; \
    python3 -m venv /opt/clusterkit/venv; \
    pip="/opt/clusterkit/venv/bin/pip install -q"; \
    if [ "$WITH_TORCH" = 1 ]; then \
      # A wheel that was sent along is the CPU build already; its index need not be reachable then.
      set -- /opt/wheels/torch-"$TORCH_CPU_VERSION"*.whl; [ ! -e "$1" ] || TORCH_CPU_INDEX=; \
      $pip ${TORCH_CPU_INDEX:+--extra-index-url "$TORCH_CPU_INDEX"} "torch==$TORCH_CPU_VERSION"; \
      $pip 'transformers>=5.10,<6' 'tokenizers>=0.22' 'safetensors>=0.6' 'tensorboard>=2.19' 'bm25s>=0.2' 'pyarrow>=18' \
        'aiohttp>=3.12' 'orjson>=3.10' 'math-verify[antlr4_13_2]>=0.8'; \
    fi; \
    $pip "ray[default]==$RAY_VERSION" 'pydantic>=2.10' 'pyyaml>=6.0' 'numpy>=2.0' 'zstandard>=0.23' 'httpx>=0.27'

FROM system
COPY --from=packages /opt/clusterkit/venv /opt/clusterkit/venv
COPY node/ /opt/clusterkit/node/
ENV PATH=/opt/clusterkit/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONPATH=/opt/clusterkit/node PYTHONUNBUFFERED=1
WORKDIR /root
CMD ["ray", "--version"]
