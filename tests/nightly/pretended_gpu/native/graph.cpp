#include "graph.h"

#include <utility>

#include "memory.h"

namespace pretended {
namespace {

std::shared_ptr<Graph> captured;
Contents before;

}  // namespace

void Graph::replay() const {
  for (auto& each : work) each();
}

void begin_capture() {
  before = contents();
  keep_new_blocks(true);
  captured = std::make_shared<Graph>();
}

std::shared_ptr<Graph> end_capture() {
  keep_new_blocks(false);
  restore(std::exchange(before, {}));
  return std::exchange(captured, nullptr);
}

bool is_capturing() { return captured != nullptr; }

void capture(std::function<void()> work) {
  if (captured) captured->work.push_back(std::move(work));
}

}  // namespace pretended
