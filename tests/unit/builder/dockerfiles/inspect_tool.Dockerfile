ARG PYTHON_VERSION=3.12
ARG VARIANT=-bookworm
FROM registry.example/library/python:${PYTHON_VERSION}${VARIANT}

LABEL org.opencontainers.image.title="a tool image" maintained="yes"

RUN ["apt-get", "update"]
RUN set -eux; \
	apt-get install -y --no-install-recommends nodejs npm; \
	# leave no lists
	rm -rf /var/lib/apt/lists/*

# the old form of ENV
ENV PYTHONPATH /opt/tool:/opt/lib with spaces
ENV VIRTUAL_ENV=/opt/venv
ENV PATH="$VIRTUAL_ENV/bin:$PATH"
RUN python3 -m venv $VIRTUAL_ENV

COPY ["requirements.txt", "package*.json", "/opt/tool/"]
ADD data.tar.gz /opt/data
RUN --mount=type=cache,target=/root/.cache/pip pip install -r /opt/tool/requirements.txt
WORKDIR /opt/tool
ENTRYPOINT ["/bin/sh", "-c", "sleep infinity & wait"]
