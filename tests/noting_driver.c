// A CUDA driver that launches nothing and notes what it was asked to launch.
//
// The last two digits of a function are the number of its parameters.
#include <stdint.h>
#include <string.h>

enum { MOST_NOTES = 256, MOST_PARAMETERS = 64 };

typedef struct {
  uint64_t grid, threads, shared, stream, function, attributes, attribute, allowed;
  uint64_t parameters[MOST_PARAMETERS];
} Note;
typedef struct {
  int id;
  char padding[4];
  int allowed;
  char rest[60];
} Attribute;
typedef struct {
  unsigned int grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned int count;
} Config;

static Note notes[MOST_NOTES];
static uint64_t map_sums[MOST_NOTES];
static int noted, mapped, has_context = 1, next_error;

int begin_notes(int with_context, int error) {
  has_context = with_context;
  next_error = error;
  return noted = mapped = 0;
}
int count_maps(void) { return mapped; }
uint64_t map_sum_at(int index) { return map_sums[index]; }
int count_notes(void) { return noted; }
Note* note_at(int index) { return &notes[index]; }

int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void** extra) {
  if (next_error) return next_error;
  if (!has_context || noted == MOST_NOTES) return 201;
  Note* note = &notes[noted++];
  memset(note, 0, sizeof *note);
  note->grid = (uint64_t)config->grid[0] * config->grid[1] * config->grid[2];
  note->threads = (uint64_t)config->block[0] * config->block[1] * config->block[2];
  note->shared = config->shared;
  note->stream = (uint64_t)config->stream;
  note->function = (uint64_t)function;
  note->attributes = config->count;
  if (config->count) {
    note->attribute = (uint64_t)config->attributes[0].id;
    note->allowed = (uint64_t)config->attributes[0].allowed;
  }
  for (int i = 0; i < (int)(note->function % 100); ++i)
    memcpy(&note->parameters[i], parameters[i], 8);
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = has_context ? &noted : 0;
  return 0;
}
int cuCtxSetCurrent(void* context) {
  has_context = context != 0;
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &noted;
  return 0;
}
int cuGetErrorString(int error, const char** text) {
  *text = "noted";
  return 0;
}
int cuPointerGetAttribute(void* into, int attribute, uint64_t pointer) {
  memcpy(into, &pointer, 8);
  return 0;
}
// A map here is where its tensor begins; of all else a sum is noted.
int cuTensorMapEncodeTiled(void* map, int type, unsigned int rank, void* address,
                           const uint64_t* sizes, const uint64_t* strides, const unsigned int* box,
                           const unsigned int* steps, int interleave, int swizzle, int promotion,
                           int fill) {
  uint64_t sum = 1;
  const int plain[] = {type, (int)rank, interleave, swizzle, promotion, fill};
  for (int i = 0; i < 6; ++i) sum = sum * 1000003 + (uint64_t)plain[i];
  for (unsigned int i = 0; i < rank; ++i) {
    sum = sum * 1000003 + sizes[i];
    sum = sum * 1000003 + (i + 1 < rank ? strides[i] : 0);
    sum = sum * 1000003 + box[i] * 7 + steps[i];
  }
  memcpy(map, &address, 8);
  if (mapped < MOST_NOTES) map_sums[mapped++] = sum;
  return 0;
}
int cuDriverGetVersion(int* version) {
  *version = 13020;
  return 0;
}
// What Triton's own module needs to load and never calls here.
int cuCtxGetLimit(void) { return 1; }
int cuCtxSetLimit(void) { return 1; }
int cuDeviceGetAttribute(void) { return 1; }
int cuFuncGetAttribute(void) { return 1; }
int cuFuncSetAttribute(void) { return 1; }
int cuFuncSetCacheConfig(void) { return 1; }
int cuModuleGetFunction(void) { return 1; }
int cuModuleLoadData(void) { return 1; }
