// CPU tensors over a GPU's memory, for one operation: it takes these in place of its arguments.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace pretended {

class Aliases {
 public:
  // An argument as the CPU's kernel takes it: tensors, storages and devices of the GPU are replaced, in lists too.
  c10::IValue to_cpu(const c10::IValue& argument);

  // What the operation did to its arguments themselves: resized, given other memory, made coalesced.
  void settle();

  // A result as the GPU's kernel would give it.
  c10::IValue to_gpu(const c10::IValue& result);

  // The devices of its tensors, without the CPU's of no dimension, which kernels of a GPU take, too.
  const std::set<std::string>& devices() const { return devices_; }

 private:
  struct Pair {
    at::Tensor original, alias;
  };

  at::Tensor alias_of(const at::Tensor& tensor);
  at::Tensor original_of(const at::Tensor& tensor);
  at::Tensor over_gpu(const at::Tensor& strided);
  at::Tensor over_cpu(const at::Tensor& strided);
  c10::Storage cpu_storage(const c10::Storage& storage);
  c10::Storage gpu_storage(const c10::Storage& storage);
  void settle_sparse(Pair& pair);
  void settle_strided(Pair& pair);

  std::vector<Pair> pairs_;
  std::vector<at::Tensor> passed_;  // CPU tensors as they came
  std::unordered_map<c10::StorageImpl*, c10::Storage> cpu_storages_, gpu_storages_;  // by their counterpart
  std::vector<c10::Storage> kept_;  // so that no address stands for two
  std::set<std::string> devices_;
};

}  // namespace pretended
