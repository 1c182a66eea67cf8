// The proxy as functions of C, which __init__.py calls. What a vendor adds, a Copies, lies in
// copies.h beside this file.
#include "proxy.h"

#include <memory>

#include "copies.h"
#if defined(ARK_UCX)
#include "ucx.h"
#endif

namespace {

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
  Bound(const char* library, int device, uint64_t fifo, uint32_t slots, uint64_t abort)
      : engine(library, device), proxy(fifo, slots, abort, engine) {}
  Both engine;
  ark::Proxy proxy;
  std::string address, key;
};

// What this thread was told last: why its last call failed, or what stopped a proxy.
thread_local std::string said;

template <typename Call>
int attempt(const Call& call) {
  try {
    call();
    return 1;
  } catch (const std::exception& error) {
    said = error.what();
    return 0;
  }
}

}  // namespace

// Those that return int return 0 where they failed, and proxy_failure says why. What is returned of
// texts is valid until the thread's next call.
#define ARK_CALL extern "C" __attribute__((visibility("default")))

ARK_CALL const char* proxy_failure() { return said.c_str(); }

// Null if it failed.
ARK_CALL Bound* proxy_new(uint64_t fifo, uint32_t slots, uint64_t abort, const char* library,
                          int device) {
  Bound* made = nullptr;
  attempt([&] { made = new Bound(library, device, fifo, slots, abort); });
  return made;
}

ARK_CALL void proxy_delete(Bound* self) { delete self; }

#if defined(ARK_UCX)
// What a peer needs to reach the memory.
ARK_CALL int proxy_network(Bound* self, uint64_t begin, uint64_t nbytes, const char** address,
                           size_t* address_size, const char** key, size_t* key_size) {
  return attempt([&] {
    self->engine.ucx = std::make_unique<ark::Ucx>();
    self->key = self->engine.ucx->expose(begin, nbytes);
    self->address = self->engine.ucx->address();
    *address = self->address.data();
    *address_size = self->address.size();
    *key = self->key.data();
    *key_size = self->key.size();
  });
}

ARK_CALL int proxy_connect(Bound* self, int rank, const char* address, size_t address_size,
                           const char* key, size_t key_size) {
  return attempt(
      [&] { self->engine.ucx->connect(rank, {address, address_size}, {key, key_size}); });
}
#endif

ARK_CALL void proxy_allow(Bound* self, uint64_t begin, uint64_t nbytes, int peer, uint64_t there) {
  self->proxy.allow({begin, begin + nbytes, peer, there});
}

ARK_CALL int proxy_start(Bound* self) {
  return attempt([&] { self->proxy.start(); });
}

ARK_CALL void proxy_stop(Bound* self) { self->proxy.stop(); }
ARK_CALL void proxy_wake(Bound* self) { self->proxy.wake(); }
ARK_CALL uint32_t proxy_served(Bound* self) { return self->proxy.served(); }
ARK_CALL uint64_t proxy_rests(Bound* self) { return self->proxy.rests(); }

// Empty if nothing stopped it.
ARK_CALL const char* proxy_error(Bound* self) {
  said = self->proxy.error();
  return said.c_str();
}
