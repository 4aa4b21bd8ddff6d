#include "traits.h"

#include <memory>
#include <unordered_map>
#include <unordered_set>

namespace sim {

bool starts_with(const std::string& text, const char* prefix) {
  return text.rfind(prefix, 0) == 0;
}

namespace {

bool holds_tensors(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::TensorType) {
    return true;
  }
  if (const auto optional = type->cast<c10::OptionalType>()) {
    return holds_tensors(optional->getElementType());
  }
  if (const auto list = type->cast<c10::ListType>()) {
    return holds_tensors(list->getElementType());
  }
  return false;
}

bool holds_generator(const c10::TypePtr& type) {
  if (const auto optional = type->cast<c10::OptionalType>()) {
    return holds_generator(optional->getElementType());
  }
  return type->kind() == c10::TypeKind::GeneratorType;
}

/// In-place operations that only overwrite their target, without reading it.
bool only_overwrites(const std::string& base) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::copy_",       "aten::fill_",          "aten::zero_",          "aten::normal_",    "aten::uniform_",
      "aten::random_",     "aten::bernoulli_",     "aten::exponential_",   "aten::geometric_", "aten::cauchy_",
      "aten::log_normal_", "aten::_foreach_copy_", "aten::_foreach_zero_", "aten::eye_",       "aten::resize_as_"};
  return names->count(base) > 0;
}

Traits read_traits(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  Traits traits;
  const std::string base = schema.name();
  traits.name = schema.overload_name().empty() ? base : base + "." + schema.overload_name();
  const bool overwrites = only_overwrites(base);
  for (const auto& argument : schema.arguments()) {
    const auto* alias = argument.alias_info();
    Argument use = Argument::Other;
    if (holds_tensors(argument.type())) {
      use = Argument::Read;
      // Arguments like `out=` are overwritten; other written arguments are updated.
      if (alias != nullptr && alias->isWrite()) {
        use = argument.kwarg_only() || overwrites ? Argument::Write : Argument::ReadWrite;
      }
    }
    // The schema does not say that it updates the running statistics in training.
    if (base == "aten::native_batch_norm") {
      if (starts_with(argument.name(), "running_")) {
        traits.updated_in_training.push_back(traits.arguments.size());
      }
      if (argument.name() == "training") {
        traits.training = static_cast<int>(traits.arguments.size());
      }
    }
    if (holds_generator(argument.type())) {
      traits.generator = static_cast<int>(traits.arguments.size());
    }
    traits.arguments.push_back(use);
  }
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    if (alias != nullptr && !alias->isWrite()) {
      traits.returns_view = true;
    }
  }
  traits.host_waits = op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  traits.over_lists = starts_with(base, "aten::_foreach_");
  traits.mixes_devices = !starts_with(base, "aten::") || starts_with(base, "aten::index") ||
      starts_with(base, "aten::_index_put") || starts_with(base, "aten::_unsafe_index") ||
      starts_with(base, "aten::repeat_interleave") || starts_with(base, "aten::lstm") ||
      starts_with(base, "aten::gru") || starts_with(base, "aten::rnn_");
  return traits;
}

}  // namespace

const Traits& traits_of(const c10::OperatorHandle& op) {
  // Per thread, so that no lock is needed. Compared by name, because an operation can be deregistered and another take
  // its place.
  thread_local std::unordered_map<c10::OperatorHandle, std::pair<c10::OperatorName, std::unique_ptr<Traits>>> known;
  auto found = known.find(op);
  if (found != known.end() && found->second.first == op.operator_name() &&
      found->second.second->arguments.size() == op.schema().arguments().size()) {
    return *found->second.second;
  }
  auto& entry =
      known.insert_or_assign(op, std::make_pair(op.operator_name(), std::make_unique<Traits>(read_traits(op))))
          .first->second;
  return *entry.second;
}

}  // namespace sim
