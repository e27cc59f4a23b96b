FROM --platform=linux/x86_64 sweb.env.py.x86_64.0123456789abcdef:latest

COPY ./setup_repo.sh /root/
RUN sed -i -e 's/\r$//' /root/setup_repo.sh && /bin/bash /root/setup_repo.sh
RUN git -C /testbed reset --hard 0123456 && git -C /testbed remote remove origin

WORKDIR /testbed/
CMD ["tail", "-f", "/dev/null"]
