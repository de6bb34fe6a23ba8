// Which contributions each expert computes, and memory for one call.
//
// A contribution is one (token, slot): index token * K + slot, tokens counted from the chunk's
// first. Ids and mapped values out of range contribute nothing and are never used as an index.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "call.h"

namespace int8moe {

class Scratch {
 public:
  template <class T>
  T* take(int64_t count) {
    const size_t bytes = (size_t(count < 1 ? 1 : count) * sizeof(T) + 63) / 64 * 64;
    void* block = std::aligned_alloc(64, bytes);
    if (block == nullptr) throw std::bad_alloc();
    blocks_.emplace_back(block, &std::free);
    return static_cast<T*>(block);
  }

 private:
  std::vector<std::unique_ptr<void, void (*)(void*)>> blocks_;
};

struct Group {
  int64_t expert, begin, end;  // positions in Routing::order
};

struct Routing {
  std::vector<int32_t> local;  // [tokens, K] local expert or -1
  std::vector<int64_t> order;  // live contributions, by expert, then by index
  std::vector<Group> groups;   // experts with at least one

  Routing(const Call& call, int64_t first, int64_t tokens);
};

inline int64_t local_expert(const Call& call, int64_t token, int64_t slot) {
  int64_t id = call.ids.at(token, slot);
  if (call.expert_map.values != nullptr) {
    if (id < 0 || id >= call.expert_map_size) return -1;
    id = call.expert_map.at(id, 0);
  }
  return id >= 0 && id < call.experts ? id : -1;
}

inline Routing::Routing(const Call& call, int64_t first, int64_t tokens)
    : local(size_t(tokens * call.top_k)) {
  std::vector<int64_t> start(size_t(call.experts) + 1, 0);
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t slot = 0; slot < call.top_k; ++slot) {
      const int64_t expert = local_expert(call, first + token, slot);
      local[size_t(token * call.top_k + slot)] = int32_t(expert);
      if (expert >= 0) ++start[size_t(expert) + 1];
    }
  }
  for (size_t expert = 0; expert < size_t(call.experts); ++expert) {
    if (start[expert + 1] != 0) {
      groups.push_back({int64_t(expert), start[expert], start[expert] + start[expert + 1]});
    }
    start[expert + 1] += start[expert];
  }
  order.resize(size_t(start.back()));
  for (size_t index = 0; index < local.size(); ++index) {
    if (local[index] >= 0) order[size_t(start[size_t(local[index])]++)] = int64_t(index);
  }
}

}  // namespace int8moe
