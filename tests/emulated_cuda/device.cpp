// A CUDA device in the memory of the host: its allocations carry the device's name, and CPU kernels do the work.
//
// Every operator on tensors of the device runs on host tensors of the same memory. So views, in-place operators and
// resizing have their usual effects, and tensors of two devices do not mix.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <unordered_map>
#include <unordered_set>

namespace {

const c10::Device kDevice(c10::kCUDA, 0);
const c10::Device kHost(c10::kCPU);

std::atomic<int64_t> allocated{0}, peak{0}, capacity{int64_t(8) << 30};
std::atomic<int> wait_mode{0};  // what an operator does that waits for the device: 0 nothing, 1 warn, 2 raise
std::atomic<bool> capturing{false};

// ---- memory
struct Block {
  c10::DataPtr memory;
  size_t bytes;
};

void check_capacity(size_t bytes) {
  TORCH_CHECK_WITH(
      OutOfMemoryError, allocated + int64_t(bytes) <= capacity, "CUDA out of memory. Tried to allocate ", bytes,
      " bytes, ", capacity - allocated, " are free");
}

c10::DataPtr on_device(c10::DataPtr memory, size_t bytes) {
  check_capacity(bytes);
  void* data = memory.get();
  int64_t now = allocated += bytes, highest = peak;
  while (now > highest && !peak.compare_exchange_weak(highest, now)) {
  }
  auto release = [](void* context) {
    auto* block = static_cast<Block*>(context);
    allocated -= block->bytes;
    delete block;
  };
  return {data, new Block{std::move(memory), bytes}, release, kDevice};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    check_capacity(bytes);  // before the host's memory is taken
    return on_device(c10::GetCPUAllocator()->allocate(bytes), bytes);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
DeviceAllocator allocator;

// Returns the storage's memory under another device's name; it keeps the storage alive.
c10::DataPtr same_memory(const c10::Storage& storage, c10::Device device) {
  auto release = [](void* context) { delete static_cast<c10::Storage*>(context); };
  return {storage.mutable_data(), new c10::Storage(storage), release, device};
}

c10::Storage make_storage(c10::DataPtr memory, size_t bytes, c10::Allocator* allocator) {
  return {c10::Storage::use_byte_size_t(), bytes, std::move(memory), allocator, /*resizable=*/true};
}

// ---- device, streams and generators
struct DeviceGuard final : c10::impl::NoOpDeviceGuardImpl<c10::kCUDA> {
  c10::Stream stream() const { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, DeviceGuard)

struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(uint64_t seed = at::default_rng_seed_val) : CPUGeneratorImpl(seed) { device_ = kDevice; }
  void set_device(c10::Device device) { device_ = device; }
};

const at::Generator& default_generator() {
  static at::Generator generator = at::make_generator<DeviceGenerator>();
  return generator;
}

}  // namespace

namespace at {  // where the registry looks for it, under this name

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<DeviceGenerator>(); }
  void deviceSynchronize(DeviceIndex) const override {}
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

namespace {

// ---- operators
at::Tensor same_view(const at::Tensor& tensor, c10::Storage storage, c10::DispatchKey key) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

// One operator's arguments on the device and their twins on the host.
class Call {
 public:
  bool has_device_tensor = false;
  std::optional<c10::Device> device;  // named by an argument

  c10::IValue to_host(const c10::IValue& value) {
    if (value.isTensor()) return to_host(value.toTensor());
    if (value.isStorage()) {
      auto storage = value.toStorage();
      return storage.device().is_cuda() ? twin_of(storage) : storage;
    }
    if (value.isDevice()) {
      device = value.toDevice();
      return kHost;
    }
    if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      auto* generator = static_cast<DeviceGenerator*>(value.toGenerator().unsafeGetGeneratorImpl());
      generator->set_device(kHost);
      generators_.push_back(generator);
    }
    return in_lists(value, [this](const c10::IValue& item) { return to_host(item); });
  }

  c10::IValue to_device(const c10::IValue& value) {
    if (value.isTensor()) return to_device(value.toTensor());
    return in_lists(value, [this](const c10::IValue& item) { return to_device(item); });
  }

  // Gives the arguments the memory, sizes and strides that the operator has given to their twins.
  void follow_twins() {
    for (auto& [ours, twin] : tensors_) {
      auto storage = ours.storage();
      auto now = twin.storage();
      auto known = on_device_.find(now.unsafeGetStorageImpl());
      if (known != on_device_.end() && !known->second.is_alias_of(storage)) {
        ours.unsafeGetTensorImpl()->set_storage_keep_dtype(known->second);
      } else if (now.data() != storage.data() || now.nbytes() != storage.nbytes()) {
        storage.set_data_ptr_noswap(on_device(same_memory(now, kHost), now.nbytes()));
        storage.set_nbytes(now.nbytes());
      }
      if (ours.sizes() != twin.sizes() || ours.strides() != twin.strides())
        ours.unsafeGetTensorImpl()->set_sizes_and_strides(twin.sizes(), twin.strides(), twin.storage_offset());
    }
  }

  ~Call() {
    for (auto* generator : generators_) generator->set_device(kDevice);
  }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> on_host_;    // by those of the device
  std::unordered_map<c10::StorageImpl*, c10::Storage> on_device_;  // by those of the host
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;         // (on the device, on the host)
  std::vector<DeviceGenerator*> generators_;

  c10::Storage twin_of(const c10::Storage& storage) {
    auto found = on_host_.find(storage.unsafeGetStorageImpl());
    if (found == on_host_.end()) {
      auto twin = make_storage(same_memory(storage, kHost), storage.nbytes(), c10::GetCPUAllocator());
      on_device_.emplace(twin.unsafeGetStorageImpl(), storage);
      found = on_host_.emplace(storage.unsafeGetStorageImpl(), twin).first;
    }
    return found->second;
  }

  at::Tensor to_host(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    has_device_tensor = true;
    for (auto& [ours, twin] : tensors_)
      if (ours.is_same(tensor)) return twin;
    auto twin = same_view(tensor, twin_of(tensor.storage()), c10::DispatchKey::CPU);
    tensors_.emplace_back(tensor, twin);
    return twin;
  }

  at::Tensor to_device(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& [ours, twin] : tensors_)
      if (twin.is_same(tensor)) return ours;
    auto storage = tensor.storage();
    auto found = on_device_.find(storage.unsafeGetStorageImpl());
    if (found == on_device_.end()) {
      auto bytes = storage.nbytes();
      auto own = make_storage(on_device(same_memory(storage, kHost), bytes), bytes, &allocator);
      found = on_device_.emplace(storage.unsafeGetStorageImpl(), own).first;
    }
    return same_view(tensor, found->second, c10::DispatchKey::CUDA);
  }

  template <typename Convert>
  c10::IValue in_lists(const c10::IValue& value, Convert convert) {
    if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = convert(tensor).toTensor();
      return tensors;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
        tensors.push_back(tensor ? std::optional(convert(*tensor).toTensor()) : tensor);
      return tensors;
    }
    if (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList()) {
      c10::List<std::vector<at::Tensor>> lists;
      for (const c10::IValue& list : value.toListRef()) lists.push_back(convert(list).toTensorVector());
      return lists;
    }
    return value;
  }
};

// Returns whether the host waits for the device in such a call, because it needs values or reads pageable memory.
bool waits(const std::string& name, const c10::ArrayRef<c10::IValue>& arguments) {
  static const std::unordered_set<std::string> kReading = {
      "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2",
      "aten::bincount", "aten::equal", "aten::unique_consecutive", "aten::repeat_interleave"};
  if (name != "aten::copy_") return kReading.count(name) > 0;
  auto from = arguments[1].toTensor();
  return from.device() != arguments[0].toTensor().device() && from.numel() > 0 && !arguments[2].toBool();
}

void check_waiting(const c10::OperatorHandle& op, const c10::ArrayRef<c10::IValue>& arguments) {
  if ((!capturing && wait_mode == 0) || !waits(op.schema().name(), arguments)) return;
  TORCH_CHECK(!capturing, "CUDA error: operation not permitted when stream is capturing (", op.schema().name(), ")");
  TORCH_CHECK(wait_mode != 2, "called a synchronizing CUDA operation (", op.schema().name(), ")");
  TORCH_WARN("called a synchronizing CUDA operation (", op.schema().name(), ")");
}

void check_devices(const c10::OperatorHandle& op, const c10::ArrayRef<c10::IValue>& arguments) {
  static const std::unordered_set<std::string> kMixing = {"aten::copy_", "aten::set_", "aten::index", "aten::_index_put_impl_",
                                                          "aten::index_put_"};
  if (kMixing.count(op.schema().name())) return;
  for (auto& argument : arguments) {
    if (!argument.isTensor()) continue;
    auto tensor = argument.toTensor();
    TORCH_CHECK(
        !tensor.defined() || !tensor.is_cpu() || tensor.dim() == 0,
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (",
        op.schema().name(), ")");
  }
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto num_arguments = op.schema().arguments().size();
  auto arguments = torch::jit::last(*stack, num_arguments);
  check_waiting(op, arguments);
  c10::InferenceMode as_usual(false);  // tensors of inference mode could not be twins of others
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Call call;
  torch::jit::Stack own;
  for (auto& argument : arguments) own.push_back(call.to_host(argument));
  bool is_on_device = call.device ? call.device->is_cuda() : call.has_device_tensor;
  if (call.has_device_tensor) check_devices(op, arguments);
  for (size_t place = 0; place < num_arguments; ++place)
    if (is_on_device && own[place].isNone() && op.schema().arguments()[place].name() == "generator")
      own[place] = call.to_host(default_generator());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &own);
  call.follow_twins();
  torch::jit::drop(*stack, num_arguments);
  for (auto& value : own) stack->push_back(is_on_device ? call.to_device(value) : value);
}

torch::CppFunction on_host() { return torch::CppFunction::makeFromBoxedFunction<&run_on_host>(); }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(on_host()); }

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), at::dtype_or_default(dtype));
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", on_host());  // otherwise torch looks for code of the device
}

// Torch warns of replaced operators, which these are.
struct Silence final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
} silence;
c10::WarningHandler* const previous_handler = c10::WarningUtils::get_warning_handler();
const bool is_silent = (c10::WarningUtils::set_warning_handler(&silence), true);

TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (auto* name :
       {"send", "recv_", "recv_any_source_", "broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_",
        "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_",
        "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "reduce_", "gather_", "scatter_", "alltoall_",
        "alltoall_base_", "barrier"})
    m.impl(name, on_host());
}

const bool is_silent_no_longer = (c10::WarningUtils::set_warning_handler(previous_handler), true);

TORCH_LIBRARY(emulated_cuda, m) {
  m.def("default_generator() -> Generator?", [] { return default_generator(); });
  m.def("resize_storage(Tensor tensor, int bytes) -> ()", [](const at::Tensor& tensor, int64_t bytes) {
    auto storage = tensor.storage();
    auto memory = allocator.allocate(bytes);
    std::memcpy(memory.get(), storage.data(), std::min<size_t>(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(bytes);
  });
  m.def("allocated() -> int", [] { return allocated.load(); });
  m.def("peak() -> int", [] { return peak.load(); });
  m.def("reset_peak() -> ()", [] { peak = allocated.load(); });
  m.def("set_capacity(int bytes) -> ()", [](int64_t bytes) { capacity = bytes; });
  m.def("set_wait_mode(int mode) -> ()", [](int64_t mode) { wait_mode = int(mode); });
  m.def("get_wait_mode() -> int", [] { return int64_t(wait_mode); });
  m.def("is_capturing() -> bool", [] { return capturing.load(); });
  m.def("set_capturing(bool active) -> ()", [](bool active) { capturing = active; });
}

// As on a GPU: flash kernels take half precision without a mask, the memory-efficient ones a mask and any precision, but
// not fewer heads of keys than of queries. Both are `kernels.py`'s operators here. Else every score is stored.
int64_t choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor&, const std::optional<at::Tensor>& mask, double,
    bool, std::optional<double>, bool) {
  bool is_half = query.scalar_type() == at::kBFloat16 || query.scalar_type() == at::kHalf;
  bool is_fused = query.scalar_type() != at::kDouble && ((is_half && !mask) || query.size(1) == key.size(1));
  return static_cast<int64_t>(is_fused ? sdp::SDPBackend::overrideable : sdp::SDPBackend::math);
}

const bool is_ready = [] {
  c10::SetAllocator(c10::kCUDA, &allocator);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  return true;
}();

}  // namespace
