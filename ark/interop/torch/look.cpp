// Checks the tensors of a call in one native function, because checks in Python would take longer
// than the kernel. It checks whether tensors that must not move (such as parameters) still have
// their addresses, and returns the addresses of all other tensors. Compiled and called by look.py.
//
// A tensor's Python object contains torch's handle of the tensor, an at::Tensor, at an offset that
// look.py determines. Everything else is read through torch's C interface (aoti_torch/c/shim.h),
// whose functions are passed as addresses.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

namespace {

using Handle = void*;

struct Functions {  // in the order of look.py's FUNCTIONS; each returns 0 on success
  int (*data_ptr)(Handle, void**);
  int (*dim)(Handle, int64_t*);
  int (*sizes)(Handle, int64_t**);
  int (*strides)(Handle, int64_t**);
  int (*dtype)(Handle, int32_t*);
  int (*layout)(Handle, int32_t*);
  int (*device_type)(Handle, int32_t*);
  int (*device_index)(Handle, int32_t*);
  int (*storage_size)(Handle, int64_t*);
  int (*storage_offset)(Handle, int64_t*);
  bool (*is_negative)(Handle);  // returns the flag, not a status
};

// The properties of a tensor for which a kernel was compiled. A tensor that may move is contiguous.
struct Kind {
  int64_t dim, nbytes, itemsize;
  int32_t dtype, layout, device_type, device_index;
  std::vector<int64_t> extents;  // sizes, then strides
};

struct Known {
  Py_ssize_t place;
  PyTypeObject* type;
  void* address;  // the address of a tensor that must not move
  Kind kind;
};

struct Look {
  Functions torch;
  Py_ssize_t offset, given;
  std::vector<Known> staying, moving;

  Handle handle(PyObject* object) const { return reinterpret_cast<char*>(object) + offset; }

  bool read(PyObject* object, Kind& kind) const {
    Handle h = handle(object);
    int64_t *sizes, *strides;
    if (torch.layout(h, &kind.layout) || torch.dim(h, &kind.dim) || torch.sizes(h, &sizes) ||
        torch.strides(h, &strides) || torch.dtype(h, &kind.dtype) ||
        torch.device_type(h, &kind.device_type) || torch.device_index(h, &kind.device_index))
      return false;
    int64_t count = 1;
    for (int64_t d = 0; d < kind.dim; ++d) count *= sizes[d];
    kind.itemsize = count > 0 ? kind.nbytes / count : 0;
    kind.extents.assign(sizes, sizes + kind.dim);
    kind.extents.insert(kind.extents.end(), strides, strides + kind.dim);
    return true;
  }

  // True if the tensor has the sizes and strides of `kind`.
  bool lies(PyObject* object, const Kind& kind) const {
    Handle h = handle(object);
    int64_t dim, *sizes, *strides;
    if (torch.dim(h, &dim) || dim != kind.dim || torch.sizes(h, &sizes) ||
        torch.strides(h, &strides))
      return false;
    const int64_t* wanted = kind.extents.data();
    return dim == 0 || (!std::memcmp(sizes, wanted, dim * sizeof *wanted) &&
                        !std::memcmp(strides, wanted + dim, dim * sizeof *wanted));
  }

  // True if the memory of a tensor with the sizes of `kind` is long enough and holds the tensor's
  // values (no negative bit).
  bool holds(PyObject* object, const Kind& kind) const {
    Handle h = handle(object);
    int64_t size, begin;
    return !torch.storage_size(h, &size) && !torch.storage_offset(h, &begin) &&
           size >= begin * kind.itemsize + kind.nbytes && !torch.is_negative(h);
  }

  // True if the tensor has all properties of `kind`. The layout is compared first, because torch
  // returns no sizes or strides of a sparse tensor.
  bool is(PyObject* object, const Kind& kind) const {
    Handle h = handle(object);
    int32_t layout, dtype, type, index;
    if (torch.layout(h, &layout) || layout != kind.layout || !lies(object, kind) ||
        torch.dtype(h, &dtype) || torch.device_type(h, &type) || torch.device_index(h, &index))
      return false;
    return dtype == kind.dtype && type == kind.device_type && index == kind.device_index;
  }
};

const char NAME[] = "ark.look";

void drop(PyObject* capsule) { delete static_cast<Look*>(PyCapsule_GetPointer(capsule, NAME)); }

// look(tensors): returns the addresses of the tensors that may move. Returns None if a tensor
// differs from the tensors for which `look` was created, or if its negative bit is set (its values
// are then the negated values in memory).
PyObject* look(PyObject* capsule, PyObject* given) {
  const Look& my = *static_cast<Look*>(PyCapsule_GetPointer(capsule, NAME));
  if (!PyList_Check(given) || PyList_Size(given) != my.given) Py_RETURN_NONE;
  for (const Known& known : my.staying) {
    PyObject* object = PyList_GetItem(given, known.place);
    void* address;
    if (Py_TYPE(object) != known.type || my.torch.data_ptr(my.handle(object), &address) ||
        address != known.address || !my.lies(object, known.kind) ||
        my.torch.is_negative(my.handle(object)))
      Py_RETURN_NONE;
  }
  for (const Known& known : my.moving) {
    PyObject* object = PyList_GetItem(given, known.place);
    if (Py_TYPE(object) != known.type || !my.is(object, known.kind) ||
        !my.holds(object, known.kind))
      Py_RETURN_NONE;
  }
  PyObject* made = PyTuple_New(my.moving.size());
  for (size_t i = 0; made != nullptr && i < my.moving.size(); ++i) {
    void* address;
    PyObject* object = PyList_GetItem(given, my.moving[i].place);
    bool failed = my.torch.data_ptr(my.handle(object), &address);
    PyObject* number = failed ? nullptr : PyLong_FromVoidPtr(address);
    if (number == nullptr || PyTuple_SetItem(made, i, number)) Py_CLEAR(made);
    if (failed) Py_RETURN_NONE;
  }
  return made;
}

PyMethodDef LOOK = {"look", look, METH_O, nullptr};

// looker(functions, offset, tensors, sizes): creates a function `look` for calls with tensors like
// `tensors`. functions: the addresses of torch's functions. offset: the position of the handle in a
// Python object. sizes: the bytes of each tensor that may move; -1 for each tensor that must not
// move.
PyObject* looker(PyObject*, PyObject* words) {
  PyObject *functions, *tensors, *nbytes;
  Py_ssize_t offset;
  if (!PyArg_ParseTuple(words, "O!nO!O!", &PyTuple_Type, &functions, &offset, &PyList_Type,
                        &tensors, &PyList_Type, &nbytes))
    return nullptr;
  void* found[sizeof(Functions) / sizeof(void*)];
  for (size_t i = 0; i < sizeof(Functions) / sizeof(void*); ++i) {
    PyObject* number = PyTuple_GetItem(functions, i);
    found[i] = number != nullptr ? PyLong_AsVoidPtr(number) : nullptr;
    if (found[i] == nullptr) return nullptr;
  }
  Look* my = new (std::nothrow) Look();
  if (my == nullptr) return PyErr_NoMemory();
  PyObject* capsule = PyCapsule_New(my, NAME, drop);
  if (capsule == nullptr) {
    delete my;
    return nullptr;
  }
  std::memcpy(&my->torch, found, sizeof found);
  my->offset = offset;
  my->given = PyList_Size(tensors);
  bool good = PyList_Size(nbytes) == my->given;
  for (Py_ssize_t i = 0; good && i < my->given; ++i) {
    PyObject* object = PyList_GetItem(tensors, i);
    Known known = {i, Py_TYPE(object), nullptr, {}};
    known.kind.nbytes = PyLong_AsLongLong(PyList_GetItem(nbytes, i));
    bool moving = known.kind.nbytes >= 0;
    good = my->read(object, known.kind) &&
           (moving || !my->torch.data_ptr(my->handle(object), &known.address));
    (moving ? my->moving : my->staying).push_back(std::move(known));
  }
  PyObject* made = good ? PyCFunction_NewEx(&LOOK, capsule, nullptr) : nullptr;
  Py_DECREF(capsule);
  if (!good) PyErr_SetString(PyExc_ValueError, "torch does not say what a tensor is");
  return made;
}

PyMethodDef METHODS[] = {{"looker", looker, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "ark_look", nullptr, -1, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_ark_look() { return PyModule_Create(&MODULE); }
