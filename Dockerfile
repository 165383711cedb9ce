# GPU image: NVIDIA's PyTorch base (PyTorch, CUDA, NCCL and apex as NVIDIA built them) with the packages of docker/constraints-gpu.txt.
#   docker build -t megatron-trace:latest .
# What it can do on a machine:  docker run --rm --gpus all megatron-trace:latest python tools/env.py
FROM nvcr.io/nvidia/pytorch:26.02-py3

# The base pins its own packages for every pip; these are the ones to keep, and the project's constraints replace the rest.
ENV PIP_CONSTRAINT="" \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    OMP_NUM_THREADS=1

# The name apex on the package index is something else; what counts is that the base's extensions are there.
RUN python -c "import torch, amp_C; from apex.optimizers import FusedAdam"

WORKDIR /opt/megatron-trace
COPY docker/constraints-gpu.txt docker/
# Built against the base's PyTorch, so without build isolation; --no-deps keeps that PyTorch.
RUN NVTE_FRAMEWORK=pytorch pip install --no-cache-dir --no-build-isolation --no-deps \
        transformer-engine==2.20.2 transformer-engine-cu13==2.20.2 transformer-engine-torch==2.20.2 nvdlfw-inspect==0.2.2 \
 && pip install --no-cache-dir --no-deps \
        megatron-core==0.19.2 sglang==0.5.17 sglang-kernel==0.4.5 nvidia-modelopt==0.47.0 compressed-tensors==0.18.0 \
 && pip install --no-cache-dir -c docker/constraints-gpu.txt \
        ray==2.60.0 transformers==5.12.1 tokenizers==0.22.2 apache-tvm-ffi==0.1.11 pydantic==2.14.4 openai==2.6.1 \
        fastapi==0.165.0 uvicorn==0.54.0 msgspec==0.23.0 orjson==3.13.0 pyzmq==27.3.0 dill==0.4.1 gguf==0.19.0 \
        pybase64==1.5.1 setproctitle==1.3.8 partial-json-parser==0.2.1.1.post7 soundfile==0.13.1 \
        python-multipart==0.0.34 loguru==0.7.3 ipython==9.18.1 easydict==1.14 distro==1.9.0

COPY . .
RUN pip install --no-cache-dir --no-deps -e .

# One process group and one engine need more file handles and locked memory than containers give by default; see docs/install.md.
CMD ["python", "tools/env.py"]
