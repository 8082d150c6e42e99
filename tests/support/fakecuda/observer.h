// What the runtime and NCCL tell an observer (ops.cpp): work on streams, events, waits of the host.

#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace fakecuda {

using Range = std::pair<uintptr_t, uintptr_t>;  // [begin, end), in bytes
using Ranges = std::vector<Range>;

enum class Kind {
  Work,
  Record,
  Wait,
  EventSync,
  EventQuery,
  EventDestroy,
  StreamSync,
  DeviceSync,
  Forget,  // memory went back to the system
};

struct Happening {
  Kind kind;
  const void* stream = nullptr;
  const void* event = nullptr;
  std::string name = {};
  Ranges reads = {}, writes = {};
};

using Observer = void (*)(const Happening&);

}  // namespace fakecuda

extern "C" {
void fakecuda_observe(fakecuda::Observer observer);
void fakecuda_happened(const fakecuda::Happening& happening);
void fakecuda_count(const char* what);
}
