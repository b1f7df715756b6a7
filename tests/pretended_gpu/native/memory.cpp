#include "memory.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace pretended {
namespace {

constexpr size_t ALIGNMENT = 512;  // as torch's caching allocator
constexpr size_t LIMIT = size_t(16) << 30;

// Blocks by address.
struct Blocks {
  std::map<char*, size_t> sizes;
  std::set<char*> kept;
  bool keep_new = false;
  std::mutex mutex;

  void* allocate(size_t size, unsigned char fill) {
    TORCH_CHECK_WITH(OutOfMemoryError, size < LIMIT, "CUDA out of memory. Tried to allocate ", size, " bytes");
    size_t rounded = (size / ALIGNMENT + 1) * ALIGNMENT;
    char* block = static_cast<char*>(std::aligned_alloc(ALIGNMENT, rounded));
    std::memset(block, fill, rounded);
    std::lock_guard<std::mutex> guard(mutex);
    sizes[block] = size;
    if (keep_new) kept.insert(block);
    return block;
  }

  void free(void* address) {
    std::lock_guard<std::mutex> guard(mutex);
    char* block = static_cast<char*>(address);
    if (kept.count(block)) return;
    sizes.erase(block);
    std::free(block);
  }

  bool holds(const void* address) {
    std::lock_guard<std::mutex> guard(mutex);
    auto behind = sizes.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (behind == sizes.begin()) return false;
    auto [block, size] = *std::prev(behind);
    return address < block + size;
  }
};

// Never destroyed: tensors are freed until the very end.
Blocks& on_device = *new Blocks;
Blocks& pinned = *new Blocks;

template <bool DEVICE>
struct Allocator final : c10::Allocator {
  static Blocks& blocks() { return DEVICE ? on_device : pinned; }

  static void free(void* address) { blocks().free(address); }

  c10::DataPtr allocate(size_t size) override {
    auto device = DEVICE ? gpu() : c10::Device(c10::DeviceType::CPU);
    if (size == 0) return {nullptr, device};
    void* block = blocks().allocate(size, 0xA5);  // nobody may count on zeros
    return {block, block, &free, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free; }

  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};

Allocator<true> device_memory;
Allocator<false> pinned_memory;

}  // namespace

c10::Allocator* device_allocator() { return &device_memory; }

c10::Allocator* pinned_allocator() { return &pinned_memory; }

bool is_pinned(const void* address) { return pinned.holds(address); }

int64_t allocated_bytes() {
  std::lock_guard<std::mutex> guard(on_device.mutex);
  int64_t sum = 0;
  for (auto& [block, size] : on_device.sizes) sum += (size / ALIGNMENT + 1) * ALIGNMENT;
  return sum;
}

void keep_new_blocks(bool keep) {
  std::lock_guard<std::mutex> guard(on_device.mutex);
  on_device.keep_new = keep;
}

Contents contents() {
  std::lock_guard<std::mutex> guard(on_device.mutex);
  Contents found;
  for (auto& [block, size] : on_device.sizes) found[block] = std::string(block, size);
  return found;
}

void restore(const Contents& contents) {
  std::lock_guard<std::mutex> guard(on_device.mutex);
  for (auto& [block, bytes] : contents) {
    auto it = on_device.sizes.find(block);
    if (it != on_device.sizes.end() && it->second == bytes.size()) std::memcpy(block, bytes.data(), bytes.size());
  }
}

}  // namespace pretended
