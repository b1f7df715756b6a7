#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "graph.h"
#include "memory.h"
#include "transfers.h"

namespace pretended {
namespace {

constexpr int MOST = 8;  // GPUs

std::atomic<int> gpu_count{1};
thread_local c10::DeviceIndex current = 0;
thread_local std::array<c10::StreamId, MOST> streams{};
std::atomic<c10::StreamId> last_stream{0};
std::atomic<int> mode{0};
std::vector<at::Generator> generators;  // for a GPU, kept for ever

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

Stream stream_on(Device device, c10::StreamId id) { return Stream(Stream::UNSAFE, device, id); }

// Work is done when it is given: streams have nothing to wait for, and events only the copies of transfers.h.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  Device getDevice() const override { return current_gpu(); }
  void setDevice(Device device) const override { exchange_gpu(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Device exchangeDevice(Device device) const override { return Device(type(), exchange_gpu(device.index())); }
  DeviceIndex deviceCount() const noexcept override { return gpu_count; }

  Stream getStream(Device device) const override { return stream_on(device, current_stream(device.index())); }
  Stream getDefaultStream(Device device) const override { return stream_on(device, 0); }
  Stream getNewStream(Device device, int) const override { return stream_on(device, new_stream()); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return stream_on(device, new_stream()); }
  Stream exchangeStream(Stream next) const override {
    auto before = getStream(next.device());
    set_stream(next.id(), next.device_index());
    return before;
  }
  bool queryStream(const Stream&) const override { return has_landed(UINT64_MAX); }
  void synchronizeStream(const Stream&) const override { wait_for_gpu("stream"); }
  void synchronizeDevice(const DeviceIndex) const override { wait_for_gpu("device"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}

  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(tick());
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void* event) const override { return has_landed(reinterpret_cast<uint64_t>(event)); }
  void synchronizeEvent(void* event) const override { land(reinterpret_cast<uint64_t>(event)); }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex deviceCount() const override { return gpu_count; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { exchange_gpu(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange_gpu(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange_gpu(index); }
  int getNumGPUs() const override { return gpu_count; }
  long versionRuntimeCuDNN() const override { return 0; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  Device getDeviceFromPtr(void* address) const override { return Device(c10::DeviceType::CUDA, gpu_of(address)); }
  void deviceSynchronize(DeviceIndex) const override { wait_for_gpu("device"); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return generators.emplace_back(at::detail::createCPUGenerator()); }
};

// DDP makes one for the log of its first steps.
struct ReducerTimer final : c10d::Timer {
  explicit ReducerTimer(Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return 1; }
};

}  // namespace

bool is_of_gpu(const at::Generator& generator) {
  return std::find(generators.begin(), generators.end(), generator) != generators.end();
}

void install_device() {
  c10::SetAllocator(c10::DeviceType::CUDA, device_allocator(), 255);
  // torch has made its hooks by now, and would not take others: theirs get our methods. Neither has fields.
  static Hooks hooks;
  *reinterpret_cast<void**>(const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) =
      *reinterpret_cast<void**>(&hooks);
  c10d::TimerRegistry()->Register(
      c10::kCUDA, [](Device device) -> std::unique_ptr<c10d::Timer> { return std::make_unique<ReducerTimer>(device); },
      c10::REGISTRY_PREFERRED);
  // A torch built with CUDA would choose among kernels of its own for these.
  at::globalContext().setSDPUseCuDNN(false);
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
}

void set_gpu_count(int count) {
  TORCH_CHECK(count <= MOST, "no more than ", MOST, " GPUs can be pretended");
  gpu_count = count;
}

c10::Device current_gpu() { return Device(c10::DeviceType::CUDA, current); }

void require_gpu(Device device) { TORCH_CHECK(device.index() < gpu_count, "CUDA error: invalid device ordinal"); }

c10::DeviceIndex exchange_gpu(c10::DeviceIndex index) {
  require_gpu(Device(c10::DeviceType::CUDA, index));
  return index < 0 ? index : std::exchange(current, index);
}

c10::StreamId current_stream(c10::DeviceIndex index) { return streams[index < 0 ? current : index]; }

void set_stream(c10::StreamId id, c10::DeviceIndex index) { streams[index] = id; }

c10::StreamId new_stream() { return last_stream += 8; }

void set_sync_mode(int next) { mode = next; }

int sync_mode() { return mode; }

void wait_for_gpu(const std::string& operation) {
  TORCH_CHECK(!is_capturing(), "CUDA error: operation not permitted when stream is capturing: ", operation);
  TORCH_CHECK(mode < 2, "called a synchronizing CUDA operation: ", operation);
  land();
}

}  // namespace pretended
