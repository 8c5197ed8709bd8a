# NVIDIA hosts: jax brings CUDA and cuDNN as wheels, the host brings the driver. See README.md.
FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /pid_jax
COPY pyproject.toml constraints.txt README.md ./
COPY pid_jax pid_jax
COPY tools tools
COPY configs configs
COPY launch launch
RUN python -m pip install --no-cache-dir -c constraints.txt -e '.[cuda12,text,tensorboard]'
# What the NVIDIA container toolkit hands in.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENTRYPOINT []
CMD ["python", "-m", "pid_jax.check_env", "--platform=gpu"]
