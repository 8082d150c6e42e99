// A CUDA runtime without a GPU. Device memory is host memory, work is done when it is enqueued, and
// events have always happened, unless they are behind a collective that waits for other ranks.
// Calls are counted, and reported to an observer. Kernels cannot run (ops.cpp computes their
// values), so launching one is an error that names it.

#include "observer.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

using fakecuda::Happening;
using fakecuda::Kind;
using fakecuda::Range;
using fakecuda::Tickets;

int num_devices() {
  static const char* value = std::getenv("FAKECUDA_DEVICES");
  return value ? std::atoi(value) : 8;
}

constexpr size_t kCapacity = size_t(80) << 30;  // of a device, in bytes; not committed

// Objects with "*new" are never destroyed: torch calls the runtime while the process exits.

// -- counting

std::mutex counts_mutex;
auto& counts = *new std::map<std::string, uint64_t>;

void count(const std::string& what) {
  const std::lock_guard<std::mutex> lock(counts_mutex);
  ++counts[what];
}

// -- memory

struct Block {
  size_t size;
  int device;
};

std::mutex memory_mutex;
auto& device_blocks = *new std::map<uintptr_t, Block>;
auto& pinned_blocks = *new std::map<uintptr_t, Block>;
auto& used = *new std::map<int, size_t>;  // bytes, by device
thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) { return last_error = error; }

const Block* find(const std::map<uintptr_t, Block>& blocks, const void* p) {
  auto next = blocks.upper_bound(uintptr_t(p));
  if (next == blocks.begin()) return nullptr;
  --next;
  return uintptr_t(p) < next->first + next->second.size ? &next->second : nullptr;
}

bool is_in(const std::map<uintptr_t, Block>& blocks, const void* p) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  return find(blocks, p) != nullptr;
}

// -- streams, events and a virtual clock

struct Stream {
  int priority;
};

struct Event {
  std::optional<double> time;  // of the virtual clock, in milliseconds
  Tickets behind;              // guarded by Pending
};

std::pair<int, const void*> key_of(const void* stream) {
  const bool is_default = uintptr_t(stream) <= 2;  // each device has its own
  return {is_default ? current_device : -1, stream};
}

// Collectives that wait for other ranks (nccl.cpp), and what is behind them on streams. All other
// work has run when it was enqueued, so it is only not complete. Copies to the host run late: the
// host that has waited for one reads what the collectives have written.
class Pending {
 public:
  uint64_t begin(const void* stream, Tickets* behind) {
    const std::lock_guard<std::mutex> lock(mutex_);
    *behind = open_of(of_streams_[key_of(stream)]);
    of_streams_[key_of(stream)].insert(++last_);
    open_.insert(last_);
    ++num_open_;
    return last_;
  }

  void end(uint64_t ticket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_.erase(ticket);
    std::vector<Late> later;
    for (auto& late : late_)
      if (open_of(late.behind).empty())
        late.act();
      else
        later.push_back(std::move(late));
    late_ = std::move(later);
    --num_open_;
    ended_.notify_all();
  }

  bool is_open(const Tickets& tickets) {
    if (num_open_ == 0) return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    return !open_of(tickets).empty();
  }

  Tickets of_stream(const void* stream) {
    if (num_open_ == 0) return {};
    const std::lock_guard<std::mutex> lock(mutex_);
    return open_of(of_streams_[key_of(stream)]);
  }

  Tickets of_event(Event* event) {
    if (num_open_ == 0) return {};
    const std::lock_guard<std::mutex> lock(mutex_);
    return open_of(event->behind);
  }

  Tickets of_all() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return open_;
  }

  void record(Event* event, const void* stream) {
    if (num_open_ == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    event->behind = open_of(of_streams_[key_of(stream)]);
  }

  void wait(const void* stream, Event* event) {
    if (num_open_ == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    of_streams_[key_of(stream)].merge(open_of(event->behind));
  }

  // Call a function, later if the stream is not complete.
  void act(const void* stream, std::function<void()> act) {
    if (num_open_ == 0) return act();
    const std::lock_guard<std::mutex> lock(mutex_);
    auto behind = open_of(of_streams_[key_of(stream)]);
    if (behind.empty()) return act();
    late_.push_back({std::move(behind), std::move(act)});
  }

  // Block the host.
  void finish(const Tickets& tickets) {
    if (tickets.empty()) return;
    std::unique_lock<std::mutex> lock(mutex_);
    ended_.wait(lock, [&] { return open_of(tickets).empty(); });
  }

 private:
  struct Late {
    Tickets behind;
    std::function<void()> act;
  };

  Tickets open_of(const Tickets& tickets) {
    Tickets open;
    for (const auto ticket : tickets)
      if (open_.count(ticket)) open.insert(ticket);
    return open;
  }

  std::mutex mutex_;
  std::condition_variable ended_;
  std::atomic<int> num_open_ = 0;  // read without the lock: there are none unless ranks hang
  uint64_t last_ = 0;
  Tickets open_;
  std::map<std::pair<int, const void*>, Tickets> of_streams_;
  std::vector<Late> late_;  // in the order of their enqueuing
};

auto& pending = *new Pending;

// Only torch.cuda._sleep and NCCL's all-gathers and reduce-scatters take time, the latter one after
// the other as within one communicator. The host takes none until it waits.
class Clock {
 public:
  void set_collective_ms(double ms) { collective_ms_ = ms; }

  void sleep(const void* stream, double ms) {
    const std::lock_guard<std::mutex> lock(mutex_);
    end_of(stream) += ms;
  }

  void advance(const Happening& happening) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto* event = static_cast<Event*>(const_cast<void*>(happening.event));
    switch (happening.kind) {
      case Kind::Work:
        if (happening.name == "nccl all_gather" || happening.name == "nccl reduce_scatter") {
          auto& end = end_of(happening.stream);
          last_collective_ = end = std::max(end, last_collective_) + collective_ms_;
        }
        break;
      case Kind::Record: event->time = end_of(happening.stream); break;
      case Kind::Wait: {
        auto& end = end_of(happening.stream);
        end = std::max(end, event->time.value_or(0));
        break;
      }
      case Kind::EventSync: host_ = std::max(host_, event->time.value_or(0)); break;
      case Kind::StreamSync: host_ = end_of(happening.stream); break;
      case Kind::DeviceSync:
        for (const auto& [stream, end] : ends_) host_ = std::max(host_, end);
        break;
      default: break;
    }
  }

 private:
  double& end_of(const void* stream) {
    auto& end = ends_[key_of(stream)];
    return end = std::max(end, host_);
  }

  std::mutex mutex_;
  double host_ = 0, last_collective_ = 0, collective_ms_ = 0;
  std::map<std::pair<int, const void*>, double> ends_;  // of what was enqueued
};

auto& virtual_clock = *new Clock;
fakecuda::Observer observer = nullptr;

void wait_of_host(const char* call, const Happening& happening) {
  count(std::string("host waits: ") + call);
  fakecuda_happened(happening);
}

// -- kernels

thread_local struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} launch;
auto& kernel_names = *new std::unordered_map<const void*, std::string>;

cudaError_t launch_kernel(
    const void* function, void** args = nullptr, cudaStream_t stream = nullptr) {
  const auto& name = kernel_names[function];
  if (args && name.find("spin_kernel") != std::string::npos) {  // torch.cuda._sleep
    virtual_clock.sleep(stream, double(*static_cast<int64_t*>(args[0])) / 1e6);
    return cudaSuccess;
  }
  std::fprintf(stderr, "fakecuda: the kernel %s cannot run\n", name.c_str());
  return fail(cudaErrorNotSupported);
}

cudaError_t copy(void* to, const void* from, size_t size, const void* stream, bool async) {
  if (size == 0) return cudaSuccess;
  const bool to_device = is_in(device_blocks, to), from_device = is_in(device_blocks, from);
  const auto direction = std::string(from_device ? "D" : "H") + "to" + (to_device ? "D" : "H");
  const bool pageable = (!to_device && !is_in(pinned_blocks, to)) ||
                        (!from_device && !is_in(pinned_blocks, from));
  count("copies " + direction + (pageable ? ", pageable" : ""));
  const bool waits = !async || (pageable && !to_device);
  if (waits) pending.finish(pending.of_stream(stream));
  if (to_device)
    std::memmove(to, from, size);
  else
    pending.act(stream, [=] { std::memmove(to, from, size); });
  fakecuda_happened({Kind::Work, stream, nullptr, "copy " + direction,
                     {{uintptr_t(from), uintptr_t(from) + size}},
                     {{uintptr_t(to), uintptr_t(to) + size}}});
  if (waits) wait_of_host("copy", {Kind::StreamSync, stream});
  return cudaSuccess;
}

}  // namespace

API void fakecuda_observe(fakecuda::Observer by) { observer = by; }
API void fakecuda_happened(const Happening& happening) {
  virtual_clock.advance(happening);
  if (observer) observer(happening);
}
API void fakecuda_set_collective_ms(double ms) { virtual_clock.set_collective_ms(ms); }
API void fakecuda_count(const char* what) { count(what); }
API uint64_t fakecuda_begin(const void* stream, Tickets* behind) {
  return pending.begin(stream, behind);
}
API void fakecuda_end(uint64_t ticket) { pending.end(ticket); }
API bool fakecuda_is_pending(const Tickets& tickets) { return pending.is_open(tickets); }
API void fakecuda_finish(const void* stream) { pending.finish(pending.of_stream(stream)); }
API void fakecuda_reset_counts() {
  const std::lock_guard<std::mutex> lock(counts_mutex);
  counts.clear();
}
API void fakecuda_counts(char* text, size_t size) {  // as lines "what=number"
  const std::lock_guard<std::mutex> lock(counts_mutex);
  std::string all;
  for (const auto& [what, number] : counts) all += what + "=" + std::to_string(number) + "\n";
  std::snprintf(text, size, "%s", all.c_str());
}

// -- devices

API cudaError_t cudaGetDeviceCount(int* n) { return *n = num_devices(), cudaSuccess; }
API cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices()) return fail(cudaErrorInvalidDevice);
  return current_device = device, cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device < 0 || device >= num_devices()) return fail(cudaErrorInvalidDevice);
  std::memset(p, 0, sizeof(*p));
  std::snprintf(p->name, sizeof(p->name), "fakecuda");
  p->totalGlobalMem = kCapacity;
  p->major = 9;
  p->minor = 0;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerMultiprocessor = 233472;
  p->sharedMemPerBlockOptin = 232448;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->totalConstMem = 65536;
  p->l2CacheSize = 50 << 20;
  p->memoryBusWidth = 5120;
  for (int i = 0; i < 3; ++i) p->maxThreadsDim[i] = i < 2 ? 1024 : 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->pciBusID = device + 1;
  p->unifiedAddressing = p->managedMemory = p->canMapHostMemory = p->concurrentKernels = 1;
  p->asyncEngineCount = 3;
  p->textureAlignment = 512;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  std::snprintf(id, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int* v) { return *v = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* v) { return *v = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaGetLastError() {
  const auto error = last_error;
  last_error = cudaSuccess;
  return error;
}
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(cudaError_t) { return "fakecuda error"; }
API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNotSupported: return "operation not supported: fakecuda cannot run kernels";
    default: return "an error of fakecuda";
  }
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// -- memory

static void forget(const void* p, size_t size) {
  fakecuda_happened(
      {Kind::Forget, nullptr, nullptr, "", {}, {{uintptr_t(p), uintptr_t(p) + size}}});
}
API cudaError_t cudaMalloc(void** p, size_t size) {
  count("cudaMalloc");
  const std::lock_guard<std::mutex> lock(memory_mutex);
  const size_t rounded = (size + 4095) / 4096 * 4096;
  if (used[current_device] + rounded > kCapacity) return fail(cudaErrorMemoryAllocation);
  void* found = mmap(nullptr, rounded ? rounded : 4096, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  used[current_device] += rounded;
  device_blocks[uintptr_t(found)] = {rounded, current_device};
  *p = found;
  return cudaSuccess;
}
API cudaError_t cudaFree(void* p) {
  if (p == nullptr) return cudaSuccess;
  pending.finish(pending.of_all());
  wait_of_host("cudaFree", {Kind::DeviceSync});
  Block block;
  {
    const std::lock_guard<std::mutex> lock(memory_mutex);
    const auto found = device_blocks.find(uintptr_t(p));
    if (found == device_blocks.end()) return fail(cudaErrorInvalidValue);
    block = found->second;
    used[block.device] -= block.size;
    device_blocks.erase(found);
  }
  forget(p, block.size);
  munmap(p, block.size ? block.size : 4096);
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  *total = kCapacity;
  *free = kCapacity - used[current_device];
  return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** p, size_t size, unsigned) {
  count("cudaHostAlloc");
  *p = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  if (!*p) return fail(cudaErrorMemoryAllocation);
  const std::lock_guard<std::mutex> lock(memory_mutex);
  pinned_blocks[uintptr_t(*p)] = {size, current_device};
  return cudaSuccess;
}
API cudaError_t cudaFreeHost(void* p) {
  size_t size = 0;
  {
    const std::lock_guard<std::mutex> lock(memory_mutex);
    const auto found = pinned_blocks.find(uintptr_t(p));
    if (found == pinned_blocks.end()) return fail(cudaErrorInvalidValue);
    size = found->second.size;
    pinned_blocks.erase(found);
  }
  forget(p, size);
  std::free(p);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* p, size_t size, unsigned) {
  count("cudaHostRegister");
  const std::lock_guard<std::mutex> lock(memory_mutex);
  pinned_blocks[uintptr_t(p)] = {size, current_device};
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* p) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  return pinned_blocks.erase(uintptr_t(p)) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  std::memset(a, 0, sizeof(*a));
  a->device = -2;
  a->type = cudaMemoryTypeUnregistered;
  if (const auto* block = find(device_blocks, p)) {
    a->type = cudaMemoryTypeDevice;
    a->device = block->device;
    a->devicePointer = const_cast<void*>(p);
  } else if (const auto* pinned = find(pinned_blocks, p)) {
    a->type = cudaMemoryTypeHost;
    a->device = pinned->device;
    a->hostPointer = a->devicePointer = const_cast<void*>(p);
  }
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  return copy(to, from, size, nullptr, false);
}
API cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, size, stream, true);
}
API cudaError_t cudaMemcpyPeerAsync(
    void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  return copy(to, from, size, stream, true);
}
API cudaError_t cudaMemcpy2DAsync(
    void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
    cudaMemcpyKind, cudaStream_t stream) {
  for (size_t i = 0; i < height; ++i)
    copy((char*)to + i * to_pitch, (const char*)from + i * from_pitch, width, stream, true);
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* p, int value, size_t size, cudaStream_t stream) {
  std::memset(p, value, size);
  fakecuda_happened(
      {Kind::Work, stream, nullptr, "memset", {}, {{uintptr_t(p), uintptr_t(p) + size}}});
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* p, int value, size_t size) {
  return cudaMemsetAsync(p, value, size, nullptr);
}
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}

// -- streams

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  *stream = reinterpret_cast<cudaStream_t>(new Stream{priority});
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // its number is not reused
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = uintptr_t(stream) > 2 ? reinterpret_cast<Stream*>(stream)->priority : 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return pending.of_stream(stream).empty() ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  pending.finish(pending.of_stream(stream));
  wait_of_host("cudaStreamSynchronize", {Kind::StreamSync, stream});
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
  pending.finish(pending.of_all());  // of the process
  wait_of_host("cudaDeviceSynchronize", {Kind::DeviceSync});
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  count("stream waits");
  pending.wait(stream, reinterpret_cast<Event*>(event));
  fakecuda_happened({Kind::Wait, stream, event});
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
    const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges, size_t* number) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (graph) *graph = nullptr;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (number) *number = 0;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  return function(data), cudaSuccess;
}

// -- events

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  count("events created");
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  fakecuda_happened({Kind::EventDestroy, nullptr, event});
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  count("events recorded");
  pending.record(reinterpret_cast<Event*>(event), stream);
  fakecuda_happened({Kind::Record, stream, event});
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (!pending.of_event(reinterpret_cast<Event*>(event)).empty()) return cudaErrorNotReady;
  fakecuda_happened({Kind::EventQuery, nullptr, event});
  return cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  pending.finish(pending.of_event(reinterpret_cast<Event*>(event)));
  wait_of_host("cudaEventSynchronize", {Kind::EventSync, nullptr, event});
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  for (auto* event : {start, end})
    if (!pending.of_event(reinterpret_cast<Event*>(event)).empty()) return cudaErrorNotReady;
  const auto& from = reinterpret_cast<Event*>(start)->time;
  const auto& to = reinterpret_cast<Event*>(end)->time;
  if (!from || !to) return fail(cudaErrorInvalidResourceHandle);
  return *ms = float(*to - *from), cudaSuccess;
}

// -- kernels

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(
    void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
    int*) {
  kernel_names[function] = name;
}
API unsigned __cudaPushCallConfiguration(
    dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  launch = {grid, block, shared, stream};
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(
    dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = launch.grid, *block = launch.block, *shared = launch.shared;
  *static_cast<cudaStream_t*>(stream) = launch.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3, dim3, void** args, size_t, cudaStream_t stream) {
  return launch_kernel(kernel, args, stream);
}
API cudaError_t cudaLaunchKernel(
    const void* function, dim3, dim3, void** args, size_t, cudaStream_t stream) {
  return launch_kernel(function, args, stream);
}
API cudaError_t cudaLaunchCooperativeKernel(
    const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch_kernel(function);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) {
  return launch_kernel(function);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof(*attributes));
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* number, const void*, int, size_t, unsigned) {
  return *number = 2, cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int* number, const void*, int, size_t) {
  return *number = 2, cudaSuccess;
}
API cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* status) {
  *function = nullptr;
  if (status) *status = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
