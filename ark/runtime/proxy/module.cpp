// The proxy as a Python module. What a vendor adds, a Copies, lies in copies.h beside this file.
#include "proxy.h"

#include <pybind11/pybind11.h>

#include <memory>

#include "copies.h"
#if defined(ARK_UCX)
#include "ucx.h"
#endif

namespace py = pybind11;

namespace {

// Memory that this process reaches: copied by the device's engines.
class Local : public ark::Engine {
 public:
  Local(const std::string& library, int device) : copies_(library, device) {}
  void open() override { copies_.open(); }
  void copy(const ark::Range& from, const ark::Range& to, uint64_t source, uint64_t target,
            uint64_t size) override {
    if (from.peer >= 0 || to.peer >= 0) throw std::runtime_error("there is no way to that host");
    copies_.start(target, source, size);
  }
  void add(const ark::Range&, uint64_t, uint32_t) override {
    throw std::runtime_error("a counter of this host is not the proxy's to signal");
  }
  uint32_t completed() override { return copies_.completed(); }
  void close() override { copies_.close(); }

 private:
  Copies copies_;
};

struct Bound {
  std::unique_ptr<ark::Engine> engine;
  std::unique_ptr<ark::Proxy> proxy;
};

}  // namespace

PYBIND11_MODULE(ark_proxy, m) {
  const auto free = py::call_guard<py::gil_scoped_release>();
  py::class_<Bound> bound(m, "Proxy", py::module_local());
  bound
      .def(py::init([](uint64_t fifo, uint32_t slots, uint64_t abort, const std::string& library,
                       int device) {
        auto made = std::make_unique<Bound>();
        made->engine = std::make_unique<Local>(library, device);
        made->proxy = std::make_unique<ark::Proxy>(fifo, slots, abort, *made->engine);
        return made;
      }))
      .def("allow", [](Bound& self, uint64_t begin, uint64_t nbytes, int peer,
                       uint64_t there) { self.proxy->allow({begin, begin + nbytes, peer, there}); })
      .def(
          "start", [](Bound& self) { self.proxy->start(); }, free)
      .def(
          "stop", [](Bound& self) { self.proxy->stop(); }, free)
      .def("wake", [](Bound& self) { self.proxy->wake(); })
      .def("error", [](Bound& self) { return self.proxy->error(); })
      .def("served", [](Bound& self) { return self.proxy->served(); })
      .def("rests", [](Bound& self) { return self.proxy->rests(); });
}
