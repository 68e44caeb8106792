# docker build -f launch/cpu.Dockerfile -t vlm-rl:cpu .
# docker run -v "$PWD/runs:/src/runs" vlm-rl:cpu make quickstart
FROM python:3.11-slim-bookworm
ENV DEBIAN_FRONTEND=noninteractive VENV=/opt/vlm-rl PATH=/opt/vlm-rl/bin:$PATH
RUN apt-get update \
    && apt-get install --yes --no-install-recommends chromium fonts-dejavu-core g++ git libnuma1 make \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
WORKDIR /src
RUN make venv
CMD ["make", "test"]
