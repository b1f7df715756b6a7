#include "notes.h"

#include <atomic>
#include <mutex>

namespace pretended {
namespace {

std::vector<std::pair<std::string, bool>> taken;
std::atomic<bool> taking{false};
std::mutex mutex;

}  // namespace

void take_notes(bool on) {
  std::lock_guard<std::mutex> guard(mutex);
  if (on) taken.clear();
  taking = on;
}

bool takes_notes() { return taking; }

void note(const std::string& name, bool by_host) {
  if (!taking) return;
  std::lock_guard<std::mutex> guard(mutex);
  taken.emplace_back(name, by_host);
}

std::vector<std::pair<std::string, bool>> notes() {
  std::lock_guard<std::mutex> guard(mutex);
  return taken;
}

}  // namespace pretended
