# CPU image: tests, planning and the tiny run.
#   docker build -f docker/cpu.Dockerfile -t megatron-trace:cpu .
FROM python:3.11-slim-bookworm

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    OMP_NUM_THREADS=1

WORKDIR /opt/megatron-trace
COPY docker/constraints-cpu.txt docker/
# First and alone, so that no other requirement can pull another build of it. A build without CUDA is smaller; the index is chosen by
# the build arguments PIP_INDEX_URL and PIP_EXTRA_INDEX_URL, which pip reads.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir torch==2.13.0

COPY . .
RUN pip install --no-cache-dir -c docker/constraints-cpu.txt -e ".[dev]"

CMD ["torchrun", "--nproc-per-node", "2", "launch/pretrain_rl.py", "--config", "configs/tiny_moe_cpu.yaml"]
