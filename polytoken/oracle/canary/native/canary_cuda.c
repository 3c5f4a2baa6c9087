/* The canary for an NVIDIA GPU: a kernel of one thread on a stream of its own, through the driver alone.
 *
 *     cc -shared -fPIC -O2 -o canary_cuda.so canary_cuda.c -ldl -lpthread
 *
 * No CUDA toolkit is needed: the driver's library is opened when the first probe is asked for, and translates the
 * kernel. The stream has the lowest priority and waits for no other, so a probe is late only when the device serves
 * nobody. It uses the process's own context, as the engine does. */
#include "canary.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <time.h>

enum { NON_BLOCKING_STREAM = 1, EVENT_WITHOUT_TIME = 2, RELAXED_CAPTURE = 2 };

static const char TOUCH[] =
    ".version 6.0\n"
    ".target sm_50\n"
    ".address_size 64\n"
    ".visible .entry touch(.param .u64 cell)\n"
    "{\n"
    "    .reg .b32 %r<2>;\n"
    "    .reg .b64 %rd<3>;\n"
    "    ld.param.u64 %rd1, [cell];\n"
    "    cvta.to.global.u64 %rd2, %rd1;\n"
    "    ld.global.u32 %r1, [%rd2];\n"
    "    add.u32 %r1, %r1, 1;\n"
    "    st.global.u32 [%rd2], %r1;\n"
    "    ret;\n"
    "}\n";

static struct {
    int (*set_context)(void *context);
    int (*set_capture_mode)(int *mode);
    int (*record)(void *event, void *stream);
    int (*launch)(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                  unsigned shared, void *stream, void **arguments, void **extra);
    int (*wait_event)(void *event);
    int (*wait_stream)(void *stream);
    void *context, *kernel, *stream, *begun;
    unsigned long long cell;
    int ready;
} gpu;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The driver's function of this name, into a pointer of the right type; `missing` becomes 1 where there is none. */
static void find(void *library, const char *name, void *pointer, int *missing) {
    void *found = dlsym(library, name);
    *(void **)pointer = found;
    if (found == NULL) *missing = 1;
}

static void set_up(void) {
    int (*init)(unsigned), (*get_device)(int *, int), (*retain)(void **, int), (*load)(void **, const void *);
    int (*get_function)(void **, void *, const char *), (*priorities)(int *, int *);
    int (*make_stream)(void **, unsigned, int), (*make_event)(void **, unsigned);
    int (*allocate)(unsigned long long *, size_t), (*fill)(unsigned long long, unsigned, size_t);
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *module = NULL;
    int missing = 0, device = 0, least = 0, greatest = 0;
    if (library == NULL) return;
    find(library, "cuInit", &init, &missing);
    find(library, "cuDeviceGet", &get_device, &missing);
    find(library, "cuDevicePrimaryCtxRetain", &retain, &missing);
    find(library, "cuCtxSetCurrent", &gpu.set_context, &missing);
    find(library, "cuThreadExchangeStreamCaptureMode", &gpu.set_capture_mode, &missing);
    find(library, "cuModuleLoadData", &load, &missing);
    find(library, "cuModuleGetFunction", &get_function, &missing);
    find(library, "cuCtxGetStreamPriorityRange", &priorities, &missing);
    find(library, "cuStreamCreateWithPriority", &make_stream, &missing);
    find(library, "cuEventCreate", &make_event, &missing);
    find(library, "cuMemAlloc_v2", &allocate, &missing);
    find(library, "cuMemsetD32_v2", &fill, &missing);
    find(library, "cuEventRecord", &gpu.record, &missing);
    find(library, "cuLaunchKernel", &gpu.launch, &missing);
    find(library, "cuEventSynchronize", &gpu.wait_event, &missing);
    find(library, "cuStreamSynchronize", &gpu.wait_stream, &missing);
    if (missing || init(0) || get_device(&device, 0) || retain(&gpu.context, device)) return;
    if (gpu.set_context(gpu.context) || load(&module, TOUCH) || get_function(&gpu.kernel, module, "touch")) return;
    if (priorities(&least, &greatest) || make_stream(&gpu.stream, NON_BLOCKING_STREAM, least)) return;
    if (make_event(&gpu.begun, EVENT_WITHOUT_TIME) || allocate(&gpu.cell, 4) || fill(gpu.cell, 0, 1)) return;
    gpu.ready = 1;
}

int ds4_gpu_canary_probe(double seconds[2]) {
    void *arguments[] = {&gpu.cell};
    int mode = RELAXED_CAPTURE; /* what the engine records into graphs meanwhile is no business of this thread */
    pthread_once(&once, set_up);
    if (!gpu.ready || gpu.set_context(gpu.context) || gpu.set_capture_mode(&mode)) return 0;
    const double start = now();
    if (gpu.record(gpu.begun, gpu.stream)) return 0;
    if (gpu.launch(gpu.kernel, 1, 1, 1, 1, 1, 1, 0, gpu.stream, arguments, NULL)) return 0;
    if (gpu.wait_event(gpu.begun)) return 0;
    seconds[0] = now() - start;
    if (gpu.wait_stream(gpu.stream)) return 0;
    seconds[1] = now() - start;
    return 1;
}
