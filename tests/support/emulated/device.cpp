// The kernels of the emulated device: one boxed kernel that runs the CPU's on the same memory, and
// tells the observer which bytes were read and written. See __init__.py.

#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/record_function.h>
#include <torch/library.h>

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return pinned_memory.holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto data = device_memory.allocate(nbytes);
    if (nbytes && impl->nbytes())
      std::memcpy(data.get(), impl->data(), std::min(nbytes, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(nbytes);
  }
};

// -- what an operation reads and writes

using Ranges = std::vector<std::pair<uintptr_t, uintptr_t>>;  // [begin, end), in bytes

constexpr int64_t kMaxRuns = 64;

// Append the contiguous runs of a tensor's elements; of one with more runs than kMaxRuns, the range
// from the first to the last.
void add_ranges(const at::Tensor& tensor, Ranges& ranges) {
  if (tensor.numel() == 0) return;
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size), the innermost first
  for (int64_t i = 0; i < tensor.dim(); ++i)
    if (tensor.size(i) > 1 && tensor.stride(i) > 0)
      dims.emplace_back(tensor.stride(i), tensor.size(i));
  std::sort(dims.begin(), dims.end());
  int64_t run = 1;
  size_t inner = 0;
  for (; inner < dims.size() && dims[inner].first <= run; ++inner)
    run += (dims[inner].second - 1) * dims[inner].first;
  int64_t num_runs = 1;
  for (size_t i = inner; i < dims.size(); ++i) num_runs *= dims[i].second;
  if (num_runs > kMaxRuns)
    for (; inner < dims.size(); ++inner) run += (dims[inner].second - 1) * dims[inner].first;
  std::vector<int64_t> starts{0};
  for (; inner < dims.size(); ++inner) {
    std::vector<int64_t> next;
    for (const auto start : starts)
      for (int64_t i = 0; i < dims[inner].second; ++i)
        next.push_back(start + i * dims[inner].first);
    starts = std::move(next);
  }
  const auto itemsize = static_cast<int64_t>(tensor.element_size());
  const auto begin = address(tensor.const_data_ptr());
  for (const auto start : starts)
    ranges.emplace_back(begin + start * itemsize, begin + (start + run) * itemsize);
}

enum class Use { Read, Write, View };

Use use_of(const c10::Argument& argument) {
  const auto* info = argument.alias_info();
  return info == nullptr ? Use::Read : info->isWrite() ? Use::Write : Use::View;
}

// Operations that change where a tensor lies, and touch no element.
bool moves_nothing(const std::string& name) {
  static const std::set<std::string> names{"aten::resize_", "aten::set_", "aten::empty"};
  return names.count(name) > 0;
}

// Operations of which a real device has to know the values of its inputs to size its outputs.
bool reads_sizes(const std::string& name) {
  static const std::set<std::string> names{
      "aten::nonzero", "aten::masked_select", "aten::_unique2"};
  return names.count(name) > 0;
}

// -- the boxed kernel

// One call: the operation runs on CPU tensors that alias the device's memory.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(*stack) {}

  void run() {
    const auto& schema = op_.schema();
    const auto first = stack_.size() - schema.arguments().size();
    for (size_t i = 0; i < schema.arguments().size(); ++i)
      stack_[first + i] = given(stack_[first + i], use_of(schema.arguments()[i]));
    const bool is_copy = schema.name() == "aten::copy_";
    const bool non_blocking = is_copy && stack_.back().isBool() && stack_.back().toBool();
    {
      at::DisableRecordFunctionGuard not_of_the_host;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    }
    for (const auto& [original, alias] : aliases_) follow(original, alias);
    bool syncs = reads_sizes(schema.name());
    for (size_t i = stack_.size() - schema.returns().size(); i < stack_.size(); ++i) {
      syncs = syncs || !(stack_[i].isTensor() || stack_[i].isTensorList());
      stack_[i] = returned(stack_[i]);
    }
    if (is_copy) syncs = syncs || copy_with_host(non_blocking);
    if (!moves_nothing(schema.name()) && !(reads_.empty() && writes_.empty()))
      tell("op", current_stream, schema.name(), reads_, writes_);
    if (syncs) tell("host_waits_for_stream", current_stream);
  }

 private:
  c10::IValue given(const c10::IValue& value, Use use) {
    if (value.isTensor()) return given(value.toTensor(), use);
    if (value.isDevice()) return c10::Device(c10::kCPU);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(given(tensor, use));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional(given(*tensor, use)) : std::nullopt);
      return list;
    }
    return value;
  }

  at::Tensor given(const at::Tensor& tensor, Use use) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kEmulated) {
      if (tensor.numel()) host_.emplace_back(tensor, use);
      return tensor;
    }
    const auto storage = tensor.storage();
    const auto needed = at::detail::computeStorageNbytes(
        tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset());
    TORCH_CHECK(
        moves_nothing(op_.schema().name()) || use == Use::View || tensor.numel() == 0 ||
            needed <= storage.nbytes(),
        op_.schema().name(), " uses a tensor of ", needed, " bytes whose storage has ",
        storage.nbytes(), ": it was freed");
    auto& cpu_storage = storages_[storage.unsafeGetStorageImpl()];
    if (!cpu_storage)
      cpu_storage = c10::Storage(
          c10::Storage::use_byte_size_t(), storage.nbytes(),
          c10::DataPtr(storage.mutable_data(), c10::kCPU), c10::GetAllocator(c10::kCPU), true);
    auto alias = at::detail::make_tensor<at::TensorImpl>(
        c10::Storage(cpu_storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = alias.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    aliases_.emplace_back(tensor, alias);
    if (use != Use::View) add_ranges(tensor, use == Use::Write ? writes_ : reads_);
    return alias;
  }

  // If the kernel has resized an alias, resize the tensor.
  void follow(const at::Tensor& original, const at::Tensor& alias) {
    auto* impl = original.unsafeGetTensorImpl();
    auto* storage = original.storage().unsafeGetStorageImpl();
    const auto& cpu = alias.storage();
    if (cpu.nbytes() != storage->nbytes()) {
      auto data = device_memory.allocate(cpu.nbytes());
      if (cpu.nbytes()) std::memcpy(data.get(), cpu.data(), cpu.nbytes());
      storage->set_data_ptr_noswap(std::move(data));
      storage->set_nbytes(cpu.nbytes());
    }
    if (alias.sizes() != original.sizes() || alias.strides() != original.strides()) {
      impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
      if (!moves_nothing(op_.schema().name())) add_ranges(original, writes_);
    }
  }

  c10::IValue returned(const c10::IValue& value) {
    if (value.isTensor()) return returned(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(returned(tensor));
      return list;
    }
    return value;
  }

  at::Tensor returned(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    for (const auto& [original, alias] : aliases_)
      if (alias.is_same(tensor)) return original;
    for (const auto& [host, use] : host_)
      if (host.is_same(tensor)) return host;
    for (const auto& [original, alias] : aliases_)
      if (alias.storage().is_alias_of(tensor.storage()))
        return on_device(tensor, c10::Storage(original.storage()));
    const auto nbytes = tensor.storage().nbytes();  // a new tensor
    c10::Storage storage(
        c10::Storage::use_byte_size_t(), nbytes, device_memory.allocate(nbytes), &device_memory,
        true);
    if (nbytes) std::memcpy(storage.mutable_data(), tensor.storage().data(), nbytes);
    auto found = on_device(tensor, std::move(storage));
    add_ranges(found, writes_);
    return found;
  }

  static at::Tensor on_device(const at::Tensor& tensor, c10::Storage storage) {
    auto found = at::detail::make_tensor<at::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), tensor.dtype());
    found.unsafeGetTensorImpl()->set_sizes_and_strides(
        tensor.sizes(), tensor.strides(), tensor.storage_offset());
    return found;
  }

  // Add what a copy does to host memory. Return true if the host waits for the copy: always if it
  // lands in memory that is not pinned.
  bool copy_with_host(bool non_blocking) {
    bool syncs = false;
    for (const auto& [tensor, use] : host_) {
      const bool is_pinned = pinned_memory.holds(tensor.const_data_ptr());
      if (is_pinned) add_ranges(tensor, use == Use::Write ? writes_ : reads_);
      syncs = syncs || !non_blocking || (!is_pinned && use == Use::Write);
    }
    return syncs;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases_;  // (of the device, of the CPU)
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
  std::vector<std::pair<at::Tensor, Use>> host_;
  Ranges reads_, writes_;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

// -- the kernels that cannot go that way

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const auto numel = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_storage(self, std::move(storage), 0, {numel}, {1});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_memory.recordStream(self.storage().data_ptr(), stream);
}

// `.data` of a tensor can be set to one on the CPU, and the other way round, as with CUDA.
bool has_compatible_shallow_copy_type(const at::Tensor&, const at::Tensor&) { return true; }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// -- operations of the host on pinned memory

std::unique_ptr<at::ObserverContext> on_call(const at::RecordFunction& call) {
  const auto schema = call.operator_schema();
  if (!schema || moves_nothing(schema->name())) return nullptr;
  const auto inputs = call.inputs();
  Ranges reads, writes;
  bool is_of_host = true;
  const auto add = [&](const at::Tensor& tensor, Use use) {
    if (!tensor.defined()) return;
    is_of_host = is_of_host && tensor.device().is_cpu();
    if (is_of_host && use != Use::View && tensor.numel() && tensor.has_storage() &&
        pinned_memory.holds(tensor.const_data_ptr()))
      add_ranges(tensor, use == Use::Write ? writes : reads);
  };
  for (size_t i = 0; i < std::min(inputs.size(), schema->arguments().size()); ++i) {
    const auto use = use_of(schema->arguments()[i]);
    if (inputs[i].isTensor()) add(inputs[i].toTensor(), use);
    if (inputs[i].isTensorList())
      for (const at::Tensor& tensor : inputs[i].toTensorList()) add(tensor, use);
  }
  if (!is_of_host || (reads.empty() && writes.empty())) return nullptr;
  // What has no kernel for the CPU calls other operations, which are seen as well.
  const auto op = c10::Dispatcher::singleton().findOp(schema->operator_name());
  if (schema->name() == "aten::copy_" ||
      (op && op->hasKernelForDispatchKey(c10::DispatchKey::CPU)))
    tell("host", schema->name(), reads, writes);
  return nullptr;
}

// -- Python

at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;

void observe(py::object by) {
  const bool was_observed = is_observed.exchange(!by.is_none());
  *observer = std::move(by);
  if (is_observed && !was_observed)
    callback = at::addGlobalCallback(
        at::RecordFunctionCallback(on_call).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  if (!is_observed && was_observed) at::removeCallback(callback);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  observer = new py::object(py::none());
  c10::SetAllocator(kEmulated, &device_memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("observe", &observe, "Tell an observer from now on; None: nobody.");
  m.def("is_pinned", [](uintptr_t address) {
    return pinned_memory.holds(reinterpret_cast<const void*>(address));
  });
}
