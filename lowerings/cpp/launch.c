// Launch all kernels of a repeated call: a plan made once, addresses that are new each time.
//
// launch(plan, addresses, output, scratch, stream, device), addresses a tuple. A plan is bytes of
// eight-byte numbers: how many launches; of each the function, programs, threads, shared memory,
// whether it may start early and how many parameters; of each of those a kind and a value.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

enum { CONSTANT = 0, ADDRESS = 1, SCRATCH = 2, OUTPUT = 3 };
enum { MOST_PARAMETERS = 64, MOST_ADDRESSES = 16 };

// Of cuda.h as far as it is needed, which is not on every machine with a driver.
enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
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

static int launch_all(const uint64_t* plan, const uint64_t* addresses, uint64_t output,
                      uint64_t scratch, void* stream) {
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
    plan += 6;
    for (uint64_t i = 0; i < count; ++i, plan += 2) {
      values[i] = plan[1];
      if (plan[0] == ADDRESS) values[i] = addresses[plan[1]];
      if (plan[0] == SCRATCH) values[i] += scratch;
      if (plan[0] == OUTPUT) values[i] += output;
      parameters[i] = &values[i];
    }
    int error = launch_kernel(&config, function, parameters, NULL);
    if (error) return error;
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
  uint64_t output = PyLong_AsUnsignedLongLong(args[2]);
  uint64_t scratch = PyLong_AsUnsignedLongLong(args[3]);
  void* stream = PyLong_AsVoidPtr(args[4]);
  long device = PyLong_AsLong(args[5]);
  if (PyErr_Occurred()) return NULL;
  const uint64_t* plan = (const uint64_t*)PyBytes_AS_STRING(args[0]);
  int error;
  Py_BEGIN_ALLOW_THREADS;
  error = ensure_context((int)device);
  if (!error) error = launch_all(plan, addresses, output, scratch, stream);
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
