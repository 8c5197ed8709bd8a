# TPU hosts: bash and this repository with the locked versions. See README.md beside this file.
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
RUN python -m pip install --no-cache-dir -c constraints.txt -e '.[tpu,text,tensorboard]'
# The shell's child gets SIGTERM itself: no wrapper stands between it and the platform.
ENTRYPOINT []
CMD ["python", "-m", "pid_jax.check_env", "--platform=tpu"]
