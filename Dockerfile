# An image with megatoken and its CPU kernels. For NVIDIA GPUs: another index of torch, and the compiler that torch.compile needs.
#   docker build -t megatoken:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 --build-arg APT=g++ .
# Run it on the current folder: docker run --rm -v "$PWD:/work" --user "$(id -u):$(id -g)" megatoken doctor
ARG PYTHON=3.13

FROM python:$PYTHON AS build
COPY . /src
RUN pip wheel --no-deps -w /wheel /src

FROM python:$PYTHON-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "torch>=2.11"
ARG APT=""
RUN if [ -n "$APT" ]; then apt-get update && apt-get install -y --no-install-recommends $APT && rm -rf /var/lib/apt/lists/*; fi
COPY --from=build /wheel /wheel
RUN pip install --no-cache-dir "$(echo /wheel/*.whl)[data,plot,s3]"

# HOME for caches can be written by any user: docker run --user and Kubernetes choose their own.
RUN useradd --uid 1000 --create-home --home-dir /home/megatoken megatoken && chmod 777 /home/megatoken && mkdir -m 777 /work
ENV HOME=/home/megatoken
USER 1000
WORKDIR /work
ENTRYPOINT ["megatoken"]
