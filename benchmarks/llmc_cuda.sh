#!/usr/bin/env bash
# Build llm.c's train_gpt2cu from a checkout and time it in turns with megatoken on one GPU.
#
#     benchmarks/llmc_cuda.sh CHECKOUT DATA OUT [CUDNN_FRONTEND_INCLUDE]
#
# CHECKOUT: https://github.com/karpathy/llm.c (f1e2ace was measured); it is copied, not changed.
# DATA: a folder of `megatoken prepare`, whose shards llm.c reads as well.
# OUT: receives the program and the record llmc-cuda.json, rewritten after each turn.
# CUDNN_FRONTEND_INCLUDE: headers of https://github.com/NVIDIA/cudnn-frontend for cuDNN attention;
# without them llm.c is built with its own, slower attention.
# PEERS="--nanogpt CHECKOUT --transformers" also times these.
#
# Two changes to the copy:
# - CUDA 13 replaced the device number in cudaMemAdvise by a cudaMemLocation.
# - cuDNN's backward stays deterministic, as in llm.c; DETERMINISTIC=0 switches it off.
set -euo pipefail
if [ $# -lt 3 ]; then
    sed -n '2,18s/^# \{0,1\}//p' "$0"
    exit 2
fi
root=$(cd "$(dirname "$0")/.." && pwd)
checkout=$(cd "$1" && pwd)
data=$(cd "$2" && pwd)
mkdir -p "$3"
out=$(cd "$3" && pwd)
frontend=${4:-}
build=$out/llm.c
if [ ! -x "$build/train_gpt2cu" ]; then
    rm -rf "$build"
    cp -r "$checkout" "$build"
    cd "$build"
    if [ "$(nvcc --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')" -ge 13 ]; then
        location='cudaMemLocation{cudaMemLocationTypeHost, 0}'
        sed -i "s/\(cudaMemAdviseSetPreferredLocation, \)cudaCpuDeviceId/\1$location/" \
            llmc/cuda_utils.cuh
        grep -q cudaMemLocationTypeHost llmc/cuda_utils.cuh
    fi
    if [ "${DETERMINISTIC:-1}" = 0 ]; then
        sed -i 's/set_deterministic_algorithm(true)/set_deterministic_algorithm(false)/' \
            llmc/cudnn_att.cpp
        grep -q 'set_deterministic_algorithm(false)' llmc/cudnn_att.cpp
    fi
    options=(NO_MULTI_GPU=1 USE_CUDNN=0)
    if [ -n "$frontend" ]; then
        # The Makefile only accepts a folder in HOME or in the checkout.
        mkdir -p cudnn-frontend
        ln -sfn "$(cd "$root" && cd "$frontend" && pwd)" cudnn-frontend/include
        options=(NO_MULTI_GPU=1 USE_CUDNN=1 "HOME=$build")
        export NVCC_APPEND_FLAGS="${NVCC_APPEND_FLAGS:-} -lnvrtc -lcuda"  # for recent headers
    fi
    make "${options[@]}" train_gpt2cu
fi
cd "$root"
export PYTHONPATH=$root/src:$root${PYTHONPATH:+:$PYTHONPATH}
exec python benchmarks/record.py --out "$out" llmc-cuda -- python -m benchmarks.sustained \
    --device cuda --data "$data" --llmc "$build/train_gpt2cu" \
    --batch-seqs "${BATCH_SEQS:-64,512}" --turns "${TURNS:-3}" ${PEERS:-}
