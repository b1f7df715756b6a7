// A CUDA driver with one sm_90 that computes nothing: every call succeeds, launches are counted and noted.
// It defines what Triton's NVIDIA backend calls, and no more. Nothing here may be slow: perf times what is above it.

#include <cuda.h>
#include <stdint.h>
#include <string.h>

#define NOTED 256
#define MAX_PARAMS 16

typedef struct {
  const char *kernel;
  uint64_t stream;
  uint32_t grid[3], block[3], shared, n_params;
  uint64_t params[MAX_PARAMS];
} Launch;  // perf/stub_driver/__init__.py has the same

// Not for several threads: Triton launches without the interpreter's lock.
static Launch launches[NOTED];
static uint64_t n_launches;
static uint32_t n_params;

uint64_t stub_launches(void) { return n_launches; }

// The launch of that number, counted from 0; NULL before it is made and once it is forgotten.
const Launch *stub_launch(uint64_t number) {
  return number < n_launches && number + NOTED >= n_launches ? &launches[number % NOTED] : NULL;
}

// A launch does not say how many parameters there are: from now on the first `count` are noted, 8 bytes each.
void stub_note_params(uint32_t count) { n_params = count < MAX_PARAMS ? count : MAX_PARAMS; }

// Whoever computes what is launched, after all: it is called within the launch.
typedef void (*OnLaunch)(CUfunction function, uint32_t n_programs, void **params);
static OnLaunch on_launch;
void stub_on_launch(OnLaunch call) { on_launch = call; }

static CUresult note(Launch launch, void **params) {
  if (on_launch) on_launch((CUfunction)launch.kernel, launch.grid[0], params);
  launch.n_params = n_params;
  for (uint32_t i = 0; i < n_params; i++) memcpy(&launch.params[i], params[i], sizeof(uint64_t));
  launches[n_launches++ % NOTED] = launch;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
  Launch launch = {.kernel = (const char *)f,
                   .stream = (uint64_t)c->hStream,
                   .grid = {c->gridDimX, c->gridDimY, c->gridDimZ},
                   .block = {c->blockDimX, c->blockDimY, c->blockDimZ},
                   .shared = c->sharedMemBytes};
  return note(launch, params);
}

CUresult cuLaunchKernel(CUfunction f, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **params,
                        void **extra) {
  Launch launch = {.kernel = (const char *)f,
                   .stream = (uint64_t)stream,
                   .grid = {grid_x, grid_y, grid_z},
                   .block = {block_x, block_y, block_z},
                   .shared = shared};
  return note(launch, params);
}

// Handles: nobody looks at what they point to, but NULL would mean that there is none.

static int handle;

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)&handle;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
  *device = 0;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)&handle;
  return CUDA_SUCCESS;
}

// A function's handle is its name, so that a launch can tell it.
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)strdup(name);
  return *function ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

// Attributes: an H100's, where somebody reads them.

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
  *count = 1;
  return CUDA_SUCCESS;
}

static int device_attribute(CUdevice_attribute attribute) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return 0;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return 227 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 228 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return 65536;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 132;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 2619000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 5120;
    default: return 0;
  }
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = device_attribute(attribute);
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

// Any address is a device's.
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
  memcpy(value, &address, sizeof address);
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "an error of the stub driver";
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  *count = 1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 0;
  return CUDA_SUCCESS;
}

// Calls that are made for their effect alone, and have none.

#pragma GCC diagnostic ignored "-Wattribute-alias"
#define SUCCEEDS(name) extern __typeof__(name) name __attribute__((alias("success")))

static CUresult success(void) { return CUDA_SUCCESS; }

SUCCEEDS(cuInit);
SUCCEEDS(cuCtxSetCurrent);
SUCCEEDS(cuCtxSetLimit);
SUCCEEDS(cuModuleUnload);
SUCCEEDS(cuFuncSetAttribute);
SUCCEEDS(cuFuncSetCacheConfig);
SUCCEEDS(cuTensorMapEncodeTiled);
SUCCEEDS(cuTensorMapEncodeIm2col);
