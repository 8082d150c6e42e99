// Values of torch's CUDA kernels, none of which can run: each operation that has one runs the CPU's
// kernel on CPU tensors that alias the memory of the device. New results go into memory of the real
// caching allocator. Copies, views, allocation, streams and events are torch's own.
//
// While recording, everything that the checker of order needs is kept: the bytes that each
// operation, copy and collective reads and writes on which stream, allocations, and waits.

#include "observer.h"

#include "../cpu_kernels.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/native/TensorIterator.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/utils/pybind.h>

#include <frameobject.h>
#include <pybind11/stl.h>

#include <atomic>
#include <mutex>
#include <set>
#include <string>

namespace {

namespace py = pybind11;
using namespace cpu_kernels;
using fakecuda::Happening;
using fakecuda::Kind;

bool is_pinned(const void* p) {
  cudaPointerAttributes attributes;
  cudaPointerGetAttributes(&attributes, p);
  return attributes.type == cudaMemoryTypeHost;
}

// -- recording

using Place = std::vector<std::string>;  // the innermost call first

struct Record {
  std::string kind;
  const void* stream = nullptr;
  const void* event = nullptr;
  std::string name = {};
  Ranges reads = {}, writes = {};
  Place place = {};
};

std::atomic<bool> recording{false};
std::mutex records_mutex;
auto& records = *new std::vector<Record>;
// Recorded by the allocator when it frees a block with streams that record_stream named.
auto& events_of_allocator = *new std::set<const void*>;
thread_local Place last_place;
thread_local bool finding_place = false;
thread_local bool freeing = false;      // between the request to free a block and its completion
thread_local bool has_readers = false;  // the block being freed has such streams

void keep(Record record) {
  const std::lock_guard<std::mutex> lock(records_mutex);
  records.push_back(std::move(record));
}

// Where the running thread is in Python, without torch's own calls. Needs Python's lock.
Place find_place() {
  constexpr size_t kNumCalls = 4;
  Place place;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame && place.size() < kNumCalls) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const std::string file = PyUnicode_AsUTF8(code->co_filename);
    if (file.find("site-packages/torch/") == std::string::npos && file.rfind("<frozen", 0) != 0)
      place.push_back(file + ":" + std::to_string(PyFrame_GetLineNumber(frame)) + " " +
                      PyUnicode_AsUTF8(code->co_name));
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return place;
}

// Remember where this thread is, for what the runtime and the allocator will report.
void set_place() {
  if (!recording || finding_place) return;
  finding_place = true;  // creating a frame may free tensors
  py::gil_scoped_acquire gil;
  last_place = find_place();
  finding_place = false;
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::Work: return "op";
    case Kind::Record: return "record";
    case Kind::Wait: return "wait";
    case Kind::EventSync:
    case Kind::EventQuery: return "event_sync";  // the host may rely on the answer
    case Kind::EventDestroy: return "event_destroy";
    case Kind::StreamSync: return "stream_sync";
    case Kind::DeviceSync: return "device_sync";
    default: return "forget";
  }
}

void on_happening(const Happening& happening) {
  if (!recording) return;
  if (happening.kind == Kind::EventQuery) {
    // The program learns nothing from queries by NCCL's watchdog and by the allocator.
    if (PyGILState_GetThisThreadState() == nullptr) return;
    const std::lock_guard<std::mutex> lock(records_mutex);
    if (events_of_allocator.count(happening.event)) return;
  }
  if (happening.kind == Kind::Record) {
    const std::lock_guard<std::mutex> lock(records_mutex);
    if (freeing)
      events_of_allocator.insert(happening.event);
    else
      events_of_allocator.erase(happening.event);
    has_readers |= freeing;
  }
  if (PyGILState_Check()) set_place();
  keep({name_of(happening.kind), happening.stream, happening.event, happening.name,
        happening.reads, happening.writes, last_place});
}

void on_allocator(const c10::cuda::CUDACachingAllocator::TraceEntry& entry) {
  using Entry = c10::cuda::CUDACachingAllocator::TraceEntry;
  if (!recording) return;
  std::string kind;
  switch (entry.action_) {
    case Entry::ALLOC: kind = "allocate"; break;
    case Entry::FREE_REQUESTED:
      freeing = true;
      has_readers = false;
      return;
    case Entry::FREE_COMPLETED:
      // Directly after the request, unless other streams' events have to happen first.
      kind = freeing && !has_readers ? "free" : "free_after_events";
      freeing = false;
      break;
    default: return;
  }
  const auto begin = uintptr_t(entry.addr_);
  keep({kind, entry.stream_, nullptr, "", {}, {{begin, begin + entry.size_}}, last_place});
}

// Operations that accept CPU tensors of one or more dimensions beside those of the device.
bool takes_host(const std::string& name) {
  static const std::set<std::string> names{
      "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
      "aten::copy_"};
  return names.count(name) > 0;
}

// Random numbers come from the CPU's generator, seeded by the state of the device's.
class Random {
 public:
  explicit Random(c10::DeviceIndex device) {
    auto generator = at::cuda::detail::getDefaultCUDAGenerator(device);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    const auto offset = generator.get_offset();
    auto cpu = at::detail::getDefaultCPUGenerator();
    saved_ = cpu.get_state();
    cpu.set_current_seed(generator.current_seed() * 1000003 + offset);
    generator.set_offset(offset + 4);
  }
  ~Random() { at::Generator(at::detail::getDefaultCPUGenerator()).set_state(saved_); }

 private:
  at::Tensor saved_;
};

// -- the boxed kernel

class CudaCall final : public Call {
 public:
  CudaCall(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : Call(op, stack, c10::DispatchKey::CUDA, c10::cuda::CUDACachingAllocator::get()) {}

  void run() {
    const auto& schema = op_.schema();
    replace_arguments();
    TORCH_CHECK(
        !has_host_ || takes_host(schema.name()) || aliases_.empty(),
        "Expected all tensors to be on the same device, but found at least two devices, cuda:",
        int(device_), " and cpu! (", schema.operator_name(), ")");
    if (device_ < 0) device_ = c10::cuda::current_device();
    const c10::cuda::CUDAGuard guard(device_);
    set_place();
    const auto stream = c10::cuda::getCurrentCUDAStream(device_);
    const bool waits = op_.hasTag(at::Tag::data_dependent_output) ||
                       op_.hasTag(at::Tag::dynamic_output_shape);
    if (waits) fakecuda_finish(stream.stream());
    {
      std::optional<Random> random;
      if (op_.hasTag(at::Tag::nondeterministic_seeded)) random.emplace(device_);
      run_on_cpu();
    }
    replace_results();
    if (!(reads_.empty() && writes_.empty())) {
      fakecuda_count("kernels");
      if (recording)
        fakecuda_happened({Kind::Work, stream.stream(), nullptr, schema.name(), reads_, writes_});
    }
    if (waits) cudaStreamSynchronize(stream.stream());
  }

 private:
  bool is_on_device(const at::Tensor& tensor, Use) override {
    if (!tensor.is_cuda()) {
      has_host_ = has_host_ || (tensor.is_cpu() && tensor.numel() && tensor.dim() > 0);
      return false;
    }
    TORCH_CHECK(
        device_ < 0 || device_ == tensor.get_device(),
        "Expected all tensors to be on the same device, but found at least two devices, cuda:",
        int(device_), " and cuda:", tensor.get_device(), "!");
    device_ = tensor.get_device();
    return true;
  }

  c10::IValue given_other(const c10::IValue& value) override {
    if (value.isGenerator()) return c10::IValue();
    if (!value.isDevice()) return value;
    if (value.toDevice().has_index()) device_ = value.toDevice().index();
    return c10::Device(c10::kCPU);
  }

  c10::DeviceIndex device_ = -1;
  bool has_host_ = false;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  CudaCall(op, stack).run();
}

void has_no_value(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(false, "fakecuda: no value for ", op.schema().operator_name());
}

// -- operations that cannot go that way

// Torch's own, if it needs no kernel; so are copies from and to the host, which call other
// operations to change dtype or strides.
void copy(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, 3);
  auto self = arguments[0].toTensor();
  const auto source = arguments[1].toTensor();
  const bool is_plain = self.dtype() == source.dtype() && self.sizes() == source.sizes() &&
                        self.strides() == source.strides() && self.is_non_overlapping_and_dense() &&
                        self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  if (self.is_cuda() && source.is_cuda() && self.device() == source.device() && !is_plain)
    return run_on_cpu(op, stack);
  set_place();
  at::native::copy_(self, source, arguments[2].toBool());
  torch::jit::drop(*stack, 3);
  torch::jit::push(*stack, self);
}

void foreach_copy(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, 3);
  const auto to = arguments[0].toTensorVector(), from = arguments[1].toTensorVector();
  for (size_t i = 0; i < to.size(); ++i)
    if (!to[i].is_cuda() || !from[i].is_cuda()) {
      for (size_t j = 0; j < to.size(); ++j) to[j].copy_(from[j], arguments[2].toBool());
      return torch::jit::drop(*stack, 3);
    }
  run_on_cpu(op, stack);
}

int64_t sdp_choice(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    double, bool, std::optional<double>, bool) {
  return 0;  // the composite of other operations
}

// The CPU's kernels do not convert from half to float.
void softmax(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& arguments = *stack;
  const auto at = arguments.size() - 3;
  if (arguments[at + 2].toBool()) {
    arguments[at] = arguments[at].toTensor().to(at::kFloat);
    arguments[at + 2] = false;
  }
  run_on_cpu(op, stack);
}

void softmax_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& arguments = *stack;
  const auto at = arguments.size() - 4;
  const auto dtype = arguments[at + 3].toScalarType();
  arguments[at + 3] = arguments[at].toTensor().scalar_type();
  run_on_cpu(op, stack);
  arguments.back() = arguments.back().toTensor().to(dtype);
}

// Operations that need no kernel stay torch's own.
bool is_kept(const c10::OperatorHandle& op) {
  static const std::set<std::string> names{
      "aten::empty",     "aten::empty_strided", "aten::set_",        "aten::resize_",
      "aten::is_pinned", "aten::record_stream", "aten::_pin_memory", "aten::_local_scalar_dense",
      "aten::is_set_to", "aten::_efficientzerotensor"};
  const auto& schema = op.schema();
  if (names.count(schema.name())) return true;
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

bool has_cpu_kernel(const c10::OperatorHandle& op) {
  for (const auto key :
       {c10::DispatchKey::CPU, c10::DispatchKey::CompositeExplicitAutograd,
        c10::DispatchKey::CompositeExplicitAutogradNonFunctional,
        c10::DispatchKey::CompositeImplicitAutograd})
    if (op.hasKernelForDispatchKey(key)) return true;
  return false;
}

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void register_all() {
  Silent silent;  // about kernels that are replaced
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static torch::Library library(
      torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  static const std::set<std::string> special{
      "aten::copy_", "aten::_foreach_copy_", "aten::_fused_sdp_choice", "aten::_softmax",
      "aten::_log_softmax", "aten::_softmax_backward_data", "aten::_log_softmax_backward_data"};
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    if (is_kept(*op) || (name.overload_name.empty() && special.count(name.name))) continue;
    library.impl(
        c10::toString(name).c_str(),
        has_cpu_kernel(*op) ? torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()
                            : torch::CppFunction::makeFromBoxedFunction<&has_no_value>());
  }
  library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&copy>());
  library.impl("_foreach_copy_", torch::CppFunction::makeFromBoxedFunction<&foreach_copy>());
  library.impl("_fused_sdp_choice", sdp_choice);
  for (const auto* name : {"_softmax", "_log_softmax"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&softmax>());
  for (const auto* name : {"_softmax_backward_data", "_log_softmax_backward_data"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&softmax_backward>());
}

// -- operations of the host on pinned memory

std::unique_ptr<at::ObserverContext> on_call(const at::RecordFunction& call) {
  if (!recording || finding_place) return nullptr;
  const auto schema = call.operator_schema();
  if (!schema) return nullptr;
  auto [reads, writes] = host_ranges(call, *schema, is_pinned);
  if (reads.empty() && writes.empty()) return nullptr;
  // Operations without a kernel for the CPU call others, which are recorded as well.
  const auto op = c10::Dispatcher::singleton().findOp(schema->operator_name());
  if (schema->name() != "aten::copy_" &&
      !(op && op->hasKernelForDispatchKey(c10::DispatchKey::CPU)))
    return nullptr;
  set_place();
  keep({"host", nullptr, nullptr, schema->name(), std::move(reads), std::move(writes), last_place});
  return nullptr;
}

// -- Python

void record(bool on) {
  static bool is_attached = false;
  if (on && !is_attached) {
    is_attached = true;
    fakecuda_observe(&on_happening);
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(&on_allocator);
    at::addGlobalCallback(
        at::RecordFunctionCallback(on_call).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  }
  recording = on;
}

py::tuple as_tuple(const Ranges& ranges) {
  py::tuple result(ranges.size());
  for (size_t i = 0; i < ranges.size(); ++i)
    result[i] = py::make_tuple(ranges[i].first, ranges[i].second);
  return result;
}

// Return the records, (kind, stream, event, name, reads, writes, place) of each, and forget them.
py::list drain() {
  std::vector<Record> drained;
  {
    const std::lock_guard<std::mutex> lock(records_mutex);
    drained.swap(records);
  }
  py::list list;
  for (const auto& each : drained)
    list.append(py::make_tuple(
        each.kind, uintptr_t(each.stream), uintptr_t(each.event), each.name, as_tuple(each.reads),
        as_tuple(each.writes), py::tuple(py::cast(each.place))));
  return list;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_all();
  m.def("record", &record);
  m.def("drain", &drain);
}
