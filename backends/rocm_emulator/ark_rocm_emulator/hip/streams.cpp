// Streams and events. A stream is a queue with a thread that executes its work. The null stream and
// the blocking streams of its device wait for each other, as with HIP's legacy default stream.
// Event times are durations of the emulation.
#include <atomic>
#include <cstdio>

#include "runtime.h"

namespace ark_hip {

void Op::wait() {
  std::unique_lock<std::mutex> hold(lock);
  changed.wait(hold, [this] { return done; });
}

bool Op::wait_for(std::chrono::milliseconds time) {
  std::unique_lock<std::mutex> hold(lock);
  return changed.wait_for(hold, time, [this] { return done; });
}

bool Op::is_done() {
  std::lock_guard<std::mutex> hold(lock);
  return done;
}

void Op::finish() {
  std::lock_guard<std::mutex> hold(lock);
  finished = Clock::now();
  done = true;
  run = nullptr;
  after.clear();
  launch.reset();
  changed.notify_all();
}

namespace {

// The kind of a failure: a call that is refused while a kernel runs. Distinct from
// ark_emu::ErrorKind and kDmaFailure.
constexpr int kUnderKernel = 101;

void work_off(Stream* stream) {
  for (;;) {
    std::shared_ptr<Op> op;
    {
      std::unique_lock<std::mutex> hold(stream->lock);
      stream->changed.wait(hold, [&] { return stream->closing || !stream->queue.empty(); });
      if (stream->queue.empty()) return;
      op = stream->queue.front();
    }
    for (auto& earlier : op->after) earlier->wait();
    Runtime& rt = stream->runtime;
    hipError_t error = hipSuccess;
    if (op->run && sticky_error(rt, stream->device) == hipSuccess) error = op->run();
    if (error != hipSuccess) {
      std::lock_guard<std::mutex> hold(rt.lock);
      Device& device = *rt.devices[size_t(stream->device)];
      if (device.sticky == hipSuccess) device.sticky = error;
    }
    {
      std::lock_guard<std::mutex> hold(stream->lock);
      stream->queue.pop_front();
    }
    {
      std::lock_guard<std::mutex> hold(rt.lock);
      op->predicted = rt.devices[size_t(stream->device)]->predicted;
    }
    op->finish();
  }
}

Stream& null_stream(Runtime& rt, int device) {
  std::lock_guard<std::mutex> hold(rt.lock);
  auto& stream = rt.devices[size_t(device)]->null_stream;
  if (!stream) stream = std::make_unique<Stream>(rt, device, 0, true);
  return *stream;
}

std::shared_ptr<Op> last_of(Stream& stream) {
  std::lock_guard<std::mutex> hold(stream.lock);
  return stream.last;
}

std::vector<Stream*> streams_of(Runtime& rt, int device) {
  std::lock_guard<std::mutex> hold(rt.lock);
  Device& d = *rt.devices[size_t(device)];
  std::vector<Stream*> all(d.streams.begin(), d.streams.end());
  if (d.null_stream) all.push_back(d.null_stream.get());
  return all;
}

bool kernel_under_way(Runtime& rt, int device) {
  for (Stream* stream : streams_of(rt, device)) {
    std::lock_guard<std::mutex> hold(stream->lock);
    for (auto& op : stream->queue)
      if (op->kernel) return true;
  }
  return false;
}

// Null if the handle is unknown.
std::shared_ptr<Event> find_event(Runtime& rt, hipEvent_t handle) {
  std::lock_guard<std::mutex> hold(rt.lock);
  const auto found = rt.events.find(uintptr_t(handle));
  return found == rt.events.end() ? nullptr : found->second;
}

std::shared_ptr<Op> recorded(Runtime& rt, const Event& event) {
  std::lock_guard<std::mutex> hold(rt.lock);
  return event.op;
}

}  // namespace

Stream::Stream(Runtime& rt, int on, unsigned with, bool null)
    : runtime(rt), device(on), flags(with), null_stream(null) {
  worker = std::thread(work_off, this);
}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> hold(lock);
    closing = true;
    changed.notify_all();
  }
  worker.join();
}

hipError_t sticky_error(Runtime& rt, int device) {
  std::lock_guard<std::mutex> hold(rt.lock);
  return rt.devices[size_t(device)]->sticky;
}

Stream* resolve(Runtime& rt, hipStream_t handle) {
  if (uintptr_t(handle) <= 2) return &null_stream(rt, current_device);  // null, legacy, per thread
  auto* stream = reinterpret_cast<Stream*>(handle);
  std::lock_guard<std::mutex> hold(rt.lock);
  for (auto& device : rt.devices)
    if (device->streams.count(stream)) return stream;
  return nullptr;
}

void enqueue_op(Stream& stream, const std::shared_ptr<Op>& op) {
  Runtime& rt = stream.runtime;
  std::vector<Stream*> others;
  {
    std::lock_guard<std::mutex> hold(rt.lock);
    Device& device = *rt.devices[size_t(stream.device)];
    if (stream.null_stream) {
      for (Stream* other : device.streams)
        if (other->blocking()) others.push_back(other);
    } else if (stream.blocking() && device.null_stream) {
      others.push_back(device.null_stream.get());
    }
  }
  for (Stream* other : others) {
    std::shared_ptr<Op> last = last_of(*other);
    if (last && !last->is_done()) op->after.push_back(last);
  }
  std::lock_guard<std::mutex> hold(stream.lock);
  stream.queue.push_back(op);
  stream.last = op;
  stream.changed.notify_all();
}

std::shared_ptr<Op> enqueue(Stream& stream, std::function<hipError_t()> run) {
  auto op = std::make_shared<Op>();
  op->run = std::move(run);
  enqueue_op(stream, op);
  return op;
}

void wait_device(Runtime& rt, int device) {
  for (Stream* stream : streams_of(rt, device))
    if (std::shared_ptr<Op> last = last_of(*stream)) last->wait();
}

bool quiet(Runtime& rt, int device, const char* call) {
  if (!rt.settings.implicit_sync && kernel_under_way(rt, device)) {
    std::lock_guard<std::mutex> hold(rt.lock);
    rt.failures.push_back({std::string(call) + " while a kernel runs on device " +
                               std::to_string(device) + ": HIP waits until it has ended",
                           kUnderKernel, device});
    if (rt.settings.report)
      fprintf(stderr, "ark_rocm_emulator: %s\n", rt.failures.back().message.c_str());
    return false;
  }
  wait_device(rt, device);
  return true;
}

}  // namespace ark_hip

using namespace ark_hip;

HIP_EXPORT hipError_t hipDeviceSynchronize() {
  HIP_ENTER();
  wait_device(*rt, current_device);
  return answer(sticky_error(*rt, current_device));
}

HIP_EXPORT hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned flags) {
  HIP_ENTER();
  if (!stream || flags > kStreamNonBlocking) return answer(hipErrorInvalidValue);
  auto* made = new Stream(*rt, current_device, flags, false);
  std::lock_guard<std::mutex> hold(rt->lock);
  rt->devices[size_t(current_device)]->streams.insert(made);
  *stream = reinterpret_cast<hipStream_t>(made);
  return hipSuccess;
}

HIP_EXPORT hipError_t hipStreamCreate(hipStream_t* stream) {
  return hipStreamCreateWithFlags(stream, 0);
}

HIP_EXPORT hipError_t hipStreamCreateWithPriority(hipStream_t* stream, unsigned flags, int) {
  return hipStreamCreateWithFlags(stream, flags);
}

HIP_EXPORT hipError_t hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = 0;
  return hipSuccess;
}

HIP_EXPORT hipError_t hipStreamDestroy(hipStream_t stream) {
  HIP_ENTER();
  if (uintptr_t(stream) <= 2) return answer(hipErrorInvalidHandle);
  Stream* found = resolve(*rt, stream);
  if (!found) return answer(hipErrorInvalidHandle);
  if (std::shared_ptr<Op> last = last_of(*found)) last->wait();
  {
    std::lock_guard<std::mutex> hold(rt->lock);
    if (rt->devices[size_t(found->device)]->streams.erase(found) == 0)
      return answer(hipErrorInvalidHandle);  // another thread destroyed it
  }
  delete found;
  return hipSuccess;
}

HIP_EXPORT hipError_t hipStreamQuery(hipStream_t stream) {
  HIP_ENTER();
  Stream* found = resolve(*rt, stream);
  if (!found) return answer(hipErrorInvalidHandle);
  std::shared_ptr<Op> last = last_of(*found);
  if (last && !last->is_done()) return hipErrorNotReady;
  return answer(sticky_error(*rt, found->device));
}

HIP_EXPORT hipError_t hipStreamSynchronize(hipStream_t stream) {
  HIP_ENTER();
  Stream* found = resolve(*rt, stream);
  if (!found) return answer(hipErrorInvalidHandle);
  if (found->null_stream) {  // the null stream is done when every blocking stream is
    auto op = enqueue(*found, nullptr);
    op->wait();
  } else if (std::shared_ptr<Op> last = last_of(*found)) {
    last->wait();
  }
  return answer(sticky_error(*rt, found->device));
}

HIP_EXPORT hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned) {
  HIP_ENTER();
  const std::shared_ptr<Event> awaited = find_event(*rt, event);
  Stream* found = resolve(*rt, stream);
  if (!found || !awaited) return answer(hipErrorInvalidHandle);
  if (std::shared_ptr<Op> earlier = recorded(*rt, *awaited)) {
    auto op = std::make_shared<Op>();
    op->after.push_back(std::move(earlier));
    enqueue_op(*found, op);
  }
  return hipSuccess;
}

HIP_EXPORT hipError_t hipStreamGetFlags(hipStream_t stream, unsigned* flags) {
  HIP_ENTER();
  Stream* found = resolve(*rt, stream);
  if (!found) return answer(hipErrorInvalidHandle);
  if (!flags) return answer(hipErrorInvalidValue);
  *flags = found->flags;
  return hipSuccess;
}

HIP_EXPORT hipError_t hipStreamGetDevice(hipStream_t stream, int* device) {
  HIP_ENTER();
  Stream* found = resolve(*rt, stream);
  if (!found) return answer(hipErrorInvalidHandle);
  if (!device) return answer(hipErrorInvalidValue);
  *device = found->device;
  return hipSuccess;
}

HIP_EXPORT hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned flags) {
  HIP_ENTER();
  if (!event) return answer(hipErrorInvalidValue);
  static std::atomic<uintptr_t> numbers{0};
  const uintptr_t number = ++numbers;
  auto made = std::make_shared<Event>();
  made->device = current_device;
  made->flags = flags;
  std::lock_guard<std::mutex> hold(rt->lock);
  rt->events.emplace(number, std::move(made));
  *event = reinterpret_cast<hipEvent_t>(number);
  return hipSuccess;
}

HIP_EXPORT hipError_t hipEventCreate(hipEvent_t* event) {
  return hipEventCreateWithFlags(event, 0);
}

HIP_EXPORT hipError_t hipEventDestroy(hipEvent_t event) {
  HIP_ENTER();
  std::lock_guard<std::mutex> hold(rt->lock);
  return rt->events.erase(uintptr_t(event)) != 0 ? hipSuccess : answer(hipErrorInvalidHandle);
}

HIP_EXPORT hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
  HIP_ENTER();
  const std::shared_ptr<Event> found = find_event(*rt, event);
  Stream* on = resolve(*rt, stream);
  if (!on || !found) return answer(hipErrorInvalidHandle);
  if (found->device != on->device) return answer(hipErrorInvalidHandle);
  std::shared_ptr<Op> op = enqueue(*on, nullptr);
  std::lock_guard<std::mutex> hold(rt->lock);
  found->op = std::move(op);
  return hipSuccess;
}

HIP_EXPORT hipError_t hipEventRecordWithFlags(hipEvent_t event, hipStream_t stream, unsigned) {
  return hipEventRecord(event, stream);
}

HIP_EXPORT hipError_t hipEventSynchronize(hipEvent_t event) {
  HIP_ENTER();
  const std::shared_ptr<Event> found = find_event(*rt, event);
  if (!found) return answer(hipErrorInvalidHandle);
  if (const std::shared_ptr<Op> op = recorded(*rt, *found)) op->wait();
  return answer(sticky_error(*rt, found->device));
}

HIP_EXPORT hipError_t hipEventQuery(hipEvent_t event) {
  HIP_ENTER();
  const std::shared_ptr<Event> found = find_event(*rt, event);
  if (!found) return answer(hipErrorInvalidHandle);
  const std::shared_ptr<Op> op = recorded(*rt, *found);
  if (op && !op->is_done()) return hipErrorNotReady;
  return answer(sticky_error(*rt, found->device));
}

// Returns the time between two events: the host's time, which is the duration of the emulation and
// not that of a GPU, or with a timing model the predicted time.
HIP_EXPORT hipError_t hipEventElapsedTime(float* ms, hipEvent_t start, hipEvent_t stop) {
  HIP_ENTER();
  if (!ms) return answer(hipErrorInvalidValue);
  const std::shared_ptr<Event> from = find_event(*rt, start), to = find_event(*rt, stop);
  if (!from || !to) return answer(hipErrorInvalidHandle);
  const std::shared_ptr<Op> first = recorded(*rt, *from), last = recorded(*rt, *to);
  constexpr unsigned kDisableTiming = 0x2;
  if (!first || !last || ((from->flags | to->flags) & kDisableTiming))
    return answer(hipErrorInvalidHandle);
  if (!first->is_done() || !last->is_done()) return answer(hipErrorNotReady);
  if (rt->settings.timing != 0) {
    *ms = float((last->predicted - first->predicted) * 1e-6);
    return hipSuccess;
  }
  *ms = std::chrono::duration<float, std::milli>(last->finished - first->finished).count();
  return hipSuccess;
}
