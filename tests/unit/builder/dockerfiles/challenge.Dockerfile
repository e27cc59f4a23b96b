FROM alpine:3.20 AS build
ARG FLAG
ARG CFLAGS="-O0 -fno-stack-protector"
RUN apk add --no-cache gcc musl-dev
WORKDIR /src
COPY <<'EOF' vuln.c
#include <stdio.h>
int main(void) { char b[16]; gets(b); printf("%s\n", b); return 0; }
EOF
RUN gcc ${CFLAGS} -o vuln vuln.c

FROM debian:bookworm-slim
ARG FLAG=flag{placeholder}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN <<EOF
useradd --create-home --shell /bin/bash ctf
echo "${FLAG}" > /home/ctf/flag.txt
chown root:ctf /home/ctf/flag.txt
chmod 640 /home/ctf/flag.txt
EOF
COPY --from=build --chown=root:ctf /src/vuln /home/ctf/
RUN chmod u+s /home/ctf/vuln
USER ctf
WORKDIR /home/ctf
VOLUME ["/data"]
STOPSIGNAL SIGKILL
ENTRYPOINT exec socat TCP-LISTEN:${PORT:-1337},fork EXEC:./vuln
