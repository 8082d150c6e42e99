// What devices in host memory share (emulated/device.cpp, fakecuda/ops.cpp): an operation runs the
// CPU's kernel on tensors that alias the memory of the device, and says which bytes it reads and
// writes.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cpu_kernels {

using Range = std::pair<uintptr_t, uintptr_t>;  // [begin, end), in bytes
using Ranges = std::vector<Range>;

constexpr int64_t kMaxRuns = 64;

// Append the contiguous runs of a tensor's elements; of one with more runs than kMaxRuns, the range
// from the first to the last.
inline void add_ranges(const at::Tensor& tensor, Ranges& ranges) {
  if (tensor.numel() == 0 || !tensor.has_storage()) return;
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
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  for (const auto start : starts)
    ranges.emplace_back(begin + start * itemsize, begin + (start + run) * itemsize);
}

enum class Use { Read, Write, View };

inline Use use_of(const c10::Argument& argument) {
  const auto* info = argument.alias_info();
  return info == nullptr ? Use::Read : info->isWrite() ? Use::Write : Use::View;
}

// One call of an operation.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::DispatchKey key,
       c10::Allocator* allocator)
      : op_(op), stack_(*stack), key_(key), allocator_(allocator) {}
  virtual ~Call() = default;

 protected:
  // Whether an argument is on the device. If not, it is passed on as it is.
  virtual bool is_on_device(const at::Tensor& tensor, Use use) = 0;
  // Whether the operation changes where tensors lie, and touches no element.
  virtual bool moves_nothing() const { return false; }
  virtual c10::IValue given_other(const c10::IValue& value) { return value; }

  void replace_arguments() {
    const auto& arguments = op_.schema().arguments();
    const auto first = stack_.size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i)
      stack_[first + i] = given(stack_[first + i], use_of(arguments[i]));
  }

  void run_on_cpu() {
    at::DisableRecordFunctionGuard not_of_the_host;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
  }

  void replace_results() {
    for (const auto& [original, alias] : aliases_) follow(original, alias);
    for (size_t i = stack_.size() - op_.schema().returns().size(); i < stack_.size(); ++i)
      stack_[i] = returned(stack_[i]);
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases_;  // (of the device, of the CPU)
  std::vector<std::pair<at::Tensor, Use>> host_;            // arguments on the CPU
  Ranges reads_, writes_;

 private:
  c10::IValue given(const c10::IValue& value, Use use) {
    if (value.isTensor()) return given(value.toTensor(), use);
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
    return given_other(value);
  }

  at::Tensor given(const at::Tensor& tensor, Use use) {
    if (!tensor.defined()) return tensor;
    if (!is_on_device(tensor, use)) {
      if (tensor.numel()) host_.emplace_back(tensor, use);
      return tensor;
    }
    const auto storage = tensor.storage();
    const auto needed = at::detail::computeStorageNbytes(
        tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset());
    TORCH_CHECK(
        moves_nothing() || use == Use::View || tensor.numel() == 0 || needed <= storage.nbytes(),
        op_.schema().name(), " uses a tensor of ", needed, " bytes whose storage has ",
        storage.nbytes(), ": it was freed");
    auto& cpu_storage = storages_[storage.unsafeGetStorageImpl()];
    if (!cpu_storage)
      cpu_storage = c10::Storage(
          c10::Storage::use_byte_size_t(), storage.nbytes(),
          c10::DataPtr(storage.mutable_data(), c10::kCPU), c10::GetAllocator(c10::kCPU), true);
    auto keys = c10::DispatchKeySet(c10::DispatchKey::CPU);
    for (const auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative})
      if (tensor.key_set().has(key)) keys = keys.add(key);
    auto alias =
        at::detail::make_tensor<at::TensorImpl>(c10::Storage(cpu_storage), keys, tensor.dtype());
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
      auto data = allocator_->allocate(cpu.nbytes());
      if (cpu.nbytes()) std::memcpy(data.get(), cpu.data(), cpu.nbytes());
      storage->set_data_ptr_noswap(std::move(data));
      storage->set_nbytes(cpu.nbytes());
    }
    if (alias.sizes() != original.sizes() || alias.strides() != original.strides()) {
      impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
      if (!moves_nothing()) add_ranges(original, writes_);
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
        c10::Storage::use_byte_size_t(), nbytes, allocator_->allocate(nbytes), allocator_, true);
    if (nbytes) std::memcpy(storage.mutable_data(), tensor.storage().data(), nbytes);
    auto result = on_device(tensor, std::move(storage));
    add_ranges(result, writes_);
    return result;
  }

  at::Tensor on_device(const at::Tensor& tensor, c10::Storage storage) const {
    auto result = at::detail::make_tensor<at::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(key_), tensor.dtype());
    result.unsafeGetTensorImpl()->set_sizes_and_strides(
        tensor.sizes(), tensor.strides(), tensor.storage_offset());
    return result;
  }

  c10::DispatchKey key_;
  c10::Allocator* allocator_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

// What an operation of the host reads and writes of pinned memory; both are empty if an argument is
// on the device.
template <typename IsPinned>
std::pair<Ranges, Ranges> host_ranges(
    const at::RecordFunction& call, const c10::FunctionSchema& schema, const IsPinned& is_pinned) {
  const auto inputs = call.inputs();
  Ranges reads, writes;
  bool is_of_host = true;
  const auto add = [&](const at::Tensor& tensor, Use use) {
    if (!tensor.defined()) return;
    is_of_host = is_of_host && tensor.device().is_cpu();
    if (is_of_host && use != Use::View && tensor.numel() && tensor.has_storage() &&
        is_pinned(tensor.const_data_ptr()))
      add_ranges(tensor, use == Use::Write ? writes : reads);
  };
  for (size_t i = 0; i < std::min(inputs.size(), schema.arguments().size()); ++i) {
    const auto use = use_of(schema.arguments()[i]);
    if (inputs[i].isTensor()) add(inputs[i].toTensor(), use);
    if (inputs[i].isTensorList())
      for (const at::Tensor& tensor : inputs[i].toTensorList()) add(tensor, use);
  }
  if (!is_of_host) return {};
  return {std::move(reads), std::move(writes)};
}

}  // namespace cpu_kernels
