# docker build -f launch/gpu.Dockerfile -t vlm-rl .
# docker run --gpus all --ipc host -v "$PWD/work:/workspace" vlm-rl vlm-rl doctor
#
# CUDA comes with the wheels of torch; the compiler is for what DeepSpeed and vLLM build at their first use.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
# What vLLM compiles is kept with the work, for the next container.
ENV DEBIAN_FRONTEND=noninteractive VENV=/opt/vlm-rl PATH=/opt/vlm-rl/bin:$PATH VLLM_CACHE_ROOT=/workspace/.cache/vllm
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git libnuma1 make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
WORKDIR /src
RUN make EXTRAS=vllm venv
WORKDIR /workspace
CMD ["vlm-rl", "--help"]
