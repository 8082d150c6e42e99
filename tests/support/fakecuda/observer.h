// What the runtime and NCCL tell an observer (ops.cpp): work on streams, events, waits of the host.
// And how NCCL tells the runtime that a collective is not complete.

#pragma once

#include <cstdint>
#include <set>
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
using Tickets = std::set<uint64_t>;  // of work that is not complete

}  // namespace fakecuda

extern "C" {
void fakecuda_observe(fakecuda::Observer observer);
void fakecuda_happened(const fakecuda::Happening& happening);
void fakecuda_count(const char* what);
// Enqueue work on a stream that is not complete until its ticket is ended. It must not be ended
// before what it is behind on the stream, except by an abort.
uint64_t fakecuda_begin(const void* stream, fakecuda::Tickets* behind);
void fakecuda_end(uint64_t ticket);
bool fakecuda_is_pending(const fakecuda::Tickets& tickets);
void fakecuda_finish(const void* stream);  // blocks until all work of the stream is complete
}
