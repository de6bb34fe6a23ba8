// What racecheck takes for ordered: threads store to shared memory, an mbarrier tells others.
//
//   nvcc -arch=sm_90 -DARRIVAL=0 tests/racecheck_order.cu -o order
//   compute-sanitizer --tool racecheck ./order
//
// ARRIVAL 0: every thread that stored arrives; 1: one of them, after a barrier of all; 2: one of
// them, without, which is a race. H200, CUDA 13.0: 0, 1 and 1 hazards are reported. PTX orders 1,
// too (barriers and arrivals are cumulative), so that racecheck does not follow such an order.
// stream_tiles.py passes its notes on so; Gluon's arrive is always one thread's.
#include <cstdint>
#include <cstdio>

constexpr int WRITERS = 64;

__device__ uint32_t shared_address(void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__global__ void pass_on(int *out) {
    __shared__ int data[WRITERS];
    __shared__ alignas(8) uint64_t ready;
    const int thread = threadIdx.x;
    const int arrivals = ARRIVAL == 0 ? WRITERS : 1;
    if (thread == 0)
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&ready)),
                     "r"(arrivals));
    __syncthreads();
    if (thread < WRITERS) {
        data[thread] = 3 * thread;
        if (ARRIVAL == 1)
            asm volatile("bar.sync 1, %0;" ::"n"(WRITERS) : "memory");
        if (ARRIVAL == 0 || thread == 0)
            asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(
                             shared_address(&ready))
                         : "memory");
    } else {
        asm volatile("{ .reg .pred done;\n"
                     "again: mbarrier.try_wait.parity.shared.b64 done, [%0], 0;\n"
                     "@!done bra again; }" ::"r"(shared_address(&ready))
                     : "memory");
        out[thread - WRITERS] = data[thread - WRITERS] + data[(thread - WRITERS) ^ 33];
    }
}

int main() {
    int *out = nullptr;
    if (cudaMalloc(&out, WRITERS * sizeof(int)) != cudaSuccess)
        return 1;
    pass_on<<<1, 2 * WRITERS>>>(out);
    const cudaError_t error = cudaDeviceSynchronize();
    std::printf("%s\n", cudaGetErrorString(error));
    return error == cudaSuccess ? 0 : 1;
}
