#include "transfers.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

namespace pretended {
namespace {

constexpr uint64_t LAG = 40;  // operations

struct Transfer {
  uint64_t begun;
  at::Tensor host;  // alive until then
  std::string bytes;
  bool to_host;

  void end() const {
    if (to_host) {
      std::memcpy(host.mutable_data_ptr(), bytes.data(), bytes.size());
    } else {
      TORCH_CHECK(
          std::memcmp(host.const_data_ptr(), bytes.data(), bytes.size()) == 0,
          "pinned memory was written while the GPU had yet to copy it");
    }
  }
};

std::deque<Transfer>& under_way = *new std::deque<Transfer>;  // never destroyed: tensors outlive it
std::mutex mutex;
uint64_t count = 0;

std::string bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

bool is_awaited(const at::Tensor& host) {
  std::lock_guard<std::mutex> guard(mutex);
  auto same = [&](const Transfer& each) { return each.to_host && each.host.const_data_ptr() == host.const_data_ptr(); };
  return std::any_of(under_way.begin(), under_way.end(), same);
}

}  // namespace

uint64_t tick() {
  std::unique_lock<std::mutex> guard(mutex);
  auto now = ++count;
  guard.unlock();
  if (now > LAG) land(now - LAG);
  return now;
}

void begin_transfer(const at::Tensor& to, const at::Tensor& from) {
  auto& host = to.is_cpu() ? to : from;
  if (!to.is_cpu() && is_awaited(from)) land();  // one copy after the other
  std::lock_guard<std::mutex> guard(mutex);
  if (!to.is_cpu()) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
  under_way.push_back({count, host, bytes_of(from), to.is_cpu()});
}

bool has_landed(uint64_t until) {
  tick();  // who asks again and again gets there
  std::lock_guard<std::mutex> guard(mutex);
  return under_way.empty() || under_way.front().begun > until;
}

void land(uint64_t until) {
  std::vector<Transfer> ended;  // their tensors are freed without the lock: that may take Python's
  std::lock_guard<std::mutex> guard(mutex);
  while (!under_way.empty() && under_way.front().begun <= until) {
    ended.push_back(std::move(under_way.front()));
    under_way.pop_front();
    ended.back().end();
  }
}

}  // namespace pretended
