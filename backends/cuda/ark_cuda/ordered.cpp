// Enqueues the copies that precede a launch, and the launch itself, on one stream in a single call
// from Python. Compiled and called by ordered.py, which passes the driver's functions as addresses.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <new>

namespace {

using Word = unsigned long long;

struct Queue {
  int (*push)(void*);
  int (*pop)(void**);
  int (*clear)(Word, unsigned char, size_t, void*);
  int (*copy)(Word, Word, size_t, void*);
  int (*record)(void*, void*);
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                void**);
  void *context, *stream;
};

const char NAME[] = "ark.ordered";
constexpr int LAUNCH_WORDS = 11, STEP_WORDS = 3;

Queue* of(PyObject* capsule) { return static_cast<Queue*>(PyCapsule_GetPointer(capsule, NAME)); }

void drop(PyObject* capsule) { delete of(capsule); }

template <class T>
T* at(Word word) {
  return reinterpret_cast<T*>(word);
}

// Enqueues the steps, then an event, the launch and a second event. A step is a copy or, if its
// source is 0, a clear of memory. The CUDA context must be current.
int enqueue(const Queue& my, const Word* launch, const Word* step, Word steps) {
  int code = 0;
  for (Word i = 0; code == 0 && i < steps; ++i, step += STEP_WORDS) {
    code = step[1] == 0 ? my.clear(step[0], 0, step[2], my.stream)
                        : my.copy(step[0], step[1], step[2], my.stream);
  }
  if (code == 0) code = my.record(at<void>(launch[0]), my.stream);
  unsigned d[7];
  for (int i = 0; i < 7; ++i) d[i] = static_cast<unsigned>(launch[3 + i]);
  void* params = at<void>(launch[10]);
  if (code == 0) {
    code = my.launch(at<void>(launch[2]), d[0], d[1], d[2], d[3], d[4], d[5], d[6], my.stream,
                     &params);
  }
  if (code == 0) code = my.record(at<void>(launch[1]), my.stream);
  return code;
}

// Runs the enqueued operations. The argument is the address of an array of words: the number of
// steps; two events, the function, seven dimensions, the parameters; then target, source and bytes
// of each step. Returns the driver's first result code that is not 0.
PyObject* run(PyObject* capsule, PyObject* address) {
  const Queue& my = *of(capsule);
  const Word* words = static_cast<const Word*>(PyLong_AsVoidPtr(address));
  if (words == nullptr) return nullptr;
  void* before = nullptr;
  long code = 0;
  Py_BEGIN_ALLOW_THREADS  // a full queue makes the driver wait
      code = my.push(my.context);
  if (code == 0) {
    code = enqueue(my, words + 1, words + 1 + LAUNCH_WORDS, words[0]);
    my.pop(&before);
  }
  Py_END_ALLOW_THREADS return PyLong_FromLong(code);
}

PyMethodDef RUN = {"run", run, METH_O, nullptr};

// Returns a function `run` for one stream. Arguments: the driver functions cuCtxPushCurrent,
// cuCtxPopCurrent, cuMemsetD8Async, cuMemcpyAsync, cuEventRecord, cuLaunchCooperativeKernel, then
// the context and the stream.
PyObject* queue(PyObject*, PyObject* given) {
  Word w[8];
  if (!PyArg_ParseTuple(given, "KKKKKKKK", w, w + 1, w + 2, w + 3, w + 4, w + 5, w + 6, w + 7)) {
    return nullptr;
  }
  Queue* my = new (std::nothrow) Queue{
      reinterpret_cast<decltype(Queue::push)>(w[0]),
      reinterpret_cast<decltype(Queue::pop)>(w[1]),
      reinterpret_cast<decltype(Queue::clear)>(w[2]),
      reinterpret_cast<decltype(Queue::copy)>(w[3]),
      reinterpret_cast<decltype(Queue::record)>(w[4]),
      reinterpret_cast<decltype(Queue::launch)>(w[5]),
      at<void>(w[6]),
      at<void>(w[7]),
  };
  if (my == nullptr) return PyErr_NoMemory();
  PyObject* capsule = PyCapsule_New(my, NAME, drop);
  if (capsule == nullptr) {
    delete my;
    return nullptr;
  }
  PyObject* made = PyCFunction_NewEx(&RUN, capsule, nullptr);
  Py_DECREF(capsule);
  return made;
}

PyMethodDef METHODS[] = {{"queue", queue, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "ark_ordered", nullptr, -1, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_ark_ordered() { return PyModule_Create(&MODULE); }
