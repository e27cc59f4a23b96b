# The image every container of a farm runs. `make image` builds it (src/agentenv/image): the context holds
# `site/` (agentenv's sandbox and the wheels it needs, unpacked outside) and nothing else. The only network
# the build uses is apt's. BuildKit is not needed.
ARG BASE=debian:bookworm-slim
FROM ${BASE}

# What the container itself needs: bubblewrap, slirp4netns, python3 (the server), bash-static
# (docs/decisions/0009), e2fsprogs (docs/decisions/0031). The rest is what commands in a slot look for. No compiler,
# nothing set-uid.
RUN export DEBIAN_FRONTEND=noninteractive \
 && apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends \
      bash-static bubblewrap ca-certificates curl e2fsprogs git jq less patch procps python-is-python3 \
      python3 python3-pip python3-venv ripgrep slirp4netns tmux unzip xz-utils >/dev/null \
 && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/* /usr/share/doc/*/changelog* \
 && find /usr -name __pycache__ -type d -prune -exec rm -rf {} + \
 && find / -xdev -perm /6000 -type f -exec chmod a-s {} +

# Not below /usr: slots see all of /usr, and need none of this.
COPY site /opt/agentenv
# The root file system is read-only when it runs, so what Python would cache is made now.
RUN python3 -m compileall -q --invalidation-mode unchecked-hash -x 'lib2to3/tests' /opt/agentenv /usr/lib/python3 /usr/lib/python3.11

ENV PYTHONPATH=/opt/agentenv PYTHONDONTWRITEBYTECODE=1 LANG=C.UTF-8
ENTRYPOINT ["/usr/bin/python3", "-P", "-s", "-m", "agentenv.sandbox"]
CMD ["/local/spec.json"]
