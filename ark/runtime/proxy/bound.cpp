// Defines the proxy's functions that Python calls. It is compiled for each vendor, with the
// vendor's class Copies from copies.h. module.cpp is the same for all vendors and is compiled
// separately.
#include "bound.h"

#include "copies.h"
#include "proxy.h"
#if defined(ARK_UCX)
#include "ucx.h"
#endif

namespace {

// Starts copies by the device's copy engines if this process can access the memory, and by UCX if
// the memory is on another host. Completed operations of both kinds are counted in the order in
// which they were started.
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
  // Called before an operation begins: waits for all operations of the other kind (copy engine or
  // UCX) that are in progress. So operations of both kinds complete in the order in which they were
  // started, and their counts can be added.
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

class Served : public ark::Bound {
 public:
  Served(uint64_t fifo, uint32_t slots, uint64_t abort, const std::string& library, int device)
      : engine_(library, device), proxy_(fifo, slots, abort, engine_) {}

#if defined(ARK_UCX)
  bool has_network() override { return true; }
  std::pair<std::string, std::string> network(uint64_t begin, uint64_t nbytes) override {
    engine_.ucx = std::make_unique<ark::Ucx>();
    const std::string key = engine_.ucx->expose(begin, nbytes);
    return {engine_.ucx->address(), key};
  }
  void connect(int rank, const std::string& address, const std::string& key) override {
    engine_.ucx->connect(rank, address, key);
  }
#else
  bool has_network() override { return false; }
  std::pair<std::string, std::string> network(uint64_t, uint64_t) override {
    throw std::runtime_error("this proxy was compiled without UCX");
  }
  void connect(int, const std::string&, const std::string&) override { network(0, 0); }
#endif
  void allow(uint64_t begin, uint64_t nbytes, int peer, uint64_t there) override {
    proxy_.allow({begin, begin + nbytes, peer, there});
  }
  void start() override { proxy_.start(); }
  void stop() override { proxy_.stop(); }
  void wake() override { proxy_.wake(); }
  std::string error() override { return proxy_.error(); }
  uint32_t served() override { return proxy_.served(); }
  uint64_t rests() override { return proxy_.rests(); }

 private:
  Both engine_;
  ark::Proxy proxy_;
};

}  // namespace

std::unique_ptr<ark::Bound> ark::make_bound(uint64_t fifo, uint32_t slots, uint64_t abort,
                                            const std::string& library, int device) {
  return std::make_unique<Served>(fifo, slots, abort, library, device);
}

// Python loads only one module of a name, so each vendor's module has its own name.
extern "C" void* PyInit_ark_proxy();
#define ARK_JOINED(a, b) a##b
#define ARK_INIT(name) ARK_JOINED(PyInit_, name)
extern "C" __attribute__((visibility("default"))) void* ARK_INIT(ARK_MODULE)() {
  return PyInit_ark_proxy();
}
