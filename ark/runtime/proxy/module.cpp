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

using Bytes = std::string;

// Memory that this process reaches is copied by the device's engines, what is on another host by
// UCX. Operations of either end in the order of their starts, or are counted as if.
class Both : public ark::Engine {
 public:
  Both(const std::string& library, int device) : copies_(library, device) {}

  void open() override {
    copies_.open();
#if defined(ARK_UCX)
    if (ucx != nullptr) ucx->begin();
#endif
  }

  void copy(const ark::Range& from, const ark::Range& to, uint64_t source, uint64_t target,
            uint64_t size) override {
    if (from.peer < 0 && to.peer < 0) {
      settle(false);
      copies_.start(target, source, size);
      ++here_;
      return;
    }
#if defined(ARK_UCX)
    if (ucx != nullptr && (from.peer < 0 || to.peer < 0)) {
      settle(true);
      if (to.peer >= 0) {
        ucx->put(to.peer, source, to.there + (target - to.begin), size);
      } else {
        ucx->get(from.peer, target, from.there + (source - from.begin), size);
      }
      ++far_;
      return;
    }
#endif
    throw std::runtime_error("there is no way to that host");
  }

  void add(const ark::Range& to, uint64_t target, uint32_t value) override {
#if defined(ARK_UCX)
    if (ucx != nullptr && to.peer >= 0) {
      settle(true);
      ucx->add(to.peer, to.there + (target - to.begin), value);
      ++far_;
      return;
    }
#endif
    (void)target;
    (void)value;
    throw std::runtime_error("a counter of this host is not the proxy's to signal");
  }

  uint32_t completed() override {
    uint32_t done = copies_.completed();
#if defined(ARK_UCX)
    if (ucx != nullptr) done += ucx->completed();
#endif
    return done;
  }

  bool stirred() override {
#if defined(ARK_UCX)
    if (ucx != nullptr) return ucx->stirred();
#endif
    return ark::Engine::stirred();
  }

  void rest(std::chrono::microseconds most) override {
#if defined(ARK_UCX)
    if (ucx != nullptr) return ucx->rest(most);
#endif
    ark::Engine::rest(most);
  }

  void wake() override {
#if defined(ARK_UCX)
    if (ucx != nullptr) return ucx->wake();
#endif
    ark::Engine::wake();
  }

  void close() override {
    copies_.close();
    here_ = far_ = 0;
  }

#if defined(ARK_UCX)
  std::unique_ptr<ark::Ucx> ucx;
#endif

 private:
  // Before the other kind begins, what is under way of this one ends: so the sum counts in order.
  void settle(bool far) {
#if defined(ARK_UCX)
    if (ucx == nullptr) return;
    if (far) {
      while (copies_.completed() != here_) std::this_thread::yield();
    } else {
      while (ucx->completed() != far_) std::this_thread::yield();
    }
#endif
    (void)far;
  }

  Copies copies_;
  uint32_t here_ = 0, far_ = 0;
};

struct Bound {
  std::unique_ptr<Both> engine;
  std::unique_ptr<ark::Proxy> proxy;
  ~Bound() { proxy.reset(); }
};

}  // namespace

PYBIND11_MODULE(ARK_MODULE, m) {
  const auto free = py::call_guard<py::gil_scoped_release>();
  py::class_<Bound> bound(m, "Proxy", py::module_local());
  bound
      .def(py::init([](uint64_t fifo, uint32_t slots, uint64_t abort, const std::string& library,
                       int device) {
        auto made = std::make_unique<Bound>();
        made->engine = std::make_unique<Both>(library, device);
        made->proxy = std::make_unique<ark::Proxy>(fifo, slots, abort, *made->engine);
        return made;
      }))
#if defined(ARK_UCX)
      .def("network",
           [](Bound& self, uint64_t begin, uint64_t nbytes) {
             self.engine->ucx = std::make_unique<ark::Ucx>();
             const Bytes key = self.engine->ucx->expose(begin, nbytes);
             return py::make_tuple(py::bytes(self.engine->ucx->address()), py::bytes(key));
           })
      .def("connect", [](Bound& self, int rank, const Bytes& address,
                         const Bytes& key) { self.engine->ucx->connect(rank, address, key); })
#endif
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
