#include "notes.h"

#include <atomic>
#include <chrono>
#include <mutex>

namespace pretended {
namespace {

std::vector<std::tuple<std::string, std::string, double, double>> taken;
std::atomic<bool> taking{false};
std::mutex mutex;

}  // namespace

double now() {
  auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::micro>(since).count();
}

void take_notes(bool on) {
  std::lock_guard<std::mutex> guard(mutex);
  if (on) taken.clear();
  taking = on;
}

bool takes_notes() { return taking; }

void note(const std::string& name, const std::string& kind, double begin) {
  if (!taking) return;
  std::lock_guard<std::mutex> guard(mutex);
  taken.emplace_back(name, kind, begin, now());
}

std::vector<std::tuple<std::string, std::string, double, double>> notes() {
  std::lock_guard<std::mutex> guard(mutex);
  return taken;
}

}  // namespace pretended
