// Writes to memory and counters of ranks on other hosts, through UCX, over any transport that UCX
// finds (TCP, InfiniBand, RoCE). Memory is registered once. Messages from other hosts can execute
// no code and access only registered memory.
#pragma once

#include <poll.h>
#include <ucp/api/ucp.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "proxy.h"

namespace ark {

class Ucx {
 public:
  Ucx() {
    ucp_config_t* config = nullptr;
    check(ucp_config_read(nullptr, nullptr, &config), "reading UCX's settings");
    // With this setting, a flush of the UCX worker sends no message of its own. The end of a flush
    // then shows that all operations before it have ended (see the argument `alone` of finish).
    counted_ = ucp_config_modify(config, "FLUSH_WORKER_EPS", "n") == UCS_OK;
    ucp_params_t params = {};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_RMA | UCP_FEATURE_AMO32 | UCP_FEATURE_WAKEUP;
    const ucs_status_t made = ucp_init(&params, config, &context_);
    ucp_config_release(config);
    check(made, "opening UCX");
    ucp_worker_params_t worker = {};
    worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // one thread after another
    check(ucp_worker_create(context_, &worker, &worker_), "opening a UCX worker");
    check(ucp_worker_get_efd(worker_, &events_), "asking UCX for its events");
  }
  ~Ucx() {
    for (auto& [rank, peer] : peers_) {
      if (peer.end == nullptr) continue;  // it was never reached
      if (peer.key != nullptr) ucp_rkey_destroy(peer.key);
      void* request = ucp_ep_close_nb(peer.end, UCP_EP_CLOSE_MODE_FORCE);
      for (int i = 0; UCS_PTR_IS_PTR(request) && i < 100000; ++i) {
        if (ucp_request_check_status(request) != UCS_INPROGRESS) break;
        ucp_worker_progress(worker_);
      }
      if (UCS_PTR_IS_PTR(request)) ucp_request_free(request);
    }
    // Waits for operations in progress: they refer to their endpoints, which must not be closed
    // before the operations end.
    for (int i = 0; i < 100000 && !ended(); ++i) ucp_worker_progress(worker_);
    while (!flying_.empty()) drop(flying_);
    while (!late_.empty()) drop(late_);
    for (ucp_mem_h memory : memory_) ucp_mem_unmap(context_, memory);
    ucp_worker_destroy(worker_);
    ucp_cleanup(context_);
  }

  // The UCX worker address by which peers connect to this rank.
  std::string address() {
    ucp_address_t* address = nullptr;
    size_t length = 0;
    check(ucp_worker_get_address(worker_, &address, &length), "asking UCX for its address");
    const std::string made(reinterpret_cast<char*>(address), length);
    ucp_worker_release_address(worker_, address);
    return made;
  }

  // Registers memory so that peers can write to it. Returns the key that they need for this.
  std::string expose(uint64_t begin, uint64_t size) {
    ucp_mem_map_params_t params = {};
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
    params.address = reinterpret_cast<void*>(begin);
    params.length = size;
    ucp_mem_h memory = nullptr;
    check(ucp_mem_map(context_, &params, &memory), "registering memory");
    memory_.push_back(memory);
    void* key = nullptr;
    size_t length = 0;
    check(ucp_rkey_pack(context_, memory, &key, &length), "packing a key of memory");
    const std::string made(static_cast<char*>(key), length);
    ucp_rkey_buffer_release(key);
    return made;
  }

  void connect(int rank, const std::string& address, const std::string& key) {
    Peer& peer = peers_[rank];
    peer.owner = this;
    peer.rank = rank;
    ucp_ep_params_t params = {};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                        UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.address = reinterpret_cast<const ucp_address_t*>(address.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.cb = [](void* given, ucp_ep_h, ucs_status_t status) {
      Peer& lost = *static_cast<Peer*>(given);
      lost.owner->lost_ = "the connection to rank " + std::to_string(lost.rank) +
                          " broke: " + ucs_status_string(status);
    };
    params.err_handler.arg = &peer;
    check(ucp_ep_create(worker_, &params, &peer.end), "connecting to a peer");
    check(ucp_ep_rkey_unpack(peer.end, key.data(), &peer.key), "taking a peer's key");
  }

  void put(int rank, uint64_t source, uint64_t there, uint64_t size) {
    Peer& peer = next(rank);
    const ucp_request_param_t none = {};
    keep(ucp_put_nbx(peer.end, reinterpret_cast<void*>(source), size, there, peer.key, &none),
         "a put");
    ++open_;
  }

  void get(int rank, uint64_t target, uint64_t there, uint64_t size) {
    Peer& peer = next(rank);
    const ucp_request_param_t none = {};
    keep(ucp_get_nbx(peer.end, reinterpret_cast<void*>(target), size, there, peer.key, &none),
         "a get");
    ++open_;
  }

  void add(int rank, uint64_t there, uint32_t value) {
    Peer& peer = next(rank);
    auto held = std::make_unique<uint32_t>(value);
    ucp_request_param_t params = {};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_DATATYPE;
    params.datatype = ucp_dt_make_contig(sizeof(uint32_t));
    void* request =
        ucp_atomic_op_nbx(peer.end, UCP_ATOMIC_OP_ADD, held.get(), 1, there, peer.key, &params);
    keep(request, "a signal", std::move(held));
    ++open_;
  }

  // Lets UCX process communication. Returns the number of operations that have ended.
  uint32_t completed() {
    while (ucp_worker_progress(worker_) != 0) stirred_ = true;
    if (!lost_.empty()) throw std::runtime_error(lost_);
    while (!late_.empty() && status(late_.front()) != UCS_INPROGRESS) drop(late_);
    while (!flying_.empty()) {
      const ucs_status_t how = status(flying_.front());
      if (how == UCS_INPROGRESS) break;
      done_ += flying_.front().counts;
      flushes_ -= flying_.front().counts != 0;
      drop(flying_);
      check(how, "an operation over UCX");
    }
    // A flush reports the end of all operations before it. If two flushes are in progress, further
    // operations wait for the next flush.
    if (open_ != 0 && (flushes_ < 2 || open_ >= MANY))
      finish(counted_ && flushes_ == 0 && late_.empty());
    return done_;
  }

  bool stirred() { return std::exchange(stirred_, false); }

  void rest(std::chrono::microseconds most) {
    if (ucp_worker_arm(worker_) != UCS_OK) return;  // something has come
    struct pollfd waited = {events_, POLLIN, 0};
    const struct timespec limit = {0, static_cast<long>(most.count()) * 1000};
    ppoll(&waited, 1, &limit, nullptr);
  }

  void wake() { ucp_worker_signal(worker_); }

  // Prepares for a launch. Operations that an earlier launch has left in progress are no longer
  // counted. The values that they send stay allocated until they end.
  void begin() {
    std::move(flying_.begin(), flying_.end(), std::back_inserter(late_));
    flying_.clear();
    done_ = open_ = flushes_ = 0;
    alone_ = false;
  }

 private:
  struct Peer {
    Ucx* owner = nullptr;
    int rank = -1;
    ucp_ep_h end = nullptr;
    ucp_rkey_h key = nullptr;
  };
  struct Flying {
    void* request;
    uint32_t counts;                  // operations that have ended when this flush has
    std::unique_ptr<uint32_t> value;  // the value that it sends, kept until it has ended
  };

  // Called when an operation begins; returns its peer. Operations that have not been flushed are
  // called open. If there are open operations to another peer, they are flushed first, so that all
  // operations are counted in order.
  Peer& next(int rank) {
    const auto found = peers_.find(rank);
    if (found == peers_.end()) throw std::runtime_error("there is no way to that host");
    if (alone_) accompany();
    if (open_ != 0 && peer_ != &found->second) finish();
    peer_ = &found->second;
    return found->second;
  }
  void keep(void* request, const char* what, std::unique_ptr<uint32_t> value = nullptr) {
    if (UCS_PTR_IS_ERR(request)) check(UCS_PTR_STATUS(request), what);
    flying_.push_back({request, 0, std::move(value)});
  }
  // Flushes the open operations: when the flush has ended, what they have written is in the peer's
  // memory. alone: true if no other operation is in progress; then the worker is flushed instead of
  // the endpoint. Only one flush of the worker may be in progress, because each holds every
  // endpoint, and UCX counts the holds in 8 bits.
  void finish(bool alone = false) {
    const ucp_request_param_t none = {};
    void* request =
        alone ? ucp_worker_flush_nbx(worker_, &none) : ucp_ep_flush_nbx(peer_->end, &none);
    if (UCS_PTR_IS_ERR(request)) check(UCS_PTR_STATUS(request), "a flush");
    flying_.push_back({request, open_, nullptr});
    open_ = 0;
    ++flushes_;
    alone_ = alone;
  }
  // Called when an operation begins while a flush of the UCX worker is in progress. The flush would
  // wait for the new operation too. So the operations before the flush are marked as open (not
  // flushed) again, and are flushed by their endpoint instead.
  void accompany() {
    alone_ = false;
    if (flying_.empty() || flying_.back().counts == 0) return;  // it has ended
    open_ = flying_.back().counts;
    flying_.back().counts = 0;
    --flushes_;
    late_.push_back(std::move(flying_.back()));
    flying_.pop_back();
  }
  static ucs_status_t status(const Flying& one) {
    return one.request == nullptr ? UCS_OK : ucp_request_check_status(one.request);
  }
  bool ended() const {
    const auto over = [](const Flying& one) { return status(one) != UCS_INPROGRESS; };
    return std::all_of(flying_.begin(), flying_.end(), over) &&
           std::all_of(late_.begin(), late_.end(), over);
  }
  static void drop(std::deque<Flying>& from) {
    if (from.front().request != nullptr) ucp_request_free(from.front().request);
    from.pop_front();
  }
  static void check(ucs_status_t status, const char* what) {
    if (status == UCS_OK) return;
    throw std::runtime_error(std::string(what) + " failed: " + ucs_status_string(status));
  }

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int events_ = -1;
  std::map<int, Peer> peers_;
  std::vector<ucp_mem_h> memory_;
  std::deque<Flying> flying_, late_;
  std::string lost_;
  bool stirred_ = false;
  bool counted_ = false;  // a flush of the worker sends no message
  bool alone_ = false;    // the last flush is one of the worker
  static constexpr uint32_t MANY = 64;
  Peer* peer_ = nullptr;  // the peer of the open operations
  uint32_t open_ = 0, flushes_ = 0, done_ = 0;
};

}  // namespace ark
