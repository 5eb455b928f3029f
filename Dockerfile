# docker build --target server .    the service and its dashboard
# docker build --target trainer --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#                                   an example job under `holdfast run`
FROM python:3.11-slim AS source
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY agent agent
COPY server server
COPY web web
COPY migrations migrations

FROM source AS server
RUN pip install --no-cache-dir -c constraints.txt '.[server,postgres]' \
    && useradd --create-home holdfast && install -d -o holdfast /data /secrets
USER holdfast
VOLUME /data
EXPOSE 7117
# Bound to more than loopback it has accounts, or insists on HOLDFAST_TOKEN.
CMD ["holdfast", "serve", "--host", "0.0.0.0", "--port", "7117", "--db", "/data/holdfast.db"]

FROM source AS trainer
# the package index for torch alone; empty: PyPI, whose build for Linux x86-64 brings CUDA, several GB
ARG TORCH_INDEX=
RUN pip install --no-cache-dir "$(grep '^torch==' constraints.txt)" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} \
    && pip install --no-cache-dir -c constraints.txt '.[torch,s3]' \
    && useradd --create-home holdfast && install -d -o holdfast /checkpoints
COPY examples examples
USER holdfast
VOLUME /checkpoints
CMD ["holdfast", "run", "--store", "/checkpoints", "--", "python", "examples/char_gpt.py"]
