# docker build --target server .    the service and its dashboard
# docker build --target trainer --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#                                   an example job under `holdfast run`
#
# After `make docs`, the server's image contains the guide.
#
# Both run as user 10001 and write to their volume and to /tmp only: start them with a read-only root file system.
FROM python:3.11.14-slim-bookworm AS source
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY agent agent
COPY series series
COPY server server
COPY web web
COPY migrations migrations
RUN useradd --create-home --uid 10001 holdfast

FROM source AS server
RUN pip install --no-cache-dir --compile -c constraints.txt '.[server,postgres]' \
    && install -d -o holdfast /data /secrets
USER 10001
VOLUME /data
EXPOSE 7117
HEALTHCHECK --interval=10s --timeout=6s --start-period=60s --retries=3 \
  CMD python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:7117/readyz', timeout=5)"
# Bound to more than loopback it has accounts, or insists on HOLDFAST_TOKEN.
CMD ["holdfast", "serve", "--host", "0.0.0.0", "--port", "7117", "--db", "/data/holdfast.db"]

FROM source AS trainer
# the package index for torch alone; empty: PyPI, whose build for Linux x86-64 brings CUDA, several GB
ARG TORCH_INDEX=
RUN pip install --no-cache-dir --compile "$(grep '^torch==' constraints.txt)" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} \
    && pip install --no-cache-dir --compile -c constraints.txt '.[torch,s3]' ./series \
    && install -d -o holdfast /checkpoints
COPY examples examples
USER 10001
VOLUME /checkpoints
CMD ["holdfast", "run", "--store", "/checkpoints", "--", "python", "examples/char_gpt.py"]
