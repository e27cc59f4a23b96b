# escape=`
FROM debian:trixie-slim as base

RUN apt-get update && `
    apt-get install -y --no-install-recommends postgresql nginx cron sudo && `
    rm -rf /var/lib/apt/lists/*

FROM base
ADD nginx.conf /etc/nginx/nginx.conf
COPY . /srv/app
RUN echo 'postgres ALL=(ALL) NOPASSWD:ALL' >> /etc/sudoers; `
    for d in a b c; do mkdir -p "/srv/$d"; done
EXPOSE 80 443/tcp 8000-8002
CMD service postgresql start && nginx -g 'daemon off;'
