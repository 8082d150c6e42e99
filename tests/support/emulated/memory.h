// The streams, events and memory of the emulated device. See __init__.py.
//
// An observer in Python is told what is enqueued and freed, and where the host waits.

#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

namespace py = pybind11;

constexpr auto kEmulated = c10::DeviceType::PrivateUse1;
const c10::Device kDevice{kEmulated, 0};

// -- the observer

py::object* observer = nullptr;  // never destroyed: memory is freed after Python has ended
std::atomic<bool> is_observed{false};

template <typename... Args>
void tell(const char* method, const Args&... args) {
  if (!is_observed) return;
  py::gil_scoped_acquire gil;
  if (!is_observed) return;
  py::error_scope keep;  // tensors are freed while Python exceptions are on their way
  observer->attr(method)(args...);
}

// -- streams

using StreamId = c10::StreamId;

thread_local StreamId current_stream = 0;
std::atomic<StreamId> last_stream{0};
std::atomic<int64_t> last_event{0};

c10::Stream stream_of(StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kEmulated; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(++last_stream); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream_of(++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current_stream, stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    tell("host_waits_for_stream", stream.id());
  }
  void synchronizeDevice(c10::DeviceIndex) const override { tell("host_waits_for_device"); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag)
      const override {
    if (*event == nullptr) *event = new int64_t(++last_event);
    tell("record", *static_cast<int64_t*>(*event), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) tell("wait", *static_cast<int64_t*>(event), stream.id());
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) tell("host_waits_for_event", *static_cast<int64_t*>(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<int64_t*>(event);
  }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 0; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// -- memory

constexpr size_t kAlignment = 512;
constexpr int kNaN = 0xff;  // in every byte: a NaN in every floating dtype

void* new_memory(size_t nbytes) {
  void* memory = std::aligned_alloc(kAlignment, nbytes);
  TORCH_CHECK(memory, "out of memory");
  return memory;
}

size_t rounded(size_t nbytes) {
  return (nbytes + kAlignment - 1) / kAlignment * kAlignment;
}

uintptr_t address(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

void free_on_device(void* memory);

// A block belongs to the stream that was current when it was allocated. When it is freed, that
// stream gets it back without a wait. A block that record_stream has named is not used again.
struct DeviceMemory final : c10::DeviceAllocator {
  struct Block {
    size_t nbytes;
    StreamId stream;
    std::set<StreamId> readers;  // from record_stream
  };

  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, kDevice};
    const auto size = rounded(nbytes);
    void* memory = take(size);
    tell("allocate", current_stream, address(memory), address(memory) + size);
    return {memory, memory, &free_on_device, kDevice};
  }

  void* take(size_t size) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto& unused = free_blocks[{current_stream, size}];
    void* memory = nullptr;
    if (unused.empty()) {
      memory = new_memory(size);
    } else {
      memory = unused.back();
      unused.pop_back();
    }
    std::memset(memory, kNaN, size);
    blocks[memory] = {size, current_stream, {}};
    stats.allocated_bytes[0].increase(size);
    return memory;
  }

  void free(void* memory) {
    Block block;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      block = blocks.at(memory);
      blocks.erase(memory);
      std::memset(memory, kNaN, block.nbytes);
      stats.allocated_bytes[0].decrease(block.nbytes);
    }
    // Before anyone can get the block again. In a destructor nothing may be thrown.
    try {
      tell("free", block.stream, address(memory), address(memory) + block.nbytes, block.readers);
    } catch (const std::exception& error) {
      TORCH_WARN("the observer of frees failed: ", error.what());
    }
    if (block.readers.empty()) {
      const std::lock_guard<std::mutex> lock(mutex);
      free_blocks[{block.stream, block.nbytes}].push_back(memory);
    }
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = blocks.find(data.get());
    if (found != blocks.end() && found->second.stream != stream.id())
      found->second.readers.insert(stream.id());
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_on_device; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { stats.allocated_bytes[0].reset_peak(); }

  std::mutex mutex;
  std::unordered_map<const void*, Block> blocks;
  std::map<std::pair<StreamId, size_t>, std::vector<void*>> free_blocks;
  c10::CachingDeviceAllocator::DeviceStats stats;
};

auto& device_memory = *new DeviceMemory;

void free_on_device(void* memory) {
  if (memory) device_memory.free(memory);
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  device_memory.recordStream(data, stream);
}

void free_pinned(void* memory);

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const auto size = std::max(rounded(nbytes), kAlignment);
    void* memory = new_memory(size);
    const std::lock_guard<std::mutex> lock(mutex);
    sizes[address(memory)] = size;
    return {memory, memory, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
  bool holds(const void* pointer) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto next = sizes.upper_bound(address(pointer));
    return next != sizes.begin() && address(pointer) < (--next)->first + next->second;
  }

  std::mutex mutex;
  std::map<uintptr_t, size_t> sizes;  // by the address
};

auto& pinned_memory = *new PinnedMemory;

void free_pinned(void* memory) {
  size_t nbytes = 0;
  {
    const std::lock_guard<std::mutex> lock(pinned_memory.mutex);
    nbytes = pinned_memory.sizes.at(address(memory));
    pinned_memory.sizes.erase(address(memory));
  }
  try {  // it is not used again before all copies that the device was given have ended
    tell("forget", address(memory), address(memory) + nbytes);
  } catch (const std::exception& error) {
    TORCH_WARN("the observer of frees failed: ", error.what());
  }
  std::free(memory);
}

}  // namespace
