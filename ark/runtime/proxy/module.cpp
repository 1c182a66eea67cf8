// The proxy as a Python module. It is the same for all vendors and is compiled once.
#include <pybind11/pybind11.h>

#include "bound.h"

namespace py = pybind11;
using ark::Bound;

PYBIND11_MODULE(ark_proxy, m) {
  const auto free = py::call_guard<py::gil_scoped_release>();
  py::class_<Bound>(m, "Proxy", py::module_local())
      .def(py::init(&ark::make_bound))
      .def("has_network", &Bound::has_network)
      .def("network",
           [](Bound& self, uint64_t begin, uint64_t nbytes) {
             const auto made = self.network(begin, nbytes);
             return py::make_tuple(py::bytes(made.first), py::bytes(made.second));
           })
      .def("connect", &Bound::connect)
      .def("allow", &Bound::allow)
      .def("start", &Bound::start, free)
      .def("stop", &Bound::stop, free)
      .def("wake", &Bound::wake)
      .def("error", &Bound::error)
      .def("served", &Bound::served)
      .def("rests", &Bound::rests);
}
