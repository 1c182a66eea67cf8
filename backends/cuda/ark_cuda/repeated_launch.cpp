// Launches one kernel repeatedly on a caller's stream, each time in a single call from Python: the
// launch, then an event. Compiled and called by repeated_launch.py, which passes the driver's
// functions as addresses.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <new>

namespace {

struct RepeatedLaunch {
  int (*context)(void**);
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                void**);
  int (*record)(void*, void*);
  void *own, *function, *event;
  void** params;
  unsigned dims[6], shared;  // of the grid, then of its blocks
};

const char NAME[] = "ark.repeated_launch";
constexpr long OTHER = -1;  // another context is current

RepeatedLaunch* of(PyObject* capsule) {
  return static_cast<RepeatedLaunch*>(PyCapsule_GetPointer(capsule, NAME));
}

void drop(PyObject* capsule) { delete of(capsule); }

// Launches the prepared kernel on a stream. Returns the driver's result code. Returns OTHER,
// without a launch, if the current CUDA context is not the prepared one.
PyObject* repeated_launch(PyObject* capsule, PyObject* stream) {
  const RepeatedLaunch& my = *of(capsule);
  void* queue = PyLong_AsVoidPtr(stream);
  if (queue == nullptr && PyErr_Occurred()) return nullptr;
  void* current = nullptr;
  long code = my.context(&current);
  if (code == 0 && current != my.own) return PyLong_FromLong(OTHER);
  const unsigned* d = my.dims;
  Py_BEGIN_ALLOW_THREADS  // a full queue makes the driver wait
      if (code == 0) code =
          my.launch(my.function, d[0], d[1], d[2], d[3], d[4], d[5], my.shared, queue, my.params);
  if (code == 0) code = my.record(my.event, queue);
  Py_END_ALLOW_THREADS return PyLong_FromLong(code);
}

PyMethodDef REPEATED_LAUNCH = {"repeated_launch", repeated_launch, METH_O, nullptr};

// launcher(cuCtxGetCurrent, cuLaunchCooperativeKernel, cuEventRecord, context, function, event,
// params, six dimensions, shared bytes): prepares a launch and returns a function
// `repeated_launch`. params: the launch arguments, whose address must not change.
PyObject* launcher(PyObject*, PyObject* words) {
  unsigned long long at[7];
  unsigned d[7];
  if (!PyArg_ParseTuple(words, "KKKKKKKIIIIIII", at, at + 1, at + 2, at + 3, at + 4, at + 5, at + 6,
                        d, d + 1, d + 2, d + 3, d + 4, d + 5, d + 6))
    return nullptr;
  RepeatedLaunch* my = new (std::nothrow) RepeatedLaunch{
      reinterpret_cast<decltype(RepeatedLaunch::context)>(at[0]),
      reinterpret_cast<decltype(RepeatedLaunch::launch)>(at[1]),
      reinterpret_cast<decltype(RepeatedLaunch::record)>(at[2]),
      reinterpret_cast<void*>(at[3]),
      reinterpret_cast<void*>(at[4]),
      reinterpret_cast<void*>(at[5]),
      reinterpret_cast<void**>(at[6]),
      {d[0], d[1], d[2], d[3], d[4], d[5]},
      d[6],
  };
  if (my == nullptr) return PyErr_NoMemory();
  PyObject* capsule = PyCapsule_New(my, NAME, drop);
  if (capsule == nullptr) {
    delete my;
    return nullptr;
  }
  PyObject* made = PyCFunction_NewEx(&REPEATED_LAUNCH, capsule, nullptr);
  Py_DECREF(capsule);
  return made;
}

PyMethodDef METHODS[] = {{"launcher", launcher, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef MODULE = {PyModuleDef_HEAD_INIT,
                      "ark_repeated_launch",
                      nullptr,
                      -1,
                      METHODS,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_ark_repeated_launch() { return PyModule_Create(&MODULE); }
