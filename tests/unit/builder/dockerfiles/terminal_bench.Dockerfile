FROM registry.example/t-bench/python-3-13:20250620

RUN apt-get update \
 && apt-get install -y --no-install-recommends \
    tmux asciinema curl \
    # needed by the task's tests

    gcc make \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /app

COPY task-deps/server.py task-deps/data-?.csv ./
COPY protected/ /protected
RUN pip install --no-cache-dir "flask==3.1.0" 'numpy<2' \
 && python -c "import flask; print(flask.__name__)"
ENV FLASK_APP=/app/server.py \
    FLASK_ENV="development" LONG='two words'
CMD ["/bin/bash"]
