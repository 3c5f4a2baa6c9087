/* The canary for an NVIDIA GPU: an empty kernel on a stream of its own.
 *
 *     nvcc -shared -Xcompiler -fPIC -O2 -o canary_cuda.so canary_cuda.cu
 *
 * The stream has the lowest priority and waits for no other, so a probe is late only when the device serves nobody. */
#include "canary.h"

#include <cuda_runtime.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

__global__ void touch(int *out) { *out += 1; }

extern "C" int ds4_gpu_canary_probe(double seconds[2]) {
    static cudaStream_t stream = nullptr;
    static cudaEvent_t begun = nullptr;
    static int *cell = nullptr;
    if (stream == nullptr) {
        int least = 0, greatest = 0;
        if (cudaDeviceGetStreamPriorityRange(&least, &greatest) != cudaSuccess) return 0;
        if (cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, least) != cudaSuccess) return 0;
        if (cudaEventCreateWithFlags(&begun, cudaEventDisableTiming) != cudaSuccess) return 0;
        if (cudaMalloc(&cell, sizeof(int)) != cudaSuccess) return 0;
        if (cudaMemsetAsync(cell, 0, sizeof(int), stream) != cudaSuccess) return 0;
    }
    const double start = now();
    if (cudaEventRecord(begun, stream) != cudaSuccess) return 0;
    touch<<<1, 1, 0, stream>>>(cell);
    if (cudaGetLastError() != cudaSuccess) return 0;
    if (cudaEventSynchronize(begun) != cudaSuccess) return 0;
    seconds[0] = now() - start;
    if (cudaStreamSynchronize(stream) != cudaSuccess) return 0;
    seconds[1] = now() - start;
    return 1;
}
