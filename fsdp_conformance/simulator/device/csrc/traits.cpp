#include "traits.h"

#include <algorithm>
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

/// Whether an operation may be left out where only the order counts: nothing but tensors comes back, and no memory gets
/// its first values.
bool has_only_numbers(const c10::OperatorHandle& op, const Traits& traits) {
  static const auto* first_values = new std::unordered_set<std::string>{
      "aten::fill_.Scalar", "aten::fill_.Tensor", "aten::zero_", "aten::copy_", "aten::set_.source_Tensor"};
  const auto& results = op.schema().returns();
  return starts_with(traits.name, "aten::") && !traits.returns_view && !traits.host_waits && traits.generator < 0 &&
      first_values->count(traits.name) == 0 &&
      std::all_of(
             results.begin(), results.end(), [](const c10::Argument& result) { return holds_tensors(result.type()); });
}

/// The last part of a name: "sum" of "aten::sum".
std::string bare(const std::string& base) {
  return base.substr(base.rfind(':') + 1);
}

/// How unwritten inputs show in the results (uninitialized.h).
Flow flow_of(const c10::OperatorHandle& op, const std::string& base) {
  const std::string name = bare(base);
  static const auto* places = new std::unordered_set<std::string>{
      "where",
      "stack",
      "hstack",
      "vstack",
      "dstack",
      "constant_pad_nd",
      "slice_scatter",
      "select_scatter",
      "diagonal_scatter",
      "as_strided_scatter",
      "_chunk_cat",
      "split_with_sizes_copy",
      "split_copy",
      "nan_to_num",
      "block_diag",
      "fill",
      "bernoulli",
      "normal_functional"};
  static const auto* places_by_prefix = new std::vector<const char*>{
      "index_put",    "_index_put", "_unsafe_index_put", "index_add", "index_copy",    "index_fill",
      "index_reduce", "scatter",    "masked_",           "put_",      "_unsafe_masked"};
  static const auto* reductions = new std::unordered_set<std::string>{
      "sum",
      "mean",
      "prod",
      "norm",
      "linalg_vector_norm",
      "max",
      "min",
      "amax",
      "amin",
      "aminmax",
      "all",
      "any",
      "var",
      "std",
      "var_mean",
      "std_mean",
      "dot",
      "vdot",
      "nansum",
      "argmax",
      "argmin",
      "logsumexp",
      "count_nonzero",
      "mse_loss",
      "huber_loss",
      "smooth_l1_loss",
      "binary_cross_entropy",
      "median",
      "_foreach_norm",
      "_foreach_max"};
  if (name == "cat") {
    return Flow::Pieces;
  }
  if (places->count(name) > 0 ||
      std::any_of(places_by_prefix->begin(), places_by_prefix->end(), [&](const char* prefix) {
        return starts_with(name, prefix);
      })) {
    return Flow::Places;
  }
  if (reductions->count(name) > 0) {
    return Flow::Reduces;
  }
  return op.hasTag(at::Tag::pointwise) || starts_with(name, "_foreach_") ? Flow::Elementwise : Flow::Selects;
}

using SliceDims = std::vector<std::pair<size_t, std::vector<int64_t>>>;

/// Products of matrices, and attention, which is made of them: (batch, head, query, channel).
const SliceDims& kept_of(const std::string& name) {
  static const auto* products = new std::unordered_map<std::string, SliceDims>{
      {"mm", {{0, {0}}, {1, {1}}}},
      {"addmm", {{1, {0}}, {2, {1}}}},
      {"bmm", {{0, {0, 1}}, {1, {0, 2}}}},
      {"baddbmm", {{1, {0, 1}}, {2, {0, 2}}}},
      {"mv", {{0, {0}}}},
      {"addmv", {{1, {0}}}},
      {"_scaled_dot_product_flash_attention_for_cpu", {{0, {0, 1, 2}}, {1, {0, 1}}, {2, {0, 1, 3}}}}};
  static const auto* nothing = new SliceDims();
  // `addmm_` is the same in place.
  const auto found = products->find(name.back() == '_' ? name.substr(0, name.size() - 1) : name);
  return found == products->end() ? *nothing : found->second;
}

/// The operations behind `tensor[...]` and `tensor[...] = `.
bool indexes(const std::string& name) {
  static const auto* names = new std::unordered_set<std::string>{
      "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"};
  return names->count(name) > 0;
}

Traits read_traits(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  Traits traits;
  const std::string base = schema.name();
  traits.name = schema.overload_name().empty() ? base : base + "." + schema.overload_name();
  const bool overwrites = only_overwrites(base);
  for (const auto& argument : schema.arguments()) {
    const auto* alias = argument.alias_info();
    Usage use = Usage::Other;
    if (holds_tensors(argument.type())) {
      use = Usage::Read;
      // Arguments like `out=` are overwritten; other written arguments are updated.
      if (alias != nullptr && alias->isWrite()) {
        use = argument.kwarg_only() || overwrites ? Usage::Write : Usage::ReadWrite;
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
    if (argument.name() == "indices" && indexes(bare(base))) {
      traits.indices = static_cast<int>(traits.arguments.size());
    }
    if (argument.name() == "beta") {
      traits.beta = static_cast<int>(traits.arguments.size());
    }
    if (argument.name() == "lr" && starts_with(base, "aten::_fused_")) {
      traits.learning_rate = static_cast<int>(traits.arguments.size());
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
  // CUDA's coalesce counts the different indices, and the host waits for their number.
  traits.host_waits = op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape) ||
      base == "aten::_coalesce";
  traits.kept = kept_of(bare(base));
  traits.flow = traits.kept.empty() ? flow_of(op, base) : Flow::Product;
  // These choose by a mask, and may find unwritten values where the mask is false.
  traits.decides_by_mask = base == "aten::masked_select" || starts_with(base, "aten::index");
  traits.over_lists = starts_with(base, "aten::_foreach_");
  traits.adds_up_in_float32 = schema.overload_name() != "out" &&
      (base == "aten::convolution" || base == "aten::_convolution" || base == "aten::convolution_backward");
  traits.mixes_devices = !starts_with(base, "aten::") || starts_with(base, "aten::index") ||
      starts_with(base, "aten::_index_put") || starts_with(base, "aten::_unsafe_index") ||
      starts_with(base, "aten::repeat_interleave") || starts_with(base, "aten::lstm") ||
      starts_with(base, "aten::gru") || starts_with(base, "aten::rnn_");
  traits.only_numbers = has_only_numbers(op, traits);
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
