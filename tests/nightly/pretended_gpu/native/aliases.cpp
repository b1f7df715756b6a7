#include "aliases.h"

#include <ATen/native/SparseTensorUtils.h>
#include <c10/core/InferenceMode.h>

#include <cstring>

#include "device.h"
#include "memory.h"

namespace pretended {
namespace {

using at::sparse::get_sparse_impl;
using c10::DispatchKey;

c10::Storage made_storage(size_t size, c10::DataPtr data, c10::Allocator* allocator) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), size, std::move(data), allocator, /*resizable=*/true));
}

at::Tensor strided_like(const at::Tensor& tensor, c10::Storage storage, DispatchKey key) {
  auto made = at::detail::make_tensor<at::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

at::Tensor sparse_like(const at::Tensor& tensor, at::Tensor indices, at::Tensor values, DispatchKey key) {
  auto* like = get_sparse_impl(tensor);
  auto made = at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(key), tensor.dtype());
  get_sparse_impl(made)->raw_resize_(like->sparse_dim(), like->dense_dim(), tensor.sizes());
  get_sparse_impl(made)->set_indices_and_values_unsafe(std::move(indices), std::move(values));
  get_sparse_impl(made)->set_coalesced(like->coalesced());
  return made;
}

template <typename Of>
c10::IValue each_of(const c10::IValue& list, Of of) {
  if (list.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : list.toTensorVector()) made.push_back(of(tensor));
    return made;
  }
  if (list.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& tensor : list.toOptionalTensorVector())
      made.push_back(tensor ? std::optional<at::Tensor>(of(*tensor)) : tensor);
    return made;
  }
  auto items = list.toList();
  if (items.elementType()->kind() != c10::TypeKind::ListType) return list;
  c10::impl::GenericList made(items.elementType());  // of lists, as collectives take them
  for (const c10::IValue& item : items) made.push_back(each_of(item, of));
  return made;
}

}  // namespace

c10::IValue Aliases::to_cpu(const c10::IValue& argument) {
  auto of = [this](const at::Tensor& tensor) { return alias_of(tensor); };
  if (argument.isTensor()) return of(argument.toTensor());
  if (argument.isList()) return each_of(argument, of);
  if (argument.isStorage() && argument.toStorage().device().is_cuda()) return cpu_storage(argument.toStorage());
  if (argument.isDevice() && argument.toDevice().is_cuda()) {
    require_gpu(argument.toDevice());
    return c10::Device(c10::DeviceType::CPU);
  }
  return argument;
}

c10::IValue Aliases::to_gpu(const c10::IValue& result) {
  auto of = [this](const at::Tensor& tensor) { return original_of(tensor); };
  if (result.isTensor()) return of(result.toTensor());
  return result.isList() ? each_of(result, of) : result;
}

at::Tensor Aliases::alias_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (tensor.is_cuda() || tensor.dim() > 0) devices_.insert(tensor.device().str());
  if (!tensor.is_cuda()) return passed_.emplace_back(tensor);
  for (auto& pair : pairs_)
    if (pair.original.is_same(tensor)) return pair.alias;
  auto* sparse = tensor.is_sparse() ? get_sparse_impl(tensor) : nullptr;
  auto alias = sparse ? sparse_like(tensor, over_cpu(sparse->indices()), over_cpu(sparse->values()), DispatchKey::SparseCPU)
                      : over_cpu(tensor);
  pairs_.push_back({tensor, alias});
  return alias;
}

at::Tensor Aliases::original_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu()) return tensor;
  for (auto& pair : pairs_)
    if (pair.alias.is_same(tensor)) return pair.original;
  for (auto& each : passed_)
    if (each.is_same(tensor)) return tensor;
  if (!tensor.is_sparse()) return over_gpu(tensor);
  auto* sparse = get_sparse_impl(tensor);
  return sparse_like(tensor, over_gpu(sparse->indices()), over_gpu(sparse->values()), DispatchKey::SparseCUDA);
}

at::Tensor Aliases::over_cpu(const at::Tensor& strided) {
  return strided_like(strided, cpu_storage(strided.storage()), DispatchKey::CPU);
}

at::Tensor Aliases::over_gpu(const at::Tensor& strided) {
  // A view of a normal tensor is one also where new tensors are inference tensors.
  bool is_view = gpu_storages_.count(strided.storage().unsafeGetStorageImpl());
  c10::InferenceMode guard(!is_view && c10::InferenceMode::is_enabled());
  return strided_like(strided, gpu_storage(strided.storage()), DispatchKey::CUDA);
}

c10::Storage Aliases::cpu_storage(const c10::Storage& storage) {
  auto known = cpu_storages_.find(storage.unsafeGetStorageImpl());
  if (known != cpu_storages_.end()) return known->second;
  auto* owner = new c10::Storage(storage);  // a collective may hold the alias for longer than this call
  c10::DataPtr data(
      storage.mutable_data(), owner, [](void* owner) { delete static_cast<c10::Storage*>(owner); },
      c10::Device(c10::DeviceType::CPU));
  auto made = made_storage(storage.nbytes(), std::move(data), c10::GetAllocator(c10::DeviceType::CPU));
  cpu_storages_.emplace(storage.unsafeGetStorageImpl(), made);
  gpu_storages_.emplace(made.unsafeGetStorageImpl(), storage);
  return made;
}

c10::Storage Aliases::gpu_storage(const c10::Storage& storage) {
  auto known = gpu_storages_.find(storage.unsafeGetStorageImpl());
  if (known != gpu_storages_.end()) return known->second;
  auto made = made_storage(storage.nbytes(), device_allocator()->allocate(storage.nbytes()), device_allocator());
  if (storage.nbytes()) std::memcpy(made.mutable_data(), storage.data(), storage.nbytes());
  gpu_storages_.emplace(storage.unsafeGetStorageImpl(), made);
  kept_.push_back(storage);
  return made;
}

void Aliases::settle() {
  for (auto& [original, cpu] : cpu_storages_) {
    auto& gpu = gpu_storages_.at(cpu.unsafeGetStorageImpl());
    if (cpu.data() == gpu.data() && cpu.nbytes() == gpu.nbytes()) continue;
    c10::DeviceGuard guard(gpu.device());
    auto data = device_allocator()->allocate(cpu.nbytes());
    if (cpu.nbytes()) std::memcpy(data.mutable_get(), cpu.data(), cpu.nbytes());
    gpu.set_data_ptr_noswap(std::move(data));
    gpu.set_nbytes(cpu.nbytes());
  }
  for (auto& pair : pairs_) pair.original.is_sparse() ? settle_sparse(pair) : settle_strided(pair);
}

void Aliases::settle_strided(Pair& pair) {
  auto* original = pair.original.unsafeGetTensorImpl();
  auto storage = gpu_storage(pair.alias.storage());
  if (storage.unsafeGetStorageImpl() != pair.original.storage().unsafeGetStorageImpl())
    original->set_storage_keep_dtype(storage);
  if (pair.alias.sizes() != pair.original.sizes() || pair.alias.strides() != pair.original.strides())
    original->set_sizes_and_strides(pair.alias.sizes(), pair.alias.strides());
  if (pair.alias.storage_offset() != pair.original.storage_offset())
    original->set_storage_offset(pair.alias.storage_offset());
}

void Aliases::settle_sparse(Pair& pair) {
  auto *original = get_sparse_impl(pair.original), *alias = get_sparse_impl(pair.alias);
  auto is_known = [this](const at::Tensor& tensor) {
    return gpu_storages_.count(tensor.storage().unsafeGetStorageImpl()) > 0;
  };
  bool same = is_known(alias->indices()) && is_known(alias->values());
  if (!same || alias->values().sizes() != original->values().sizes())
    original->set_indices_and_values_unsafe(over_gpu(alias->indices()), over_gpu(alias->values()));
  original->set_coalesced(alias->coalesced());
}

}  // namespace pretended
