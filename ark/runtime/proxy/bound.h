// The interface of the proxy for Python. bound.cpp implements it with a vendor's copies; module.cpp
// makes it a Python module.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace ark {

class Bound {
 public:
  virtual ~Bound() = default;
  // True if the proxy was compiled with UCX. Without UCX, network and connect fail.
  virtual bool has_network() = 0;
  // Registers memory so that peers on other hosts can access it. Returns the address of this rank's
  // UCX worker, and the key of the memory.
  virtual std::pair<std::string, std::string> network(uint64_t begin, uint64_t nbytes) = 0;
  virtual void connect(int rank, const std::string& address, const std::string& key) = 0;
  virtual void allow(uint64_t begin, uint64_t nbytes, int peer, uint64_t there) = 0;
  virtual void start() = 0;
  virtual void stop() = 0;
  virtual void wake() = 0;
  virtual std::string error() = 0;
  virtual uint32_t served() = 0;
  virtual uint64_t rests() = 0;
};

// fifo, abort: the addresses of the trigger FIFO and of the abort word. library: the path of the
// driver's library.
std::unique_ptr<Bound> make_bound(uint64_t fifo, uint32_t slots, uint64_t abort,
                                  const std::string& library, int device);

}  // namespace ark
