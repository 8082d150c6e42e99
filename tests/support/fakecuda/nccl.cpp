// NCCL for the processes of one host, over POSIX shared memory. A collective is done in the thread
// that calls it, once all ranks have called it. A rank ends with a message if others call a
// different collective, or if they do not call it within FAKECUDA_NCCL_TIMEOUT seconds.
//
// With FAKECUDA_NCCL_HANGS=SECONDS, read when a communicator is made, a thread of the communicator
// does its calls in order, each once all earlier work of its stream is complete and all ranks have
// made the same call: never, if they make different ones. The caller waits for at most SECONDS, and
// not at all behind another pending call. To the runtime, the stream is not complete until the call
// is done, or its communicator aborted or destroyed. The input is copied when a call is made.
// Making and splitting communicators is the same with and without the variable.

#include "observer.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

extern "C" int cudaGetDevice(int*);
using ncclResult_t = int;
enum { kSuccess = 0, kSystemError = 2, kInvalidArgument = 4, kInvalidUsage = 5 };
struct ncclUniqueId {
  char internal[128];
};
struct ncclComm;

namespace {

constexpr size_t kSlotNbytes = 4 << 20, kMailNbytes = 1 << 20;
constexpr int kMaxRanks = 8;
constexpr int kItemsizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // by dtype
constexpr const char* kDtypes[] = {"int8",    "uint8",   "int32",   "uint32",   "int64", "uint64",
                                   "float16", "float32", "float64", "bfloat16", "e4m3",  "e5m2"};

struct Signature {
  char name[16];
  uint64_t count;
  int dtype, op, root;

  std::string text() const {
    return std::string(name) + " of " + std::to_string(count) + " " +
           (dtype < 0 ? "-" : kDtypes[dtype]) + " (op " + std::to_string(op) + ", root " +
           std::to_string(root) + ")";
  }
};

struct Mail {  // of one rank to another
  std::atomic<uint32_t> full;
  uint32_t nbytes;
  char data[kMailNbytes];
};

struct Meeting {
  std::atomic<uint32_t> arrived, generation;
  std::atomic<uint64_t> num_calls[kMaxRanks];
  Signature calls[kMaxRanks];  // the latest of each rank
};

struct Shared {
  Meeting of_hosts, of_devices;  // to make and split communicators; for their calls
  int64_t words[kMaxRanks][2];
  char slots[kMaxRanks][kSlotNbytes];
  Mail mail[kMaxRanks][kMaxRanks];
};

double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

double timeout_s() {
  static const char* text = std::getenv("FAKECUDA_NCCL_TIMEOUT");
  return text ? std::atof(text) : 120;
}

std::optional<double> hangs_s() {
  const char* text = std::getenv("FAKECUDA_NCCL_HANGS");
  return text && *text ? std::optional(std::atof(text)) : std::nullopt;
}

[[noreturn]] void stop(const std::string& message) {
  std::fprintf(stderr, "fakecuda: %s\n", message.c_str());
  std::abort();
}

struct Call {
  Signature signature;
  const void* send;
  void* recv;
  int peer;
  ncclComm* comm;
  const void* stream;
};

struct Job {  // calls that are done as one, by the thread of their communicator
  std::vector<Call> calls;
  std::vector<std::vector<char>> inputs;
  uint64_t ticket;
  fakecuda::Tickets behind;
};

}  // namespace

struct ncclComm {
  std::string name;
  int rank, size, num_splits = 0;
  Shared* shared;
  std::map<int, double> factors;  // of the reductions that the program created, by number

  std::optional<double> waits_s = std::nullopt;  // if calls may hang
  std::mutex mutex = {};                         // guards jobs
  std::condition_variable changed = {};
  std::deque<Job> jobs = {};  // the first one is being done
  std::atomic<bool> has_ended = false;
  std::thread thread = {};

  std::string state(const Meeting& meeting) {
    std::string text = "number of calls and the latest, by rank:";
    for (int r = 0; r < size; ++r)
      text += " " + std::to_string(meeting.num_calls[r]) + " (" + meeting.calls[r].text() + ")";
    return text;
  }

  [[noreturn]] void time_out(const Meeting& meeting, const Signature& call) {
    stop("rank " + std::to_string(rank) + " of " + name + " timed out in " + call.text() + "; " +
         state(meeting));
  }

  bool can_hang(const Meeting& meeting) { return waits_s && &meeting == &shared->of_devices; }

  // Return whether all ranks have come: false if the communicator has ended.
  bool barrier(Meeting& meeting, const Signature& call) {
    const uint32_t generation = meeting.generation;
    if (meeting.arrived.fetch_add(1) + 1 == uint32_t(size)) {
      meeting.arrived = 0;
      meeting.generation = generation + 1;
      syscall(SYS_futex, &meeting.generation, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
      return true;
    }
    const double end = now_s() + timeout_s();
    const bool hangs = can_hang(meeting);
    while (meeting.generation == generation) {
      if (hangs && has_ended) return false;
      const timespec interval{hangs ? 0 : 1, hangs ? 10'000'000 : 0};
      syscall(SYS_futex, &meeting.generation, FUTEX_WAIT, generation, &interval, nullptr, 0);
      if (!hangs && meeting.generation == generation && now_s() > end) time_out(meeting, call);
    }
    return true;
  }

  // All ranks must make the same call. Return whether they have.
  bool begin(Meeting& meeting, const Signature& call) {
    meeting.calls[rank] = call;
    ++meeting.num_calls[rank];
    if (!barrier(meeting, call)) return false;
    for (int r = 0; r < size; ++r) {
      const auto& other = meeting.calls[r];
      if (!std::strcmp(other.name, call.name) && other.count == call.count &&
          other.dtype == call.dtype && other.root == call.root)
        continue;
      if (!can_hang(meeting))
        stop("ranks of " + name + " call different collectives: rank " + std::to_string(rank) +
             " " + call.text() + ", rank " + std::to_string(r) + " " + other.text());
      while (!has_ended) usleep(10'000);
      return false;
    }
    return barrier(meeting, call);
  }
};

namespace {

using Comm = ncclComm*;

// -- numbers

template <typename T, typename Sum>
void reduce_as(
    const std::vector<const char*>& from, char* to, size_t n, int op, double factor,
    bool integral) {
  auto* out = reinterpret_cast<T*>(to);
  for (size_t i = 0; i < n; ++i) {
    Sum sum = Sum(reinterpret_cast<const T*>(from[0])[i]);
    if (factor != 1) sum = Sum(sum * factor);
    for (size_t r = 1; r < from.size(); ++r) {
      Sum next = Sum(reinterpret_cast<const T*>(from[r])[i]);
      if (factor != 1) next = Sum(next * factor);
      switch (op) {
        case 1: sum *= next; break;
        case 2: sum = std::max(sum, next); break;
        case 3: sum = std::min(sum, next); break;
        default: sum += next;
      }
    }
    if (op == 4) sum = integral ? Sum(sum / Sum(from.size())) : Sum(sum * (1.0 / from.size()));
    out[i] = T(sum);
  }
}

struct BFloat16 {
  uint16_t bits;
  BFloat16(float value) {
    uint32_t all;
    std::memcpy(&all, &value, 4);
    bits = value != value ? 0x7fc0 : uint16_t((all + 0x7fff + ((all >> 16) & 1)) >> 16);
  }
  operator float() const {
    const uint32_t all = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &all, 4);
    return value;
  }
};

void reduce(
    Comm comm, const std::vector<const char*>& from, char* to, size_t n, int dtype, int op) {
  double factor = 1;
  if (op > 4) factor = comm->factors.at(op), op = 0;
  switch (dtype) {
    case 0: return reduce_as<int8_t, int64_t>(from, to, n, op, factor, true);
    case 1: return reduce_as<uint8_t, int64_t>(from, to, n, op, factor, true);
    case 2: return reduce_as<int32_t, int64_t>(from, to, n, op, factor, true);
    case 3: return reduce_as<uint32_t, int64_t>(from, to, n, op, factor, true);
    case 4: return reduce_as<int64_t, int64_t>(from, to, n, op, factor, true);
    case 5: return reduce_as<uint64_t, uint64_t>(from, to, n, op, factor, true);
    case 6: return reduce_as<_Float16, float>(from, to, n, op, factor, false);
    case 7: return reduce_as<float, float>(from, to, n, op, factor, false);
    case 8: return reduce_as<double, double>(from, to, n, op, factor, false);
    case 9: return reduce_as<BFloat16, float>(from, to, n, op, factor, false);
    default: stop(std::string("no reduction of ") + kDtypes[dtype]);
  }
}

// -- calls

std::string last_error;
thread_local int depth = 0;
thread_local std::vector<Call> queue;

bool is_p2p(const Call& call) {
  return !std::strcmp(call.signature.name, "send") || !std::strcmp(call.signature.name, "recv");
}

// Count the call, and say what it reads and writes. Return the size of its input in bytes.
size_t tell(const Call& call) {
  const auto comm = call.comm;
  const std::string name = call.signature.name;
  const size_t nbytes = call.signature.count * kItemsizes[call.signature.dtype];
  const size_t all = nbytes * comm->size;
  const bool is_root = call.signature.root == comm->rank;
  size_t in = nbytes, out = nbytes;
  if (name == "all_gather") out = all;
  if (name == "reduce_scatter") in = all;
  if (name == "all_to_all") in = out = all;
  if (name == "broadcast" && !is_root) in = 0;
  if (name == "reduce" && !is_root) out = 0;
  if (name == "send") out = 0;
  if (name == "recv") in = 0;
  fakecuda_count(("nccl " + name).c_str());
  fakecuda::Happening happening{fakecuda::Kind::Work, call.stream, nullptr, "nccl " + name};
  if (in) happening.reads.emplace_back(uintptr_t(call.send), uintptr_t(call.send) + in);
  if (out) happening.writes.emplace_back(uintptr_t(call.recv), uintptr_t(call.recv) + out);
  fakecuda_happened(happening);
  return in;
}

void run_p2p(std::vector<Call>& calls) {
  std::vector<size_t> done(calls.size());
  const double end = now_s() + timeout_s();
  for (size_t left = calls.size(); left;) {
    bool moved = false;
    std::map<std::pair<Comm, int>, bool> busy;
    for (size_t i = 0; i < calls.size(); ++i) {
      auto& call = calls[i];
      const size_t nbytes = call.signature.count * kItemsizes[call.signature.dtype];
      if (done[i] > nbytes) continue;
      const bool sends = !std::strcmp(call.signature.name, "send");
      auto& is_busy = busy[{call.comm, call.peer * 2 + sends}];
      if (is_busy) continue;
      is_busy = true;
      auto* shared = call.comm->shared;
      auto& mail = sends ? shared->mail[call.comm->rank][call.peer]
                         : shared->mail[call.peer][call.comm->rank];
      if (mail.full == (sends ? 1u : 0u)) continue;
      const size_t part = std::min(kMailNbytes, nbytes - done[i]);
      if (sends) {
        std::memcpy(mail.data, (const char*)call.send + done[i], part);
        mail.nbytes = part;
      } else {
        if (mail.nbytes != part && call.comm->waits_s) continue;
        if (mail.nbytes != part)
          stop("recv of " + std::to_string(nbytes) + " bytes from a send of another size");
        std::memcpy((char*)call.recv + done[i], mail.data, part);
      }
      mail.full = sends;
      moved = true;
      done[i] += part;
      if (done[i] == nbytes) done[i] = nbytes + 1, --left;
    }
    if (!moved) {
      auto* comm = calls[0].comm;
      if (comm->waits_s && comm->has_ended) return;
      if (!comm->waits_s && now_s() > end)
        comm->time_out(comm->shared->of_devices, calls[0].signature);
      usleep(50);
    }
  }
}

void run_collective(const Call& call) {
  const auto& signature = call.signature;
  const auto comm = call.comm;
  auto* shared = comm->shared;
  const int size = comm->size, rank = comm->rank;
  const size_t item = kItemsizes[signature.dtype], nbytes = signature.count * item;
  const std::string name = signature.name;
  const auto* send = static_cast<const char*>(call.send);
  auto* recv = static_cast<char*>(call.recv);
  auto& meeting = shared->of_devices;
  if (!comm->begin(meeting, signature)) return;
  const bool parts = name == "reduce_scatter" || name == "all_to_all";
  const size_t step = (parts ? kSlotNbytes / size : kSlotNbytes) / 16 * 16;
  for (size_t at = 0; at < nbytes; at += step) {
    const size_t n = std::min(step, nbytes - at);
    char* mine = shared->slots[rank];
    if (parts)
      for (int r = 0; r < size; ++r) std::memcpy(mine + r * step, send + r * nbytes + at, n);
    else if (name != "broadcast" || rank == signature.root)
      std::memcpy(mine, send + at, n);
    if (!comm->barrier(meeting, signature)) return;
    std::vector<const char*> from;
    for (int r = 0; r < size; ++r) from.push_back(shared->slots[r] + (parts ? rank * step : 0));
    if (name == "all_gather" || name == "all_to_all")
      for (int r = 0; r < size; ++r) std::memcpy(recv + r * nbytes + at, from[r], n);
    else if (name == "broadcast")
      std::memcpy(recv + at, from[signature.root], n);
    else if (name != "reduce" || rank == signature.root)
      reduce(comm, from, recv + at, n / item, signature.dtype, signature.op);
    if (!comm->barrier(meeting, signature)) return;
  }
}

void run_all(const std::vector<Call>& calls) {
  std::vector<Call> p2p;
  for (auto& call : calls)
    if (is_p2p(call))
      p2p.push_back(call);
    else
      run_collective(call);
  run_p2p(p2p);
}

// The thread of a communicator whose calls may hang.
void run_jobs(Comm comm) {
  std::unique_lock<std::mutex> lock(comm->mutex);
  while (true) {
    comm->changed.wait(lock, [&] { return comm->has_ended || !comm->jobs.empty(); });
    if (comm->has_ended) break;
    const auto& job = comm->jobs.front();
    lock.unlock();
    while (fakecuda_is_pending(job.behind) && !comm->has_ended) usleep(1000);
    if (!comm->has_ended) run_all(job.calls);
    lock.lock();
    if (comm->has_ended) break;
    fakecuda_end(job.ticket);
    comm->jobs.pop_front();
    comm->changed.notify_all();
  }
  for (const auto& job : comm->jobs) fakecuda_end(job.ticket);
  comm->jobs.clear();
  comm->changed.notify_all();
}

void start(Comm comm, Job job) {
  std::unique_lock<std::mutex> lock(comm->mutex);
  if (comm->has_ended) return;
  const uint64_t ticket = job.ticket = fakecuda_begin(job.calls[0].stream, &job.behind);
  const bool waits = comm->jobs.empty() && job.behind.empty();
  const auto signature = job.calls[0].signature;
  comm->jobs.push_back(std::move(job));
  if (!comm->thread.joinable()) comm->thread = std::thread(run_jobs, comm);
  comm->changed.notify_all();
  const auto limit = std::chrono::duration<double>(*comm->waits_s);
  const auto is_done = [&] { return !fakecuda_is_pending({ticket}); };
  if (waits && !comm->changed.wait_for(lock, limit, is_done))
    std::fprintf(
        stderr, "fakecuda: %s is pending on rank %d of %s, later values are not valid; %s\n",
        signature.text().c_str(), comm->rank, comm->name.c_str(),
        comm->state(comm->shared->of_devices).c_str());
}

void end(Comm comm) {
  if (!comm || !comm->waits_s) return;  // torch aborts a communicator twice
  {
    const std::lock_guard<std::mutex> lock(comm->mutex);
    comm->has_ended = true;
    comm->changed.notify_all();
  }
  if (comm->thread.joinable()) comm->thread.join();
}

void run(const std::vector<Call>& calls) {
  std::vector<Call> now;
  std::vector<std::pair<Comm, Job>> jobs;
  for (auto call : calls) {
    const size_t nbytes = tell(call);
    if (!call.comm->waits_s) {
      now.push_back(call);
      continue;
    }
    auto of_comm = std::find_if(
        jobs.begin(), jobs.end(), [&](const auto& job) { return job.first == call.comm; });
    if (of_comm == jobs.end()) of_comm = jobs.insert(of_comm, {call.comm, {}});
    const auto* input = static_cast<const char*>(call.send);
    of_comm->second.inputs.emplace_back(input, input + nbytes);
    call.send = of_comm->second.inputs.back().data();
    of_comm->second.calls.push_back(call);
  }
  run_all(now);
  for (auto& [comm, job] : jobs) start(comm, std::move(job));
}

ncclResult_t enqueue(
    const char* name, const void* send, void* recv, size_t count, int dtype, int op, int root,
    int peer, Comm comm, const void* stream) {
  if (count == 0) return kSuccess;
  Call call{{}, send, recv, peer, comm, stream};
  std::snprintf(call.signature.name, sizeof(call.signature.name), "%s", name);
  call.signature.count = count, call.signature.dtype = dtype;
  call.signature.op = op, call.signature.root = root;
  queue.push_back(call);
  if (depth == 0) run(std::exchange(queue, {}));
  return kSuccess;
}

// -- communicators

Comm join(const std::string& name, int size, int rank) {
  if (size > kMaxRanks) return nullptr;
  const int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, sizeof(Shared))) return nullptr;
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return nullptr;
  auto* comm = new ncclComm{name, rank, size, 0, static_cast<Shared*>(memory), {}};
  const Signature call{"init", uint64_t(size), -1, 0, 0};
  int device = 0;
  cudaGetDevice(&device);
  comm->waits_s = hangs_s();
  comm->shared->words[rank][0] = device;
  comm->begin(comm->shared->of_hosts, call);
  if (rank == 0) shm_unlink(name.c_str());
  for (int r = 0; r < size; ++r)
    if (r != rank && comm->shared->words[r][0] == device) {
      last_error = "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " +
                   std::to_string(r) + " both on CUDA device " + std::to_string(device + 1) +
                   "000";
      return nullptr;
    }
  comm->begin(comm->shared->of_hosts, {"init done", uint64_t(size), -1, 0, 0});
  fakecuda_count("nccl communicators");
  return comm;
}

}  // namespace

API ncclResult_t ncclGetVersion(int* version) { return *version = 23007, kSuccess; }
API const char* ncclGetErrorString(ncclResult_t) { return "an error of fakecuda"; }
API const char* ncclGetLastError(Comm) { return last_error.c_str(); }
API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  std::memset(id, 0, sizeof(*id));
  std::snprintf(
      id->internal, sizeof(id->internal), "/fakecuda-%d-%08x%08x", getpid(), random(), random());
  return kSuccess;
}
API ncclResult_t ncclCommInitRank(Comm* comm, int size, ncclUniqueId id, int rank) {
  *comm = join(id.internal, size, rank);
  return *comm ? kSuccess : kInvalidUsage;
}
API ncclResult_t ncclCommInitRankConfig(Comm* comm, int size, ncclUniqueId id, int rank, void*) {
  return ncclCommInitRank(comm, size, id, rank);
}
API ncclResult_t ncclCommInitRankScalable(
    Comm* comm, int size, int rank, int, ncclUniqueId* ids, void*) {
  return ncclCommInitRank(comm, size, ids[0], rank);
}
API ncclResult_t ncclCommSplit(Comm comm, int color, int key, Comm* found, void*) {
  const int number = comm->num_splits++;
  comm->shared->words[comm->rank][0] = color;
  comm->shared->words[comm->rank][1] = key;
  comm->begin(comm->shared->of_hosts, {"split", uint64_t(number), -1, 0, 0});
  std::vector<std::pair<int64_t, int>> members;
  for (int r = 0; r < comm->size; ++r)
    if (comm->shared->words[r][0] == color) members.emplace_back(comm->shared->words[r][1], r);
  std::sort(members.begin(), members.end());
  comm->begin(comm->shared->of_hosts, {"split done", uint64_t(number), -1, 0, 0});
  *found = nullptr;
  if (color < 0) return kSuccess;
  int rank = 0;
  while (members[rank].second != comm->rank) ++rank;
  *found = join(comm->name + "-" + std::to_string(number) + "-" + std::to_string(color),
                members.size(), rank);
  return *found ? kSuccess : kInvalidUsage;
}
API ncclResult_t ncclCommFinalize(Comm) { return kSuccess; }
API ncclResult_t ncclCommDestroy(Comm comm) {
  end(comm);
  munmap(comm->shared, sizeof(Shared));
  delete comm;
  return kSuccess;
}
API ncclResult_t ncclCommAbort(Comm comm) { return end(comm), kSuccess; }
API ncclResult_t ncclCommGetAsyncError(Comm, ncclResult_t* error) { return *error = 0, kSuccess; }
API ncclResult_t ncclCommCount(Comm comm, int* size) { return *size = comm->size, kSuccess; }
API ncclResult_t ncclCommUserRank(Comm comm, int* rank) { return *rank = comm->rank, kSuccess; }
API ncclResult_t ncclCommRegister(Comm, void*, size_t, void** handle) {
  return *handle = nullptr, kSuccess;
}
API ncclResult_t ncclCommDeregister(Comm, void*) { return kSuccess; }
API ncclResult_t ncclGroupStart() { return ++depth, kSuccess; }
API ncclResult_t ncclGroupEnd() {
  if (depth == 0) return kInvalidUsage;
  if (--depth == 0) run(std::exchange(queue, {}));
  return kSuccess;
}
API ncclResult_t ncclRedOpCreatePreMulSum(int* op, void* scalar, int dtype, int, Comm comm) {
  double factor = 1;
  if (dtype == 6) factor = *static_cast<_Float16*>(scalar);
  else if (dtype == 7) factor = *static_cast<float*>(scalar);
  else if (dtype == 8) factor = *static_cast<double*>(scalar);
  else if (dtype == 9) factor = *static_cast<BFloat16*>(scalar);
  else return kInvalidArgument;
  *op = 5 + comm->factors.size();
  comm->factors[*op] = factor;
  return kSuccess;
}
API ncclResult_t ncclRedOpDestroy(int, Comm) { return kSuccess; }
API ncclResult_t ncclAllReduce(
    const void* send, void* recv, size_t n, int dtype, int op, Comm comm, void* stream) {
  return enqueue("all_reduce", send, recv, n, dtype, op, 0, -1, comm, stream);
}
API ncclResult_t ncclAllGather(
    const void* send, void* recv, size_t n, int dtype, Comm comm, void* stream) {
  return enqueue("all_gather", send, recv, n, dtype, 0, 0, -1, comm, stream);
}
API ncclResult_t ncclReduceScatter(
    const void* send, void* recv, size_t n, int dtype, int op, Comm comm, void* stream) {
  return enqueue("reduce_scatter", send, recv, n, dtype, op, 0, -1, comm, stream);
}
API ncclResult_t ncclBroadcast(
    const void* send, void* recv, size_t n, int dtype, int root, Comm comm, void* stream) {
  return enqueue("broadcast", send, recv, n, dtype, 0, root, -1, comm, stream);
}
API ncclResult_t ncclBcast(void* data, size_t n, int dtype, int root, Comm comm, void* stream) {
  return ncclBroadcast(data, data, n, dtype, root, comm, stream);
}
API ncclResult_t ncclReduce(
    const void* send, void* recv, size_t n, int dtype, int op, int root, Comm comm, void* stream) {
  return enqueue("reduce", send, recv, n, dtype, op, root, -1, comm, stream);
}
API ncclResult_t ncclAlltoAll(
    const void* send, void* recv, size_t n, int dtype, Comm comm, void* stream) {
  return enqueue("all_to_all", send, recv, n, dtype, 0, 0, -1, comm, stream);
}
API ncclResult_t ncclSend(
    const void* send, size_t n, int dtype, int peer, Comm comm, void* stream) {
  return enqueue("send", send, nullptr, n, dtype, 0, 0, peer, comm, stream);
}
API ncclResult_t ncclRecv(void* recv, size_t n, int dtype, int peer, Comm comm, void* stream) {
  return enqueue("recv", nullptr, recv, n, dtype, 0, 0, peer, comm, stream);
}
