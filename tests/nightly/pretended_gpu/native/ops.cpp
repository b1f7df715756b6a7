#include "ops.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <set>

#include "aliases.h"
#include "device.h"
#include "graph.h"
#include "memory.h"
#include "notes.h"
#include "transfers.h"

namespace pretended {
namespace {

using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;
using Values = std::vector<IValue>;

const std::string AMP_UNSCALE = "aten::_amp_foreach_non_finite_check_and_unscale_";

bool is_collective(const std::string& name) { return name.rfind("c10d::", 0) == 0; }

// What gloo serves for the host's tensors only; it reads a GPU's memory then as if it were the host's.
bool gloo_lacks(const std::string& name) {
  static const std::set<std::string> names = {
      "c10d::allgather_coalesced_", "c10d::allgather_into_tensor_coalesced_", "c10d::allreduce_coalesced_",
      "c10d::send", "c10d::recv_", "c10d::recv_any_source_"};
  return names.count(name);
}

bool may_mix_devices(const std::string& name) {
  static const std::set<std::string> names = {"aten::copy_", "aten::_index_put_impl_", "aten::_foreach_copy_", "aten::set_"};
  return names.count(name) || name.rfind("aten::index", 0) == 0 || is_collective(name);
}

bool reads_on_host(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2", "aten::_coalesce"};
  return names.count(name);
}

// The tensor on the host that is copied to the GPU or from there; undefined in other operations.
at::Tensor host_side(const std::string& name, const Values& arguments) {
  if (name != "aten::copy_") return {};
  auto to = arguments[0].toTensor(), from = arguments[1].toTensor();
  return to.is_cpu() ? to : from.is_cpu() ? from : at::Tensor();
}

bool waits(const std::string& name, const Values& arguments) {
  auto host = host_side(name, arguments);
  if (!host.defined()) return reads_on_host(name);
  return !(arguments[2].toBool() && is_pinned(host.const_data_ptr()));
}

// A copy of bytes as they are, to or from pinned memory, which may go on while the host does.
bool is_transfer(const std::string& name, const Values& arguments) {
  if (!host_side(name, arguments).defined() || waits(name, arguments)) return false;
  auto to = arguments[0].toTensor(), from = arguments[1].toTensor();
  return to.dtype() == from.dtype() && to.sizes() == from.sizes() && to.is_contiguous() && from.is_contiguous();
}

bool gives_a_view(const OperatorHandle& op) {
  static const std::set<std::string> others = {"aten::set_", "aten::resize_", "aten::_reshape_alias", "aten::_unsafe_view"};
  for (auto& result : op.schema().returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return others.count(op.schema().name());
}

Values top(const Stack& stack, size_t count) { return {stack.end() - count, stack.end()}; }

template <typename Change>
void change_top(Stack& stack, size_t count, Change change) {
  for (auto value = stack.end() - count; value != stack.end(); ++value) *value = change(*value);
}

// The GPU whose kernel would run: that of the first tensor there, else the one that was asked for.
std::optional<c10::Device> place(const Values& arguments) {
  std::optional<c10::Device> asked;
  for (auto& argument : arguments) {
    if (argument.isDevice()) asked = argument.toDevice();
    if (argument.isTensor() && argument.toTensor().is_cuda()) return argument.toTensor().device();
    if (!argument.isTensorList()) continue;
    for (const at::Tensor& tensor : argument.toTensorVector())
      if (tensor.is_cuda()) return tensor.device();
  }
  return asked && asked->is_cuda() ? asked : std::nullopt;
}

bool is_dense(const at::Tensor& tensor) { return tensor.is_non_overlapping_and_dense(); }

// What CUDA's kernels refuse and the CPU's take.
void refuse_what_cuda_lacks(const std::string& name, const Values& arguments) {
  for (auto& argument : arguments)
    TORCH_CHECK(
        !argument.isGenerator() || is_of_gpu(argument.toGenerator()),
        "Expected a 'cuda' device type for generator but found 'cpu'");
  if (name == AMP_UNSCALE) {
    for (auto& tensor : arguments[0].toTensorVector())
      TORCH_CHECK_NOT_IMPLEMENTED(tensor.dtype() != at::kBFloat16, "unscaling is not implemented for 'BFloat16'");
  } else if (name.rfind("aten::_fused_", 0) == 0 && name.back() == '_') {
    auto params = arguments[0].toTensorVector(), grads = arguments[1].toTensorVector();
    for (size_t i = 0; i < params.size(); i++)
      TORCH_CHECK(
          params[i].dtype() == grads[i].dtype() && params[i].strides() == grads[i].strides() && is_dense(grads[i]),
          "params and grads must have same dtype, device, and layout (", name, ")");
  }
}

// Whether CUDA's kernel, which checks in fp32, finds an overflow where the CPU's does not.
bool overflows_in_fp32(const std::string& name, const Values& on_cpu) {
  if (name != AMP_UNSCALE) return false;
  for (auto& tensor : on_cpu[0].toTensorVector())
    if (tensor.dtype() == at::kDouble && !tensor.to(at::kFloat).isfinite().all().item<bool>()) return true;
  return false;
}

// The CPU's kernel on the same memory.
void compute(const OperatorHandle& op, DispatchKey cpu, Stack& stack) {
  const auto& name = op.schema().name();
  auto arguments = top(stack, op.schema().arguments().size());
  if (is_transfer(name, arguments)) {
    begin_transfer(arguments[0].toTensor(), arguments[1].toTensor());
    torch::jit::drop(stack, arguments.size());
    return stack.push_back(arguments[0]);
  }
  auto gpu = place(arguments);
  TORCH_CHECK(!(gpu && gloo_lacks(name)), "gloo has no ", name, " for tensors of a GPU");
  c10::OptionalDeviceGuard guard(gpu);
  refuse_what_cuda_lacks(name, arguments);
  Aliases aliases;
  change_top(stack, arguments.size(), [&](const IValue& value) { return aliases.to_cpu(value); });
  bool overflows = overflows_in_fp32(name, top(stack, arguments.size()));
  auto& devices = aliases.devices();
  TORCH_CHECK(
      devices.size() < 2 || may_mix_devices(name),
      "Expected all tensors to be on the same device, but found at least two devices, ", *devices.rbegin(), " and ",
      *devices.begin(), "! (", name, ")");
  if (is_collective(name)) {
    op.callBoxed(stack);
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(cpu), &stack);
  }
  if (overflows) *arguments[1].toTensor().mutable_data_ptr<float>() = 1.0f;
  aliases.settle();
  change_top(stack, op.schema().returns().size(), [&](const IValue& value) { return aliases.to_gpu(value); });
}

// The same, as a profiler sees it.
void compute_noted(const OperatorHandle& op, DispatchKey cpu, Stack& stack) {
  std::string name = op.schema().name();
  auto arguments = top(stack, op.schema().arguments().size());
  auto host = host_side(name, arguments);
  if (host.defined() || name == "aten::_local_scalar_dense") {
    bool down = !host.defined() || arguments[0].toTensor().is_cpu();
    if (waits(op.schema().name(), arguments)) note("cudaStreamSynchronize", true);
    name = down ? "Memcpy DtoH" : "Memcpy HtoD";
  }
  compute(op, cpu, stack);
  if (!gives_a_view(op)) note(name, false);
}

// A tensor over the same memory that keeps no history of gradients alive.
IValue without_history(const IValue& value) {
  auto detached = [](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda() || tensor.is_sparse()) return tensor;
    return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), false));
  };
  if (value.isTensor()) return detached(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> made;
  for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(detached(tensor));
  return made;
}

void overwrite(const at::Tensor& result, const at::Tensor& with) {
  if (!result.defined() || result.is_sparse()) return;
  auto &to = result.storage(), &from = with.storage();
  if (to.data() != from.data()) std::memcpy(to.mutable_data(), from.data(), from.nbytes());
}

void capture_op(const OperatorHandle& op, DispatchKey cpu, Values arguments, Values results) {
  for (auto* values : {&arguments, &results})
    for (auto& value : *values) value = without_history(value);
  capture([=] {
    Stack stack(arguments.begin(), arguments.end());
    compute(op, cpu, stack);
    for (size_t i = 0; i < results.size(); i++) {
      if (results[i].isTensor()) overwrite(results[i].toTensor(), stack[i].toTensor());
      if (!results[i].isTensorList()) continue;
      auto to = results[i].toTensorVector(), from = stack[i].toTensorVector();
      for (size_t j = 0; j < to.size(); j++) overwrite(to[j], from[j]);
    }
  });
}

void run(const OperatorHandle& op, DispatchKey cpu, Stack* stack) {
  const auto& name = op.schema().name();
  auto arguments = top(*stack, op.schema().arguments().size());
  if (name == "aten::record_stream") return torch::jit::drop(*stack, arguments.size());
  if (waits(name, arguments)) wait_for_gpu(name);
  if (!gives_a_view(op)) tick();
  takes_notes() ? compute_noted(op, cpu, *stack) : compute(op, cpu, *stack);
  if (!is_capturing() || gives_a_view(op)) return;
  capture_op(op, cpu, std::move(arguments), top(*stack, op.schema().returns().size()));
}

void run_strided(const OperatorHandle& op, Stack* stack) { run(op, DispatchKey::CPU, stack); }

void run_sparse(const OperatorHandle& op, Stack* stack) { run(op, DispatchKey::SparseCPU, stack); }

using Dtype = std::optional<at::ScalarType>;

// The GPU of a new tensor.
c10::Device checked(std::optional<c10::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  if (device) require_gpu(*device);
  return device && device->has_index() ? *device : current_gpu();
}

at::Tensor empty(
    c10::SymIntArrayRef size, Dtype dtype, std::optional<at::Layout>, std::optional<c10::Device> device,
    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(checked(device, pin));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), device_allocator(), c10::DispatchKeySet(DispatchKey::CUDA),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, Dtype dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool> pin) {
  c10::DeviceGuard guard(checked(device, pin));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_allocator(),
      c10::DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

// Where a composite of other operations serves the GPU, too, it is left; `copy_` is one only by its name.
bool has_own_kernel(const OperatorHandle& op, DispatchKey cpu, DispatchKey gpu, const std::string& name) {
  if (is_collective(name)) return op.hasKernelForDispatchKey(gpu);
  return op.hasKernelForDispatchKey(cpu) || op.hasKernelForDispatchKey(gpu) || name == "aten::copy_";
}

torch::Library& library(const std::string& space, DispatchKey key) {
  static std::map<std::pair<std::string, DispatchKey>, torch::Library> made;
  auto place = std::make_pair(space, key);
  if (!made.count(place)) made.emplace(place, torch::Library(torch::Library::IMPL, space, key, __FILE__, __LINE__));
  return made.at(place);
}

void serve(const c10::OperatorName& name, bool collectives) {
  std::string space(name.getNamespace().value_or(""));
  auto op = c10::Dispatcher::singleton().findOp(name);
  if (!op || !(space == "aten" || (space == "c10d" && (collectives || gloo_lacks(name.name))))) return;
  auto local = name.name.substr(space.size() + 2) + (name.overload_name.empty() ? "" : "." + name.overload_name);
  if (local == "empty.memory_format" || local == "empty_strided" || local == "barrier") return;
  if (has_own_kernel(*op, DispatchKey::CPU, DispatchKey::CUDA, name.name))
    library(space, DispatchKey::CUDA).impl(local.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_strided>());
  if (has_own_kernel(*op, DispatchKey::SparseCPU, DispatchKey::SparseCUDA, name.name) && space == "aten")
    library(space, DispatchKey::SparseCUDA).impl(local.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_sparse>());
}

struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

void install_ops(bool built_with_cuda) {
  Quiet quiet;  // torch warns of kernels that are replaced
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  library("_", DispatchKey::CUDA).fallback(torch::CppFunction::makeFromBoxedFunction<&run_strided>());
  library("_", DispatchKey::SparseCUDA).fallback(torch::CppFunction::makeFromBoxedFunction<&run_sparse>());
  library("aten", DispatchKey::CUDA).impl("empty.memory_format", &empty);
  library("aten", DispatchKey::CUDA).impl("empty_strided", &empty_strided);
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) serve(name, !built_with_cuda);
}

}  // namespace pretended
