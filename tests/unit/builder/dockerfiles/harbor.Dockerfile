# syntax=docker/dockerfile:1
FROM ubuntu:24.04

ENV DEBIAN_FRONTEND=noninteractive

RUN apt-get update && apt-get install -y \
    python3 python3-pip python3-venv \
    redis-server \
    && apt-get clean && rm -rf /var/lib/apt/lists/*

RUN pip3 install --break-system-packages pytest==8.4.1

WORKDIR /workspace

COPY files/ /workspace/
COPY --chmod=755 entry.sh /usr/local/bin/entry.sh
RUN mkdir -p /logs/verifier && chown -R root:root /workspace

HEALTHCHECK --interval=5s --retries=3 CMD redis-cli ping || exit 1
EXPOSE 6379
CMD ["sleep", "infinity"]
