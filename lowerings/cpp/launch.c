// Launch all kernels of a repeated call: a plan made once, addresses that are new each time.
//
// launch(plan, addresses, output, scratch, stream, device), addresses a tuple. A plan is bytes of
// eight-byte numbers: how many launches; of each the function, programs, threads, shared memory,
// whether it may start early and how many parameters; of each of those a kind and a value. Behind a
// MAP, whose value is its rank, follow kind and value of where its tensor begins, element type and
// swizzling as the driver numbers them, and of each dimension, the innermost first, size, bytes of
// a step (0 for the first) and size of the box.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

enum { CONSTANT = 0, ADDRESS = 1, SCRATCH = 2, OUTPUT = 3, MAP = 4 };
enum { MOST_PARAMETERS = 64, MOST_ADDRESSES = 16, MOST_MAPS = 6, MOST_RANK = 5 };

// Of cuda.h as far as it is needed, which is not on every machine with a driver.
enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6, L2_PROMOTION_128B = 2 };
typedef struct {
  uint64_t opaque[16];
} __attribute__((aligned(64))) TensorMap;
typedef struct {
  int id;
  char padding[4];
  union {
    char padding[64];
    int allowed;
  } value;
} Attribute;
typedef struct {
  unsigned int grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned int attribute_count;
} Config;

static int (*launch_kernel)(const Config*, void*, void**, void**);
static int (*encode_map)(TensorMap*, int, unsigned int, void*, const uint64_t*, const uint64_t*,
                         const unsigned int*, const unsigned int*, int, int, int, int);
static int (*get_context)(void**);
static int (*set_context)(void*);
static int (*get_device)(int*, int);
static int (*retain_context)(void**, int);
static int (*error_string)(int, const char**);

static int find(void* library, const char* name, void* into) {
  void* found = dlsym(library, name);
  memcpy(into, &found, sizeof found);
  return found != NULL;
}

static int find_driver(void) {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY);
  return library && find(library, "cuLaunchKernelEx", &launch_kernel) &&
         find(library, "cuTensorMapEncodeTiled", &encode_map) &&
         find(library, "cuCtxGetCurrent", &get_context) &&
         find(library, "cuCtxSetCurrent", &set_context) &&
         find(library, "cuDeviceGet", &get_device) &&
         find(library, "cuDevicePrimaryCtxRetain", &retain_context) &&
         find(library, "cuGetErrorString", &error_string);
}

// A thread that has launched nothing yet has no context.
static int ensure_context(int device) {
  void* context = NULL;
  int number = 0;
  int error = get_context(&context);
  if (error || context) return error;
  if ((error = get_device(&number, device))) return error;
  if ((error = retain_context(&context, number))) return error;
  return set_context(context);
}

// What a call has: where its tensors begin, its result, and the memory for all else.
typedef struct {
  const uint64_t* addresses;
  uint64_t output, scratch;
} Given;

static uint64_t value_of(uint64_t kind, uint64_t value, const Given* given) {
  if (kind == ADDRESS) return given->addresses[value];
  if (kind == SCRATCH) return given->scratch + value;
  return kind == OUTPUT ? given->output + value : value;
}

// Makes the map that a plan goes on with; returns what follows it.
static const uint64_t* make_map(TensorMap* map, uint64_t rank, const uint64_t* plan,
                                const Given* given, int* error) {
  uint64_t sizes[MOST_RANK], strides[MOST_RANK];
  unsigned int box[MOST_RANK], steps[MOST_RANK];
  const uint64_t* dimension = plan + 4;
  for (uint64_t i = 0; i < rank; ++i, dimension += 3) {
    sizes[i] = dimension[0];
    if (i) strides[i - 1] = dimension[1];
    box[i] = (unsigned int)dimension[2];
    steps[i] = 1;
  }
  *error = encode_map(map, (int)plan[2], (unsigned int)rank,
                      (void*)value_of(plan[0], plan[1], given), sizes, strides, box, steps, 0,
                      (int)plan[3], L2_PROMOTION_128B, 0);
  return dimension;
}

static int launch_all(const uint64_t* plan, const Given* given, void* stream) {
  for (uint64_t left = *plan++; left > 0; --left) {
    Attribute early = {.id = PROGRAMMATIC_STREAM_SERIALIZATION, .value = {.allowed = 1}};
    Config config = {{(unsigned int)plan[1], 1, 1},
                     {(unsigned int)plan[2], 1, 1},
                     (unsigned int)plan[3],
                     stream,
                     &early,
                     plan[4] ? 1 : 0};
    void* function = (void*)plan[0];
    uint64_t count = plan[5], values[MOST_PARAMETERS];
    void* parameters[MOST_PARAMETERS];
    TensorMap maps[MOST_MAPS];
    int error = 0, made = 0;
    plan += 6;
    for (uint64_t i = 0; i < count; ++i) {
      uint64_t kind = plan[0], value = plan[1];
      plan += 2;
      if (kind == MAP) {
        plan = make_map(&maps[made], value, plan, given, &error);
        parameters[i] = &maps[made++];
        if (error) return error;
      } else {
        values[i] = value_of(kind, value, given);
        parameters[i] = &values[i];
      }
    }
    if ((error = launch_kernel(&config, function, parameters, NULL))) return error;
  }
  return 0;
}

static PyObject* launch(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 6 || !PyBytes_Check(args[0]) || !PyTuple_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "launch: wanted (bytes, tuple, int, int, int, int)");
    return NULL;
  }
  uint64_t addresses[MOST_ADDRESSES];
  Py_ssize_t given = PyTuple_GET_SIZE(args[1]);
  if (given > MOST_ADDRESSES) {
    PyErr_Format(PyExc_ValueError, "launch: wanted %d addresses at most", MOST_ADDRESSES);
    return NULL;
  }
  for (Py_ssize_t i = 0; i < given; ++i)
    addresses[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(args[1], i));
  Given call = {addresses, PyLong_AsUnsignedLongLong(args[2]), PyLong_AsUnsignedLongLong(args[3])};
  void* stream = PyLong_AsVoidPtr(args[4]);
  long device = PyLong_AsLong(args[5]);
  if (PyErr_Occurred()) return NULL;
  const uint64_t* plan = (const uint64_t*)PyBytes_AS_STRING(args[0]);
  int error;
  Py_BEGIN_ALLOW_THREADS;
  error = ensure_context((int)device);
  if (!error) error = launch_all(plan, &call, stream);
  Py_END_ALLOW_THREADS;
  if (error) {
    const char* text = NULL;
    error_string(error, &text);
    PyErr_Format(PyExc_RuntimeError, "launch: CUDA error %d: %s", error, text ? text : "unknown");
    return NULL;
  }
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, "Launch the kernels of a plan."},
    {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "int8moe_launch", NULL, -1, methods};

PyMODINIT_FUNC PyInit_int8moe_launch(void) {
  if (!find_driver()) {
    PyErr_SetString(PyExc_ImportError, "int8moe_launch: no driver with cuLaunchKernelEx");
    return NULL;
  }
  return PyModule_Create(&module);
}
