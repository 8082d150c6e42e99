// The kernels of the emulated device: one boxed kernel that runs the CPU's on the same memory, and
// tells the observer which bytes were read and written. See __init__.py.

#include "memory.h"

#include "../cpu_kernels.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

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

// -- the boxed kernel

using namespace cpu_kernels;

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

class EmulatedCall final : public Call {
 public:
  EmulatedCall(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : Call(op, stack, c10::DispatchKey::PrivateUse1, &device_memory) {}

  void run() {
    const auto& schema = op_.schema();
    replace_arguments();
    const bool is_copy = schema.name() == "aten::copy_";
    const bool non_blocking = is_copy && stack_.back().isBool() && stack_.back().toBool();
    run_on_cpu();
    bool syncs = reads_sizes(schema.name());
    for (size_t i = stack_.size() - schema.returns().size(); i < stack_.size(); ++i)
      syncs = syncs || !(stack_[i].isTensor() || stack_[i].isTensorList());
    replace_results();
    if (is_copy) syncs = syncs || copy_with_host(non_blocking);
    if (!moves_nothing() && !(reads_.empty() && writes_.empty()))
      tell("op", current_stream, schema.name(), reads_, writes_);
    if (syncs) tell("host_waits_for_stream", current_stream);
  }

 private:
  bool is_on_device(const at::Tensor& tensor, Use) override {
    return tensor.device().type() == kEmulated;
  }

  bool moves_nothing() const override { return ::moves_nothing(op_.schema().name()); }

  c10::IValue given_other(const c10::IValue& value) override {
    return value.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : value;
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
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  EmulatedCall(op, stack).run();
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
  const auto [reads, writes] = host_ranges(
      call, *schema, [](const void* data) { return pinned_memory.holds(data); });
  if (reads.empty() && writes.empty()) return nullptr;
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
