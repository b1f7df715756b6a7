// What torch_cuda.py needs of the rest.

#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/extension.h>

#include <cstring>

#include "device.h"
#include "graph.h"
#include "memory.h"
#include "notes.h"
#include "ops.h"
#include "transfers.h"

namespace {

using namespace pretended;

void resize_storage(const at::Tensor& over, size_t size) {
  auto storage = over.storage();
  c10::DeviceGuard guard(storage.device());
  auto data = device_allocator()->allocate(size);
  if (auto both = std::min(size, storage.nbytes())) std::memcpy(data.mutable_get(), storage.data(), both);
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(size);
}

void capture_call(const py::function& call) {
  auto kept = std::make_shared<py::function>(call);
  capture([kept] { (*kept)(); });
}

void replay(const Graph& graph) {
  at::NoGradGuard guard;
  graph.replay();
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  bool built_with_cuda = at::detail::getCUDAHooks().isBuilt();
  install_device();
  install_ops(built_with_cuda);
  module.def("set_gpu_count", set_gpu_count);
  module.def("current_gpu", [] { return current_gpu().index(); });
  module.def("exchange_gpu", exchange_gpu);
  module.def("blocks_on", blocks_on);
  module.def("allocated_bytes", allocated_bytes);
  module.def("resize_storage", resize_storage);
  module.def("current_stream", current_stream);
  module.def("set_stream", set_stream);
  module.def("new_stream", new_stream);
  module.def("sync_mode", sync_mode);
  module.def("set_sync_mode", set_sync_mode);
  module.def("wait_for_gpu", wait_for_gpu);
  py::class_<Graph, std::shared_ptr<Graph>>(module, "Graph")
      .def_property_readonly("is_empty", [](const Graph& graph) { return graph.work.empty(); });
  module.def("begin_capture", begin_capture);
  module.def("end_capture", end_capture);
  module.def("is_capturing", is_capturing);
  module.def("capture", capture_call);
  module.def("replay", replay);
  module.def("tick", tick);
  module.def("has_landed", has_landed);
  module.def("land", [](uint64_t until) { land(until); });
  module.def("take_notes", take_notes);
  module.def("note", note);
  module.def("notes", notes);
}
